"""The programs in docs/ that `megaresume new` writes: ``python -m tests.docs.starting_points`` copies them anew.

A page has a comment ``<!-- megaresume new TRAINER: FILE -->`` and, right after it, the fence that the file stands in.
"""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

from tests.cli.conftest import megaresume
from tests.docs.pages import DOCS

PLACE = re.compile(
    r"(?P<head><!-- megaresume new (?P<trainer>[a-z]+): (?P<file>[\w.]+) -->\n```\w+\n)(?P<text>.*?)(?P<end>^```$)",
    re.DOTALL | re.MULTILINE,
)


@cache
def file_of(trainer: str, name: str) -> str:
    """What `megaresume new TRAINER` writes into the file."""
    with tempfile.TemporaryDirectory() as directory:
        done = megaresume("new", trainer, directory)
        assert done.returncode == 0, done.stderr
        return (Path(directory) / name).read_text()


def renewed(text: str) -> str:
    """The page with the programs of today."""
    return PLACE.sub(lambda found: found["head"] + file_of(found["trainer"], found["file"]) + found["end"], text)


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        if PLACE.search(page.read_text()):
            page.write_text(renewed(page.read_text()))
