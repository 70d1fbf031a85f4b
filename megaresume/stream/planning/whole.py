"""Documents that must never be cut, such as those with images: refused where a packing would cut them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError
from megaresume.stream.source import LengthSource

#: lengths asked for at a time.
SCAN = 1 << 20


def check_whole(config: StreamConfig, sources: Sequence[LengthSource]) -> None:
    """Refuse a config under which, now or in a declared stage, a document would be cut that must not be.

    Args:
        config: with the stages to come.
        sources: one for each of the config's. Those whose documents are never cut say so by ``whole`` (True); they may
            say by ``longest`` how many tokens the longest has, or else every length is asked for; and by ``advice``
            what to do about a document that is too long.

    Raises:
        ConfigError: packing ``split`` with such a source, or samples shorter than its longest document.
    """
    current = config.without_stages()
    for stage in (None, *config.stages):
        current = current if stage is None else current.changed_by(stage)
        where = "" if stage is None else f" in stage '{stage.name}'"
        for entry, source in zip(current.sources, sources, strict=True):
            if entry.weight and getattr(source, "whole", False):
                _check(entry.name, _longest(source), current, where, getattr(source, "advice", None))


def _longest(source: LengthSource) -> int:
    """What the source says, or else what its lengths say."""
    known = getattr(source, "longest", None)
    if known is not None:
        return int(known)
    chunks = (np.arange(first, min(first + SCAN, len(source))) for first in range(0, len(source), SCAN))
    return max((int(source.lengths(ids).max()) for ids in chunks), default=0)


def _check(name: str, longest: int, config: StreamConfig, where: str, advice: str | None) -> None:
    own = next(source.packing for source in config.sources if source.name == name)
    which = "packing.mode" if own is None else f"sources.{name}.packing"
    if config.packing.mode == "split" or own == "split":
        raise ConfigError(
            f"packing 'split' would cut documents of source '{name}' that must stay whole{where}",
            found=f"{which} split, which cuts documents anywhere",
            expected="knapsack, best_fit or none: whole documents",
            action="set packing: knapsack" if own is None else f"remove packing from source '{name}'",
        )
    if longest > config.seq_length:
        raise ConfigError(
            f"source '{name}' has documents that are longer than a sample{where}",
            found=f"up to {longest} tokens, and samples of {config.seq_length}",
            expected=f"documents of at most {config.seq_length} tokens: these are never cut",
            cause="a long text, large or many images, or a shorter seq_length than they were prepared for",
            action=advice
            or f"raise seq_length to {longest}; or hold the documents to a sample: max_tokens: {config.seq_length} "
            "with too_long: truncate (cut the text) or drop (leave the document out); or prepare smaller images",
        )
