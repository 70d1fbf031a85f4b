"""Make Megatron's builder build what is recorded: with its own code, from the recorded sizes, weights and documents.

The builder makes every single-corpus dataset by calling the class it was given, with the corpus, its documents, the
samples needed and the split. So a stand-in for that class sees all of them, in every version since 0.8 and on every
path through the builder, and replaces what must match the record.

Before the build, `needed_sizes` computes how many samples a resumed run needs, as Megatron may ask for too few: it asks
for those of a whole run with today's flags (``train_iters * global_batch_size``) and starts at
``consumed_train_samples``. A run that has used larger global batches or evaluated more often would reach the end of its
datasets before the end of its steps, and die with a bare ``StopIteration``. The request is raised by what was consumed
beyond these flags, so nothing is added if nothing changed.

`refuse_empty_splits`: for splits without tokens, Megatron adds up empty epochs forever, and the job hangs at its start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.data.spans import spans_path
from megaresume.hosts.megatron.arguments import schedule_from_args
from megaresume.hosts.megatron.guard.record import (
    SPLITS,
    Array,
    ArrayHashes,
    Blend,
    BuilderRecord,
    ComponentRecord,
    Corpus,
    Request,
    SplitRecord,
    array_digest,
    contents_of,
    index_arrays,
)
from megaresume.stream.errors import ConfigError


def is_blend(dataset: Any) -> bool:
    """Whether it is a ``BlendedDataset``: components, and the order in which they take turns."""
    return hasattr(dataset, "datasets") and "dataset_index" in vars(dataset)


def components_of(dataset: Any) -> list[Any]:
    """The single-corpus datasets of a blend or of several validation sets, or the dataset itself."""
    if dataset is None:
        return []
    if isinstance(dataset, list | tuple):
        return list(dataset)
    return list(dataset.datasets) if is_blend(dataset) else [dataset]


def part(dataset: Any, what: str) -> ArrayHashes:
    """Hashes of a dataset's index arrays."""
    arrays = {name: array_digest(array, f"{name} of {what}") for name, array in sorted(index_arrays(dataset).items())}
    return ArrayHashes(samples=len(dataset), arrays=arrays)


def blend_part(blend: Any, samples: int | None = None) -> ArrayHashes:
    """Hashes of the turns of a blend over its first samples (None: all)."""
    arrays = index_arrays(blend)
    size = len(arrays["dataset_index"]) if samples is None else samples
    return ArrayHashes(
        samples=size,
        arrays={name: array_digest(array[:size], f"{name} of the blend") for name, array in sorted(arrays.items())},
    )


def observe(request: Request, datasets: Sequence[Any]) -> BuilderRecord:
    """Record what a builder was asked for and what it built."""
    return BuilderRecord(
        dataset=request.dataset,
        settings=request.settings,
        blend=request.blend,
        blend_per_split=request.blend_per_split,
        sizes=request.sizes,
        splits=tuple(observe_split(request, dataset) for dataset in datasets),
    )


def observe_split(request: Request, dataset: Any) -> SplitRecord | None:
    """The record of one split; None if it was not built."""
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
    lengths, tokens = None, None
    if corpus is not None and documents[1] <= corpus.documents:
        lengths, tokens = corpus.identity(documents)
    requested = getattr(dataset, "num_samples", None)
    return ComponentRecord(
        path=None if path is None else str(path),
        documents=documents,
        total=documents[1] if corpus is None else corpus.documents,
        requested=None if requested is None else int(requested),
        built=part(dataset, str(path)),
        lengths=lengths,
        tokens=tokens,
        contents=contents_of(path),
    )


def _documents(dataset: Any) -> tuple[int, int]:
    """The documents [first, end) that a dataset draws from.

    Those in its index, if it has one: a cached index may be older than the file, and is what gets trained.
    """
    index: Array | None = index_arrays(dataset).get("document_index")
    if index is not None and len(index):
        return _lowest(index, np.min), _lowest(index, np.max) + 1
    indices = getattr(dataset, "indices", None)
    if indices is None or not len(indices):
        return 0, 0
    return int(indices[0]), int(indices[-1]) + 1


def _lowest(array: Array, function: Any) -> int:
    # In chunks: a memory-mapped index need not fit into memory.
    step = 1 << 24
    return int(function([function(array[at : at + step]) for at in range(0, len(array), step)]))


def unguarded(record: BuilderRecord, datasets: Iterable[Any]) -> list[str]:
    """What a record cannot promise about an order, in words."""
    notes = []
    for name, split, dataset in zip(SPLITS, record.splits, datasets, strict=True):
        if split is not None and not any(component.built.arrays for component in split.components):
            notes.append(f"the {name} set ({record.dataset}) builds no index: its documents are recorded, no order")
        if any(hasattr(component, "np_rng") for component in components_of(dataset)):
            notes.append(
                f"the {name} set ({record.dataset}) draws random numbers from one generator per process, which "
                "restarts at every start: the documents are pinned, but NOT what the dataset does with them "
                "(fill-in-the-middle splits will differ after a resume)"
            )
    return notes


