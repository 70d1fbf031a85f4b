"""`Witness`: which micro-batches the model was given, as its own forward saw them.

Counting shows how many micro-batches were taken and how many trained; it cannot show that two were taken, one was
evaluated and the other trained twice. So a micro-batch is recognised by its tokens when it enters ``engine.forward``:

    next(data)       fingerprint of the tokens                        int64, 8,192 tokens in about 10 us
    engine.forward   fingerprints of integer inputs of that many tokens, on their own device, without waiting for it
    engine.step      at the end of a step: were all of its micro-batches among them? (One wait for the device, where
                     DeepSpeed waits for the norm of the gradients anyway.)

A loop may change its inputs (mask, cut, repeat, split them) or call the module past the engine. Then forwards are not
recognised and the witness says nothing: it speaks only if it recognised every forward of the step that builds a graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from megaresume.checkpoint.session.rank_log import Noted


@lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, int64[count]: keyed by place, the same on every device."""
    generator = torch.Generator().manual_seed(count)
    return (torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) * 2 + 1).to(device)


def fingerprint(tokens: torch.Tensor) -> torch.Tensor:
    """The weighted sum of all tokens modulo 2^64: int64[], on their device. Places count, the shape does not."""
    flat = tokens.detach().reshape(-1).to(torch.int64)
    return (flat * _weights(flat.numel(), flat.device)).sum()


def tokens_of(batch: Any) -> torch.Tensor | None:
    """What a batch of any kind is recognised by: its largest tensor of integers on the CPU, the first of them."""
    found = [t for t in _tensors(batch) if _is_integer(t) and t.device.type == "cpu" and t.numel()]
    return max(found, key=torch.Tensor.numel, default=None)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What is known of one."""

    #: in words: its samples.
    name: str
    #: fingerprint of its tokens, and their number; None if it cannot be recognised.
    key: int | None = None
    tokens: int = 0
    #: for the log of samples.
    noted: Noted | None = None

    def __str__(self) -> str:
        return self.name


class Witness:
    """What one engine's forward was given since the last optimizer step."""

    #: fingerprints of the micro-batches of all engines of this process that were handed out lately, or only looked at.
    _known: ClassVar[deque[int]] = deque(maxlen=1024)

    def __init__(self) -> None:
        self._forwards: list[list[torch.Tensor]] = []

    def know(self, key: int | None) -> None:
        """A micro-batch with this fingerprint is handed out, or shown."""
        if key is not None:
            self._known.append(key)

    @property
    def graphs(self) -> int:
        """Forwards that built a graph: those that a backward can follow."""
        return len(self._forwards)

    def clear(self) -> None:
        """A step is over."""
        self._forwards.clear()

    def look(self, inputs: Sequence[Any], out: Sequence[MicroBatch]) -> None:
        """Note what a forward is given.

        Args:
            inputs: its arguments, nested as they like.
            out: the micro-batches that are out.
        """
        if not torch.is_grad_enabled():
            return
        sizes = {batch.tokens for batch in out if batch.key is not None}
        found = [t for t in _tensors(inputs) if t.numel() in sizes and _is_integer(t)]
        if any(t.is_cuda for t in found) and torch.cuda.is_current_stream_capturing():
            found = []  # what is captured is only run later
        self._forwards.append([fingerprint(t) for t in found])

    def seen(self, out: Sequence[MicroBatch]) -> list[MicroBatch] | None:
        """Which of the micro-batches that are out the model was given, in the order of its forwards; each once.

        Those of other steps and engines are recognised as well, and count for nothing. None if a forward was given
        something else as well, or there was none.
        """
        keys = [batch.key for batch in out if batch.key is not None]
        if len(keys) < len(out) or not self._forwards or not all(self._forwards):
            return None
        values = torch.stack([one for forward in self._forwards for one in forward]).tolist()
        found: dict[int, None] = {}
        for forward in self._forwards:
            mine = {values.pop(0) for _ in forward}
            known = [index for index, key in enumerate(keys) if key in mine]
            if not known and not any(one in self._known for one in mine):
                return None
            found |= dict.fromkeys(known)
        return [out[index] for index in found]

    def unseen(self, out: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Those that the model was not given, if that is known."""
        seen = self.seen(out)
        return [] if seen is None else [batch for batch in out if not any(batch is one for one in seen)]


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
