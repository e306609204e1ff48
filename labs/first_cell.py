"""Find the course or clone it, and install missing packages, in the first cell of every notebook.

A notebook is opened in JupyterLab, in VS Code or in Colab, which has only the notebook. So the text of its first cell,
`FIRST_CELL`, needs only Python; when it has the course, it calls `prepare`. To publish the course, write its address
here, into `REPOSITORY`, and run `python -m labs.notebook`: then all notebooks have it, and a badge below their titles
that opens them in Colab.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = ""  # https://github.com/owner/name
FIRST_CELL = f'''# Finds the course that this notebook is in, or clones it, and installs what is missing.
REPOSITORY = "{REPOSITORY}"  # where there is no clone, as in Colab: the course's address, as `git clone` takes it

import subprocess
import sys
from pathlib import Path

folders = [Path.cwd(), *Path.cwd().parents, Path("six-engines").absolute()]
course = next((folder for folder in folders if (folder / "labs/first_cell.py").exists()), folders[-1])
if not course.exists():
    assert REPOSITORY, "the course is not here: put its address into REPOSITORY, above"
    subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, str(course)], check=True)
sys.path.insert(0, str(course))

from labs.first_cell import prepare

prepare("{{folder}}")'''
ADDRESS = re.compile(r'^REPOSITORY = "(.*)"', re.MULTILINE)
BEGINS = FIRST_CELL.partition("\n")[0]
NEEDED = (
    "llguidance",
    "matplotlib",
    "pytest",
    "torch",
    "uvicorn",
    "xxhash",
)  # one or more of each part that the notebooks use
COLAB = "https://colab.research.google.com/github/"
BADGE = re.compile(r"\n\n\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)")


def prepare(folder: str) -> None:
    """Change to a folder of the course, put it on Python's path, and install missing packages.

    Raises:
        subprocess.CalledProcessError: pip could not install them; its output is above.
    """
    os.chdir(ROOT / folder)
    sys.path.insert(0, str(ROOT / folder))
    if lacks_packages():
        print("installing what the notebooks need; this can take some minutes")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[bench,labs]"]
        subprocess.run(install, check=True)
    if note := leave_out_old_gpu():
        print(note)


def lacks_packages() -> bool:
    """Return whether a package is missing or too old. It imports none, so a newer one can still be installed."""
    try:
        return not all(map(find_spec, NEEDED)) or int(version("transformers").partition(".")[0]) < 5
    except PackageNotFoundError:
        return True


def leave_out_old_gpu() -> str:
    """Hide GPUs without Triton kernels from this process and its children; return the message about it.

    Must be called before PyTorch looks for a GPU.
    """
    try:
        query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # there is no GPU
        return ""
    name, _, capability = said.strip().partition("\n")[0].rpartition(", ")
    if float(capability) >= 8.0:
        return ""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return (
        f"{name} has compute capability {capability}; Triton's kernels and fast bfloat16 need 8.0, stage C's `fused` "
        "and the megakernel 9.0. So this notebook runs on the CPU. A stage on this GPU, in float16: "
        f"!CUDA_VISIBLE_DEVICES=0 make -C {ROOT} stage-a DTYPE=float16 VENV= PYTHON=python3"
    )


def with_address(cell: str, repository: str) -> str:
    """Return the cell with this address of the course."""
    return ADDRESS.sub(f'REPOSITORY = "{repository}"', cell)


def with_badge(text: str, file: Path, repository: str) -> str:
    """Return the text of a notebook, or of its first cell, with a badge below the title that opens it in Colab.

    Args:
        text: begins with the title.
        file: of the notebook, relative to the course's root.
        repository: `https://github.com/owner/name`; "": no badge, because Colab would have nothing to open.
    """
    text = BADGE.sub("", text, count=1)
    if not repository:
        return text
    owner_and_name = repository.removeprefix("https://github.com/").removesuffix(".git").strip("/")
    picture = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    title, line_break, rest = text.partition("\n")
    return f"{title}\n\n{picture}({COLAB}{owner_and_name}/blob/main/{file}){line_break}{rest}"
