"""`Prompts`: the prompts of reinforcement learning, each trained exactly once, even if rollouts end out of order.

    prompts = megaresume.Prompts(dataset, rollouts=8, max_staleness=4, ledger="run/prompts.jsonl")
    for prompt in prompts.issue(64): ...              send to rollout workers
    if prompts.done(ordinal, ticket, rollout, version=3): ...    a rollout came back: is it wanted?
    prompts.trained(step, ordinals)                   after the optimizer's step
    checkpoint["prompts"] = prompts.state_dict()      with the weights

An ordinal is the number of a sample in the order of `megaresume.DataLoader`. Four parts know about it:

    InFlight        what happened to it: stream/in_flight.py
    PromptOrder     its item: prompt_order.py
    Tickets         for which issue of it a rollout was made, and whether this run still has the weights that made it
    PromptLedger    the proof, a line for each state: checkpoint/records/prompt_ledger.py

A prompt is handed out with a *ticket*, which comes back with its rollouts. Workers that survive a crash have other
weights under the same version numbers: they must load those of the checkpoint before they are sent prompts.
"""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.item_hash import item_hash
from megaresume.batches.rank_loader import process_rank
from megaresume.checkpoint.records.prompt_ledger import STATE, PromptLedger
from megaresume.files import write_atomic
from megaresume.hosts.prompt_order import OF_ORDER, PromptOrder, loader_of
from megaresume.hosts.tickets import Tickets, reached_of
from megaresume.stream.arguments import unknown_name
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.in_flight import Flight, InFlight, OnStale, PromptOrRollout, as_number
from megaresume.stream.state import StreamState, open_envelope
from megaresume.stream.state_text import checksum

FORMAT, VERSION = "megaresume.prompts", 1


class Prompt(NamedTuple):
    """An issued prompt."""

    #: its number in the run, used in every call.
    ordinal: int
    #: the epoch of its dataset, from 0.
    epoch: int
    #: its number in the dataset.
    item: int
    #: passed to the rollout worker, and back to `Prompts.done`: identifies the content, and this issue of it.
    ticket: str
    #: name of the dataset; ``data`` if there is only one.
    dataset: str
    #: ``dataset[item]``.
    content: Any
    #: the numbers of the wanted rollouts: all for a new prompt, the missing ones for one issued again.
    rollouts: tuple[int, ...]


class Outstanding(NamedTuple):
    """A prompt that was issued, with rollouts that are not back."""

    ordinal: int
    #: the numbers of these; and of those that are back, but not trained.
    rollouts: tuple[int, ...]
    back: tuple[int, ...]
    #: version of the weights when it was last issued, and how long ago that is.
    version: int
    seconds: float


def digest_of(content: Any) -> str:
    """The content of a prompt as 16 hex digits: the same in every process, also for tensors, arrays and pictures."""
    return f"{item_hash(content):016x}"


