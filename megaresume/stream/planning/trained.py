"""Weights by trained tokens: refused of sources that do not know them, or have none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError
from megaresume.stream.source import LengthSource, count_trained

#: documents looked at, at first; twice as many each time that none of them is trained.
FIRST_CHUNK = 1 << 10
CHUNK = 1 << 20


def check_trained(config: StreamConfig, sources: Sequence[LengthSource]) -> None:
    """Refuse a blend by trained tokens of sources that could not be weighed, now or in a declared stage.

    Args:
        config: with the stages to come.
        sources: one for each of the config's.

    Raises:
        ConfigError: a source decides what is trained as its documents are read, or trains nothing at all.
    """
    if config.blend.unit != "trained":
        return
    weights = [source.weight for source in config.sources]
    for stage in config.stages:
        weights = [
            max(w, dict(stage.weights or ()).get(s.name, 0)) for w, s in zip(weights, config.sources, strict=True)
        ]
    for entry, source, weight in zip(config.sources, sources, weights, strict=True):
        if weight and not hasattr(source, "trained_spans"):
            raise ConfigError(
                f"source '{entry.name}' does not say which tokens are trained before they are read",
                found=f"blend.unit trained, and a {type(source).__name__}",
                expected="corpora of .bin and .idx, which have a .spans or are trained entirely",
                action="set blend: {unit: tokens}",
            )
        if weight and not _trains(source):
            raise ConfigError(
                f"nothing of source '{entry.name}' is trained",
                found=f"{len(source):,} documents without a trained token, and blend.unit trained",
                expected="at least one trained token, since its weight is positive",
                cause="the corpus was prepared with --train flags that mark nothing of it",
                action=f"prepare it again, or give '{entry.name}' weight 0",
            )


def _trains(source: LengthSource) -> bool:
    if not len(source):
        return True  # an empty one is refused where it is drawn
    first, size = 0, FIRST_CHUNK
    while first < len(source):
        ids = np.arange(first, min(first + size, len(source)), dtype=np.int64)
        if count_trained(source, ids, np.zeros_like(ids), source.lengths(ids)).any():
            return True
        first, size = first + size, min(2 * size, CHUNK)
    return False
