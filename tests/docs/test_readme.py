"""README.md and docs/index.md: short, without dead links, and every page two clicks away."""

from __future__ import annotations

import re
from pathlib import Path

from megaresume.program import COMMANDS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def links(document: Path, text: str | None = None) -> set[Path]:
    """Files that a document links to."""
    text = document.read_text() if text is None else text
    return {document.parent / link for link in re.findall(r"\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)", text)}


def anchors(document: Path) -> set[str]:
    """Of its headings, as they are made on a page."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    assert all(path.exists() for path in links(README)), [path for path in links(README) if not path.exists()]
    for name, anchor in re.findall(r"\]\((docs/[\w-]+\.md)#([\w-]+)\)", text):
        assert anchor in anchors(ROOT / name), (name, anchor)


def test_every_page_is_two_clicks_away() -> None:
    index = DOCS / "index.md"
    first = links(index, index.read_text().partition("```{toctree}")[0])
    second = {page for one in first if one.suffix == ".md" for page in links(one)}
    pages = {page.resolve() for page in DOCS.glob("*.md")} - {index}
    assert pages <= {page.resolve() for page in first | second}
    assert {page.resolve() for page in links(README) if page.suffix == ".md"} <= pages | {
        index,
        ROOT / "CONTRIBUTING.md",
    }


def test_every_command_is_in_its_table() -> None:
    named = re.findall(r"^\| `megaresume ([a-z-]+)", (DOCS / "commands.md").read_text(), re.MULTILINE)
    assert set(COMMANDS) <= {*named, "completion"}