def extendable(split: SplitRecord) -> bool:
    """Whether epochs can be added after the recorded samples: all components are like ``GPTDataset``."""
    names = {"document_index", "sample_index", "shuffle_index"}
    return all(names <= set(component.built.arrays) for component in split.components)


def pinned_splits(record: BuilderRecord, request: Request, free: set[int]) -> dict[int, SplitRecord]:
    """The splits that must match the record: recorded, asked for, and not freed by the user."""
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
    """Make the builder build these splits as recorded, within the block.

    Args:
        builder: a ``BlendedMegatronDatasetBuilder``.
        record: what it built when it was recorded.
        request: what it is asked for now.
        splits: the splits to pin, by number.
        cache: build in this directory, and use nothing that is cached elsewhere; None: where Megatron looks.
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
        # No index: the order does not depend on the size, and nothing can be appended.
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
    """The corpora at their current paths, with exactly the recorded weights."""
    return list(new[0]), None if old[1] is None else [float.fromhex(weight) for weight in old[1]]


def without_lazy_caches(config: Any) -> Any:
    """A config that builds what is not cached (--dataloader-fast-cache-load and the like expect everything cached)."""
    config = copy.copy(config)
    for name in ("fast_cache_load", "defer_npy_index_mmap"):
        if getattr(config, name, False):
            setattr(config, name, False)
    return config


def cold(config: Any, cache: str) -> Any:
    """A config that builds into a separate directory."""
    config = without_lazy_caches(config)
    config.path_to_cache = cache
    return config


#: (split, path) -> components; several if a blend has the same corpus more than once.
_Pins = dict[tuple[int, str | None], list[ComponentRecord]]


def _pins(request: Request, splits: dict[int, SplitRecord]) -> _Pins:
    pins: _Pins = {}
    for i, split in splits.items():
        blend = request.blend_of(i)
        paths: list[str | None] = list(blend[0]) if blend is not None else [None] * len(split.components)
        for path, component in zip(paths, split.components, strict=True):
            pins.setdefault((i, path), []).append(component)
    return pins


class _StandIn:
    """Called by the builder in place of the dataset class; returns datasets of exactly that class."""

    def __init__(self, cls: Any, pins: _Pins) -> None:
        self._cls, self._pins = cls, pins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)

    def __call__(
        self, corpus: Any, path: str | None, indices: Any, num_samples: int | None, split: Any, config: Any, *rest: Any
    ) -> Any:
        components = self._pins.get((int(split.value), path))
        if components:
            indices = _pinned_documents(indices, components[-1].documents)
            # Which of several is being built cannot be told.
            if components[0].built.arrays and len(components) == 1:
                num_samples = components[0].requested
        return self._cls(corpus, path, indices, num_samples, split, config, *rest)


def _pinned_documents(indices: Any, documents: tuple[int, int]) -> Any:
    """The recorded documents, unless a class chooses its own or leaves them to its cache."""
    first, end = documents
    if indices is None or first >= end or (len(indices) and int(indices[-1]) - int(indices[0]) + 1 != len(indices)):
        return indices
    return np.arange(first, end, dtype=np.int32)


# What was built, compared with the record array by array


def mismatches(split: SplitRecord, dataset: Any, name: str) -> list[str]:
    """Every difference between a built split and the record, in words; empty: the same order, bit for bit.

    A blend shorter than a recorded size is compared by its components alone.
    """
    components = components_of(dataset)
    if len(components) != len(split.components):
        return [f"the {name} set has {len(components)} components, not {len(split.components)}"]
    found: list[str] = []
    for record, component in zip(split.components, components, strict=True):
        base = getattr(component, "base", component)
        found += _differing(record.built, part(base, str(record.path)), f"{record.path} ({name})")
        epochs = getattr(component, "epochs", [])
        for number, (old, new) in enumerate(zip(record.epochs, epochs, strict=False), start=1):
            now = part(new, f"epoch {number} of {record.path}")
            found += _differing(old, now, f"further epoch {number} of {record.path} ({name})")
    if bool(split.blend) != is_blend(dataset):
        return [*found, f"the {name} set is {'not ' if split.blend else ''}a blend"]
    if split.blend:
        size = len(index_arrays(dataset)["dataset_index"])
        for old in split.blend:
            if old.samples <= size:
                found += _differing(old, blend_part(dataset, old.samples), f"the blend ({name})")
    return found


def _differing(old: ArrayHashes, new: ArrayHashes, what: str) -> list[str]:
    # Without an index, the length says nothing about the order: it is what was asked for.
    if old.samples != new.samples and old.arrays:
        return [f"{what} has {new.samples} samples, not {old.samples}"]
    return [
        f"{array} of {what} has the hash {new.arrays.get(array, 'of nothing')}, not {digest}"
        for array, digest in old.arrays.items()
        if new.arrays.get(array) != digest
    ]


def refuse_spans(request: Request) -> None:
    """Raise a ConfigError for corpora that mark which tokens are trained, as Megatron's datasets ignore the marks."""
    blends = [blend for split in range(len(SPLITS)) if (blend := request.blend_of(split)) is not None]
    spans = [path for paths, _ in blends for path in paths if spans_path(Path(path)).is_file()]
    if spans:
        raise ConfigError(
            "Megatron's own datasets would train every token of conversations",
            found=f"{spans_path(Path(spans[0]))}, which says which tokens are trained",
            expected="corpora without spans, or the stream instead of Megatron's datasets",
            action="pass --megaresume-data data.yaml with these corpora; or, if every token is meant to be trained, "
            "leave the .spans file out",
        )


