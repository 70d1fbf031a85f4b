"""The record for people: ``<save>/megaresume/order.json``, and what ``megaresume inspect`` says about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.atomic import make_dir
from megaresume.checkpoint.layout import RECORDS_DIR
from megaresume.checkpoint.lock import write_fenced
from megaresume.integrations.megatron.guard.record import SPLITS, BuilderRecord, OrderRecord
from megaresume.stream.errors import StateError
from megaresume.stream.json_text import parse_json

__all__ = ["ORDER", "describe", "read_record", "write_record"]

#: a copy: what counts is the record inside the checkpoint.
ORDER = "order.json"
#: corpora shown per split.
_SHOWN = 8


def write_record(save_dir: str | Path, payload: Mapping[str, Any]) -> Path:
    """Write the record beside the checkpoints, in one step. For one rank only. Raises CheckpointError.

    Args:
        save_dir: the checkpoint root (``--save``).
        payload: what `GuardOrder.payload` returned.
    """
    path = Path(save_dir) / RECORDS_DIR / ORDER
    make_dir(path.parent)
    write_fenced(Path(save_dir), path, (json.dumps(payload, indent=1) + "\n").encode())
    return path


def read_record(save_dir: str | Path) -> dict[str, Any] | None:
    """The record beside the checkpoints, as JSON; None: there is none. Raises StateError: unreadable."""
    path = Path(save_dir) / RECORDS_DIR / ORDER
    try:
        payload = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path} cannot be read",
            found=f"{type(error).__name__}: {error}",
            expected="what a save wrote there",
            cause="the file was damaged or edited; it is only a copy of what the checkpoints hold",
            action="the next save writes it anew",
        ) from error
    return payload if isinstance(payload, dict) else {}


def describe(payload: Mapping[str, Any]) -> list[str]:
    """A record in lines for people. Raises StateError: unreadable."""
    record = OrderRecord.from_dict(payload)
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
