"""A save that torch.distributed.checkpoint writes in the background: at most one, and it counts once it is whole."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from megaresume.checkpoint.session.file_errors import writing
from megaresume.checkpoint.session.host import Save
from megaresume.checkpoint.session.ranks import is_rank_0, on_all_ranks, on_rank_0
from megaresume.hosts.torch import files
from megaresume.stream.errors import MegaresumeError


class Background:
    """The save that is in flight, if any.

    Args:
        commit: makes it count: `Session.commit`.
    """

    def __init__(self, commit: Callable[[Save], object]) -> None:
        self._commit = commit
        #: what is in flight, and whether it counts already: known on rank 0.
        self._flight: tuple[Future[Any], Save] | None = None
        self._is_committed = False

    def begin(self, future: Future[Any], save: Save) -> None:
        """A save is in flight: the future of this rank's part; on rank 0, of those of all ranks."""
        self._flight, self._is_committed = (future, save), False
        save.defer()

    def settle(self) -> None:
        """See `Host.settle`."""
        flight = self._flight
        if flight is None:
            return
        future, save = flight
        self._flight = None
        on_all_ranks(lambda: _written(future, save))
        if not on_rank_0(lambda: self._is_committed):
            self._commit(save)

    def is_saving(self) -> bool:
        """See `Host.is_saving`."""
        return self._flight is not None and not self._is_committed

    def look(self) -> None:
        """Commit it, if it is written: rank 0 ends after all others. No collective."""
        if self._flight is None or self._is_committed or not is_rank_0():
            return
        future, save = self._flight
        if future.done() and future.exception() is None:
            with contextlib.suppress(MegaresumeError):  # `settle` tries again, and says it on every rank
                self._is_committed = save.commit()

    def look_at_exit(self) -> None:
        """The same at the end of a program that did not wait."""
        if self._flight is None or not is_rank_0():
            return
        future, save = self._flight
        try:
            _written(future, save)
            self.look()
        except MegaresumeError as error:
            print(f"megaresume: error: {error}", file=sys.stderr, flush=True)


def _written(future: Future[Any], save: Save) -> None:
    with writing(save.save_dir / save.tag):
        files.wait(future)
