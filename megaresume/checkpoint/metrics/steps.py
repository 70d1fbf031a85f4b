"""The loss and the gradient norm of each step in one process, with which a replay is compared.

    a micro-batch's loss, the norm --asynchronous copy--> thread --a line for each step--> the file of this process

Computes nothing: the trainer has these numbers anyway. `Made` is one step in one file.
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
    """A step, as one process recorded it."""

    step: int
    #: samples trained since the start of the run, by all ranks, including this step; None: unknown.
    samples: int | None = None
    #: digest of these samples, 16 hex digits; on rank 0.
    digest: str | None = None
    #: the loss of this process's micro-batches: their mean, or as weighted by its trainer; None: not reported.
    loss: float | None = None
    #: the norm of the gradients, before clipping; None: not reported.
    norm: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without unknown values. Numbers are written so that they are read back bit for bit."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Made:
        """Read a step. Raises KeyError, TypeError or ValueError if the line is not one."""
        kinds: dict[str, Any] = {"digest": str, "loss": float, "norm": float}
        return cls(**{name: kinds.get(name, int)(line[name]) for name in cls.__slots__ if name in line})


class Copy:
    """A tensor on its way from the device, without waiting.

    Args:
        tensor: on any device; on the CPU it is used directly.
    """

    __slots__ = ("_event", "here")

    def __init__(self, tensor: Any) -> None:
        #: the tensor on the CPU; its values are valid once `is_here`.
        self.here = tensor
        self._event: Any = None
        if tensor.is_cuda:
            import torch

            here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.here = here.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_here(self) -> bool:
        """Whether the device has finished the copy."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait for the copy."""
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
    """What the training reports about its steps, until the thread takes it."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque(maxlen=MAX_WAITING)
        self.begin()

    def begin(self) -> None:
        """Discard the numbers of an unfinished step."""
        self._losses: list[float | Copy] = []
        self._is_scaled = False
        self._norm: float | Copy | None = None

    def loss(self, value: Any, *, is_scaled: bool = False) -> None:
        """Add the loss of a micro-batch of this process. Ignores anything except a number.

        Args:
            value: a number, or a tensor of one, on any device.
            is_scaled: whether the loss of the step is the sum of such losses; otherwise it is their mean.
        """
        self._is_scaled = is_scaled
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            self._losses.append(_number(value))

    def norm(self, value: Any) -> None:
        """Set the norm of the step's gradients. Ignores anything except a number."""
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            self._norm = _number(value)

    def stepped(self, step: int, samples: int) -> None:
        """End a step: so many steps have now trained so many samples."""
        self._waiting.append(_Waiting(step, samples, self._losses, self._is_scaled, self._norm))
        self.begin()

    def take(self, *, wait: bool = False) -> list[Made]:
        """The steps whose numbers have arrived, in order; with ``wait``, all of them."""
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
