"""Reads batches ahead: in worker processes, which pass them by `megaresume.batches.parcels`, or in a thread.

Worker processes survive the signals that ask the run to stop, since Slurm sends a job's signals to all of its
processes. torch's worker would die of a SIGTERM that is not from its parent, and bring the parent down in the middle of
the very save that the signal asked for.

`check_main_guard`: whether the script may start spawned worker processes. A process that is not forked runs the script
again, except for code under ``if __name__ == "__main__":``. If the loop over the batches is not under it, each worker
begins a training of its own. That fails when it starts workers, with forty lines of traceback that hide our error; or
it waits in ``init_process_group`` for ranks that never come, and the real training waits for the worker, silently.
"""

from __future__ import annotations

import ast
import atexit
import copy
import functools
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.data

from megaresume.batches.parcels import Inbox, Outbox
from megaresume.data.store_counts import Share, store_counts
from megaresume.stream.errors import UsageError

log = logging.getLogger(__name__)

#: The beginning of torch's message when a worker has died for any reason.
_A_WORKER_DIED = "DataLoader worker (pid"

#: seconds that a program's exit waits for a batch being read, less than a scheduler leaves between its signals
#: (Slurm's KillWait: 30); and those after which it logs that it is waiting.
_PATIENCE_AT_EXIT, _SAID_AT_EXIT = 20.0, 1.0

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_listening = False


def outlive_signals(_worker: int = 0) -> None:
    """Make this worker process ignore every SIGTERM except its parent's, by which torch cleans workers up.

    May be passed to a ``DataLoader`` as ``worker_init_fn``. Calling it twice in a process is harmless; on macOS, which
    does not tell who sent a signal, it does nothing.
    """
    global _listening
    if _listening or not hasattr(signal, "sigwaitinfo"):
        return
    _listening = True
    parent = os.getppid()
    # Blocked in every thread that starts from here on; delivered to the one that waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_wait, args=(parent,), name="megaresume-signals", daemon=True).start()


def _wait(parent: int) -> None:
    while True:
        found = signal.sigwaitinfo(_SIGNALS)
        if found.si_signo == signal.SIGTERM and found.si_pid == parent:
            os._exit(0)  # as torch's own handler does


def whole(batch: Any) -> Any:
    """Collation for a `torch.utils.data.DataLoader` over a dataset that fetches whole micro-batches."""
    return batch


