"""The corpora of a run, for commands that plan its stream again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megaresume.stream.errors import UsageError

if TYPE_CHECKING:
    from megaresume.sources.base import Source
    from megaresume.stream.config import StreamConfig
    from megaresume.stream.state import StreamState

__all__ = ["as_of", "locate"]


def locate(data: str | None, root: Path, state: StreamState) -> tuple[Path, StreamConfig, Path]:
    """Where the corpora of a run are: the data config that says so, what it says, and where its paths start.

    Args:
        data: ``--data``, if it was given.
        root: the run's ``--save`` directory.
        state: a state of the run.

    Raises:
        UsageError: there is no such file.
        ConfigError: it cannot be read.
    """
    from megaresume.checkpoint.data_file import data_path
    from megaresume.sources import read_data_config
    from megaresume.stream.aliases import resolved
    from megaresume.stream.config import StreamConfig
    from megaresume.stream.skips import with_skip_files

    path = Path(data) if data else data_path(root)
    if not path.is_file():
        raise UsageError(
            "it is not known where the corpora are",
            found=f"no file {path}",
            expected="the data config of the run",
            cause="a source is a Python object, or the run was saved by another program" if not data else None,
            action="pass --data DATA.yaml",
        )
    mapping, directory = read_data_config(path)
    mapping = with_skip_files(mapping, directory)
    config = StreamConfig.from_dict(mapping, seq_length=mapping.get("seq_length", state.config["seq_length"]))
    # Under the names that the run knows its sources by.
    config = resolved(config, state.config["sources"])
    return path, config, directory


def as_of(sources: Mapping[str, Source], state: StreamState) -> dict[str, Source]:
    """The corpora without documents that came to them after a state."""
    from megaresume.sources.split import range_of

    known = {name: fingerprint.documents for name, fingerprint in state.fingerprints.items()}
    return {
        name: range_of(source, 0, known[name]) if len(source) > known.get(name, len(source)) else source
        for name, source in sources.items()
    }
