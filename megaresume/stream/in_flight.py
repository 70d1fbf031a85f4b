"""`InFlight`: the fate of every reinforcement-learning prompt, exactly once, in whatever order rollouts finish.

A prompt is identified by its ordinal, its sample number in the stream. It has ``rollouts`` rollouts, numbered from 0,
since a group may come back, be trained and be issued again in parts. Each rollout is in one of four states:

               new(), issue_again()           done()           trained()
      MISSING ----------------------> FLYING --------> DONE --------------> GONE
         ^                               |               |                    ^
         |  drop(requeue=True), stale    |               |    drop(), stale   |
         +-------------------------------+---------------+--------------------+

    call            MISSING             FLYING              DONE                       GONE
    issue_again()   FLYING              stays               stays                      stays
    done()          DONE: outlived the  DONE                not wanted: repeated       not wanted: repeated, or late
                    crash                                                              if the prompt is settled
      too old       stays           as drop(), or its       as above                   as above
                                    requeue, by on_stale;
                                    stays if it was asked
                                    for again since
      too new       refused; after a resume from before     as above                   as above
                    its weights, MISSING; stays if another
                    start asked for it
    advance()       stays               stays               as drop(), if too old now  stays
    trained(), one  refused             refused             GONE                       refused
    trained(), all  GONE, if min_rollouts of the prompt are DONE, or all that are not GONE     stays
    drop()          GONE                GONE                GONE                       refused; stays if all are meant
      requeue       stays               MISSING             MISSING                    refused; stays if all are meant
    load()          stays               MISSING             MISSING                    stays

Terms, also used for the attributes (a set of rollouts is the bits of an integer):

    flying      requested, not back yet
    done        back and accepted, not trained yet
    gone        trained or dropped: never requested again
    missing     none of these: to be requested. The prompt then *waits*
    made        which weights made the rollouts that are back: bits by version
    settled     a prompt whose rollouts are all gone: no longer in `open`. All below the *frontier* are, and some above

The state records only which prompts are open and which of their rollouts are gone: after a resume, all open prompts are
issued again first, in order of their ordinals.

Imports neither numpy nor numba.
"""

from __future__ import annotations

import heapq
import operator
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from megaresume.stream.errors import StateError, UsageError, as_count
from megaresume.stream.in_flight_text import from_runs, packed, unpacked

OnStale = Literal["requeue", "drop"]

#: an ordinal; or (ordinal, rollout) for one rollout of it.
PromptOrRollout = int | tuple[int, int]

STALE = "stale"


class Flight:
    """A prompt that was issued and is not settled."""

    __slots__ = ("attempts", "digest", "done", "flying", "gone", "issued", "made", "step", "waits")

    def __init__(self, flying: int = 0, *, gone: int = 0, step: int | None = None, waits: bool = False) -> None:
        #: the hash of the prompt's content; None after a resume, until it is needed.
        self.digest: str | None = None
        #: rollouts, as bits: see the terms above. None is in two of these.
        self.flying, self.done, self.gone = flying, 0, gone
        #: the last step that trained one of its rollouts.
        self.step = step
        #: which weights made the rollouts that are back: bits by version; None until a version is reported.
        self.made: dict[int, int] | None = None
        #: whether it must be issued again.
        self.waits = waits
        #: for each rollout requested again, the number of its latest attempt, from 1; None: no rollout was.
        self.attempts: dict[int, int] | None = None
        #: when the prompt was last issued (`time.monotonic`), and the weights' version then; None: not since the
        #: resume.
        self.issued: tuple[float, int] | None = None


