"""Text that others may have written: shown to people so that nothing in it hides what it says, and read as JSON that
may be damaged, with one kind of error for whatever is wrong with it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

#: Control characters but tab and line feed, line and paragraph separators, marks that turn the order of letters, and
#: halves of letters that no encoding has; those that stand for a byte of a path stay.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]"
)


def visible(text: str) -> str:
    """Control characters as a Python string would spell them: ESC is ``\\x1b``."""
    return _HIDDEN.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """As `visible`, with line feeds: for a name within a line."""
    return visible(text).replace("\n", "\\n")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def as_count(value: object) -> int:
    """A count of a record, which is held in 64 bits with a sign; a ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    raise ValueError(f"{value!r} is not a count")


def parse_json(data: str | bytes) -> Any:
    """Read JSON: UTF-8, every number finite.

    Raises:
        ValueError: it is none; NaN or an infinite number in it, which could not be written again; nested deeper than
            Python's stack goes.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
