"""Build the command that grades one submission in a container, and limit what it can reach.

The container has no network, a read-only file system except a folder in memory, and limits of memory, processes and
time. The grader runs as root inside, with only the rights that it needs to run answers as a user who owns nothing
(`sandbox.become_nobody`): only root reads the reference and writes the marks. The submission is mounted read-only; each
student has a separate folder for the marks.
"""

from __future__ import annotations

from pathlib import Path

# To read what a student packed and to write what the host owns; to give a folder away, become another user, end it.
RIGHTS = ("DAC_OVERRIDE", "CHOWN", "SETGID", "SETUID", "KILL")
MEMORY, SCRATCH, PROCESSES = "4g", "2g", 2000
MARKS = "marks.json"


def command(
    image: str,
    name: str,
    letter: str,
    work: Path,
    results: Path,
    seconds: float,
    options: list[str],
) -> list[str]:
    """Return the command line, beginning with the name of docker's program.

    Args:
        name: of the container, to end it by.
        work: the submission.
        results: an empty folder of this student's, where `MARKS` will be.
        seconds: after this time it ends itself.
        options: for `labs.grade`, except the paths above.
    """
    words = ["docker", "run", "--rm", "--interactive", "--name", name, "--network", "none", "--read-only"]
    words += ["--tmpfs", f"/tmp:rw,exec,mode=1777,size={SCRATCH}"]
    words += ["--memory", MEMORY, "--memory-swap", MEMORY, "--cpus", "1", "--pids-limit", str(PROCESSES)]
    words += ["--user", "0:0", "--cap-drop", "ALL", *(word for right in RIGHTS for word in ("--cap-add", right))]
    words += ["--security-opt", "no-new-privileges"]
    words += ["--volume", f"{work}:/submission:ro", "--volume", f"{results}:/results"]
    words += [image, "timeout", "--signal=KILL", f"{seconds:.0f}"]
    words += ["python", "-m", "labs.grade", letter, "--work", "/submission", "--json", f"/results/{MARKS}", "--sandbox"]
    return words + options
