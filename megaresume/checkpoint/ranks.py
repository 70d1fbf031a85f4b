"""One rank decides and all ranks know; one rank fails and all ranks fail. `ending` says how they end then.

A rank that raises alone leaves the others waiting in the next collective, for minutes or forever. So anything that can
fail on one rank (a file, a corpus, a disk) runs inside one of these functions, and all ranks raise the same error. All
of them are collectives of the default process group; without one, or without torch, there is a single rank.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import itertools
import pickle
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import xxhash

from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def world_size() -> int:
    """The number of processes in the job."""
    dist = sys.modules.get("torch.distributed")  # not imported: settings, and their readers, work without torch
    return dist.get_world_size() if dist is not None and dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The rank of this process."""
    return 0 if world_size() == 1 else int(torch_distributed().get_rank())


def is_rank_0() -> bool:
    """Whether this process writes records and prints."""
    return rank() == 0


def gather(value: Any) -> list[Any]:
    """The value of every rank, on every rank. Also a barrier."""
    if world_size() == 1:
        return [value]
    if _on_cpu():
        return _gather(value)
    values: list[Any] = [None] * world_size()
    torch_distributed().all_gather_object(values, value)
    return values


def broadcast(value: Any, source: int = 0) -> Any:
    """The value of rank ``source``, on every rank. Collective."""
    if world_size() == 1:
        return value
    if _on_cpu():
        return _spread(value, source)
    box = [value]
    torch_distributed().broadcast_object_list(box, src=source)
    return box[0]


def torch_distributed() -> Any:
    """torch.distributed, if there is more than one rank: then it is imported."""
    return sys.modules["torch.distributed"]


# Objects over a process group on CPUs, instead of torch's own functions, because of `finished`.


def _on_cpu() -> bool:
    """Whether the process group supports CPU tensors."""
    return "cpu" in {device.type for device in torch_distributed().group.WORLD._device_types}


def _gather(value: Any) -> list[Any]:
    dist, torch = torch_distributed(), sys.modules["torch"]
    mine = pickle.dumps(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    finished(dist.all_gather(sizes, torch.tensor([len(mine)]), async_op=True), sizes)
    most = max(int(size) for size in sizes)
    # (ranks, bytes of the longest), of uint8.
    rows = list(torch.zeros(world_size(), most, dtype=torch.uint8))
    padded = torch.frombuffer(bytearray(mine.ljust(most, b"\0")), dtype=torch.uint8)
    finished(dist.all_gather(rows, padded, async_op=True), rows, padded)
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, map(int, sizes), strict=True)]


def _spread(value: Any, source: int) -> Any:
    dist, torch = torch_distributed(), sys.modules["torch"]
    is_source = rank() == source
    content = bytearray(pickle.dumps(value) if is_source else b"")
    size = torch.tensor([len(content)])
    finished(dist.broadcast(size, src=source, async_op=True), size)
    data = torch.frombuffer(content, dtype=torch.uint8) if is_source else torch.zeros(int(size), dtype=torch.uint8)
    finished(dist.broadcast(data, src=source, async_op=True), data)
    return value if is_source else pickle.loads(data.numpy().tobytes())


#: collectives that have finished, with their tensors.
_kept: collections.deque[Any] = collections.deque(maxlen=16)


def finished(work: Any, *tensors: Any) -> None:
    """Wait for a collective, and keep a reference to it.

    A gloo thread drops its reference after waiting threads are told that it is done. If that is the last reference, it
    needs Python; if Python is finalizing by then, torch aborts the process (pytorch#190489). So the last few are kept
    here, and for good when the process ends.
    """
    work.wait()
    keep(work, tensors)


def keep(work: Any, tensors: Sequence[Any]) -> None:
    """Keep a reference, as `finished` does, to a collective that nobody waits for."""
    if not _kept:
        atexit.register(lambda: [ctypes.pythonapi.Py_IncRef(ctypes.py_object(one)) for one in _kept])
    _kept.append((work, tensors))


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it; it is raised again
        return None, error


def _outcome(value: T | None, error: Exception | None) -> T:
    """Return or raise the result of `_attempt`."""
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _portable(error: Exception) -> MegaresumeError:
    """An error that can be sent to another rank: ours unchanged, any other as its text."""
    if isinstance(error, MegaresumeError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}", action="see the log of the rank that it happened on")


def known_to_all(error: E) -> E:
    """Mark an error that every rank raises, so that only one of them prints it."""
    error.known_to_all_ranks = True  # type: ignore[attr-defined]
    return error


def is_known_to_all(error: Exception) -> bool:
    """Whether every rank raises it, see `known_to_all`."""
    return getattr(error, "known_to_all_ranks", False)


def on_rank_0(function: Callable[[], T]) -> T:
    """Run on rank 0; every rank gets the result (which must be picklable) or raises the error."""
    value: T | None = None
    error: Exception | None = None
    if is_rank_0():
        value, error = _attempt(function)
    value, sent = broadcast((value, None if error is None else _portable(error)))
    if error is not None:
        raise known_to_all(error)
    if sent is not None:
        raise known_to_all(sent)
    return value  # type: ignore[return-value,unused-ignore]


