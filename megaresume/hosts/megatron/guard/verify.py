"""What was built, against the record: array by array."""

from __future__ import annotations

from typing import Any

from megaresume.hosts.megatron.guard.corpora import index_arrays
from megaresume.hosts.megatron.guard.pinned import blend_part, components_of, is_blend, part
from megaresume.hosts.megatron.guard.record import Part, SplitRecord


def mismatches(split: SplitRecord, dataset: Any, name: str) -> list[str]:
    """Everything in a built split that is not as recorded, in words; empty: the same order, bit for bit.

    A blend that is shorter now than a recorded size is compared as far as it goes by its components alone.
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


def _differing(old: Part, new: Part, what: str) -> list[str]:
    # Without an index the length says nothing of the order: it is what was asked for.
    if old.samples != new.samples and old.arrays:
        return [f"{what} has {new.samples} samples, not {old.samples}"]
    return [
        f"{array} of {what} has the hash {new.arrays.get(array, 'of nothing')}, not {digest}"
        for array, digest in old.arrays.items()
        if new.arrays.get(array) != digest
    ]