class Workers:
    """torch's ``DataLoader``, with batches from worker processes in shared memory: see `Outbox`.

    Args:
        dataset: its ``__getitems__`` returns a whole batch, in the workers.
        requests: yields the argument of that, batch by batch.
        num_workers: processes; 0: the consumer reads, and torch may put the batch into page-locked memory.
        prefetch_factor: batches that a worker may be ahead; None: 2.
        copies_to_pinned: copy batches from shared memory into page-locked memory, if there is a GPU.
        worker_init_fn: called in each worker.
        options: others of torch's.
    """

    def __init__(
        self,
        dataset: Any,
        requests: Callable[[], Iterator[Any]],
        *,
        num_workers: int,
        prefetch_factor: int | None = None,
        copies_to_pinned: bool = False,
        worker_init_fn: Callable[[int], object] | None = None,
        **options: Any,
    ) -> None:
        self.inbox, self._copies_to_pinned = Inbox(pin_memory=copies_to_pinned), copies_to_pinned
        # Seeds the workers. The global generator would change the model's dropout.
        self.generator = torch.Generator()
        self._requests = _Requests(requests)
        self._worker_init_fn = worker_init_fn
        collate_fn: Callable[[Any], Any] = whole
        if num_workers:
            # Once torch has put a batch into page-locked memory, it is not in a room any more.
            ahead = None if options.get("pin_memory") else prefetch_factor or 2
            collate_fn = Outbox(whole, ahead=ahead)
        self.torch = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=self._requests,
            num_workers=num_workers,
            collate_fn=collate_fn,
            prefetch_factor=prefetch_factor,
            generator=self.generator,
            **options,
        )

    def __iter__(self) -> Iterator[Any]:
        """The batches. Raises the errors of ``requests`` after the batches before them; and as `check_main_guard`.

        Raises:
            RuntimeError: a dataset or collate_fn raised StopIteration; or a worker died. The next ``for`` starts new
                workers.
        """
        if self.torch.num_workers:
            context = self.torch.multiprocessing_context
            method = multiprocessing.get_start_method() if context is None else context.get_start_method()
            check_main_guard(method)
            if self.torch.worker_init_fn is None or not self.torch.persistent_workers:
                # Here, not in the constructor, as it cannot be pickled.
                share = None if method == "fork" else store_counts.share(self.torch.num_workers)
                self.torch.worker_init_fn = functools.partial(begin_worker, self._worker_init_fn, share)
        if not self.torch.persistent_workers:
            self.inbox = Inbox(pin_memory=self._copies_to_pinned)
        self.inbox.begin()
        kept = self.torch._iterator
        taken, batches = 0, iter(self.torch)
        if self.torch.persistent_workers and batches is not kept:
            # Keep it as long as this loader: garbage collection would take the workers apart before torch has told them
            # to end, and torch would wait 5 s for each of them.
            weakref.finalize(self, _nothing, batches._index_queues)  # type: ignore[attr-defined]
        while True:
            try:
                batch = next(batches)
            except StopIteration as error:
                # torch passes on a dataset's StopIteration, which would look like the end of the data.
                if taken < self._requests.asked:
                    text = f":\n{error.value}" if error.value else ""
                    raise RuntimeError(f"a dataset or its collate_fn raised StopIteration{text}") from error
                break
            except RuntimeError as error:
                if _A_WORKER_DIED not in str(error):
                    raise
                self._drop_workers()
                raise RuntimeError(
                    f"{str(error).rstrip('. ')}. No batch is lost: a new `for` starts other workers and continues "
                    "after the last batch that was handed out. If the machine was short of memory (dmesg tells), use "
                    "fewer num_workers or a smaller prefetch_factor"
                ) from error
            taken += 1
            yield self.inbox.unpack(batch) if self.torch.num_workers else batch
        if self._requests.ended is not None:
            raise self._requests.ended

    def _drop_workers(self) -> None:
        """Forget the workers: torch keeps ``persistent_workers`` even after one died, and every later ``for`` would
        fail."""
        kept, self.torch._iterator = self.torch._iterator, None
        if kept is not None:
            kept._shutdown_workers()  # type: ignore[attr-defined]
        self.inbox = Inbox(pin_memory=self._copies_to_pinned)

    def __getstate__(self) -> dict[str, Any]:
        """The state for copying or pickling: without running worker processes and their rooms."""
        loader = copy.copy(self.torch)
        loader._iterator = loader.worker_init_fn = None
        return self.__dict__ | {"torch": loader, "inbox": Inbox(pin_memory=self._copies_to_pinned)}


def _nothing(*_: object) -> None:
    """Do nothing."""


class _Requests:
    """A batch sampler. It is asked far ahead of the batches, so an error is held back until the batches already
    requested are out."""

    def __init__(self, requests: Callable[[], Iterator[Any]]) -> None:
        self._requests = requests
        self.ended: Exception | None = None
        #: the number of batches requested.
        self.asked = 0

    def __iter__(self) -> Iterator[Any]:
        self.ended, self.asked = None, 0
        try:
            for request in self._requests():
                self.asked += 1
                yield request
        except Exception as error:  # noqa: BLE001  raised by `Workers`
            self.ended = error


