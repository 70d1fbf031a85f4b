"""docs/tried.md: the part of it that each of the two programs writes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.upstream.fingerprint import ROOT

PAGE = ROOT / "docs" / "tried.md"


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name}: begin -->\n\n).*(?=\n<!-- {name}: end -->)", re.DOTALL)


def read_part(page: Path, name: str) -> str:
    """What stands between the marks of a part; nothing if there is no such page."""
    found = _between(name).search(page.read_text(encoding="utf-8")) if page.exists() else None
    return found[0] if found else ""


def write_part(page: Path, name: str, text: str) -> None:
    """Replace a part and leave the rest alone; a page that is not there gets this part only."""
    if page.exists():
        text, num = _between(name).subn(lambda _: text, page.read_text(encoding="utf-8"))
        if num != 1:
            raise ValueError(f"{page} has no marks <!-- {name}: begin --> and <!-- {name}: end -->")
    page.write_text(text, encoding="utf-8")