class InFlight:
    """The prompts in flight: see the module. Not thread-safe.

    Args:
        rollouts: of each prompt.
        min_rollouts: a group may be trained once this many are back and the others still out; None: all.
        max_staleness: how many versions a rollout's weights may be behind the current ones; None: no limit.
        on_stale: what happens to a rollout older than that.

    Raises:
        UsageError: a number is out of range, or not an integer.
    """

    def __init__(
        self,
        *,
        rollouts: int = 1,
        min_rollouts: int | None = None,
        max_staleness: int | None = None,
        on_stale: OnStale = "requeue",
    ) -> None:
        rollouts = _check("rollouts", rollouts, 1)
        min_rollouts = rollouts if min_rollouts is None else _check("min_rollouts", min_rollouts, 1, rollouts)
        if max_staleness is not None:
            max_staleness = _check("max_staleness", max_staleness, 0)
        if on_stale not in ("requeue", "drop"):
            raise UsageError(
                "bad on_stale",
                found=repr(on_stale),
                expected="'requeue' or 'drop'",
                action="on_stale='requeue' issues the prompt again; 'drop' gives it up",
            )
        self.rollouts, self.min_rollouts = rollouts, min_rollouts
        self.max_staleness, self.on_stale = max_staleness, on_stale
        self._all = (1 << rollouts) - 1
        self.open: dict[int, Flight] = {}
        #: a heap of the waiting ordinals, cleaned lazily: settled or complete ones stay until `take_waiting` pops them.
        self._waiting: list[int] = []
        #: the next ordinal; the last step that trained; the version of the weights that generate rollouts.
        self.next, self.step, self.weights_version = 0, 0, 0
        #: whether rollouts may exist from weights that a resume discarded.
        self.is_resumed = False
        #: counts since this object was made: prompts trained; rollouts dropped, requeued or ignored, by reason.
        self.counts: Counter[str] = Counter()
        #: prompts settled since `forget_settled`, in that order; and rollouts trained since then, by staleness.
        self._trained: dict[int, list[int]] = {}
        self._dropped: dict[str, list[int]] = {}
        self._staleness: Counter[int] = Counter()

    @property
    def frontier(self) -> int:
        """The first ordinal that is not settled."""
        return min(self.open, default=self.next)

    # Issuing

    def new(self, digests: Iterable[str]) -> range:
        """Issue the next ordinals, one for each digest."""
        first, everything, issued = self.next, self._all, (time.monotonic(), self.weights_version)
        for digest in digests:
            self.open[self.next] = flight = Flight(everything)
            flight.digest, flight.issued = digest, issued
            self.next += 1
        return range(first, self.next)

    def take_waiting(self, most: int) -> list[int]:
        """Take at most ``most`` prompts to issue again, in order. Then call `issue_again` on each, or `put_back` on
        all."""
        taken: list[int] = []
        while self._waiting and len(taken) < most:
            ordinal = heapq.heappop(self._waiting)
            flight = self.open.get(ordinal)
            if flight is not None and flight.waits:
                if self._missing(flight):
                    taken.append(ordinal)
                else:
                    flight.waits = False
        return taken

    def put_back(self, taken: Iterable[int]) -> None:
        """Return prompts of `take_waiting` that could not be issued."""
        for ordinal in taken:
            heapq.heappush(self._waiting, ordinal)

    def issue_again(self, ordinal: int, digest: str) -> tuple[int, tuple[int, ...]]:
        """Issue a prompt that was taken: the number of the attempt, and its missing rollouts."""
        flight = self.open[ordinal]
        missing = self._missing(flight)
        flight.digest, flight.waits = digest, False
        flight.flying |= missing
        flight.issued = time.monotonic(), self.weights_version
        numbers, before = self.numbers(missing), flight.attempts or {}
        attempt = 1 + max(before.values(), default=0)
        flight.attempts = before | dict.fromkeys(numbers, attempt)
        return attempt, numbers

    def _missing(self, flight: Flight) -> int:
        return self._all & ~(flight.done | flight.gone | flight.flying)

    def numbers(self, bits: int) -> tuple[int, ...]:
        """The rollouts whose bits are set."""
        return tuple(k for k in range(self.rollouts) if bits >> k & 1)

    # Results

    def flight(self, ordinal: int, call: str) -> Flight | None:
        """An open prompt; None if it is settled.

        Raises:
            StateError: it was never issued.
            UsageError: it is not an integer.
        """
        flight = self.open.get(as_number("ordinal", ordinal))
        if flight is None and not 0 <= ordinal < self.next:
            raise StateError(
                f"{call}: prompt {ordinal} was never issued",
                found=f"ordinal {ordinal}",
                expected=f"an ordinal below {self.next}, the next one",
                cause="a rollout of another run, or of a part of this one that a resume went back before",
                action="discard the rollout; after a resume, hand in only rollouts that were kept with the checkpoint",
            )
        return flight

    def done(
        self, flight: Flight, ordinal: int, rollout: int, version: int | None, attempt: int | None, newest: int
    ) -> bool:
        """Record that a rollout came back. Returns whether it is accepted: not a repeat, not settled, not stale.

        Args:
            attempt: the attempt that requested it; None: it was requested by another start.
            newest: the newest version of that start's weights that this run still has.
        """
        bit = 1 << self._number(rollout)
        if (flight.done | flight.gone) & bit:
            self.counts["repeated"] += 1
            return False
        if version is None:
            if self.max_staleness is not None:
                raise UsageError(
                    "done() needs the version of the weights",
                    found=f"version=None, with max_staleness={self.max_staleness}",
                    expected="the version that made the rollout",
                    action="pass version= along with the prompt: prompts.version, when it was issued",
                )
        else:
            version = as_number("version", version)
            if attempt is None and version > newest:
                # The weights that made it are lost, whatever version they have now. Rollouts requested since stay out.
                self.counts["of later weights"] += 1
                return False
            if version > self.weights_version:
                self._of_later_weights(ordinal, flight, bit, version)
                return False
            if self._is_stale(version):
                if attempt is not None and flight.flying & bit and attempt >= (flight.attempts or {}).get(rollout, 0):
                    self._drop(ordinal, flight, bit, STALE, requeue=self.on_stale == "requeue")
                else:
                    self.counts["superseded"] += 1
                return False
            if flight.made is None:
                flight.made = {}
            flight.made[version] = flight.made.get(version, 0) | bit
        flight.done |= bit
        flight.flying &= ~bit
        return True

    def _of_later_weights(self, ordinal: int, flight: Flight, bit: int, version: int) -> None:
        if not self.is_resumed:
            raise UsageError(
                "done(): no weights of this version yet",
                found=f"version={version}",
                expected=f"at most {self.weights_version}, as advance() said last",
                cause="the weights that roll out were updated, and advance() was not called, or later",
                action="call prompts.advance(version) before the new weights roll out",
            )
        self.counts["of later weights"] += 1
        # From weights that a resume discarded; or advance() was late, and nobody else will produce it.
        if flight.flying & bit:
            flight.flying &= ~bit
            self._wait(ordinal, flight)

    def drop(self, ordinal: int, reason: str, *, requeue: bool, rollout: int | None) -> None:
        """See `Prompts.drop`."""
        if not isinstance(reason, str) or not reason:
            raise UsageError(
                "a prompt is dropped for a reason",
                found=repr(reason),
                expected="a word",
                action=f"drop({ordinal}, 'failed'), for example",
            )
        ordinal = as_number("ordinal", ordinal)
        flight = self.flight(ordinal, "drop()")
        if flight is None:
            raise self._settled(ordinal, "drop()")
        bits = self._all & ~flight.gone if rollout is None else 1 << self._number(rollout)
        if bits & flight.gone:
            raise StateError(
                f"drop(): rollout {rollout} of prompt {ordinal} is trained or dropped already",
                found=f"rollouts {self.numbers(flight.gone)}",
                expected="one that is in flight, or came back",
                action="drop each rollout once; without rollout=, drop() takes all that are not trained",
            )
        self._drop(ordinal, flight, bits, reason, requeue=requeue)

    def advance(self, version: int) -> list[tuple[int, int]]:
        """See `Prompts.advance`."""
        self.weights_version = _check("version", version, self.weights_version)
        stale = [(ordinal, bits) for ordinal, flight in self.open.items() if (bits := self._stale(flight))]
        for ordinal, bits in stale:
            self._drop(ordinal, self.open[ordinal], bits, STALE, requeue=self.on_stale == "requeue")
        return [(ordinal, rollout) for ordinal, bits in stale for rollout in self.numbers(bits)]

    def _stale(self, flight: Flight) -> int:
        """The rollouts of a prompt that are back and too old, as bits."""
        bits = 0
        for version, made in (flight.made or {}).items():
            if self._is_stale(version):
                bits |= made
        return bits & flight.done

    def trained(self, step: int, what: Sequence[PromptOrRollout]) -> None:
        """See `Prompts.trained`. Nothing is changed if it raises."""
        step = _check("step", step, self.step)
        whole: list[int] = []
        parts: list[tuple[int, int]] = []
        for one in _listed(what):
            if isinstance(one, tuple | list):
                if len(one) != 2:
                    raise UsageError(
                        "bad prompt in trained()",
                        found=repr(one),
                        expected="an ordinal, or a pair of ordinal and rollout",
                        action=f"trained({step}, [prompt.ordinal, ...]) or trained({step}, [(prompt.ordinal, 0), ...])",
                    )
                ordinal, rollout = one
                parts.append((as_number("ordinal", ordinal), self._number(rollout)))
            else:
                whole.append(as_number("ordinal", one))
        if len(set(whole)) < len(whole) or len(set(parts)) < len(parts):
            raise StateError(
                f"trained({step}): a prompt is named twice",
                found=", ".join(str(one) for one, times in Counter([*whole, *parts]).items() if times > 1)[:200],
                expected="each ordinal once, or each of its rollouts once",
                cause="a batch holds the same rollout twice",
                action="leave the second one out of the batch",
            )
        for ordinal in whole:
            self._check_trained(step, ordinal)
        for ordinal, rollout in parts:
            flight = self._trainable(step, ordinal)
            if not flight.done >> rollout & 1:
                raise self._not_done(step, ordinal, flight, rollout)
        # Parts first: a prompt may be named both as a whole and in parts, and naming the whole settles it.
        for ordinal, rollout in parts:
            flight = self.open[ordinal]
            flight.step = step
            self._count_staleness(flight, 1 << rollout)
            self._gone(ordinal, flight, 1 << rollout)
        for ordinal in whole:
            if (whole_flight := self.open.get(ordinal)) is not None:
                whole_flight.step = step
                self._count_staleness(whole_flight, whole_flight.done)
                self._settle(ordinal, whole_flight)
        self.step = step

    def _count_staleness(self, flight: Flight, bits: int) -> None:
        for version, made in (flight.made or {}).items():
            if found := made & bits:
                self._staleness[self.weights_version - version] += found.bit_count()

    def _check_trained(self, step: int, ordinal: int) -> None:
        flight = self._trainable(step, ordinal)
        is_all = (flight.done | flight.gone) == self._all
        if not flight.done or not (is_all or flight.done.bit_count() >= self.min_rollouts):
            raise self._not_done(step, ordinal, flight)

    def _trainable(self, step: int, ordinal: int) -> Flight:
        flight = self.flight(ordinal, f"trained({step})")
        if flight is None:
            raise self._settled(ordinal, f"trained({step})")
        return flight

    def _not_done(self, step: int, ordinal: int, flight: Flight, rollout: int | None = None) -> StateError:
        back, gone = self.numbers(flight.done), self.numbers(flight.gone)
        what = f"prompt {ordinal}" if rollout is None else f"rollout {rollout} of prompt {ordinal}"
        wanted = min(self.min_rollouts, self.rollouts - len(gone))
        return StateError(
            f"trained({step}): {what} has not come back",
            found=f"rollouts {back} of {self.rollouts}, and {gone} trained or dropped before",
            expected=f"at least {wanted} that came back" if rollout is None else f"rollout {rollout} among them",
            cause="done() was not called, or said False: the rollout was stale, repeated, or its prompt was requeued",
            action="train only rollouts for which done() said True, and that advance() has not named since; for "
            "smaller groups: Prompts(min_rollouts=...)",
        )

    def _settled(self, ordinal: int, call: str) -> StateError:
        return StateError(
            f"{call}: prompt {ordinal} is settled already",
            found=f"ordinal {ordinal}, which was trained or dropped before",
            expected="a prompt in flight",
            cause="its rollouts were used twice, or after they were dropped",
            action="use only rollouts for which done() said True, and each once",
        )

    # Shared

    def _number(self, rollout: int) -> int:
        rollout = as_number("rollout", rollout)
        if not 0 <= rollout < self.rollouts:
            raise UsageError(
                "there is no such rollout",
                found=f"rollout {rollout}",
                expected=f"0 to {self.rollouts - 1}",
                action=f"count rollouts from 0; for more of them: Prompts(rollouts=...), now {self.rollouts}",
            )
        return rollout

    def _is_stale(self, version: int) -> bool:
        return self.max_staleness is not None and self.weights_version - version > self.max_staleness

    def _drop(self, ordinal: int, flight: Flight, bits: int, reason: str, *, requeue: bool) -> None:
        flight.done &= ~bits
        flight.flying &= ~bits
        if flight.made:
            flight.made = {version: left for version, made in flight.made.items() if (left := made & ~bits)}
        self.counts[f"requeued: {reason}" if requeue else f"dropped: {reason}"] += bits.bit_count()
        if not requeue:
            self._gone(ordinal, flight, bits, reason)
        else:
            self._wait(ordinal, flight)

    def _wait(self, ordinal: int, flight: Flight) -> None:
        if not flight.waits:
            flight.waits = True
            heapq.heappush(self._waiting, ordinal)

    def _gone(self, ordinal: int, flight: Flight, bits: int, reason: str = "") -> None:
        """Note that rollouts were trained or dropped; the last one settles the prompt."""
        flight.gone |= bits
        flight.done &= ~bits
        if flight.gone == self._all:
            self._settle(ordinal, flight, reason)

    def _settle(self, ordinal: int, flight: Flight, reason: str = "") -> None:
        """Settle a prompt. It counts as trained if any of its rollouts is."""
        del self.open[ordinal]
        if flight.step is None:
            self._dropped.setdefault(reason, []).append(ordinal)
        else:
            self._trained.setdefault(flight.step, []).append(ordinal)
            self.counts["trained"] += 1

    # Records and state

    @property
    def settled(self) -> tuple[dict[int, list[int]], dict[str, list[int]]]:
        """The prompts settled since `forget_settled`: ordinals by the step that trained them, and by the reason they
        were dropped for."""
        return self._trained, self._dropped

    @property
    def staleness(self) -> dict[int, int]:
        """Rollouts trained since `forget_settled`, by how many versions their weights were behind. Only rollouts whose
        version was reported."""
        return dict(sorted(self._staleness.items()))

    def forget_settled(self) -> None:
        """Forget the settled prompts, once they are recorded."""
        self._trained, self._dropped, self._staleness = {}, {}, Counter()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; many prompts in flight are packed."""
        opened = sorted(self.open)
        partial = [(k, f"{one.gone:x}", one.step) for k in opened if (one := self.open[k]).gone]
        head = {"rollouts": self.rollouts, "step": self.step, "weights_version": self.weights_version}
        return head | {"frontier": self.frontier, "next": self.next} | packed(opened, partial, self.rollouts)

    def load(self, fields: Mapping[str, Any]) -> None:
        """Continue from what `to_dict` gave.

        Raises:
            StateError: the group size differs, and some groups are trained in part.
            ValueError, KeyError, TypeError: a field is missing or wrong.
        """
        fields = unpacked(fields)
        partial = {as_count(k): (int(gone, 16), step) for k, gone, step in fields["partial"]}
        if fields["rollouts"] != self.rollouts and partial:
            some = ", ".join(map(str, list(partial)[:5]))
            raise StateError(
                "groups of another size are trained in part",
                found=f"rollouts={self.rollouts}",
                expected=f"rollouts={fields['rollouts']}, as in the state",
                cause=f"some rollouts of {len(partial)} prompts are trained, the others in flight: ordinals {some}",
                action=f"resume with Prompts(rollouts={fields['rollouts']}); or from a checkpoint without such prompts",
            )
        stop, opened = as_count(fields["next"]), from_runs(fields["open"])
        if (opened and opened[-1] >= stop) or not partial.keys() <= set(opened):
            raise ValueError("prompts in flight that were never issued")
        if any(not 0 < gone < self._all for gone, _ in partial.values()):
            raise ValueError("a group that is not trained in part")
        nothing: tuple[int, int | None] = (0, None)
        self.open = {
            k: Flight(gone=gone, step=step, waits=True) for k in opened for gone, step in [partial.get(k, nothing)]
        }
        self._waiting = opened  # ascending, and so a heap
        self.next, self.step = stop, as_count(fields["step"])
        self.weights_version = as_count(fields["weights_version"])
        self.is_resumed = True
        self.counts.clear()
        self.forget_settled()


def _listed(what: Iterable[Any]) -> list[Any]:
    try:
        return list(what)
    except TypeError as error:
        raise UsageError(
            "trained() takes a list of prompts",
            found=repr(what)[:200],
            expected="a list",
            action="trained(step, [prompt.ordinal, ...])",
        ) from error


def _check(name: str, value: int, least: int, most: int | None = None) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if isinstance(value, bool) or found < least or (most is not None and found > most):
        expected = f"a whole number, at least {least}" + ("" if most is None else f", at most {most}")
        raise UsageError(f"bad {name}", found=repr(value), expected=expected, action=f"correct {name}")
    return found


def as_number(name: str, value: int) -> int:
    """A NumPy or torch integer as Python's, since bits are shifted by it."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(
            f"bad {name}", found=repr(value), expected="a whole number", action=f"pass {name} as an int"
        ) from None
