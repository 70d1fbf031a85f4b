"""docs/reliability.md: the tables in it, written by the command that counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
COLUMNS = ("resumed exactly", "refused correctly", "lost")
_TABLE = re.compile(r"(<!-- counted -->\n).*?(<!-- end -->)", re.DOTALL)
_FLIPS = re.compile(r"(<!-- flips -->\n).*?(<!-- end -->)", re.DOTALL)

_SESSION = re.compile(r"(<!-- session -->\n).*?(<!-- end -->)", re.DOTALL)


def write_session(text: str) -> None:
    """Put the session into the document."""
    block = "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
    DOCUMENT.write_text(_SESSION.sub(lambda match: f"{match[1]}\n{block}\n{match[2]}", DOCUMENT.read_text()))


def table(counts: Mapping[str, Counter[str]]) -> str:
    """Fault, times tried, and what came of it."""
    rows = ["| fault | tried | resumed exactly | refused correctly | lost |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, outcomes in counts.items():
        good = [outcomes[column] for column in COLUMNS[:2]]
        numbers = [outcomes.total(), *good, outcomes.total() - sum(good)]
        rows.append(f"| {name} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(rows) + "\n"


def write(counts: Mapping[str, Counter[str]], *, flips: str) -> None:
    """Put the numbers into the document; the words around them stay."""
    found = counts[flips]
    words = (
        f"Of {found.total():,} bits flipped in random files of checkpoints that were saved *without* checksums, "
        f"{found['unnoticed']:,} were loaded unnoticed, {found['refused']:,} were refused because torch could not read "
        f"the file, and {found['harmless']:,} hit bytes that nothing reads.\n"
    )
    rest = {name: outcomes for name, outcomes in counts.items() if name != flips}
    text = _TABLE.sub(lambda match: match[1] + table(rest) + match[2], DOCUMENT.read_text())
    DOCUMENT.write_text(_FLIPS.sub(lambda match: match[1] + words + match[2], text))
