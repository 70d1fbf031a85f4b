"""The corpora of a run, wherever they are now."""

from __future__ import annotations

from pathlib import Path

from megaresume.checkpoint.layout import data_path
from megaresume.corpora.base import Source
from megaresume.corpora.split import range_of
from megaresume.sources import open_sources
from megaresume.sources.data_config import DataConfig
from megaresume.stream.aliases import resolved
from megaresume.stream.errors import ConfigError, UsageError
from megaresume.stream.state import StreamState

__all__ = ["open_corpora"]


def open_corpora(
    root: Path, state: StreamState, *, data: str | None, split: str | None, need_all: bool = False
) -> dict[str, Source]:
    """The corpora of a run by name, without documents that came to them after a state.

    Args:
        root: the run's ``--save`` directory.
        state: a state of the run.
        data: ``--data``, if it was given; None: the data config that was recorded beside the checkpoints.
        split: that of the run, where neither says it.
        need_all: also of sources that the data config does not have any more.

    Raises:
        UsageError: there is no data config.
        ConfigError: it cannot be read, or lacks a source that is needed.
    """
    path = Path(data) if data else data_path(root)
    if not path.is_file():
        raise UsageError(
            "it is not known where the corpora are",
            found=f"no file {path}",
            expected="the data config of the run",
            cause="a source is a Python object, or the run was saved by another program" if not data else None,
            action="pass --data DATA.yaml",
        )
    named = DataConfig.of(path)
    config = named.stream_config(seq_length=named.mapping.get("seq_length", state.config["seq_length"]))
    # Under the names that the run knows its sources by.
    config = resolved(config, state.config["sources"])
    known = {name: fingerprint.documents for name, fingerprint in state.fingerprints.items()}
    specs = {source.name: source.options for source in config.sources if source.name in known}
    missing = [name for name in known if name not in specs]
    if missing and need_all:
        raise ConfigError(
            "the data config lacks sources of the run",
            found=", ".join(source.name for source in config.sources),
            expected=", ".join(known),
            cause="sources that were removed in the middle of the run" if data is None else None,
            action=f"--data with a copy of {path} that has {', '.join(missing)} too, with the path of that time",
        )
    opened = open_sources(specs, base_dir=named.directory, split=split)
    return {
        name: range_of(opened[name], 0, documents) if len(opened[name]) > documents else opened[name]
        for name, documents in known.items()
        if name in opened
    }
