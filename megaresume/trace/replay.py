"""Plan a stream again and compare it with what was recorded: proof, or the first difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaresume.stream import cursor
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import CorpusError, MegaresumeError
from megaresume.stream.source import LengthSource
from megaresume.stream.state import SourceCursor, StreamState
from megaresume.stream.stream import Stream
from megaresume.trace.replan import Replan

__all__ = ["Recorded", "Replayed", "replay", "replay_all", "replay_between"]

#: Samples planned between two signs of life.
STRIDE = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A point of the past: what a checkpoint, a ledger line or a log says about it."""

    #: where it was recorded, for people.
    origin: str
    #: samples trained.
    sample: int
    #: rolling digest of them, 16 hex digits.
    digest: str
    #: the fields of the state that say where the stream was, if it was recorded as a whole.
    position: dict[str, Any] | None = None
    #: of a branch that the run gave up when it began again from an earlier step: its stages may be others.
    given_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A recorded point, and what planning it again gave."""

    recorded: Recorded
    #: None: the stream could not be planned up to here.
    digest: str | None
    #: fields of the position that differ.
    fields: tuple[str, ...] = ()
    #: why it could not be planned.
    error: MegaresumeError | None = None

    @property
    def holds(self) -> bool:
        """Whether the recorded point is that of the stream."""
        return self.digest == self.recorded.digest and not self.fields


def replay(
    stream: Stream, recorded: Iterable[Recorded], *, progress: Callable[[int], object] = lambda samples: None
) -> Iterator[Replayed]:
    """Check recorded points in the order of their samples.

    Ends after a point that could not be planned: nothing after it can be either.

    Args:
        stream: a stream that begins at or before the first point.
        recorded: the points.
        progress: called with the samples planned since the last call.
    """
    done = stream.start
    declared = {skip.at for skip in stream.skips.documents}
    for point in sorted(recorded, key=lambda r: r.sample):
        try:
            while done < point.sample:
                stop = min(done + STRIDE, point.sample)
                stream.plan(stop - 1, stop)
                progress(stop - done)
                done = stop
            position = cursor.comparable(stream.fields_at(point.sample))
        except MegaresumeError as error:
            yield Replayed(recorded=point, digest=None, error=error)
            return
        yield Replayed(recorded=point, digest=position["digest"], fields=_differ(position, point, declared))


def replay_all(
    recorded: Iterable[Recorded],
    state: StreamState,
    sources: Mapping[str, LengthSource],
    progress: Callable[[int], object],
) -> tuple[list[Replayed], list[str]]:
    """Every recorded point, in a stream planned from sample 0; and those of branches that were given up.

    What was given up and is the same proves as much as the rest; what is not is no part of the run any more.

    Args:
        recorded: the points.
        state: the newest of the run.
        sources: its corpora, by name, in the order of its config.
        progress: called with the samples planned since the last call.
    """
    try:
        config = StreamConfig.from_dict(state.config)
        stream = Stream(config, list(sources.values()), past=state)
    except CorpusError:
        return [], []  # already among the problems of the corpora
    checked = list(replay(stream, recorded, progress=progress))
    given_up = [c for c in checked if c.recorded.given_up and not c.holds]
    return [c for c in checked if c not in given_up], [c.recorded.origin for c in given_up]


def replay_between(
    recorded: Iterable[Recorded], replan: Replan, first: int, stop: int, progress: Callable[[int], object]
) -> Iterator[Replayed]:
    """The recorded points from sample ``first`` to ``stop``, planned from the nearest state at or before ``first``.

    Args:
        recorded: points of the run.
        replan: the run, without points of its own.
        first, stop: samples.
        progress: called with the samples planned since the last call.
    """
    wanted = sorted((p for p in recorded if first <= p.sample <= stop and not p.given_up), key=lambda p: p.sample)
    state = replan.history.before(first)
    at = 0 if state is None else state.samples
    digest = "0" * 16 if state is None else state.digest
    blocks = replan.plans(at, stop, progress=progress)
    plan = None
    for point in wanted:
        try:
            while at < point.sample:
                if plan is None or plan.stop < point.sample:
                    plan = next(blocks).plan
                at = min(plan.stop, point.sample)
                digest = f"{int(plan.digests[at - plan.first - 1]):016x}"
        except MegaresumeError as error:
            yield Replayed(recorded=point, digest=None, error=error)
            return
        yield Replayed(recorded=point, digest=digest)


def _begun(source: SourceCursor) -> SourceCursor:
    """A source with the eras that have begun: what was to come may have changed since."""
    eras = tuple(era for era in source.eras if era.first < max(source.position, 1))
    return dataclasses.replace(source, eras=eras)


def _differ(position: dict[str, Any], point: Recorded, declared: Container[int]) -> tuple[str, ...]:
    """Names of the fields of a recorded position that are not those found."""
    if point.position is None:
        return ()
    then, now = dict(point.position), dict(position)
    # A source that came later was not drawn yet, and is in no config of the time.
    now["sources"] = {name: cursor for name, cursor in now["sources"].items() if name in then["sources"]}
    for side in (then, now):
        side["sources"] = {name: _begun(cursor) for name, cursor in side["sources"].items()}
    then["stages"], now["stages"] = ([(s.first, s.name) for s in p["stages"]] for p in (then, now))
    names = list(now)
    # A list of documents to skip that is declared there, at a resume, is taken out of the open bins.
    moved = [name for name in ("sources", "bins", "pending", "tails") if now[name] != then.get(name)]
    if moved and point.sample in declared:
        names = [name for name in names if name not in moved]
    later = now["stages"][len(then["stages"]) :]
    if later and now["stages"][: len(then["stages"])] == then["stages"] and all(s[0] == point.sample for s in later):
        # It was recorded before a resume began a stage there, which starts the deficits at zero and may empty the bins.
        names = [name for name in names if name not in ("sources", "bins", "pending", "tails", "stages")]
    return tuple(name for name in names if now[name] != then.get(name))