def refuse_empty_splits(request: Request) -> None:
    """Raise a ConfigError that names an empty corpus and its split. Call it on one rank, as it reads the indexes."""
    if not hasattr(request.cls, "_build_document_sample_shuffle_indices"):
        return
    for split, (name, share, size) in enumerate(zip(SPLITS, request.shares, request.sizes, strict=True)):
        blend = request.blend_of(split)
        if share is None or size is None or blend is None:
            continue
        paths, weights = blend
        if weights is None and len(paths) > 1:
            continue  # one epoch of each: nothing is added up
        corpora = [corpus for path in paths if (corpus := Corpus.at(path, request.cls)) is not None]
        for corpus in corpora:
            if corpus.is_empty(corpus.bounds(share)):
                raise _empty(request, corpora, corpus, name, split, corpus.bounds(share))


def _empty(
    request: Request, corpora: Sequence[Corpus], corpus: Corpus, name: str, split: int, documents: tuple[int, int]
) -> ConfigError:
    cause, actions = "an empty corpus", [f"leave {corpus.path} out of the {name} set"]
    if request.blend_per_split is None:
        cause = f"--split {request.settings.get('split')} of a small corpus"
        wanted = [share is not None for share in request.shares]
        enough = _enough(corpora, wanted)
        if enough is not None:
            actions.insert(0, f"--split {enough} gives every set of every corpus some documents")
        if split > 0:
            shares = [f"{share[1] - share[0]:g}" if share is not None else "0" for share in request.shares]
            shares[split] = "0"
            actions.insert(-1, f"--split {','.join(shares)} does without a {name} set")
    return ConfigError(
        f"the {name} set of {corpus.path} has no tokens, and Megatron would loop for ever looking for some",
        found=f"documents {documents[0]}:{documents[1]} of {corpus.documents}",
        expected="at least one token in every set that is sampled",
        cause=cause,
        action="; or ".join(actions),
    )


def _enough(corpora: Sequence[Corpus], wanted: Sequence[bool]) -> str | None:
    """The --split value that leaves no set empty, with the later sets as small as possible; None if there is none."""
    fewest = min(corpus.documents for corpus in corpora)
    for documents in range(1, min(fewest, 64)):
        parts = [fewest - documents * sum(wanted[1:]), documents * wanted[1], documents * wanted[2]]
        if parts[0] <= 0:
            return None
        ends = [sum(parts[: i + 1]) / fewest for i in range(3)]
        shares = [(end - part / fewest, end) for part, end in zip(parts, ends, strict=True) if part]
        if not any(corpus.is_empty(corpus.bounds(share)) for corpus in corpora for share in shares):
            return ",".join(map(str, parts))
    return None


def needed_sizes(args: Any, project: Any, asked: Sequence[int | None]) -> tuple[int | None, ...]:
    """How many train, validation and test samples to build so that they last until the end of the run.

    Args:
        args: Megatron's arguments, once a checkpoint was loaded.
        project: which Megatron; None: use what the arguments alone tell.
        asked: what a builder is asked for; None (one epoch) and 0 (no such set) are kept.

    Raises:
        UsageError: a schedule of batch sizes that Megatron would refuse too.
    """
    # --skip-train evaluates from sample 0; the cyclic sampler wraps around, and shuffles depending on the size.
    if getattr(args, "skip_train", False) or getattr(args, "dataloader_type", None) == "cyclic":
        return tuple(asked)
    extra = (_train(args, project), _valid(args), 0)
    return tuple(size + more if size else size for size, more in zip(asked, extra, strict=True))


def _train(args: Any, project: Any) -> int:
    # With --train-samples, Megatron-LM derives the number of iterations before the data is built, and counts those.
    iterations = getattr(args, "train_iters", None)
    if not iterations:
        return 0
    consumed, left = _number(args, "consumed_train_samples"), max(int(iterations) - _number(args, "iteration"), 0)
    planned = _number(args, "train_samples") or int(iterations) * int(args.global_batch_size)
    # A finished run that is started again: Megatron's sampler asserts that a sample is left.
    needed = schedule_from_args(args, project, consumed).after(consumed, left) if left else consumed + 1
    return max(needed - planned, 0)


def _valid(args: Any) -> int:
    interval, iterations = _number(args, "eval_interval"), _number(args, "train_iters")
    if not interval or not iterations:
        return 0
    passed = min(_number(args, "iteration"), iterations) // interval
    passed = max(passed - _number(args, "start_eval_at_iter") // interval, 0)
    size = _number(args, "eval_global_batch_size") or int(args.global_batch_size)
    return max(_number(args, "consumed_valid_samples") - passed * _number(args, "eval_iters") * size, 0)


def _number(args: Any, name: str) -> int:
    return int(getattr(args, name, None) or 0)
