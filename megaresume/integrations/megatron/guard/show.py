"""The record for people: what ``megaresume inspect`` says about it."""

from __future__ import annotations

from megaresume.checkpoint.data_state import DataState
from megaresume.integrations.megatron.guard.record import SPLITS, BuilderRecord, OrderRecord

__all__ = ["describe"]

#: corpora shown per split.
_SHOWN = 8


def describe(state: DataState) -> list[str]:
    """A record in lines for people. Raises StateError: unreadable."""
    record = OrderRecord.from_state(state)
    proven = "from the first sample" if record.since == 0 else f"from sample {record.since} on"
    lines = [f"order of Megatron's own datasets, recorded {proven} (megatron-core {record.megatron})"]
    if not record.builders:
        lines.append("  nothing is guarded: the data provider used no builder of megatron-core")
    for builder in record.builders:
        lines += _builder(builder)
    lines += [f"  accepted: {words}" for words in record.accepted]
    return lines


def _builder(builder: BuilderRecord) -> list[str]:
    settings = builder.settings
    lines = [
        f"  {builder.dataset}: seed {settings.get('random_seed')}, "
        f"{settings.get('sequence_length')} tokens a sample, split {settings.get('split') or 'by path'}"
    ]
    for name, size, split in zip(SPLITS, builder.sizes, builder.splits, strict=True):
        if split is None:
            continue
        total = split.blend[-1].samples if split.blend else None
        asked = "one epoch" if size is None else f"{size} samples"
        lines.append(f"    {name}: pinned for {asked}" + (f", blend of {total}" if total is not None else ""))
        for component in split.components[:_SHOWN]:
            first, end = component.documents
            more = f", {len(component.epochs)} further epoch(s)" if component.epochs else ""
            digest = component.built.arrays.get("shuffle_index") or next(iter(component.built.arrays.values()), "-")
            lines.append(
                f"      {component.path or 'generated data'}: documents {first}:{end} of {component.total}, "
                f"{component.built.samples} samples{more}, order {digest}"
            )
        if len(split.components) > _SHOWN:
            lines.append(f"      ... and {len(split.components) - _SHOWN} more")
    return lines
