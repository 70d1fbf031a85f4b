"""``<save>/megaresume/data.yaml``: the data config that the run was last saved with, its paths absolute.

Written for people and for `megaresume verify`; no state depends on it, since corpora may move. It is an ordinary data
config: ``megaresume stream <save>/megaresume/data.yaml`` shows the run's samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.atomic import make_dir, write_atomic
from megaresume.checkpoint.layout import records_dir

__all__ = ["data_path", "write_data_file"]

_HEADER = "# The data of this run, as it was last saved. Written by megaresume; corpora may move.\n"


def data_path(root: Path) -> Path:
    """Where the data config of a run lies."""
    return records_dir(root) / "data.yaml"


def write_data_file(root: Path, origin: Mapping[str, Any]) -> None:
    """Write it, unless it says the same already.

    Raises:
        CheckpointError: the disk refuses.
    """
    import yaml

    path = data_path(root)
    content = (_HEADER + yaml.safe_dump(_plain(origin), sort_keys=False, allow_unicode=True)).encode()
    try:
        if path.read_bytes() == content:
            return
    except OSError:
        pass  # missing, or unreadable: writing tells
    make_dir(path.parent)
    write_atomic(path, content)


def _plain(value: Any) -> Any:
    """Without the aliases and classes that YAML could not write safely."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
