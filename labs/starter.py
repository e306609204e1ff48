"""Write a lab's starter: a copy of the stage in which the bodies of the exercises are missing.

    python -m labs.starter d            (make lab-d)
    python -m labs.starter d --force    (make lab-d FORCE=1): start over; the old copy is kept
    python -m labs.starter --show       whose code `LAB=1` would run; with g, `LAB=g`

The copy is in `labs/work/`, which comes first on Python's path when `LAB=1` is given: it shadows the reference package
of the same name, and every later stage runs on top of it. With `LAB=g` only lab G's copies are used; all other labs
come from the reference.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path

from labs.exercises import ROOT, WORK, Exercise, Lab, load_labs
from stage_a_naive.entrypoints.interrupts import run_command
from stage_a_naive.entrypoints.language import columns, padded, tr

IGNORED = shutil.ignore_patterns("__pycache__", "*.png", "build")


RUNS = {  # how to run a lab that is not a stage
    "g": "serve LAB=g",
    "h": "serve LAB=h ENGINE=beyond.quantization:LLM",
    "i": "serve LAB=i ENGINE=beyond.speculation:LLM ARGS='--speculation ngram'",
    "j": "serve LAB=j ENGINE=beyond.scale_out:LLM ARGS='--pipeline-parallel-size 2'",
    "k": "serve LAB=k ENGINE=beyond.structured:LLM",
    "l": "serve LAB=l ENGINE=beyond.experts:LLM MODEL=models/tutor_experts",
    "p": "stage-f LAB=p",
}


class AlreadyThere(FileExistsError):
    """There is a learner's copy already, and `force` is False."""


def write_starter(
    lab: Lab, work: Path = WORK, force: bool = False, missing: Collection[Exercise] | None = None
) -> list[Path]:
    """Write the copy; return its files and folders.

    Args:
        lab: which one.
        work: the folder to write to.
        force: replace a copy that is there, after moving it to `work/old/`.
        missing: the exercises whose bodies are taken out; None is all of the lab.

    Raises:
        AlreadyThere: there is a copy, and `force` is False; nothing was written.
    """
    missing = lab.exercises if missing is None else missing
    alone = [e for e in lab.exercises if not e.path.startswith(tuple(f"{folder}/" for folder in lab.folders))]
    copies = {ROOT / folder: lab.copy_of(folder, work) for folder in lab.folders}
    copies |= {exercise.reference: exercise.copy_in(work) for exercise in alone}
    targets = list(copies.values())
    there = [target for target in targets if target.exists()]
    if there and not force:
        raise AlreadyThere(", ".join(str(target) for target in there))
    aside = work / "old" / time.strftime(f"{lab.letter}-%Y%m%d-%H%M%S")
    for target in there:
        kept = aside / target.relative_to(work)
        kept.parent.mkdir(parents=True, exist_ok=True)
        target.rename(kept)
    for source, target in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=IGNORED)
        else:
            shutil.copyfile(source, target)
    for file in _files_above(lab):
        shutil.copyfile(ROOT / file, work / file)
    for exercise in missing:
        file = exercise.copy_in(work)
        file.write_text(exercise.starter_text(file.read_text(encoding="utf-8")), encoding="utf-8")
    link_models(work / lab.prefix)
    return targets


def link_models(work: Path) -> None:
    """Link the tutor, which the copies expect next to the stages."""
    models = work / "models"
    if models.is_symlink() and models.resolve() != (ROOT / "models").resolve():
        models.unlink()  # a submission contains the link of the machine where it was written
    if not models.exists():
        models.symlink_to(ROOT / "models", target_is_directory=True)


def _files_above(lab: Lab) -> set[Path]:
    """Return the `__init__.py` of the parent packages: `beyond/__init__.py` for beyond/serving."""
    above = {parent / "__init__.py" for folder in lab.folders for parent in Path(folder).parents}
    return {file for file in above if (ROOT / file).is_file()}


def link_one(lab: Lab, work: Path = WORK) -> Path:
    """Make and return a folder with links to this lab's copies, as far as they exist."""
    view = work / ".only" / lab.letter
    shutil.rmtree(view, ignore_errors=True)
    view.mkdir(parents=True)
    for path in [*lab.folders, *map(str, _files_above(lab))]:
        copy = lab.copy_of(path, work).absolute()
        if copy.exists():
            (view / path).parent.mkdir(exist_ok=True)
            (view / path).symlink_to(copy)
    link_models(view)
    return view


def learners_packages(work: Path) -> list[str]:
    """Return the stages that the learner has a copy of."""
    files = [*work.glob("stage_*/__init__.py"), *work.glob("beyond/*/__init__.py")]
    return sorted(str(file.parent.relative_to(work)) for file in files)


def next_steps(lab: Lab) -> str:
    """Return what a learner does first."""
    letter, width = lab.letter, max(columns(tr(exercise.title)) for exercise in lab.exercises)
    lines = [
        tr("Lab {letter}: {title}").format(letter=letter.upper(), title=tr(lab.title)),
        tr("Your copy is in labs/work/. Start with labs/lab_{letter}.md.").format(letter=letter),
    ]
    lines += [
        f"  {exercise.id:4}  {padded(tr(exercise.title), width)}  {exercise.points:3} {tr('points')}  "
        f"{'' if exercise.slow else f'{exercise.copy_in(WORK).relative_to(ROOT)}: {exercise.name}'}"
        for exercise in lab.exercises
    ]
    lines += [
        f"make grade-{letter}                 {tr('the whole table; every exercise fails at first')}",
        f"make grade-{letter} ONLY={lab.exercises[0].id}        {tr('one exercise')}",
        f"make {RUNS.get(letter, f'stage-{letter} LAB={letter}'):20}    {tr('run your engine')}",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.starter", description=__doc__.splitlines()[0])
    parser.add_argument("lab", nargs="?", choices=list(load_labs()), help="its letter")
    parser.add_argument("--force", action="store_true", help="replace a copy that is there (it is kept in work/old/)")
    parser.add_argument("--show", action="store_true", help="say which stages are the learner's")
    args = parser.parse_args(argv)
    if args.show:
        packages = learners_packages(link_one(load_labs()[args.lab]) if args.lab else WORK)
        if not packages:
            print(
                f"error: LAB={args.lab or 1}, but there is no stage of yours in labs/work; "
                f"`make lab-{args.lab or 'd'}` makes one",
                file=sys.stderr,
            )
            return 2
        print(f"[lab] yours: {', '.join(packages)}; every other stage is the reference", file=sys.stderr)
        return 0
    if args.lab is None:
        parser.error(f"which lab? {', '.join(load_labs())}")
    lab = load_labs()[args.lab]
    try:
        write_starter(lab, force=args.force)
    except AlreadyThere as error:
        print(
            f"error: your work is there already: {error}\n"
            f"Nothing was written. `make lab-{lab.letter} FORCE=1` begins again (the old copy goes to labs/work/old/).",
            file=sys.stderr,
        )
        return 2
    print(next_steps(lab))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
