"""One rank decides and all ranks know; one rank fails and all ranks fail.

A rank that raises alone leaves the others waiting in the next collective, for minutes or for ever. So what can fail
for a reason of its own (a file, a corpus, a disk) runs inside one of these, and everybody raises the same error.
All of them are collectives of the default process group; without one there is a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megaresume.checkpoint.manifest import FileEntry
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError

__all__ = [
    "gather",
    "is_rank_0",
    "known_to_all",
    "on_all_ranks",
    "on_rank_0",
    "rank",
    "same_on_all_ranks",
    "world_size",
    "written_by_all",
]

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def world_size() -> int:
    """Processes of the job."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process among all."""
    return 0 if world_size() == 1 else dist.get_rank()


def is_rank_0() -> bool:
    """Whether this process is the one that writes records and prints."""
    return rank() == 0


def gather(value: Any) -> list[Any]:
    """The value of every rank, on every rank. Also a barrier."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def _broadcast(value: Any) -> Any:
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it; it is raised again
        return None, error


def _portable(error: Exception) -> MegaresumeError:
    """An error that can be sent to another rank: ours as it is, any other by its words."""
    if isinstance(error, MegaresumeError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}", cause="see the log of the rank that it happened on")


def known_to_all(error: E) -> E:
    """Mark an error that every rank raises: one of them is enough to print it."""
    error.known_to_all_ranks = True  # type: ignore[attr-defined]
    return error


def on_rank_0(function: Callable[[], T]) -> T:
    """Run on rank 0; every rank gets the result (which must be picklable) or raises the error."""
    value: T | None = None
    error: Exception | None = None
    if is_rank_0():
        value, error = _attempt(function)
    value, sent = _broadcast((value, None if error is None else _portable(error)))
    if error is not None:
        raise known_to_all(error)
    if sent is not None:
        raise known_to_all(sent)
    return value  # type: ignore[return-value,unused-ignore]


def on_all_ranks(function: Callable[[], T]) -> T:
    """Run on every rank; if it fails on one, every rank raises, and those that did not fail say which did."""
    value, error = _attempt(function)
    errors = gather(None if error is None else _portable(error))
    if error is not None:
        raise known_to_all(error)
    for rank, other in enumerate(errors):
        if other is not None:
            other.headline = f"rank {rank}: {other.headline}"
            raise known_to_all(other)
    return value  # type: ignore[return-value]


def written_by_all(write: Callable[[], Sequence[FileEntry]]) -> tuple[FileEntry, ...]:
    """Every rank writes files of its own beside a checkpoint; what all of them wrote, by path, on every rank."""
    entries = {entry.path: entry for mine in gather(on_all_ranks(write)) for entry in mine}
    return tuple(entries[path] for path in sorted(entries))


def same_on_all_ranks(value: Any, what: str, *, cause: str, action: str) -> None:
    """Raise a StateError on every rank unless all hold the same (comparable, printable) value."""
    values: Sequence[Any] = gather(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            error = StateError(
                f"the ranks disagree on {what}",
                found=f"rank 0: {values[0]}; rank {rank}: {other}",
                expected="the same on every rank",
                cause=cause,
                action=action,
            )
            raise known_to_all(error)
