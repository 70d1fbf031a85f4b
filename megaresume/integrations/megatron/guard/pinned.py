"""Let Megatron's builder build what is recorded: with its own code, from the recorded sizes, weights and documents.

The builder makes every dataset over one corpus by calling the class that it was given, with the corpus, its
documents, the samples needed and the split. So a stand-in for that class sees every one of them, in every version
from 0.8 on, whatever way the builder goes, and replaces what must be as recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaresume.integrations.megatron.guard.record import Blend, BuilderRecord, ComponentRecord, SplitRecord
from megaresume.integrations.megatron.guard.request import Request

__all__ = ["cold", "extendable", "pin_builder", "pinned_splits", "without_lazy_caches"]


def extendable(split: SplitRecord) -> bool:
    """Whether further epochs can be put behind the recorded samples: all components are ``GPTDataset`` of a kind."""
    names = {"document_index", "sample_index", "shuffle_index"}
    return all(names <= set(component.built.arrays) for component in split.components)


def pinned_splits(record: BuilderRecord, request: Request, free: set[int]) -> dict[int, SplitRecord]:
    """The splits that must come out as recorded: those that are recorded, asked for, and not set free by the user."""
    return {
        i: split
        for i, split in enumerate(record.splits)
        if split is not None
        and i not in free
        and request.shares[i] is not None
        and (record.sizes[i] is None) == (request.sizes[i] is None)
    }


@contextmanager
def pin_builder(
    builder: Any, record: BuilderRecord, request: Request, splits: dict[int, SplitRecord], cache: str | None = None
) -> Iterator[None]:
    """While the block runs, the builder builds these splits as recorded.

    Args:
        builder: a ``BlendedMegatronDatasetBuilder``.
        record: what it built when it was recorded.
        request: what it is asked for now.
        splits: the splits to pin, by number.
        cache: build in this directory and use nothing that is cached elsewhere; None: where Megatron looks.
    """
    original = builder.cls, builder.sizes, builder.config
    builder.cls = _StandIn(builder.cls, _pins(request, splits))
    builder.sizes = [_size(record.sizes[i], size, splits.get(i)) for i, size in enumerate(request.sizes)]
    builder.config = _config(builder.config, record, request, splits, cache)
    try:
        yield
    finally:
        builder.cls, builder.sizes, builder.config = original


def _size(recorded: int | None, asked: int | None, split: SplitRecord | None) -> int | None:
    if split is None or recorded is None or asked is None:
        return asked
    if any(not component.built.arrays for component in split.components):
        # No index: the order does not depend on the size, and nothing can be put behind it.
        return max(recorded, asked)
    return recorded


def _config(
    config: Any, record: BuilderRecord, request: Request, splits: dict[int, SplitRecord], cache: str | None
) -> Any:
    config = cold(config, cache) if cache is not None else copy.copy(config)
    if record.blend is not None and request.blend is not None and splits:
        config.blend = _spelled(request.blend, record.blend)
    if record.blend_per_split is not None and request.blend_per_split is not None:
        pairs = enumerate(zip(request.blend_per_split, record.blend_per_split, strict=True))
        config.blend_per_split = [
            _spelled(new, old if i in splits and old is not None else new) if new is not None else None
            for i, (new, old) in pairs
        ]
    return config


def _spelled(new: Blend, old: Blend) -> tuple[list[str], list[float] | None]:
    """The corpora where they are now, with the recorded weights, exactly."""
    return list(new[0]), None if old[1] is None else [float.fromhex(weight) for weight in old[1]]


def without_lazy_caches(config: Any) -> Any:
    """A config that builds what is not cached (--dataloader-fast-cache-load and its kin expect everything there)."""
    config = copy.copy(config)
    for name in ("fast_cache_load", "defer_npy_index_mmap"):
        if getattr(config, name, False):
            setattr(config, name, False)
    return config


def cold(config: Any, cache: str) -> Any:
    """A config that builds into a directory of its own."""
    config = without_lazy_caches(config)
    config.path_to_cache = cache
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pin:
    component: ComponentRecord
    #: the same corpus more than once in a blend: which of them is being built cannot be told.
    ambiguous: bool


def _pins(request: Request, splits: dict[int, SplitRecord]) -> dict[tuple[int, str | None], _Pin]:
    pins: dict[tuple[int, str | None], _Pin] = {}
    for i, split in splits.items():
        blend = request.blend_of(i)
        paths: list[str | None] = list(blend[0]) if blend is not None else [None] * len(split.components)
        for path, component in zip(paths, split.components, strict=True):
            pins[i, path] = _Pin(component=component, ambiguous=(i, path) in pins)
    return pins


class _StandIn:
    """Called by the builder in place of the dataset class; returns datasets of that very class."""

    def __init__(self, cls: Any, pins: dict[tuple[int, str | None], _Pin]) -> None:
        self._cls, self._pins = cls, pins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)

    def __call__(
        self, corpus: Any, path: str | None, indices: Any, num_samples: int | None, split: Any, config: Any, *rest: Any
    ) -> Any:
        pin = self._pins.get((int(split.value), path))
        if pin is not None:
            indices = _documents(indices, pin.component.documents)
            if pin.component.built.arrays and not pin.ambiguous:
                num_samples = pin.component.requested
        return self._cls(corpus, path, indices, num_samples, split, config, *rest)


def _documents(indices: Any, documents: tuple[int, int]) -> Any:
    """The recorded documents, unless a class chooses its own or leaves them to its cache."""
    first, end = documents
    if indices is None or first >= end or (len(indices) and int(indices[-1]) - int(indices[0]) + 1 != len(indices)):
        return indices
    return np.arange(first, end, dtype=np.int32)