class Prompts:
    """Issues prompts, and keeps account of them. Safe to use from several threads; one object for a run, in the process
    that saves, or in a Ray actor. In a job with several ranks that is rank 0, which sends the prompts to the others; to
    use another rank, pass a loader: ``Prompts(DataLoader(dataset, 1, dp_rank=0, dp_size=1))``.

    Args:
        data: a `DataLoader` whose items are not packed; or data for one: a map-style dataset, or several,
            ``{name: (dataset, weight)}``.
        rollouts: number of rollouts for each prompt (GRPO's group).
        min_rollouts: number of rollouts with which a group may be trained while others are out; None: all.
        max_staleness: by how many versions the weights may be newer than those that made a rollout; None: no limit.
        on_stale: what happens to an older one: ``requeue`` issues the prompt again, ``drop`` gives up the rollout.
        ledger: file to which every state adds a line about what was trained and dropped since; None: no proof.
        order: options of `DataLoader`, if data is not one: seed, max_epochs, append, on_change, blend, stages, skip.

    Raises:
        UsageError: a number is out of range, items are packed, or this is a rank other than 0.
        ConfigError, CorpusError: as `DataLoader`.
    """

    def __init__(
        self,
        data: Any,
        *,
        rollouts: int = 1,
        min_rollouts: int | None = None,
        max_staleness: int | None = None,
        on_stale: OnStale = "requeue",
        ledger: str | Path | None = None,
        **order: Any,
    ) -> None:
        self._flights = InFlight(
            rollouts=rollouts, min_rollouts=min_rollouts, max_staleness=max_staleness, on_stale=on_stale
        )
        #: whether the process's rank decides who may issue; not for a loader with explicit ranks.
        self._by_process = not isinstance(data, DataLoader) or data.ranks.is_default
        _check_names(order)
        self._order = PromptOrder(loader_of(data, order))
        self._check_rank()
        self._ledger = None if ledger is None else PromptLedger(ledger)
        #: whether `issue` may continue: the ledger was checked, or a state was loaded.
        self.is_begun = False
        #: new for every start, and every state that is loaded.
        self._tickets = Tickets()
        self._lock = threading.RLock()

    # A run

    def issue(self, n: int) -> list[Prompt]:
        """The next prompts: first those in flight at the crash and requeued ones, in order of ordinals.

        Args:
            n: their number. Fewer are returned at the end of the data (``max_epochs``), and none after it.

        Raises:
            CorpusError: an item cannot be read.
            StateError: the ledger has trained prompts, and no state was loaded.
            UsageError: n is negative, or not an integer.
        """
        n = as_number("n", n)
        if n < 0:
            raise UsageError("bad n", found=str(n), expected="0 or more", action="issue(64) for 64 prompts")
        with self._lock:
            if not self.is_begun:
                self.begin()
            flights, tickets = self._flights, self._tickets
            # First those that wait: they are the oldest, the frontier cannot pass them, and they come before any new
            # one in the order.
            again = flights.take_waiting(n)
            try:
                places = [self._order.place(ordinal) for ordinal in again]
                while some := self._order.places(flights.next + len(places) - len(again), n - len(places)):
                    places += some
                contents = self._order.read(places)
                digests = [digest_of(content) for content in contents]
            except BaseException:
                flights.put_back(again)
                raise
            # Nothing can fail from here on: what is marked as issued is handed out.
            everything = tuple(range(flights.rollouts))
            asked = [flights.issue_again(*one) for one in zip(again, digests, strict=False)]
            new = flights.new(digests[len(again) :])
            asked += [(0, everything)] * len(new)
            return [
                Prompt(ordinal, epoch, item, tickets.new(digest, attempt), dataset, content, wanted)
                for ordinal, (epoch, item, dataset, _), digest, content, (attempt, wanted) in zip(
                    [*again, *new], places, digests, contents, asked, strict=True
                )
            ]

    def begin(self, *, is_saved: bool = True) -> None:
        """Begin with the first prompt; called by the first `issue`, which documents what is refused.

        Args:
            is_saved: whether there is a complete checkpoint. If not, the content of the ledger comes from a first save
                that was killed.
        """
        self._check_rank()  # there may be a process group by now
        if self._ledger is not None and is_saved:
            self._ledger.check_begins()
        self.is_begun = True

    def _check_rank(self) -> None:
        if self._by_process:
            rank, size = process_rank()
        else:
            rank, size = self._order.loader.dp_rank, self._order.loader.dp_size
        if rank:
            raise UsageError(
                "Prompts is one object for all ranks, and this is not rank 0",
                found=f"rank {rank} of {size}",
                expected="rank 0: each rank would issue the same prompts",
                action="make it on rank 0 (or in one Ray actor), and send the prompts; if this rank alone drives the "
                "rollouts: Prompts(DataLoader(dataset, 1, dp_rank=0, dp_size=1))",
            )

    def done(self, ordinal: int, ticket: str, rollout: int = 0, *, version: int | None = None) -> bool:
        """Take a rollout that came back; or was saved across a crash, and is passed before its prompt is issued again.

        Args:
            ordinal, ticket: of its prompt, as returned by `issue`, in this start or in one before a crash. The result
                of `digest_of` for the prompt can replace a ticket of an earlier start.
            rollout: its number.
            version: of the weights that made it; None if there is no limit on that, and a resume never goes back before
                the weights of rollouts.

        Returns:
            whether it is to be trained. Not if it is already there, its prompt is trained or dropped, it is too old
            (`counts` says which), or it was made by weights that a resume went back before: in an earlier start, by a
            version after the last one of that start that this run continues from. One that is too old is requeued or
            dropped, by ``on_stale``, unless it was requested again since.

        Raises:
            StateError: it is for another prompt, or for one that was never issued.
            UsageError: no such rollout; or no such weights, as `advance` was not called.
        """
        with self._lock:
            flights = self._flights
            ordinal = as_number("ordinal", ordinal)
            flight = flights.flight(ordinal, "done()")
            if flight is None:
                flights.counts["late"] += 1
                return False
            digest, attempt, newest = self._tickets.parsed(ticket)
            if (flight.digest or self._digest(ordinal, flight)) != digest:
                _, item, dataset, _ = self._order.place(ordinal)
                raise StateError(
                    "a rollout is of another prompt",
                    found=f"ticket {ticket!r:.40}, of ordinal {ordinal}",
                    expected=f"{flight.digest}, item {item} of dataset '{dataset}'",
                    cause="it was kept from another run or another dataset, or matched by its place in a batch; or the "
                    "item is another each time it is read",
                    action="discard it; pass ordinal and ticket of a prompt along with its rollouts",
                )
            return flights.done(flight, ordinal, rollout, version, attempt, newest)

    def _digest(self, ordinal: int, flight: Flight) -> str:
        """The digest of a prompt that was not read since the resume."""
        if flight.digest is None:
            (content,) = self._order.read([self._order.place(ordinal)])
            flight.digest = digest_of(content)
        return flight.digest

    def drop(self, ordinal: int, reason: str, requeue: bool = False, *, rollout: int | None = None) -> None:
        """Give up a prompt, or issue it again: filtered, failed, cancelled because others were enough.

        Args:
            ordinal: of the prompt.
            reason: a word, for the ledger and `counts`.
            requeue: issue it again, before any new one. Its rollouts that came back must not be trained.
            rollout: only this one; None: all that are not trained.

        Raises:
            StateError: it is already trained or dropped, or was never issued.
            UsageError: no reason, or no such rollout.
        """
        with self._lock:
            self._flights.drop(ordinal, reason, requeue=requeue, rollout=rollout)

    def advance(self, version: int) -> list[tuple[int, int]]:
        """Set the version of the weights that make rollouts from now on.

        Returns:
            (ordinal, rollout) for those that came back and are now too old: they must not be trained. They were
            requeued or dropped, by ``on_stale``.

        Raises:
            UsageError: an earlier version.
        """
        with self._lock:
            return self._flights.advance(version)

    def trained(self, step: int, ordinals: Sequence[PromptOrRollout]) -> None:
        """Note that an optimizer step has trained these prompts. Call it before the state of the step is taken.

        Args:
            step: its number.
            ordinals: of prompts, trained with all their rollouts that came back: they are then settled, and rollouts
                still out are not wanted any more. Or ``(ordinal, rollout)``, if a step trains a part of a group.

        Raises:
            StateError: one has not come back, was trained or dropped before, was never issued, or is named twice.
                Nothing is changed.
            UsageError: an earlier step, or something that is not an ordinal.
        """
        with self._lock:
            self._flights.trained(step, ordinals)

    # Kept

    def state_dict(self) -> dict[str, Any]:
        """The state, to be saved with the weights to which `trained` refers: plain JSON.

        Raises:
            StateError: something else has read from the loader.
            CheckpointError: the ledger cannot be written.
        """
        with self._lock:
            flights = self._flights
            streams = self._order.to_list(flights.frontier)
            body = {"format": FORMAT, "version": VERSION, **flights.to_dict(), "streams": streams}
            body |= {"starts": self._tickets.to_list(flights.weights_version), "line": None}
            trained, dropped = flights.settled
            if self._ledger is not None:
                body["line"] = self._ledger.append(
                    step=flights.step,
                    next=flights.next,
                    open=len(flights.open),
                    trained=trained,
                    dropped=dropped,
                    staleness=flights.staleness,
                )
            flights.forget_settled()
            return body | {"checksum": checksum(body)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`. What was in flight is issued again first.

        Raises:
            StateError: it is damaged, for other prompts, or for groups of another size that are partly trained; or the
                ledger does not have it. Nothing is changed.
            NewerFormatError: it has a newer version.
        """
        with self._lock:
            options = self._flights
            flights = InFlight(
                rollouts=options.rollouts,
                min_rollouts=options.min_rollouts,
                max_staleness=options.max_staleness,
                on_stale=options.on_stale,
            )
            streams, line, reached = open_envelope(
                state, lambda body: _read(body, flights), format_name=FORMAT, version=VERSION, texts=()
            )
            if self._ledger is not None and line is not None:
                self._ledger.check_has(line)
            self._order.load(streams, flights.next)
            if self._ledger is not None:
                self._ledger.go_on_from(line, step=flights.step, next=flights.next, open=flights.open)
            self.is_begun = True
            self._flights = flights
            self._tickets = Tickets(reached, flights.weights_version)

    # What is known

    @property
    def counts(self) -> dict[str, int]:
        """Counts since this object was created, or loaded: prompts trained; rollouts ``dropped: REASON``, ``requeued:
        REASON``, ``repeated``, ``late``, ``superseded`` (stale, and requested again since), ``of later weights``.
        """
        return dict(self._flights.counts)

    @property
    def rollouts(self) -> int:
        """The number of rollouts for each prompt."""
        return self._flights.rollouts

    @property
    def in_flight(self) -> list[int]:
        """Ordinals that are issued, or to be issued again, and not settled; ascending."""
        return sorted(self._flights.open)

    def outstanding(self) -> list[Outstanding]:
        """Prompts that are issued and not back, oldest first: for timeouts, and to see who is slow."""
        with self._lock:
            now, numbers = time.monotonic(), self._flights.numbers
            found = [
                Outstanding(ordinal, numbers(one.flying), numbers(one.done), one.issued[1], now - one.issued[0])
                for ordinal, one in self._flights.open.items()
                if one.flying and one.issued
            ]
        return sorted(found, key=lambda one: (-one.seconds, one.ordinal))

    @property
    def frontier(self) -> int:
        """The first ordinal that is not settled."""
        return self._flights.frontier

    @property
    def num_settled(self) -> int:
        """The number of settled prompts."""
        return self._flights.next - len(self._flights.open)

    @property
    def next_ordinal(self) -> int:
        """The first ordinal that was never issued."""
        return self._flights.next

    @property
    def step(self) -> int:
        """The last trained step."""
        return self._flights.step

    @property
    def version(self) -> int:
        """The version of the weights, as set by `advance`."""
        return self._flights.weights_version


def write_state(prompts: Prompts, directory: Path, step: int) -> dict[str, Any]:
    """Write the state into the directory of a checkpoint of this step, for people and `verify`; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    state = prompts.state_dict()
    write_atomic(directory / STATE, json.dumps({"step": step, "prompts": state}).encode())
    return state


def _check_names(order: Mapping[str, Any]) -> None:
    """Raise a UsageError for an option that neither `Prompts` nor `DataLoader` has."""
    own = [one.name for one in inspect.signature(Prompts).parameters.values() if one.kind is one.KEYWORD_ONLY]
    for name, value in order.items():
        if name not in inspect.signature(DataLoader).parameters:
            raise unknown_name("Prompts(dataset, ", name, value, [*own, *OF_ORDER], "docs/rl.md shows the options")


def _read(body: Mapping[str, Any], flights: InFlight) -> tuple[list[StreamState], str | None, dict[str, int] | None]:
    flights.load(body)
    line = body["line"]
    if line is not None and not isinstance(line, str):
        raise ValueError(f"line {line!r} is not a text")
    streams = [StreamState.from_json(stream) for stream in body["streams"]]
    if not streams:
        raise ValueError("no stream")
    return streams, line, reached_of(body.get("starts"))
