"""One writer at a time to a checkpoint root in an object store; and its commits, which only that writer can make.

    megaresume/heads/0000000007.json   the writer, the valid checkpoints, what the pointers name
    megaresume/alive/0000003           a counter that increases while the writer of epoch 3 lives; then "released"

Every head is created by a conditional put of the next number: if two processes try, the store refuses one. The newest
head is in force and is never deleted, and numbers only grow: whoever created the newest one knows that there was none
above it.

    start     the writer has ended, or shows no sign of life -> the next number, the next epoch: from here on, the
              previous writer cannot create a head
    commit    the next number, with one more checkpoint and the pointers moved, in one step
    removal   the next number, without the checkpoint; then its objects are deleted

All other objects are written once, under the id of their save, and are only valid if a head names it. So a writer that
has lost its lease, however long it slept between two of its instructions, moves no pointer and damages no checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megaresume.checkpoint.lock.claim import RELEASED, Owner, gone, this_process
from megaresume.checkpoint.lock.lock import Holder
from megaresume.checkpoint.records.names import Saved, recorded_tag
from megaresume.checkpoint.records.sealed import SealError, count, from_members, members, rows, seal, text, unseal
from megaresume.checkpoint.store.objects import NotAsSavedError
from megaresume.checkpoint.store.store import Store
from megaresume.stream.errors import CheckpointError, MegaresumeError
from megaresume.stream.state import is_version

FORMAT, VERSION = "megaresume.head", 1
HEADS, ALIVE = "megaresume/heads/", "megaresume/alive/"

#: how often a writer increases its counter, and how long a counter that stands still is watched, in seconds.
RENEW_SECONDS, PATIENCE_SECONDS = 10.0, 60.0
_POLL_SECONDS = 1.0
#: old heads kept below the newest one, for people.
_KEPT = 20
_REMEMBERED = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The state of a store that is in force."""

    number: int = 0
    #: number of writers so far, including this one.
    epoch: int = 0
    #: None without any head.
    owner: Owner | None = None
    #: what the pointers name; None: nothing.
    latest: str | None = None
    tracker: int | None = None
    #: complete checkpoints, in order of their commits.
    saves: tuple[Saved, ...] = ()
    #: those whose objects are deleted, or soon will be; the last `_REMEMBERED`.
    removed: tuple[Saved, ...] = ()

    @property
    def name(self) -> str:
        """The name of its object."""
        return f"{HEADS}{self.number:010d}.json"

    @property
    def alive(self) -> str:
        """The name of its writer's counter."""
        return f"{ALIVE}{self.epoch:07d}"

    def to_bytes(self) -> bytes:
        """The content of the object."""
        return seal({"format": FORMAT, "version": VERSION, **asdict(self)}, depth=2)

    def with_save(self, saved: Saved, *, latest: bool, tracker: bool) -> Head:
        """This head with one more checkpoint, which replaces an older save of its step."""
        same = [one for one in self.saves if (one.iteration, one.tag) == (saved.iteration, saved.tag)]
        head = self.without([one for one in same if one != saved])
        return replace(
            head,
            saves=(*(one for one in head.saves if one != saved), saved),
            latest=saved.tag if latest else self.latest,
            tracker=saved.iteration if tracker else self.tracker,
        )

    def without(self, gone: Iterable[Saved]) -> Head:
        """This head without these saves, whose objects may then be deleted. They never come back: see `is_removed`."""
        doomed = list(gone)
        return replace(
            self,
            saves=tuple(one for one in self.saves if one not in doomed),
            removed=tuple(dict.fromkeys((*self.removed, *doomed)))[-_REMEMBERED:],
        )

    def is_removed(self, save_id: str) -> bool:
        """Whether some process, perhaps a writer that has lost its lease, may still delete objects of a save."""
        return any(one.save_id == save_id for one in self.removed)


