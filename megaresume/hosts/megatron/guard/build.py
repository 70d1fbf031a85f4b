"""Hook on ``BlendedMegatronDatasetBuilder``: build as Megatron does and record it, or build what is recorded.

A recorded order has an end: the number of samples that the run was meant to train. If it is to train more, samples are
added after the recorded ones, none of which move: each corpus that runs out continues with additional epochs, one after
another, each shuffled separately; the blend continues with the same weights. Epoch k is a pure function of the record
and k, so the order does not depend on how often or by how much a run was extended.

    recorded:   | corpus, its epochs as Megatron built them | epoch 1 | epoch 2 | ...
    blend:      greedy by weight, sample by sample: a longer one begins with the shorter one
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data
import xxhash

from megaresume.checkpoint.ranks import on_rank_0
from megaresume.checkpoint.records.names import RECORDS_DIR
from megaresume.hosts.megatron.guard.compare import Comparison, compare, grown_too_far, refuse
from megaresume.hosts.megatron.guard.order import Pass, agreed, current_pass, from_leaders
from megaresume.hosts.megatron.guard.pinned import (
    blend_part,
    components_of,
    extendable,
    is_blend,
    mismatches,
    needed_sizes,
    observe,
    observe_split,
    part,
    pin_builder,
    pinned_splits,
    refuse_empty_splits,
    refuse_spans,
    unguarded,
    without_lazy_caches,
)
from megaresume.hosts.megatron.guard.record import (
    SPLITS,
    ArrayHashes,
    Blend,
    BuilderRecord,
    ComponentRecord,
    Request,
    SplitRecord,
)
from megaresume.stream.errors import CorpusError, StateError, listed


def around_builder_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on the builder's ``build(self) -> [train, valid, test]``. Collective, like the original."""

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = current_pass()
        if guard is None:
            return original(self, *args, **kwargs)
        return _build(guard, self, lambda: original(self, *args, **kwargs))

    return build


def _build(guard: Pass, builder: Any, original: Callable[[], Any]) -> Any:
    if getattr(guard.host.args, "phase_transition_iterations", None):
        guard.note("the order is NOT guarded: --phase-transition-iterations builds other datasets for every phase")
        guard.left_alone = True
        return original()
    try:
        request = Request.of(builder)
    except (AttributeError, TypeError, ValueError) as error:
        guard.note(f"the order is NOT guarded: a builder of another kind ({type(error).__name__}: {error})")
        guard.left_alone = True
        return original()
    on_rank_0(lambda: refuse_spans(request))
    on_rank_0(lambda: refuse_empty_splits(request))
    pin = guard.pin(len(guard.builders))
    if pin is None:
        datasets = original()
        record = agreed(datasets, lambda: observe(request, datasets))
    else:
        if guard.resumes:
            sizes = needed_sizes(guard.host.args, guard.host.project, request.sizes)
            request = replace(request, sizes=sizes)
        datasets, record = _Rebuild(guard, builder, original, pin, request).run()
    guard.builders.append(record)
    for words in agreed(datasets, lambda: unguarded(record, datasets)):
        guard.note(words)
    return datasets


