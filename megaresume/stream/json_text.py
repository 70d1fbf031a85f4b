"""JSON that others may have damaged: one kind of error for whatever is wrong with it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

__all__ = ["parse_json"]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


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
