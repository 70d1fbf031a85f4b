"""Prompts in flight as text: which are open, and which rollouts of their groups are gone.

    short   {"open": [gap, run, gap, run, ...], "partial": [[ordinal, gone rollouts in hex, step], ...]}
    packed  {"packed": the same by column, without rollouts, "gone": the rollouts, as a bitmap of each group}

Many prompts are packed.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from megaresume.stream.errors import as_count, parse_json

#: number of characters from which on the prompts in flight are packed.
PACKED_FROM = 4096


def packed(opened: Sequence[int], partial: Sequence[tuple[int, str, int | None]], rollouts: int) -> dict[str, Any]:
    """The fields of a state, packed if they are long.

    Args:
        opened: ordinals of the prompts in flight, ascending.
        partial: of groups trained or dropped in part: ordinal, the gone rollouts as bits in hex, and the last step that
            trained one.
        rollouts: of each prompt.
    """
    fields: dict[str, Any] = {"open": to_runs(opened), "partial": partial}
    if len(json.dumps(fields, separators=(",", ":"))) <= PACKED_FROM:
        return fields
    # By column, so that similar numbers are together.
    columns = [fields["open"], to_runs([k for k, _, _ in partial]), [step for _, _, step in partial]]
    text = json.dumps(columns, separators=(",", ":")).encode()
    bits = b"".join(int(gone, 16).to_bytes(-(-rollouts // 8), "little") for _, gone, _ in partial)
    return {"packed": _compressed(text), "gone": _compressed(bits)}


def unpacked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a state in the short form, with ``open`` and ``partial``, from either form.

    Raises:
        ValueError: it is damaged.
    """
    if "packed" not in fields:
        return dict(fields)
    opened, runs, steps = parse_json(_decompressed(fields, "packed"))
    ordinals, bits, width = from_runs(runs), _decompressed(fields, "gone"), -(-as_count(fields["rollouts"]) // 8)
    if len(bits) != width * len(ordinals):
        raise ValueError(f"gone: {len(bits)} bytes, of {len(ordinals)} groups of {width}")
    gone = [f"{int.from_bytes(bits[at : at + width], 'little'):x}" for at in range(0, len(bits), width or 1)]
    return {**fields, "open": opened, "partial": list(zip(ordinals, gone, steps, strict=True))}


def _compressed(data: bytes) -> str:
    # Data without repetitions, such as random bits, is smaller without zlib's search for them.
    found = []
    for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY):
        packer = zlib.compressobj(9, strategy=strategy)
        found.append(packer.compress(data) + packer.flush())
    return base64.b85encode(min(found, key=len)).decode()


def _decompressed(fields: Mapping[str, Any], name: str) -> bytes:
    try:
        return zlib.decompress(base64.b85decode(fields[name]))
    except zlib.error as error:
        raise ValueError(f"{name}: {error}") from error


def to_runs(ordinals: Sequence[int]) -> list[int]:
    """Ascending ordinals as alternating lengths of gaps and runs: [gap, run, gap, run, ...]."""
    runs: list[int] = []
    end = 0
    for ordinal in ordinals:
        if runs and ordinal == end:
            runs[-1] += 1
        else:
            runs += (ordinal - end, 1)
        end = ordinal + 1
    return runs


def from_runs(runs: Sequence[int]) -> list[int]:
    """The ordinals that `to_runs` encoded.

    Raises:
        ValueError: malformed runs.
    """
    ordinals: list[int] = []
    end = 0
    for gap, run in zip(runs[::2], runs[1::2], strict=True):
        first = end + as_count(gap)
        end = first + as_count(run)
        ordinals += range(first, end)
    return ordinals
