"""Output for people: text in columns, and HTML pages in one style without scripts or external links.

text_table([["name", "size"], ["web", "12"]])             ->  aligned lines
page(title, [paragraph, html_table(...), svg(...), ...])  ->  one self-contained file
"""

from __future__ import annotations

import html
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from megaresume.stream.errors import one_line, require, visible
from megaresume.stream.progress import spell_amount

#: Colours of lines in figures, in this order, distinguishable also by colour-blind people.
COLOURS = ("#0b6e99", "#c2571a", "#2e7d4f", "#7b4ba8", "#8a6d00", "#b3356f", "#4a5568", "#009e8f")

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2330; max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
p { margin: .4rem 0 } .verdict { font-size: 1.1rem; padding: .7rem 1rem; border-radius: 6px; margin: 1rem 0 }
.holds { background: #e3f3e8; color: #14532d } .fails { background: #fde8e6; color: #8c1d18 }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid #dde2ea; vertical-align: top }
th { font-weight: 600; color: #56607a } .number { text-align: right }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { background: #f4f6f9; padding: .7rem .9rem; white-space: pre-wrap; border-radius: 6px }
svg { max-width: 100%; height: auto }
details { margin-top: 1rem } summary { cursor: pointer; color: #56607a } .scroll { overflow-x: auto }
"""


#: directories that stand for another place, as a store's mirror does -> the name to show.
STANDS_FOR: dict[str, str] = {}


def in_place(text: str) -> str:
    """The text, with the places that directories stand for."""
    for directory, name in STANDS_FOR.items():
        text = text.replace(directory, name)
    return text


def escape(text: str) -> str:
    """Text as HTML, with control characters made visible."""
    text = html.escape(visible(in_place(text)))
    return text.encode(errors="backslashreplace").decode()  # a page is UTF-8, and a path may not be


class Visible:
    """A stream of text for people in which control characters from external text are made visible.

    Args:
        out: the stream to write to; everything except writing is delegated to it.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        """Write, with control characters made visible."""
        self._out.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def write_bytes(data: bytes | memoryview) -> None:
    """Write bytes to standard output, after earlier prints; as text if it does not accept bytes."""
    sys.stdout.flush()
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        sys.stdout.write(str(data, "utf-8", "surrogateescape"))


def spell_bytes(num_bytes: float) -> str:
    """``12 B``, ``3.4 GB``."""
    return spell_amount(num_bytes, "B")


def spell_seconds(seconds: float) -> str:
    """``12.0 s``, ``3.4 min``, ``2.5 days``."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 0.0):.1f} s"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as lines with aligned columns: numbers right, everything else left.

    Args:
        rows: the first may be a head. Every cell is printed as one line.
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [
        all(not row[i] or row[i][0].isdigit() or row[i] in "-?" for row in rows[1:])
        and all(len(row[i]) < 16 for row in rows)
        for i in range(len(widths))
    ]
    lines = []
    for row in rows:
        columns = zip(row, widths, right, strict=True)
        cells = [cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in columns]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def page_head(title: str, style: str = "") -> str:
    """The beginning of a page.

    Args:
        title: text, for the window.
        style: additional CSS.
    """
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>\n"
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style>\n"
    )


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page.

    Args:
        title: text, for the window; ``parts`` contain the heading.
        parts: HTML.
    """
    return page_head(title) + "\n".join(parts) + "\n"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table of texts.

    Args:
        head: of the columns.
        rows: as long as the head.
        numbers: right-align all columns except the first.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        marks = [" class=number" if numbers and i else "" for i in range(len(row))]
        return "".join(f"<{tag}{m}>{escape(cell)}</{tag}>" for m, cell in zip(marks, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def svg(draw: Callable[[Any], object], *, height: float) -> str:
    """A figure as inline SVG.

    Args:
        draw: called with matplotlib's axes.
        height: inches; the width is 9.5.

    Raises:
        SetupError: matplotlib is not installed.
    """
    require("matplotlib", "it draws the figures", "pip install 'megaresume[report]'; --json needs no figures")
    from matplotlib import rc_context  # deferred: takes a second to import
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # Keep letters as text: the browser has fonts for every script; matplotlib's does not, and warns. A dollar sign in a
    # name must not begin a formula; a text takes that setting when it is created.
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(9.5, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    content = visible(buffer.getvalue())
    return re.sub(r"<metadata>.*?</metadata>", "", content[content.index("<svg") :], flags=re.DOTALL)
