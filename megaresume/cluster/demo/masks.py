"""Which tokens were trained, by code of its own: it reads what ranks wrote down, and the tokens, and nothing else.

A rank writes a line for each sample that its model is given, before it is (`write_given`); a kill cuts one short.

    {"sample": 17, "tokens": "...", "position_ids": "...", "labels": "...", "loss_mask": "..."}     int32, hexadecimal
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_NAMES = ("tokens", "position_ids", "labels", "loss_mask")
_END_OF_HEADER = ord("\n")
#: tokens of the demo: bytes, and these.
END_OF_TEXT, IM_START, IM_END = 256, 257, 258


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """One sample, as a model was given it; all arrays have S places."""

    sample: int
    #: int64.
    tokens: npt.NDArray[np.int64]
    #: 0 where a document, or the padding, begins.
    positions: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    #: whether the loss of the label counts.
    trained: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A place that is not as expected."""

    sample: int
    place: int
    what: str

    def __str__(self) -> str:
        return f"sample {self.sample}, place {self.place}: {self.what}"


def write_given(log: Path, rank: int, batch: Mapping[str, Any]) -> None:
    """Add the samples of a micro-batch to the file of a rank.

    Args:
        log: of the run, ``--megaresume-log-samples``.
        rank: of this process.
        batch: tensors on the CPU: ``samples`` int64[m], tokens, positions, labels and mask [m, S].
    """
    arrays = {name: batch[name].numpy() for name in _NAMES}
    lines = []
    for row, sample in enumerate(batch["samples"].tolist()):
        words = {name: array[row].astype("<i4").tobytes().hex() for name, array in arrays.items()}
        lines.append(json.dumps({"sample": sample, **words}))
    with open(f"{log}.rank{rank}", "ab", buffering=0) as file:
        file.write("".join(f"\n{line}" for line in lines).encode() + b"\n")  # not on the line that a kill cut short


def read_given(directory: Path, name: str) -> list[Given]:
    """All samples that the ranks of all starts of a run were given, in the order of the samples."""
    found = []
    for path in sorted(directory.glob(f"{name}.jsonl.rank*")):
        for line in filter(None, path.read_bytes().split(b"\n")):
            try:
                fields = json.loads(line)
            except ValueError:
                continue  # cut short by a kill
            tokens, positions, labels, mask = (
                np.frombuffer(bytes.fromhex(fields[name]), "<i4").astype(np.int64) for name in _NAMES
            )
            found.append(Given(fields["sample"], tokens, positions, labels, mask != 0))
    return sorted(found, key=lambda one: one.sample)


def compare_masks(twin: Iterable[Given], run: Iterable[Given]) -> Iterator[Wrong]:
    """Each place of the run that differs from its twin's; and samples that only one of them has."""
    by_sample = {one.sample: one for one in twin}
    seen = set()
    for one in run:
        seen.add(one.sample)
        other = by_sample.get(one.sample)
        if other is None:
            yield Wrong(one.sample, 0, "the twin never had it")
            continue
        for name in ("tokens", "positions", "labels", "trained"):
            for place in np.flatnonzero(getattr(one, name) != getattr(other, name)).tolist():
                what = f"{name} {getattr(one, name)[place]}, the twin's {getattr(other, name)[place]}"
                yield Wrong(one.sample, place, what)
    yield from (Wrong(sample, 0, "the run never had it") for sample in sorted(by_sample.keys() - seen))


def what_is_trained(given: Iterable[Given]) -> Iterator[Wrong]:
    """Each place whose mask is not what the tokens of the sample say.

    A document that begins with `IM_START` is a conversation: the words of the assistant are trained, with the token
    that ends them. Of a text every token is trained; zeros alone are padding.

    Args:
        given: samples of bytes and special tokens.
    """
    for one in given:
        starts = np.flatnonzero(one.positions == 0).tolist()
        for first, stop in zip(starts, [*starts[1:], len(one.tokens)], strict=True):
            expected = _expected(one.tokens[first:stop].tolist())
            for place in np.flatnonzero(one.trained[first:stop] != expected).tolist():
                yield Wrong(
                    one.sample, first + place, f"trained {one.trained[first + place]}, its tokens say otherwise"
                )


def _expected(tokens: list[int]) -> list[bool]:
    """Whether the loss counts at each place: if the next token is to be learned."""
    if tokens[0] != IM_START:
        text = any(tokens)
        # Nothing follows the end of a document; a text that is split goes on in another sample.
        return [text] * (len(tokens) - 1) + [text and tokens[-1] != END_OF_TEXT]
    learned, role, answers = [], None, False
    for token in tokens:
        learned.append(answers)
        if token == IM_START:
            role = b""
        elif token == IM_END:
            answers = False
        elif role is not None and token == _END_OF_HEADER:
            answers, role = role == b"assistant", None
        elif role is not None:
            role += bytes([token])
    return [*learned[1:], False]