class _Rebuild:
    """One builder of a resumed run, which must reproduce its record."""

    def __init__(
        self, guard: Pass, builder: Any, original: Callable[[], Any], pin: BuilderRecord, request: Any
    ) -> None:
        self.guard, self.builder, self.original, self.pin, self.request = guard, builder, original, pin, request

    def run(self) -> tuple[Any, BuilderRecord]:
        free = self._compare()
        splits = pinned_splits(self.pin, self.request, free)
        self._note_unpinned(splits, free)
        datasets, splits = self._build(splits)
        now = agreed(
            datasets,
            lambda: tuple(
                splits.get(i) or observe_split(self.request, dataset) or (None if i in free else self.pin.splits[i])
                for i, dataset in enumerate(datasets)
            ),
        )
        return datasets, self._record(now, set(splits), free)

    def _compare(self) -> set[int]:
        """The splits that the user frees by accepting their differences. Raises StateError for unaccepted ones."""

        def compared() -> Comparison:
            found = compare(self.pin, self.request)
            found.differences += grown_too_far(self.pin, self.request.sizes[0])
            open_ = [d for d in found.differences if not self.guard.accepts(d.name)]
            if open_:
                raise refuse(open_, self.guard.samples)
            return found

        found = on_rank_0(compared)
        for words in found.notes:
            self.guard.note(words)
        free: set[int] = set()
        for difference in found.differences:
            free |= {0, 1, 2} if difference.split is None else {difference.split}
            self.guard.note(f"accepted: {self.guard.accept(difference)}")
        return free

    def _note_unpinned(self, splits: dict[int, SplitRecord], free: set[int]) -> None:
        for i, split in list(splits.items()):
            old, new = self.pin.sizes[i], self.request.sizes[i]
            has_index = any(component.built.arrays for component in split.components)
            if i > 0 and old is not None and new is not None and new > old and has_index and not extendable(split):
                del splits[i]
        for i, recorded in enumerate(self.pin.splits):
            if recorded is not None and i not in splits and i not in free:
                self.guard.note(f"the {SPLITS[i]} set is not pinned: it is asked for differently than recorded")

    def _build(self, splits: dict[int, SplitRecord]) -> tuple[Any, dict[int, SplitRecord]]:
        cache: str | None = None
        with pin_builder(self.builder, self.pin, self.request, splits):
            datasets = list(self.original())
            wrong = self._mismatches(splits, datasets)
        if wrong:
            cache = on_rank_0(self._own_cache)
            self.guard.note(f"the cached index is not the recorded one ({wrong[0]}); building it again in {cache}")
            with pin_builder(self.builder, self.pin, self.request, splits, cache):
                datasets = list(self.original())
                wrong = self._mismatches(splits, datasets)
            if wrong:
                raise self._other_order(wrong)
        with pin_builder(self.builder, self.pin, self.request, {}, cache):
            return datasets, self._extend(splits, datasets)

    def _mismatches(self, splits: dict[int, SplitRecord], datasets: list[Any]) -> list[str]:
        def look() -> list[str]:
            return [
                words
                for i, split in splits.items()
                if datasets[i] is not None
                for words in mismatches(split, datasets[i], SPLITS[i])
            ]

        return [words for found in from_leaders(datasets, look) for words in found]

    def _extend(self, splits: dict[int, SplitRecord], datasets: list[Any]) -> dict[int, SplitRecord]:
        sizes, asked = self.pin.sizes, self.request.sizes

        def planned() -> dict[int, Extension]:
            found = {
                i: plan_extension(split, datasets[i], max(size, sizes[i] or 0), by_length=self._weights(i) is None)
                for i, split in splits.items()
                if (size := asked[i]) is not None and datasets[i] is not None and extendable(split)
            }
            return {i: plan for i, plan in found.items() if plan is not None}

        plans = agreed(datasets, planned)
        for i, plan in plans.items():
            datasets[i] = extend(self.builder, splits[i], datasets[i], plan, self._weights(i))
            self.guard.note(
                f"the {SPLITS[i]} set continues after its {sizes[i]} recorded samples up to {plan.samples}"
                + (f", with {sum(plan.epochs)} further epoch(s) of its corpora" if any(plan.epochs) else "")
            )
        if not plans:
            return splits
        wrong = self._mismatches({i: splits[i] for i in plans}, datasets)
        if wrong:
            raise self._other_order(wrong)
        longer = agreed(datasets, lambda: {i: extension_record(splits[i], datasets[i]) for i in plans})
        return splits | longer

    def _weights(self, split: int) -> list[float] | None:
        blend = self.pin.blend if self.pin.blend is not None else (self.pin.blend_per_split or (None,) * 3)[split]
        return None if blend is None or blend[1] is None else [float.fromhex(weight) for weight in blend[1]]

    def _own_cache(self) -> str:
        """A directory for a cold build, chosen on rank 0: next to the checkpoints, where every node can read."""
        name, save = f"megaresume-{self.guard.digest}", getattr(self.guard.host.args, "save", None)
        if save:
            return os.path.join(save, RECORDS_DIR, f"index-{self.guard.digest}")
        if self.builder.config.path_to_cache:
            return os.path.join(self.builder.config.path_to_cache, name)
        paths = [blend[0][0] for i in range(3) if (blend := self.request.blend_of(i)) is not None]
        return str(Path(paths[0]).parent / name) if paths else name

    def _other_order(self, wrong: list[str]) -> StateError:
        return StateError(
            "Megatron's datasets do not come out in the recorded order",
            found=listed(wrong, 8, "; "),
            expected="the order that the checkpoint was trained in",
            cause="the flags and corpora are as recorded, so the code that builds the index is another one: another "
            "version of Megatron, NumPy, or a patch to either",
            action="use the versions of the run that saved the checkpoint; or, if it is meant, "
            "--megaresume-mode off for Megatron's own behaviour",
        )

    def _record(self, splits: tuple[Any, ...], pinned: set[int], free: set[int]) -> BuilderRecord:
        if free == {0, 1, 2}:
            return replace(observe(self.request, (None, None, None)), splits=splits)
        pairs = enumerate(zip(self.pin.sizes, self.request.sizes, strict=True))
        sizes = [old if i in pinned else new for i, (old, new) in pairs]
        return replace(
            self.pin,
            sizes=tuple(sizes),
            splits=splits,
            blend=_moved(self.pin.blend, self.request.blend),
            blend_per_split=None
            if self.pin.blend_per_split is None or self.request.blend_per_split is None
            else tuple(
                new if i in free else _moved(old, new)
                for i, (old, new) in enumerate(zip(self.pin.blend_per_split, self.request.blend_per_split, strict=True))
            ),
        )


