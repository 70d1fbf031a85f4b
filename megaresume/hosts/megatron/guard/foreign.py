"""Datasets that were built without megatron-core's builder, as those of Megatron-DeepSpeed: recorded and compared.

There is no builder to hold to a record, so nothing is pinned: what came out is compared with what was recorded, and
refused by name where it is another order. Without collectives: such providers run on some ranks only.
"""

from __future__ import annotations

import os
from typing import Any

from megaresume.hosts.megatron.guard.compare import Difference
from megaresume.hosts.megatron.guard.corpora import index_arrays
from megaresume.hosts.megatron.guard.pinned import blend_part, components_of, is_blend, mismatches, part
from megaresume.hosts.megatron.guard.record import SPLITS, BuilderRecord, ComponentRecord, SplitRecord

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


def looks() -> bool:
    """Whether this rank looks at the indexes: one per node, as far as the launcher says."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def observe_foreign(args: Any, datasets: Any) -> BuilderRecord | None:
    """The record of what a provider returned; None if nothing in it has an index that we know."""
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


def _split(dataset: Any) -> SplitRecord | None:
    components = components_of(dataset)
    if not any(index_arrays(component) for component in components):
        return None
    names = [str(getattr(component, "name", f"corpus {i}")) for i, component in enumerate(components)]
    return SplitRecord(
        components=tuple(
            ComponentRecord(
                path=name,
                documents=(0, 0),
                total=0,
                requested=None,
                built=part(component, name),
                lengths=None,
                tokens=None,
            )
            for name, component in zip(names, components, strict=True)
        ),
        blend=(blend_part(dataset),) if is_blend(dataset) else (),
    )


def differences(record: BuilderRecord, now: BuilderRecord | None, datasets: Any) -> list[Difference]:
    """Why the datasets do not have the recorded order; empty: they do."""
    changed = [] if now is None else _changed(record, now)
    found = []
    for i, (name, split) in enumerate(zip(SPLITS, record.splits, strict=True)):
        wrong = [] if split is None else mismatches(split, None if now is None else datasets[i], name)
        if wrong:
            found.append(
                Difference(
                    name=f"{name}-order",
                    recorded=f"the {name} set with the recorded hashes",
                    found="; ".join(wrong[:4]) + (f" ({'; '.join(now for _, now in changed)})" if changed else ""),
                    restore="; ".join(old for old, _ in changed)
                    or "the corpora and index caches of the run that saved the checkpoint",
                    split=i,
                )
            )
    return found


def _changed(record: BuilderRecord, now: BuilderRecord) -> list[tuple[str, str]]:
    """(flag as recorded, flag as found) of every argument that is another one."""
    return [
        (f"{flag} {record.settings.get(name, '(left out)')}", f"{flag} {now.settings.get(name, '(left out)')}")
        for name, flag in _ARGUMENTS.items()
        if record.settings.get(name) != now.settings.get(name)
    ]
