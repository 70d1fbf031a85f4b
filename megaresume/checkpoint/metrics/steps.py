"""The loss and the gradient norm of each step, as a process of the run has them: what a replay is compared with.

    a micro-batch's loss, the norm --copy, not waited for--> thread --a line for each step--> the file of this process

Nothing is computed for it: the numbers are those that the trainer has made anyway. `Made` is one step in one file.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: steps that wait for the thread; older ones are dropped.
MAX_WAITING = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A step, as one process wrote it down."""

    step: int
    #: trained since the start of the run, by all ranks, this step included; None: not known.
    samples: int | None = None
    #: of these samples, 16 hex digits; on rank 0.
    digest: str | None = None
    #: of the micro-batches of this process: their mean, or as its trainer weighs them; None: it was not told.
    loss: float | None = None
    #: of the gradients, before they are clipped; None: it was not told.
    norm: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without what is not known. A number is written so that it is read back bit for bit."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Made:
        """Raises KeyError, TypeError or ValueError for a line that is none."""
        kinds: dict[str, Any] = {"digest": str, "loss": float, "norm": float}
        return cls(**{name: kinds.get(name, int)(line[name]) for name in cls.__slots__ if name in line})


class Copy:
    """A tensor on its way from the device, which is not waited for.

    Args:
        tensor: on any device; on the CPU it is taken as it is.
    """

    __slots__ = ("_event", "here")

    def __init__(self, tensor: Any) -> None:
        #: the tensor on the CPU; its values are those of the device once `is_here`.
        self.here = tensor
        self._event: Any = None
        if tensor.is_cuda:
            import torch

            here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.here = here.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_here(self) -> bool:
        """Whether the device has done it."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()

    def __float__(self) -> float:
        return float(self.here)


def _number(value: Any) -> float | Copy:
    """A number, or a tensor of one on any device. Raises TypeError, ValueError or RuntimeError for anything else."""
    value = value.detach() if hasattr(value, "detach") else value
    if not getattr(value, "is_cuda", False):
        return float(value)
    return Copy(value.reshape(()))


@dataclass(slots=True)
class _Waiting:
    step: int
    samples: int
    losses: list[float | Copy]
    is_scaled: bool
    norm: float | Copy | None


class StepNumbers:
    """What the training notes of its steps, and the thread takes."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque(maxlen=MAX_WAITING)
        self.begin()

    def begin(self) -> None:
        """No step is under way."""
        self._losses: list[float | Copy] = []
        self._is_scaled = False
        self._norm: float | Copy | None = None

    def loss(self, value: Any, *, is_scaled: bool = False) -> None:
        """A micro-batch of this process has this loss. Anything but a number is passed over.

        Args:
            value: a number, or a tensor of one, on any device.
            is_scaled: whether the loss of the step is the sum of such losses; else it is their mean.
        """
        self._is_scaled = is_scaled
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            self._losses.append(_number(value))

    def norm(self, value: Any) -> None:
        """The gradients of the step have this norm. Anything but a number is passed over."""
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            self._norm = _number(value)

    def stepped(self, step: int, samples: int) -> None:
        """The step was made: with it so many steps have trained so many samples."""
        self._waiting.append(_Waiting(step, samples, self._losses, self._is_scaled, self._norm))
        self.begin()

    def take(self, *, wait: bool = False) -> list[Made]:
        """The steps whose numbers are here, in their order; ``wait``: for the device, so that all are."""
        done: list[Made] = []
        while self._waiting:
            step = self._waiting[0]
            copies = [one for one in (*step.losses, step.norm) if isinstance(one, Copy)]
            for one in copies if wait else ():
                one.wait()
            if not all(one.is_here() for one in copies):
                break
            self._waiting.popleft()
            done.append(
                Made(
                    step=step.step,
                    samples=step.samples,
                    loss=_of_step(step),
                    norm=None if step.norm is None else float(step.norm),
                )
            )
        return done


def _of_step(step: _Waiting) -> float | None:
    if not step.losses:
        return None
    total = sum(float(one) for one in step.losses)
    return total if step.is_scaled else total / len(step.losses)
