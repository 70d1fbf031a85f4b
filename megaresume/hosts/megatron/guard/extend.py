"""Further samples after the recorded ones, without moving any of these.

A recorded order has an end: the number of samples that the run was going to train. When it is to train more, each
corpus that runs out continues with further epochs, one after another, each shuffled by itself; the blend continues with
the same weights. Epoch k is a pure function of the record and k, so the order does not depend on how often a run was
prolonged, nor by how much.

    recorded:   | corpus, its epochs as Megatron built them | epoch 1 | epoch 2 | ...
    blend:      greedy by weight, sample by sample: a longer one begins with the shorter one
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import torch.utils.data
import xxhash

from megaresume.hosts.megatron.guard.pinned import blend_part, components_of, is_blend, part, without_lazy_caches
from megaresume.hosts.megatron.guard.record import ArrayHashes, ComponentRecord, SplitRecord
from megaresume.stream.errors import CorpusError

#: a further epoch has at least this many samples: tiny corpora are repeated so often that they have.
_MIN_SAMPLES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """What a split needs after its recorded samples. Plain, to be sent to all ranks."""

    #: samples of the blend, or of each dataset if there is none.
    samples: int
    #: per component: further epochs, and the samples to ask for to get one of them (None: just one pass).
    epochs: tuple[int, ...]
    requested: tuple[int | None, ...]


def plan_extension(split: SplitRecord, dataset: Any, samples: int, *, by_length: bool) -> Extension | None:
    """What this built split needs to hold ``samples`` samples; None: nothing.

    Args:
        split: the record.
        dataset: what the builder built for it.
        samples: how many are needed.
        by_length: it blends without weights; then Megatron has one epoch, whatever is asked for, and so do we.

    Raises:
        CorpusError: a corpus without tokens.
    """
    components = components_of(dataset)
    if is_blend(dataset):
        if dataset.size is None:
            return None
        if by_length:
            samples = min(samples, sum(len(component) for component in components))
        if dataset.size >= samples:
            return None
        # The greedy blend takes from a corpus at most its share and one sample; and one for rounding.
        needed = [0 if by_length else ceil(weight * samples) + 2 for weight in dataset.weights]
    else:
        needed = [samples] * len(components)
    plans = [
        _epochs(component, record, count)
        for component, record, count in zip(components, split.components, needed, strict=True)
    ]
    if not is_blend(dataset) and not any(count for count, _ in plans):
        return None
    return Extension(
        samples=samples, epochs=tuple(count for count, _ in plans), requested=tuple(asked for _, asked in plans)
    )


def _epochs(dataset: Any, record: ComponentRecord, needed: int) -> tuple[int, int | None]:
    missing = needed - len(dataset)
    if missing <= 0:
        return 0, None
    first, end = record.documents
    tokens = int(np.sum(dataset.dataset.sequence_lengths[first:end], dtype=np.int64))
    extra, length = int(getattr(dataset.config, "add_extra_token_to_sequence", True)), dataset.config.sequence_length
    if tokens == 0:
        raise CorpusError(f"{record.path} has no tokens to continue with", found=f"documents {first}:{end} are empty")
    samples, asked = (tokens - extra) // length, None
    if samples < _MIN_SAMPLES:
        samples = asked = _MIN_SAMPLES
    return ceil(missing / samples), asked


def epoch_seed(seed: int, number: int) -> int:
    """Seed of a further epoch, from 1 on: 32 bits, as NumPy's ``RandomState`` takes them."""
    return xxhash.xxh3_64_intdigest(f"megaresume epoch {number} of {seed}".encode()) & 0xFFFFFFFF


class Extended(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset of Megatron, and further epochs after it. Looks like the first in everything but its length."""

    def __init__(self, base: Any, epochs: Sequence[Any]) -> None:
        self.base = base
        self.epochs = list(epochs)
        self._starts = np.cumsum([0, len(base), *map(len, epochs)])
        #: for the name of a blend's cache file.
        self.unique_identifiers = dict(base.unique_identifiers) | {"megaresume_epochs": len(epochs)}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int | None) -> Any:
        # None: Megatron's padding of a batch
        if index is None or index < self._starts[1]:
            return self.base[index]
        if index >= len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.epochs[number - 1][int(index - self._starts[number])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)


def extend(builder: Any, split: SplitRecord, dataset: Any, plan: Extension, weights: Sequence[float] | None) -> Any:
    """Build what is planned. Collective where Megatron's builder is.

    Args:
        builder: the ``BlendedMegatronDatasetBuilder``, configured as for the split itself.
        split: the record.
        dataset: what the builder built for it; None: not on this rank.
        plan: from `plan_extension`.
        weights: of the blend as given by the flags; None: by the lengths of the corpora, or no blend.
    """
    components = components_of(dataset) or [None] * len(split.components)
    config = without_lazy_caches(builder.config)
    extended = [
        _extend_one(builder, component, record, epochs, requested, config)
        for component, record, epochs, requested in zip(
            components, split.components, plan.epochs, plan.requested, strict=True
        )
    ]
    if not split.blend:
        return extended if isinstance(dataset, list | tuple) else extended[0]
    given: list[Any] = []
    if dataset is not None:
        from megatron.core.datasets.utils import normalize

        given = [len(c) for c in components if c is not None] if weights is None else normalize(list(weights))
    return builder.build_generic_dataset(
        type(dataset), builder.is_built_on_rank, True, extended, given, plan.samples, config
    )


def _extend_one(
    builder: Any, dataset: Any, record: ComponentRecord, epochs: int, requested: int | None, config: Any
) -> Any:
    first, end = record.documents
    built = []
    for number in range(1, epochs + 1):
        config = copy.copy(config)
        config.random_seed = epoch_seed(builder.config.random_seed, number)
        arguments: tuple[Any, ...] = ()
        if dataset is not None:
            documents = np.arange(first, end, dtype=np.int32)
            arguments = (dataset.dataset, dataset.dataset_path, documents, requested, dataset.index_split, config)
        built.append(builder.build_generic_dataset(builder.cls, builder.is_built_on_rank, True, *arguments))
    # Always wrapped: a blend wants components of one class.
    return None if dataset is None else Extended(dataset, built)


def extension_record(split: SplitRecord, dataset: Any) -> SplitRecord:
    """The record of a split with what its dataset has after it now; what was recorded before stays."""
    components = []
    for record, component in zip(split.components, components_of(dataset), strict=True):
        epochs = getattr(component, "epochs", [])
        known = len(record.epochs)
        more = [part(e, f"epoch {n} of {record.path}") for n, e in enumerate(epochs[known:], start=known + 1)]
        components.append(replace(record, epochs=record.epochs + tuple(more)))
    blend: tuple[ArrayHashes, ...] = split.blend
    if is_blend(dataset):
        now = blend_part(dataset)
        if now.samples > blend[-1].samples:
            blend = (*blend, now)
    return SplitRecord(components=tuple(components), blend=blend)
