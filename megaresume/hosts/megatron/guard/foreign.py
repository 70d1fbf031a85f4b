"""Datasets that were built without megatron-core's builder, as those of Megatron-DeepSpeed: recorded and compared.

There is no builder to hold to a record, so nothing is pinned: what came out is compared with what was recorded, and
refused by name where it is another order. Without collectives: such providers run on some ranks only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megaresume.hosts.megatron.guard.compare import Difference
from megaresume.hosts.megatron.guard.corpora import Array, array_digest
from megaresume.hosts.megatron.guard.pinned import components_of
from megaresume.hosts.megatron.guard.record import SPLITS, BuilderRecord, ComponentRecord, Part, SplitRecord

#: what the dataset classes of the Megatrons call their indexes.
_INDEXES: tuple[str, ...] = ("doc_idx", "sample_idx", "shuffle_idx", "document_index", "sample_index", "shuffle_index")
_INDEXES += ("samples_mapping", "dataset_index", "dataset_sample_index")
#: arguments that enter the order, and their flags.
_ARGUMENTS = {
    "seed": "--seed",
    "seq_length": "--seq-length",
    "split": "--split",
    "data_path": "--data-path",
    "train_data_path": "--train-data-path",
    "valid_data_path": "--valid-data-path",
    "test_data_path": "--test-data-path",
    "train_weighted_split_paths": "--train-weighted-split-paths",
    "valid_weighted_split_paths": "--valid-weighted-split-paths",
    "data_impl": "--data-impl",
    "train_iters": "--train-iters",
    "train_samples": "--train-samples",
    "global_batch_size": "--global-batch-size",
}
_BLEND = ("dataset_index", "dataset_sample_index")


def looks() -> bool:
    """Whether this rank looks at the indexes: one per node, as far as the launcher says."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def observe_foreign(args: Any, datasets: Any) -> BuilderRecord | None:
    """The record of what a provider returned; None: nothing in it has an index that we know."""
    if not isinstance(datasets, list | tuple) or len(datasets) != 3:
        return None
    splits = tuple(_split(dataset) for dataset in datasets)
    if not any(splits):
        return None
    settings = {name: str(value) for name in _ARGUMENTS if (value := getattr(args, name, None)) is not None}
    name = next(type(c).__name__ for dataset in datasets for c in components_of(dataset))
    return BuilderRecord(
        dataset=name, settings=settings, blend=None, blend_per_split=None, sizes=(None,) * 3, splits=splits
    )


def _arrays(dataset: Any, names: Sequence[str]) -> dict[str, Array]:
    held = getattr(dataset, "__dict__", {})
    return {name: held[name] for name in names if hasattr(held.get(name), "dtype") and held[name].dtype.kind in "iu"}


def _part(dataset: Any, names: Sequence[str], samples: int | None = None) -> Part:
    arrays = {
        name: array_digest(array[:samples], f"{name} of {type(dataset).__name__}")
        for name, array in _arrays(dataset, names).items()
    }
    return Part(samples=len(dataset) if samples is None else samples, arrays=arrays)


def _split(dataset: Any) -> SplitRecord | None:
    components = [c for c in components_of(dataset) if _arrays(c, _INDEXES)]
    if not components:
        return None
    return SplitRecord(
        components=tuple(
            ComponentRecord(
                path=str(getattr(component, "name", position)),
                documents=(0, 0),
                total=0,
                requested=None,
                built=_part(component, _INDEXES),
                lengths=None,
                tokens=None,
            )
            for position, component in enumerate(components)
        ),
        blend=(_part(dataset, _BLEND),) if _arrays(dataset, _BLEND) else (),
    )


def differences(record: BuilderRecord, now: BuilderRecord | None, datasets: Any) -> list[Difference]:
    """Why the datasets do not have the recorded order; empty: they do."""
    changed = [] if now is None else _changed(record, now)
    found = []
    for i, split in enumerate(record.splits):
        new = None if now is None else now.splits[i]
        wrong = None if split is None else _wrong(split, new, datasets[i] if new is not None else None)
        if wrong is not None:
            found.append(
                Difference(
                    name=f"{SPLITS[i]}-order",
                    recorded=f"{SPLITS[i]} set: {wrong[0]}",
                    found=wrong[1] + (f" ({'; '.join(now for _, now, _ in changed)})" if changed else ""),
                    restore="; ".join(old for old, _, _ in changed)
                    or "the corpora and index caches of the run that saved the checkpoint",
                    split=i,
                )
            )
    return found


def _changed(record: BuilderRecord, now: BuilderRecord) -> list[tuple[str, str, str]]:
    """(flag as recorded, flag as found, name) of every argument that is another one."""
    return [
        (f"{flag} {record.settings.get(name, '(left out)')}", f"{flag} {now.settings.get(name, '(left out)')}", name)
        for name, flag in _ARGUMENTS.items()
        if record.settings.get(name) != now.settings.get(name)
    ]


def _wrong(old: SplitRecord, new: SplitRecord | None, dataset: Any) -> tuple[str, str] | None:
    """(recorded, found) in words."""
    if new is None:
        return "there was one", "there is none"
    if len(old.components) != len(new.components):
        return f"{len(old.components)} corpora", f"{len(new.components)}"
    for position, (a, b) in enumerate(zip(old.components, new.components, strict=True)):
        for name, digest in a.built.arrays.items():
            if b.built.arrays.get(name) != digest:
                return f"{name} of corpus {position} with hash {digest}", f"hash {b.built.arrays.get(name)}"
    if bool(old.blend) != bool(new.blend):
        return ("a blend", "none") if old.blend else ("no blend", "one")
    for part in old.blend:
        # A shorter blend is compared as far as its corpora go; its turns depend on the weights alone.
        now = _part(dataset, _BLEND, part.samples) if part.samples <= new.blend[0].samples else part
        if dict(now.arrays) != dict(part.arrays):
            return f"turns of the blend with hashes {_hashes(part)}", f"hashes {_hashes(now)}"
    return None


def _hashes(part: Part) -> str:
    return ", ".join(part.arrays.values())