def begin_worker(worker_init_fn: Callable[[int], object] | None, share: Share | None, worker: int) -> None:
    """Prepare a worker process, before it reads.

    Args:
        worker_init_fn: of the user; None: none.
        share: where it counts its requests to stores; None: it got a place when it was forked.
        worker: its number.
    """
    outlive_signals()
    if share is not None:
        store_counts.begin_worker(share, worker)
    info = torch.utils.data.get_worker_info()
    if info is not None and (given := getattr(info.dataset, "dataset", None)) is not None:
        object.__setattr__(info, "dataset", given)  # frozen; the user's functions expect their own dataset there
    if worker_init_fn is not None:
        worker_init_fn(worker)


#: The queues of batches that threads of this process have read and nobody has taken yet.
_ready: weakref.WeakSet[queue.Queue[Any]] = weakref.WeakSet()


def num_ready() -> int:
    """Number of batches that threads of this process have read and nobody has taken yet."""
    return sum(one.qsize() for one in list(_ready))


def in_thread(batches: Callable[[], Iterator[Any]], ahead: int) -> Iterator[Any]:
    """Iterate in a thread, this many items ahead. Raises the iterator's errors after the items before them."""
    ready: queue.Queue[tuple[Any, BaseException | None] | None] = queue.Queue(maxsize=ahead)
    _ready.add(ready)
    stopped = threading.Event()

    def put(item: tuple[Any, BaseException | None] | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def read_ahead() -> None:
        try:
            for batch in batches():
                if not put((batch, None)):
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001  raised again in the consumer's thread
            put((None, error))

    thread = threading.Thread(target=read_ahead, name="megaresume-prefetch", daemon=True)

    ending = threading.Event()

    def stop_at_exit() -> None:
        stopped.set()
        ending.set()
        thread.join(_SAID_AT_EXIT)
        if thread.is_alive():
            log.warning(
                "megaresume: the program has ended, and waits for a batch that is being read ahead, for %.0f s at "
                "most: a store or a disk that is slow to answer",
                _PATIENCE_AT_EXIT,
            )
            thread.join(_PATIENCE_AT_EXIT - _SAID_AT_EXIT)

    thread.start()
    # A thread still inside torch when Python exits aborts the process, with status -6.
    atexit.register(stop_at_exit)
    unregister = atexit.unregister  # at exit, the module may be gone before an unfinished iterator
    try:
        while (item := ready.get()) is not None:
            batch, error = item
            if error is not None:
                raise error
            yield batch
    finally:
        stopped.set()
        if not ending.is_set():
            unregister(stop_at_exit)
            thread.join()


def check_main_guard(start_method: str) -> None:
    """Check, before worker processes are started, that the script guards its main program.

    Args:
        start_method: of the workers.

    Raises:
        UsageError: workers would run the very statement that starts them.
    """
    if start_method == "fork" or (line := _unguarded_line()) is None:
        return
    raise UsageError(
        "worker processes would begin the training again",
        found=f'{sys.modules["__main__"].__file__}, line {line}, is not under if __name__ == "__main__":, and a worker '
        f"that is started by {start_method} runs the script from its beginning",
        expected="a script that only defines things when it is imported",
        action='put the training into a function, and call it under if __name__ == "__main__":; or read without '
        "workers (num_workers=0)",
    )


def _unguarded_line() -> int | None:
    """The line of the script's own statement that is running; None if workers do not run it, or it is unknown."""
    frame = _frame_of_main()
    if frame is None or not _is_run_by_workers():
        return None
    try:
        script = ast.parse(Path(frame.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    # Whatever the condition: an ``if`` may be false in a worker, or have ended it before this line.
    before = [node for node in script.body if node.lineno <= frame.f_lineno]
    asks = any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in before)
    return None if not before or asks or isinstance(before[-1], ast.If) else frame.f_lineno


def _frame_of_main() -> FrameType | None:
    """The frame that runs the script's own statements, if they are still running."""
    main, frame = sys.modules["__main__"], sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


def _is_run_by_workers() -> bool:
    """Whether workers run the script again, by the rule of multiprocessing.spawn.get_preparation_data."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return bool(getattr(main, "__file__", None)) and not getattr(spec, "name", "").endswith("__main__")
