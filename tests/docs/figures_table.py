"""The table of figures in docs/metrics.md: ``python -m tests.docs.figures_table`` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from megaresume.checkpoint.metrics.figures import FIGURES
from megaresume.checkpoint.metrics.words import WORDS

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"


def tables() -> dict[str, str]:
    """Name -> Markdown."""
    words = ["| word | sink |", "| --- | --- |", *(f"| `{word}` | {what} |" for word, what in WORDS.items())]
    figures = ["| figure | by | unit | kind | what |", "| --- | --- | --- | --- | --- |"]
    figures += [f"| `{f.name}` | {f.attribute} | `{f.unit}` | {f.kind} | {f.help} |" for f in FIGURES]
    return {"words": "\n".join(words) + "\n", "figures": "\n".join(figures) + "\n"}


def renewed(text: str) -> str:
    """The document with the tables of today."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        text = re.sub(f"{begin}.*{end}", lambda _, a=begin, t=table, z=end: f"{a}\n{t}\n{z}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text()))
