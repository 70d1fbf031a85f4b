"""The samples and documents that a run leaves out: which were requested (``skips.py``) and since when; and the
documents that failed.

Steps are converted to samples once, when they are first requested. The state keeps a log of requests and what is in
force. The past is immutable: samples already trained cannot be left out, and samples left out do not come back.
`FaultRecord`s are documents that could not be trained as indexed. How a fault policy treated one (masked, cut) is
reported and never affects the order: faults are carried from state to state, but are in no digest and no comparison,
since planning a state again does not recover them.

Imports neither numpy nor numba, as `megaresume.stream.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megaresume.stream.errors import ConfigError, as_count
from megaresume.stream.skips import (
    DocumentList,
    Range,
    Ranges,
    SkipConfig,
    absolute,
    common,
    length,
    minus,
    reached,
    union,
)

Unit = Literal["samples", "steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRecord:
    """One request to leave something out, as first seen."""

    #: samples trained when it was first seen.
    at: int
    #: ``skip``; ``keep``: a skip withdrawn before it was reached.
    action: Literal["skip", "keep"]
    unit: Unit
    #: the range as requested: [first, stop) samples, or (first, last) steps.
    asked: Range
    #: the range in absolute samples, [first, stop).
    samples: Range
    #: how many of those samples were already trained.
    late: int

    def __str__(self) -> str:
        first, stop = self.asked[0], self.asked[1] - (self.unit == "samples")
        words = f"{'skip' if self.action == 'skip' else 'do not skip'} {self.unit} {first:,} to {stop:,}"
        low, high = self.samples[0], self.samples[1] - 1
        num = self.samples[1] - self.samples[0] - self.late
        words += f" ({'' if self.unit == 'samples' else f'samples {low:,} to {high:,}; '}{num:,} samples)"
        late = f"{self.late:,} of them were trained already and stay trained" if num else "all were trained already"
        return words + (f": TOO LATE, {late}" if self.late else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentSkip:
    """Documents that are passed over."""

    documents: DocumentList
    #: samples trained when the list was first declared, and when it was withdrawn: it holds in between.
    at: int
    until: int | None = None

    def holds_at(self, sample: int) -> bool:
        """Whether it holds when this many samples were trained."""
        return self.at <= sample and (self.until is None or sample < self.until)


@dataclass(frozen=True, kw_only=True, slots=True)
class Skips:
    """The skips of a stream, as recorded in its state."""

    #: absolute ranges, in force or already left out.
    ranges: Ranges = ()
    #: the requests, in the order in which they were seen.
    log: tuple[SkipRecord, ...] = ()
    #: the lists of documents, in the order in which they were declared.
    documents: tuple[DocumentSkip, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ranges or self.log or self.documents)

    @property
    def asked(self) -> Ranges:
        """The samples requested and not withdrawn, including those requested too late."""
        asked: Ranges = ()
        for record in self.log:
            asked = union(asked, [record.samples]) if record.action == "skip" else minus(asked, [record.samples])
        return asked

    def changes(self) -> tuple[int, ...]:
        """The samples, ascending, at which a list of documents takes effect or ends."""
        marks = {d.at for d in self.documents} | {d.until for d in self.documents if d.until is not None}
        return tuple(sorted(marks))

    def to_plain(self) -> dict[str, Any]:
        """The skips as plain JSON."""
        return {
            "ranges": [list(r) for r in self.ranges],
            "log": [[r.at, r.action, r.unit, *r.asked, *r.samples, r.late] for r in self.log],
            "documents": [
                [d.at, d.until, d.documents.source, d.documents.to_plain(whole=True)] for d in self.documents
            ],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Skips:
        """Read what `to_plain` wrote.

        Raises:
            ValueError, KeyError, TypeError, ConfigError: it is malformed.
        """
        if not all(isinstance(plain[name], list) for name in ("ranges", "log", "documents")):
            raise ValueError(f"no lists: {plain!r:.100}")
        ranges = tuple((as_count(a), as_count(b)) for a, b in plain["ranges"])
        if ranges != union(ranges):
            raise ValueError(f"ranges {ranges!r:.100}")
        log = []
        for at, action, unit, first, last, low, high, late in plain["log"]:
            if action not in ("skip", "keep") or unit not in ("samples", "steps"):
                raise ValueError(f"a record of a skip: {action!r} {unit!r}")
            asked, samples = (as_count(first), as_count(last)), (as_count(low), as_count(high))
            log.append(
                SkipRecord(at=as_count(at), action=action, unit=unit, asked=asked, samples=samples, late=as_count(late))
            )
        documents = []
        for at, until, source, entry in plain["documents"]:
            if not isinstance(source, str):
                raise ValueError(f"documents of {source!r}")
            until = None if until is None else as_count(until)
            found = DocumentList.from_plain(source, entry)
            documents.append(DocumentSkip(documents=found, at=as_count(at), until=until))
        return cls(ranges=ranges, log=tuple(log), documents=tuple(documents))


NO_SKIPS = Skips()


def decide(
    before: Skips,
    samples: int,
    *,
    then: SkipConfig,
    now: SkipConfig,
    given: Sequence[SkipConfig] = (),
    steps_to_samples: Callable[[Range], Range] | None = None,
    end: int | None = None,
) -> tuple[Skips, tuple[str, ...]]:
    """Decide what is left out from a state on.

    Args:
        before: the skips in the state.
        samples: number of samples it has trained.
        then: what the data config of that time requested.
        now: what the current one requests. Requests that are gone from it, and not reached yet, are withdrawn.
        given: requests from elsewhere: flags, ``attach``. They are added.
        steps_to_samples: converts steps (first, last) to trained samples.
        end: trained samples at the end of the run, if known.

    Returns:
        what is left out; what changed, in words, to be recorded in the state.

    Raises:
        ConfigError: a range that begins beyond the end of the run, or is longer than the run.
    """
    here = reached(before.ranges, samples)
    future: Ranges = ((here, 1 << 62),)
    ranges, log, asked = before.ranges, list(before.log), before.asked
    wanted = union(now.samples, *(g.samples for g in given))

    # Skips requested by step do not come from the data config.
    by_steps = union(record.samples for record in before.log if record.unit == "steps")
    gone = common(minus(then.samples, union(wanted, by_steps)), common(future, asked))
    log += [SkipRecord(at=samples, action="keep", unit="samples", asked=r, samples=r, late=0) for r in gone]
    ranges, asked = minus(ranges, gone), minus(asked, gone)

    named = {(record.unit, record.asked) for record in before.log}
    new: list[tuple[Unit, Range, Range]] = [("samples", r, r) for r in minus(wanted, asked)]
    for steps in dict.fromkeys(s for g in given for s in g.steps):
        if ("steps", steps) in named:
            continue
        if steps_to_samples is None:
            raise no_schedule(steps)
        first, stop = steps_to_samples(steps)
        new.append(("steps", steps, (absolute(before.ranges, first), absolute(before.ranges, stop - 1) + 1)))
    for unit, named_as, r in new:
        late = length(minus([(r[0], min(r[1], here))], asked)) if r[0] < here else 0
        log.append(SkipRecord(at=samples, action="skip", unit=unit, asked=named_as, samples=r, late=late))
        ranges, asked = union(ranges, common([r], future)), union(asked, [r])

    for unit, named_as, r in new:
        if end is not None and r[0] >= (last := absolute(minus(ranges, [r]), end)):
            raise _beyond(unit, named_as, end, last)
        if end is not None and r[1] - r[0] > end:
            # Probably a typing error, and planning that far may take hours.
            raise _too_long(unit, named_as, r, end)
    documents, words = _decide_documents(before.documents, samples, then, now, given)
    said = [f"at sample {samples}: {record}" for record in log[len(before.log) :]]
    return Skips(ranges=ranges, log=tuple(log), documents=documents), (*said, *words)


def _decide_documents(
    before: Sequence[DocumentSkip], samples: int, then: SkipConfig, now: SkipConfig, given: Sequence[SkipConfig]
) -> tuple[tuple[DocumentSkip, ...], list[str]]:
    wanted = {d: d for c in (now, *given) for d in c.documents}
    said: list[str] = []
    result = []
    for skip in before:
        if skip.until is None and skip.documents not in wanted and skip.documents in then.documents:
            said.append(f"at sample {samples}: do not skip {skip.documents} any more")
            skip = replace(skip, until=samples)
        result.append(skip)
    for documents in wanted:
        if not any(skip.until is None and skip.documents == documents for skip in before):
            said.append(f"at sample {samples}: skip {documents}")
            documents.numbers()
            result.append(DocumentSkip(documents=documents, at=samples))
    return tuple(result), said


def check_documents(skips: Skips, sizes: Mapping[str, int]) -> None:
    """Check that the skipped documents exist.

    Args:
        skips: what is left out.
        sizes: number of documents of each available source.

    Raises:
        ConfigError: one lies beyond the end of its source.
    """
    for skip in skips.documents:
        documents = skip.documents
        num, last = sizes.get(documents.source), documents.numbers()[-1]
        if num is not None and last >= num:
            raise ConfigError(
                f"source '{documents.source}' has no document {last} that could be skipped",
                found=f"skip of {documents}",
                expected=f"documents from 0 to {num - 1}",
                action="correct the numbers; they count the documents of the trained part",
            )


def no_schedule(steps: Range) -> ConfigError:
    return ConfigError(
        "steps cannot be skipped if the batch sizes are not known",
        found=f"steps {steps[0]} to {steps[1]}",
        expected="samples, or a training program that knows which samples a step trains",
        action="skip samples: A:B",
    )


def _too_long(unit: Unit, asked: Range, samples: Range, end: int) -> ConfigError:
    return ConfigError(
        "a skip leaves out more than the run trains",
        found=f"skip of {unit} {asked[0]:,} to {asked[1] - (unit == 'samples'):,}: {samples[1] - samples[0]:,} samples",
        expected=f"at most {end:,} samples, as many as the run trains",
        cause="a typing error: the data after the skipped samples would move up from that far away",
        action="correct the range; to end the run earlier, lower --train-iters or --train-samples",
    )


def _beyond(unit: Unit, asked: Range, end: int, end_absolute: int) -> ConfigError:
    return ConfigError(
        "a skip is beyond the end of the run",
        found=f"skip of {unit} {asked[0]:,} to {asked[1] - (unit == 'samples'):,}",
        expected=f"{unit} of the run, which ends with sample {end - 1:,}"
        + (f" ({end_absolute - 1:,} counted with what is left out)" if end_absolute != end else ""),
        cause="a typing error, or the run was shortened",
        action="correct the range, or train longer",
    )


#: How many of the newest records a state keeps, since it must stay small.
MAX_FAULTS = 1000


class FaultRecord(NamedTuple):
    """One document that did not match its index, and that a policy was applied to. Sorts by sample, source,
    document."""

    #: number of the sample that holds it, in the stream.
    sample: int
    #: name of the source.
    source: str
    document: int
    epoch: int
    #: what was done to the document: ``mask``, ``truncate``, ...
    policy: str
    #: why it was done, in words.
    reason: str


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a run up to a sample."""

    #: the number of all faults, including those no longer kept.
    total: int = 0
    #: the newest faults, at most `MAX_FAULTS`, ascending.
    kept: tuple[FaultRecord, ...] = ()

    def with_new(self, faults: Iterable[FaultRecord | tuple[Any, ...]], first: int, stop: int) -> Faults:
        """The faults plus those in samples ``first .. stop``.

        Args:
            faults: `FaultRecord`, or its fields in order; those of other samples, and repeats, are ignored.
            first: number of the first sample that is not covered yet.
            stop: one after the last.
        """
        new = sorted(f for f in {FaultRecord(*fault) for fault in faults} if first <= f.sample < stop)
        return Faults(self.total + len(new), (*self.kept, *new)[-MAX_FAULTS:]) if new else self

    def to_plain(self) -> dict[str, Any]:
        """The faults as plain JSON."""
        return {"total": self.total, "kept": [list(fault) for fault in self.kept]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Faults:
        """Read what `to_plain` wrote.

        Raises:
            ValueError, KeyError, TypeError: it is malformed.
        """
        kept = tuple(_record(fields) for fields in plain["kept"])
        total = as_count(plain["total"])
        if (
            not isinstance(plain["kept"], list)
            or total < len(kept)
            or len(kept) > MAX_FAULTS
            or list(kept) != sorted(set(kept))
        ):
            raise ValueError(f"{len(kept)} faults kept of {total}, or out of order")
        return cls(total, kept)


def _record(fields: list[Any]) -> FaultRecord:
    sample, source, document, epoch, policy, reason = fields
    if not all(isinstance(text, str) for text in (source, policy, reason)):
        raise ValueError(f"a fault {fields!r:.100}")
    return FaultRecord(as_count(sample), source, as_count(document), as_count(epoch), policy, reason)


NO_FAULTS = Faults()
