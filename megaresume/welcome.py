"""``megaresume`` without a command: what somebody here probably wants next."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import megaresume

#: packages that train -> the starting point of `megaresume new`.
TRAINERS = {
    "transformers": "trainer",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "torch": "torch",
}
#: directories that trainers write, one for each checkpoint.
_CHECKPOINT = re.compile(r"iter_\d+|global_step_?\d+|checkpoint-\d+")


def welcome(directory: Path) -> str:
    """What to do in this directory: read its checkpoints, or begin.

    Args:
        directory: looked at, with the directories in it.
    """
    lines = [
        f"megaresume {megaresume.__version__}: after a kill, training goes on with exactly the data that comes next"
    ]
    if found := _checkpoints(directory):
        lines += ["", f"There are checkpoints in {found}:"]
        lines += _rows(
            {
                f"megaresume latest {found}": "the newest one that is complete",
                f"megaresume inspect {found}": "what they hold of the data",
                f"megaresume doctor {found}": "what is wrong, if anything",
            }
        )
    if (directory / "data.yaml").is_file():
        lines += ["", "There is a data.yaml:"]
        lines += _rows({"megaresume stream data.yaml --samples 0:8": "the first samples that it gives"})
    begin = {"megaresume demo": "see a small run killed and resumed (needs the extra demo)"}
    installed = [start for package, start in TRAINERS.items() if importlib.util.find_spec(package) is not None]
    begin |= {f"megaresume new {installed[0] if installed else 'TRAINER'}": _starts(installed)}
    lines += ["", "To begin:", *_rows(begin)]
    return "\n".join([*lines, "", "megaresume --help lists all commands."])


def _starts(installed: list[str]) -> str:
    others = ", ".join(installed[1:])
    return "a short program that trains and resumes" + (f"; also installed here: {others}" if others else "")


def _rows(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"  {command:<{width}}  {what}" for command, what in rows.items()]


def _checkpoints(directory: Path) -> str | None:
    """The directory with checkpoints that was changed last, as it is written on a command line."""
    found = []
    for place in [directory, *directory.iterdir()]:
        try:
            if place.is_dir() and any(_CHECKPOINT.fullmatch(one.name) for one in place.iterdir()):
                found.append((place.stat().st_mtime, str(place.relative_to(directory))))
        except OSError:  # what may not be read is not what the user is asking about
            continue
    return max(found)[1] if found else None