def _read(data: bytes, where: str) -> Head:
    try:
        fields = unseal(data)
        if fields.get("format") != FORMAT or not is_version(fields.get("version"), VERSION, f"the head {where}"):
            raise ValueError(f"it is a {fields.get('format')!r}")
        return from_members(
            Head,
            fields,
            owner=lambda value: from_members(Owner, members(value)),
            latest=lambda value: None if value is None else recorded_tag(value),
            saves=_saves,
            removed=_saves,
        )
    except (SealError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "what says which checkpoints of this store are complete cannot be read",
            found=f"{where}: {error}",
            expected="an object as it was written",
            cause="somebody has written there, or the store damages data",
            action="restore an older version of that object, if the bucket keeps versions; or copy to another URL",
        ) from error


def _saves(value: object) -> tuple[Saved, ...]:
    def one(fields: Mapping[str, Any]) -> Saved:
        return from_members(Saved, fields, tag=recorded_tag, iteration=count, save_id=text)

    return tuple(one(members(row)) for row in rows(value))


def newest_name(names: Iterable[str]) -> str | None:
    """The name of the newest head, among names of objects."""
    return max((name for name in names if name.startswith(HEADS) and name.endswith(".json")), default=None)


def newest_head(store: Store, names: Iterable[str] | None = None) -> Head | None:
    """The head of a store that is in force; None if nobody has ever written there.

    Args:
        store: the root.
        names: of its objects, if known.

    Raises:
        CheckpointError: it cannot be read.
        NewerFormatError: it was written by a newer megaresume.
        SetupError: the store does not answer, or refuses.
    """
    while True:
        name = newest_name(store.sizes(HEADS) if names is None else names)
        if name is None:
            return None
        names = None
        if (data := store.read(name)) is not None:  # otherwise the name came from an outdated answer
            return _read(data, f"{store}/{name}")