def _moved(old: Blend | None, new: Blend | None) -> Blend | None:
    """The current paths of the corpora, with the recorded weights."""
    return old if old is None or new is None else (new[0], old[1])


#: Minimum number of samples in an additional epoch: tiny corpora are repeated to reach it.
_MIN_SAMPLES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """The samples that a split needs after its recorded ones. Plain data, to be sent to all ranks."""

    #: Samples of the blend, or of each dataset if there is none.
    samples: int
    #: Per component: additional epochs, and the samples to request to get one of them (None: just one pass).
    epochs: tuple[int, ...]
    requested: tuple[int | None, ...]


def plan_extension(split: SplitRecord, dataset: Any, samples: int, *, by_length: bool) -> Extension | None:
    """The extension that makes this built split hold ``samples`` samples; None if it needs none.

    Args:
        split: the record.
        dataset: what the builder built for it.
        samples: how many are needed.
        by_length: it blends without weights; then Megatron has one epoch whatever is asked for, and so do we.

    Raises:
        CorpusError: a corpus has no tokens.
    """
    components = components_of(dataset)
    if is_blend(dataset):
        if dataset.size is None:
            return None
        if by_length:
            samples = min(samples, sum(len(component) for component in components))
        if dataset.size >= samples:
            return None
        # The greedy blend takes at most a corpus's share plus one sample; and one more for rounding.
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
        raise CorpusError(
            f"{record.path} has no tokens to continue with",
            found=f"documents {first}:{end} are empty",
            action="train fewer samples (--train-samples, --train-iters); or start a new run without this corpus",
        )
    samples, asked = (tokens - extra) // length, None
    if samples < _MIN_SAMPLES:
        samples = asked = _MIN_SAMPLES
    return ceil(missing / samples), asked


def epoch_seed(seed: int, number: int) -> int:
    """Seed of additional epoch ``number``, from 1: 32 bits, as NumPy's ``RandomState`` takes."""
    return xxhash.xxh3_64_intdigest(f"megaresume epoch {number} of {seed}".encode()) & 0xFFFFFFFF


class Extended(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset of Megatron, followed by additional epochs. Differs from that dataset only in its length."""

    def __init__(self, base: Any, epochs: Sequence[Any]) -> None:
        self.base = base
        self.epochs = list(epochs)
        self._starts = np.cumsum([0, len(base), *map(len, epochs)])
        #: For the name of a blend's cache file.
        self.unique_identifiers = dict(base.unique_identifiers) | {"megaresume_epochs": len(epochs)}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int | None) -> Any:
        # None: Megatron pads a batch
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
    """Build a planned extension. Collective where Megatron's builder is.

    Args:
        builder: the ``BlendedMegatronDatasetBuilder``, configured as for the split itself.
        split: the record.
        dataset: what the builder built for it; None: nothing on this rank.
        plan: from `plan_extension`.
        weights: the blend's, as given by the flags; None: by the lengths of the corpora, or no blend.
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
    # Always wrapped: a blend requires components of one class.
    return None if dataset is None else Extended(dataset, built)


def extension_record(split: SplitRecord, dataset: Any) -> SplitRecord:
    """The record of a split plus what its dataset now has after it; earlier entries are kept."""
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
