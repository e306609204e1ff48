"""Write the files for instructors that learners should not see: `make instructor-pack`.

The pack goes to `labs/pack/`, which git ignores: model answers to exercises and questions, a rubric per lab, the bugs
of the break-it exercises and the slowdowns of lab P, and policies to adapt.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from labs import bodies
from labs.exercises import LABS, Exercise, Lab, load_labs
from labs.mutants import load_mutations
from stage_a_naive.entrypoints.interrupts import run_command

PACK, TEMPLATES = LABS / "pack", LABS / "templates"  # the templates are copied unchanged


def rubric(lab: Lab) -> str:
    """Return points, minutes and tests of each exercise, and the handout's questions."""
    lines = [f"# Lab {lab.letter.upper()}: {lab.title}", ""]
    lines += ["| exercise | points | minutes | judged by |", "|---|---|---|---|"]
    for e in lab.exercises:
        lines.append(f"| {e.id} {e.title} | {e.points} | {e.minutes} | {', '.join(e.tests)} |")
    handout = (LABS / f"lab_{lab.letter}.md").read_text(encoding="utf-8")
    found = re.search(r"^## Questions\n(.*?)(?=^## |\Z)", handout, flags=re.DOTALL | re.MULTILINE)
    lines += ["", "An exercise's points are all or nothing, or with `--partial` in proportion to its tests that pass."]
    lines += ["", "## Questions of the handout", "", (found[1].strip() if found else "none")]
    lines += ["", "Full marks name the quantity that decides, give its size, and say when the answer changes."]
    lines += ["", "Model answers: `question_answers.md`."]
    return "\n".join(lines) + "\n"


def answers(lab: Lab) -> str:
    """Return the reference's functions, with all hints."""
    parts = [f"# Model answers of lab {lab.letter.upper()}"]
    for exercise in lab.exercises:
        language = {".py": "python", ".cpp": "cpp"}.get(Path(exercise.path).suffix, "cuda")
        parts += [f"## {exercise.id} {exercise.title}", f"`{exercise.path}`"]
        parts.append(f"```{language}\n{_definition(exercise)}\n```")
        parts.append("\n".join(f"* {hint}" for hint in exercise.hints))
        parts += [f"Slow in the starter: `{put}` instead of `{find}`." for find, put in exercise.slow]
    for mutation in load_mutations().get(lab.letter, ()):
        parts.append(
            f"## A bug\n\n`{mutation.file}`\n\n```\n{mutation.find.strip()}\n```\n\nbecomes\n\n```\n"
            f"{mutation.put.strip() or '(nothing)'}\n```"
        )
    return "\n\n".join(parts) + "\n"


def _definition(exercise: Exercise) -> str:
    text = exercise.reference.read_text(encoding="utf-8")
    return bodies.definition(text, exercise.name, exercise.path).rstrip()


def write_pack(target: Path) -> list[Path]:
    """Write all files of the pack, and return their paths."""
    templates = [path for path in sorted(TEMPLATES.rglob("*")) if path.suffix in (".py", ".md")]
    written = {target / path.relative_to(TEMPLATES): path.read_text(encoding="utf-8") for path in templates}
    for letter, lab in load_labs().items():
        written[target / f"rubric_{letter}.md"] = rubric(lab)
        written[target / f"answers_{letter}.md"] = answers(lab)
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(written)


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m labs.pack", description=__doc__.splitlines()[0]).parse_args(argv)
    print(f"{len(write_pack(PACK))} files in {PACK}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
