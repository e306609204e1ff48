"""From a learner's folder to a row of the course's table: archives from other systems, and their errors."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from labs import batch
from labs.exercises import ROOT, load_labs

LAB = load_labs()["d"]


def zipped(names: dict[str, bytes], target: Path) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in names.items():
            entry = zipfile.ZipInfo()  # its constructor would change backslashes on Windows
            entry.filename = name
            archive.writestr(entry, data)
    return target


ZIPS = {
    "as it is": "stage_d_paged/llm.py",
    "with the folder around it": "work/stage_d_paged/llm.py",
    "with all folders around it": "repository/labs/work/stage_d_paged/llm.py",
    "with backslashes": "work\\stage_d_paged\\llm.py",
}


@pytest.mark.parametrize("name", ZIPS.values(), ids=ZIPS)
def test_a_zip_of_another_system_is_unpacked_without_what_that_system_added(name, tmp_path):
    top = name.replace("\\", "/").split("/")[0]
    added = {"__MACOSX/._stage_d_paged": b"x", f"{top}/.DS_Store": b"x", f"{top}/._llm.py": b"x"}
    file = zipped({name: b"code", **added}, tmp_path / "ada.zip")
    work = batch.unpack(file, tmp_path / "ada", LAB)
    assert (work / "stage_d_paged" / "llm.py").read_bytes() == b"code"
    assert [path.name for path in (tmp_path / "ada").rglob("*") if path.is_file()] == ["llm.py"]


def test_nothing_is_unpacked_outside_of_the_students_folder(tmp_path):
    zipped({"../evil": b"", "/tmp/six-engines-evil": b"", "..\\evil": b""}, tmp_path / "ada.zip")
    with tarfile.open(tmp_path / "bob.tar", "w") as archive:
        for name in ("../evil", "/tmp/six-engines-evil"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo("stage_d_paged/llm.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    for name in ("ada.zip", "bob.tar"):
        batch.unpack(tmp_path / name, tmp_path / name[:3], LAB)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.name != "tmp"}
    assert not Path("/tmp/six-engines-evil").exists() and "evil" not in found
    assert found == {"ada", "bob", "ada.zip", "bob.tar", "ada/tmp/six-engines-evil", "bob/tmp/six-engines-evil"}


@pytest.mark.parametrize(
    "kind", ["no zip", "half a zip", "half a tar", "an encrypted zip", "a bomb", "of another kind"]
)
def test_what_cannot_be_unpacked_is_refused_for_a_reason_of_one_kind(kind, tmp_path):
    file = zipped({"stage_d_paged/llm.py": bytes(1000)}, tmp_path / "ada.zip")
    data = file.read_bytes()
    if kind == "no zip":
        file.write_bytes(b"x" * 100)
    elif kind == "half a zip":
        file.write_bytes(data[: len(data) // 2])
    elif kind == "half a tar":
        file = tmp_path / "ada.tar.gz"
        with tarfile.open(file, "w:gz") as archive:
            archive.add(ROOT / "labs" / "grade.py", "grade.py")
        file.write_bytes(file.read_bytes()[:1000])
    elif kind == "an encrypted zip":
        flag = data.rindex(b"PK\x01\x02") + 8
        file.write_bytes(data[:6] + b"\x01" + data[7:flag] + b"\x01" + data[flag + 1 :])
    elif kind == "a bomb":
        size = data.rindex(b"PK\x01\x02") + 24  # of the file when it is unpacked, as the archive's directory says it
        file.write_bytes(data[:size] + (2**32 - 2).to_bytes(4, "little") + data[size + 4 :])
    else:
        file = file.rename(tmp_path / "ada.7z")
    with pytest.raises(batch.CANNOT_UNPACK):
        batch.unpack(file, tmp_path / "ada", LAB)


def test_each_folder_and_file_is_a_submission_but_hidden_ones(tmp_path):
    for folder in ("ada", "eve", "__MACOSX"):
        (tmp_path / folder).mkdir()
    for name in ("bob.tar.gz", "cay.tgz", "dan.tar", "eve.zip", "fay.ZIP", "gil.rar", ".DS_Store"):
        (tmp_path / name).touch()
    assert list(batch.submissions_in(tmp_path)) == ["ada", "bob", "cay", "dan", "eve", "eve.zip", "fay", "gil.rar"]


@pytest.mark.slow
@pytest.mark.parametrize("text", [f"x = {'-' * 200_000}1\n", f"x = {'a.' * 100_000}b\n"])
def test_a_file_that_python_cannot_parse_costs_its_own_exercises_and_not_the_courses_table(text, tmp_path):
    for student in ("ada", "bob"):
        folder = tmp_path / "submissions" / student / "stage_a_naive"
        folder.mkdir(parents=True)
        (folder / "chat.py").write_text(text)
    assert batch.main(["a", str(tmp_path / "submissions"), str(tmp_path / "results")]) == 0
    report = json.loads((tmp_path / "results" / "ada.json").read_text())
    reasons = {exercise["id"]: exercise["reason"] for exercise in report["exercises"]}
    assert reasons["A.1"] == "stage_a_naive/chat.py: it is nested too deeply"