def shared_store() -> Any:
    """The store at which the ranks met, for messages between them without a collective."""
    return torch_distributed().distributed_c10d._get_default_store()


def pauses(longest: float, first: float = 0.005) -> Iterator[None]:
    """Pauses between polls, each longer than the last, up to ``longest`` seconds."""
    while True:
        yield
        time.sleep(first)
        first = min(1.5 * first, longest)


#: calls so far; the count is the same on every rank.
_long = itertools.count()


def on_all_ranks_for_long(
    function: Callable[[Callable[[], None]], T],
    doing: str,
    *,
    poll_seconds: float = 0.5,
    patience_seconds: float = 300.0,
) -> T:
    """Like `on_all_ranks`, for work that takes longer on some ranks than a collective waits, usually 10 to 30 minutes.

    The ranks wait at the store of their process group while there are signs of life.

    Args:
        function: gets a function to call every few seconds as a sign of life.
        doing: what it does, for the error: "converted a checkpoint".
        poll_seconds: time between polls of ranks that are done; at first shorter.
        patience_seconds: without a sign of life from any rank.

    Raises, in addition to errors of the function:
        CheckpointError: a rank gives no sign of life.
    """
    if world_size() == 1:
        return function(lambda: None)
    store, key = shared_store(), f"megaresume/long/{next(_long)}"
    last = 0.0

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= 1.0:
            last = time.monotonic()
            store.add(f"{key}/beats", 1)

    value, error = _attempt(lambda: function(beat))
    store.add(f"{key}/done", 1)
    seen, since = (-1, -1), time.monotonic()
    for _ in pauses(poll_seconds):
        if (done := store.add(f"{key}/done", 0)) == world_size():
            break
        now = done, store.add(f"{key}/beats", 0)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > patience_seconds:
            raise CheckpointError(
                "another rank gives no sign of life",
                found=f"none for {patience_seconds:.0f} s, while it {doing}; {done} of {world_size()} ranks are done",
                expected="one every few seconds",
                cause="its process was killed, or its filesystem hangs",
                action="look at the logs of the other ranks; start again: nothing is lost",
            )
    return on_all_ranks(lambda: _outcome(value, error))


def on_rank_0_for_long(function: Callable[[Callable[[], None]], T], doing: str, **waiting: float) -> T:
    """Like `on_rank_0`, for any duration: see `on_all_ranks_for_long`."""
    nothing: tuple[T | None, Exception | None] = None, None
    value, error = on_all_ranks_for_long(
        lambda beat: _attempt(lambda: function(beat)) if is_rank_0() else nothing, doing, **waiting
    )
    return on_rank_0(lambda: _outcome(value, error))


def on_all_ranks(function: Callable[[], T]) -> T:
    """Run on every rank; if it fails on one, every rank raises, and those that did not fail name the one that did."""
    value, error = _attempt(function)
    errors = gather(None if error is None else _portable(error))
    if error is not None:
        raise known_to_all(error)
    for rank, other in enumerate(errors):
        if other is not None:
            other.headline = f"rank {rank}: {other.headline}"
            raise known_to_all(other)
    return value  # type: ignore[return-value]


def written_by_all(
    write: Callable[[], Sequence[FileEntry]], ranks: Container[int] | None = None
) -> tuple[FileEntry, ...]:
    """Let every rank, or these, write files beside a checkpoint; returns all of them, sorted by path, on every rank."""
    written = gather(on_all_ranks(write))
    some = [mine for number, mine in enumerate(written) if ranks is None or number in ranks]
    entries = {entry.path: entry for mine in some for entry in mine}
    return tuple(entries[path] for path in sorted(entries))


def same_on_all_ranks(value: Any, what: str, *, cause: str, action: str) -> None:
    """Raise a StateError on every rank unless all have the same (comparable, printable) value. Collective.

    Texts are compared by their hashes: that of a data config with a thousand sources is long, and there are many ranks.
    If two differ, the error shows the text around the first difference.
    """
    is_text = isinstance(value, str)
    values: Sequence[Any] = gather(xxhash.xxh3_128_hexdigest(value.encode()) if is_text else value)
    other = next((number for number, one in enumerate(values) if one != values[0]), None)
    if other is None:
        return
    if is_text:
        values = gather(value if rank() in (0, other) else None)
    found = _around_difference(str(values[0]), str(values[other]))
    error = StateError(
        f"the ranks disagree on {what}",
        found=f"rank 0: {found[0]}; rank {other}: {found[1]}",
        expected="the same on every rank",
        cause=cause,
        action=action,
    )
    raise known_to_all(error)


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """Both texts, or the parts around their first difference if they are long."""
    shown = 80  # characters from there on, and half as many before
    if max(len(one), len(other)) <= 2 * shown:
        return one, other
    at = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start, stop = max(at - shown // 2, 0), at + shown
    return f"... {one[start:stop]} ...", f"... {other[start:stop]} ..."
