"""Built datasets → record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megaresume.integrations.megatron.guard.arrays import Array, array_digest, index_arrays
from megaresume.integrations.megatron.guard.corpus import Corpus, Identity
from megaresume.integrations.megatron.guard.record import SPLITS, BuilderRecord, ComponentRecord, Part, SplitRecord
from megaresume.integrations.megatron.guard.request import Request

__all__ = ["blend_part", "components_of", "is_blend", "observe", "observe_split", "part", "unguarded"]


def is_blend(dataset: Any) -> bool:
    """Whether it is a ``BlendedDataset``: components and how they take turns."""
    return hasattr(dataset, "datasets") and "dataset_index" in vars(dataset)


def components_of(dataset: Any) -> list[Any]:
    """The datasets over one corpus each: of a blend, of several validation sets, or the dataset itself."""
    if dataset is None:
        return []
    if isinstance(dataset, list | tuple):
        return list(dataset)
    return list(dataset.datasets) if is_blend(dataset) else [dataset]


def part(dataset: Any, what: str) -> Part:
    """The index arrays of a dataset, by content."""
    arrays = {name: array_digest(array, f"{name} of {what}") for name, array in sorted(index_arrays(dataset).items())}
    return Part(samples=len(dataset), arrays=arrays)


def blend_part(blend: Any, samples: int | None = None) -> Part:
    """How a blend takes turns over its first samples (None: all)."""
    arrays = index_arrays(blend)
    size = len(arrays["dataset_index"]) if samples is None else samples
    return Part(
        samples=size,
        arrays={name: array_digest(array[:size], f"{name} of the blend") for name, array in sorted(arrays.items())},
    )


def observe(request: Request, datasets: Sequence[Any]) -> BuilderRecord:
    """What a builder was asked for, and what it built."""
    return BuilderRecord(
        dataset=request.dataset,
        settings=request.settings,
        blend=request.blend,
        blend_per_split=request.blend_per_split,
        sizes=request.sizes,
        splits=tuple(observe_split(request, dataset) for dataset in datasets),
    )


def observe_split(request: Request, dataset: Any) -> SplitRecord | None:
    """One of train, valid, test; None: not built."""
    components = components_of(dataset)
    if not components:
        return None
    return SplitRecord(
        components=tuple(_component(request, component) for component in components),
        blend=(blend_part(dataset),) if is_blend(dataset) else (),
    )


def _component(request: Request, dataset: Any) -> ComponentRecord:
    path = getattr(dataset, "dataset_path", None)
    corpus = Corpus.at(path, request.cls)
    documents = _documents(dataset)
    known = corpus is not None and documents[1] <= corpus.documents
    identity = corpus.identity(documents) if corpus is not None and known else Identity(lengths=None, tokens=None)
    requested = getattr(dataset, "num_samples", None)
    return ComponentRecord(
        path=None if path is None else str(path),
        documents=documents,
        total=documents[1] if corpus is None else corpus.documents,
        requested=None if requested is None else int(requested),
        built=part(dataset, str(path)),
        lengths=identity.lengths,
        tokens=identity.tokens,
    )


def _documents(dataset: Any) -> tuple[int, int]:
    """The documents [first, end) that a dataset draws from.

    Those in its index, where it has one: an index from a cache may be older than the file, and stays what trains.
    """
    index: Array | None = index_arrays(dataset).get("document_index")
    if index is not None and len(index):
        return _lowest(index, np.min), _lowest(index, np.max) + 1
    indices = getattr(dataset, "indices", None)
    if indices is None or not len(indices):
        return 0, 0
    return int(indices[0]), int(indices[-1]) + 1


def _lowest(array: Array, function: Any) -> int:
    # In pieces: a memory-mapped index need not fit into memory.
    step = 1 << 24
    return int(function([function(array[at : at + step]) for at in range(0, len(array), step)]))


def unguarded(record: BuilderRecord, datasets: Iterable[Any]) -> list[str]:
    """What a record cannot promise, in words."""
    notes = []
    for name, split, dataset in zip(SPLITS, record.splits, datasets, strict=True):
        if split is not None and not any(component.built.arrays for component in split.components):
            notes.append(f"the {name} set ({record.dataset}) builds no index: its documents are recorded, no order")
        if any(hasattr(component, "np_rng") for component in components_of(dataset)):
            notes.append(
                f"the {name} set ({record.dataset}) draws random numbers from one generator per process, which starts "
                "anew at every start: the documents are pinned, but NOT what the dataset does with them "
                "(fill-in-the-middle splits will differ after a resume)"
            )
    return notes
