"""The pages of docs/, and their sections, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, title: str) -> str:
    """What stands in a page under the heading ``## title``, up to the next heading of that level."""
    parts = re.split(r"^## (.+)\n", (DOCS / page).read_text(), flags=re.MULTILINE)
    found = [text for heading, text in zip(parts[1::2], parts[2::2], strict=True) if heading == title]
    assert len(found) == 1, f"docs/{page} has {len(found)} sections {title!r}"
    return found[0]
