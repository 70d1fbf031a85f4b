"""Reads what `megaresume.training.accuracy` measured, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_held_out"]


def read_held_out(path: str | Path) -> dict[int, dict[str, Any]]:
    """By step: the last measurement in a file of ``--megaresume-log-samples``."""
    found: dict[int, dict[str, Any]] = {}
    for line in Path(path).read_bytes().split(b"\n")[:-1]:
        if b'"held_out"' in line:
            record = json.loads(line)
            if record["event"] == "held_out":
                found[record["step"]] = record
    return found