class Lease:
    """The right to write to a root in a store; taken by `take`.

    Args:
        store: the root.
        say: prints whom it waited for, or took over from.
    """

    def __init__(self, store: Store, say: Callable[[str], object]) -> None:
        self.store, self._say = store, say
        self.head = Head()
        self._changing, self._renewing = threading.Lock(), threading.Lock()
        self._ending = threading.Event()
        self._renewed = 0
        #: the process that took it: the lease does not extend to a fork.
        self._process = 0

    def take(self, run: str | None, beat: Callable[[], object] = lambda: None) -> Head:
        """Become the writer, and renew every few seconds from now on.

        Args:
            run: of the local checkpoints, for people.
            beat: called while it waits.

        Raises:
            CheckpointError: another job writes there; names it.
            SetupError: the store does not answer, or refuses.
        """
        me = this_process(token=os.urandom(8).hex(), run=run)
        while True:
            before = newest_head(self.store)
            if before is not None and not self._is_over(before, me, beat):
                continue
            before = before or Head()
            head = replace(before, number=before.number + 1, epoch=before.epoch + 1, owner=me)
            if self._make(head):
                break
            time.sleep(_POLL_SECONDS)  # another process was faster, or the store's listing is older than its objects
        self.head, self._process = head, os.getpid()
        # A second put of the same must be refused.
        if not self.store.is_conditional or self.store.creates(head.name, head.to_bytes()):
            self._say(
                f"WARNING: {self.store} has no conditional writes (If-None-Match): nothing keeps two jobs apart that "
                "write there; make sure that there is one"
            )
        self.store.prepare()
        self._renew()
        threading.Thread(target=self._run, name="megaresume-lease", daemon=True).start()
        return head

    def commit(self, change: Callable[[Head], Head]) -> Head:
        """Create the next head: the result of ``change`` for the current one.

        Raises:
            CheckpointError: another job has taken over the root.
            SetupError: the store does not answer, or refuses: the next attempt finds out whether it succeeded.
        """
        with self._changing:
            while True:
                head = replace(change(self.head), number=self.head.number + 1)
                if others := self._make(head):
                    break
                now = newest_head(self.store)
                if now is None or not self._is_mine(now) or now.number <= self.head.number:
                    raise self.lost(now)
                self.head = now  # from an attempt whose answer was lost
            self.head = head
            old = Head(number=max(head.number - _KEPT, 0)).name
            if doomed := [name for name in others if name < old]:
                with contextlib.suppress(MegaresumeError):
                    self.store.delete(doomed)
            return head

    def check(self) -> None:
        """Raise a CheckpointError if another job has taken over the root."""
        if max(self.store.sizes(HEADS), default="") == self.head.name:
            return
        now = newest_head(self.store)
        if now is None or not self._is_mine(now):
            raise self.lost(now)

    def lost(self, now: Head | None) -> CheckpointError:
        """The error for a writer that has lost the root."""
        owner = "nobody" if now is None else now.owner
        return CheckpointError(
            "this job has lost its place for copies to another one, and nothing that it copies there counts",
            found=f"{self.store} is held by {owner}",
            expected=f"this job: {self.head.owner}",
            cause="this node was taken for dead (its network, a process that was stopped), and the job was started "
            "again elsewhere; or two jobs copy to one URL",
            action="end this job: the other one continues from the last checkpoint that was committed there",
        )

    def release(self) -> None:
        """Allow the next writer to begin at once. If this fails, it watches the counter."""
        if self._process == os.getpid() and not self._ending.is_set():
            self._ending.set()
            with self._renewing:
                self.store.try_write(self.head.alive, RELEASED.encode())

    def _is_mine(self, head: Head) -> bool:
        mine = self.head.owner
        return head.owner is not None and mine is not None and head.owner.token == mine.token

    def _make(self, head: Head) -> list[str]:
        """Create a head; returns the names of all heads if it is now the newest one, otherwise none."""
        if not self.store.create(head.name, head.to_bytes()):
            return []
        there = list(self.store.sizes(HEADS))
        # A process that slept may have found a number that is free again: only the highest one counts.
        if max(there, default="") > head.name:
            self.store.delete([head.name])
            return []
        return there or [head.name]

    def _is_over(self, head: Head, me: Owner, beat: Callable[[], object]) -> bool:
        """Wait until it is clear whether a writer has ended.

        Returns:
            True: it has ended. False: there is another head by now.

        Raises:
            CheckpointError: it is alive.
        """
        holder = Holder(owner=head.owner, status="held", reason=None if head.owner is None else gone(head.owner, me))
        began, first, told = time.monotonic(), self._sign_of_life(head), False
        if first == RELEASED.encode() or head.owner is None:
            return True
        if holder.reason is not None:
            if not head.owner.is_same_process(me):
                self._say(f"{self.store} was held by {holder}: {holder.reason}; taken over")
            return True
        while (waited := time.monotonic() - began) < PATIENCE_SECONDS:
            if not told:
                told = True
                self._say(
                    f"{self.store} is held by {holder}: waiting for a sign of life, {PATIENCE_SECONDS:g} s at most"
                )
            beat()
            time.sleep(min(_POLL_SECONDS, max(PATIENCE_SECONDS - waited, 0.0)))
            now = self._sign_of_life(head)
            if now == RELEASED.encode():
                return True
            if now != first:
                raise self._refused(holder)
        if (now_newest := newest_head(self.store)) is None or now_newest.number != head.number:
            return False
        self._say(f"{self.store} was held by {holder}: no sign of life for {PATIENCE_SECONDS:g} s; taken over")
        return True

    def _sign_of_life(self, head: Head) -> bytes | None:
        """The counter of a writer; None also if it is damaged: a living writer rewrites it."""
        try:
            return self.store.read(head.alive)
        except NotAsSavedError:
            return None

    def _refused(self, holder: Holder) -> CheckpointError:
        return CheckpointError(
            "another job copies its checkpoints to this URL",
            found=f"{self.store} is held by {holder}; it is alive",
            expected="one job at a time",
            cause="the job was submitted twice, or the one before it has not ended yet",
            action=("end it" if holder.owner is None else holder.owner.how_to_end)
            + " and start again; or another --megaresume-stage-to (stage_to=)",
        )

    def _renew(self) -> None:
        with self._renewing:  # not while it is being released
            if not self._ending.is_set():
                self._renewed += 1
                self.store.write(self.head.alive, str(self._renewed).encode())

    def _run(self) -> None:
        while not self._ending.wait(RENEW_SECONDS):
            try:
                self._renew()
            except MegaresumeError:  # the next copy reports it, and the next time may succeed
                self.store.reopen()  # with the credentials available by now
