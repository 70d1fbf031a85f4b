"""The stages of a run, past and declared; and refusing those that cannot be planned.

A stage is a range of the stream with one blend and one packing. At its start (`feed.enter`), every source resumes at
its own position and the deficits of the blend are reset to zero, so that a new weight causes no burst of catch-up.
Documents in open bins stay there if the packing is the same; otherwise they are taken out in the order in which they
were put in, and are packed first.

Refused are documents that must not be cut or cannot be weighed, in any stage, and sources with no documents left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StageConfig, StreamConfig
from megaresume.stream.data_yaml import StageUnit
from megaresume.stream.errors import ConfigError
from megaresume.stream.left_out import NO_SKIPS, Skips
from megaresume.stream.skips import DocumentList
from megaresume.stream.source import LengthSource, chunks, count_trained
from megaresume.stream.state import StageRecord, StreamState

if TYPE_CHECKING:
    from megaresume.stream.feed import Masks
    from megaresume.stream.order import Orders


#: name of the stage at the beginning of a run.
FIRST = "start"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage; its config declares no further stages."""

    name: str
    config: StreamConfig
    #: the unit of ``at``: the stage begins with the first sample before which the stream holds ``at`` of them.
    unit: StageUnit
    at: int
    #: sources whose corpora have grown, and join with all their documents at once.
    grown_now: frozenset[str] = frozenset()

    @classmethod
    def recorded(cls, record: StageRecord) -> Stage:
        """The stage that a state records."""
        return cls(name=record.name, config=StreamConfig.recorded(record.config), unit="samples", at=record.first)


def declared(before: StreamConfig, changes: Sequence[StageConfig]) -> list[Stage]:
    """The stages that the changes to the config ``before`` make, one by one."""
    stages = []
    for change in changes:
        before = before.changed_by(change)
        stages.append(Stage(name=change.name, config=before, unit=change.unit, at=change.at))
    return stages


@dataclass
class Course:
    """The stages of a stream, in order, and the starts of those that were reached.

    Shared by all planners of a stream, which compute the same starts.
    """

    stages: tuple[Stage, ...]
    #: the first sample of each stage that was reached.
    began: list[int]
    #: maps steps to samples, for stages that are declared by step.
    schedule: BatchSchedule | None = None
    #: what is left out of the stream.
    skips: Skips = NO_SKIPS
    #: the orders of the sources in each stage that was reached, by stage number.
    orders: dict[int, Orders] = field(default_factory=dict)
    #: a state of the run that has gone through the first stages: its sources know which pieces their epochs had.
    past: StreamState | None = None
    #: the orders of the sources, as that state knows them.
    past_orders: Orders | None = None
    _masks: dict[tuple[int, ...], Mapping[int, Masks]] = field(default_factory=dict)
    _records: dict[int, tuple[StageRecord, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: StreamConfig) -> Course:
        """The stages that a config declares, from sample 0."""
        first = Stage(name=FIRST, config=config.without_stages(), unit="samples", at=0)
        return cls((first, *declared(first.config, config.stages)), [0])

    @classmethod
    def recorded(cls, past: StreamState) -> Course:
        """The course that led to a state, to be planned again from sample 0."""
        return cls(tuple(Stage.recorded(record) for record in past.stages), [0], skips=past.skips, past=past)

    def config(self, index: int) -> StreamConfig:
        """The config of the stage with this number."""
        return self.stages[index].config

    def index_at(self, sample: int) -> int:
        """Number of the stage that a planned sample belongs to."""
        return max(k for k, first in enumerate(self.began) if first <= sample)

    def masks_at(self, sample: int) -> Mapping[int, Masks]:
        """The documents that are passed over from a sample on, by source number: one object for each such set."""
        return self._masks_of(tuple(k for k, d in enumerate(self.skips.documents) if d.holds_at(sample)))

    def masks_from(self, sample: int) -> Mapping[int, Masks]:
        """The documents that are passed over from exactly this sample on, by source number."""
        return self._masks_of(tuple(k for k, d in enumerate(self.skips.documents) if d.at == sample))

    def _masks_of(self, which: tuple[int, ...]) -> Mapping[int, Masks]:
        if which not in self._masks:
            from megaresume.stream.feed import masks_of

            names = [source.name for source in self.config(0).sources]
            self._masks[which] = masks_of([self.skips.documents[k].documents for k in which], names)
        return self._masks[which]

    def is_due(self, index: int, samples: int, tokens: int) -> bool:
        """Whether stage ``index`` begins after this many samples and tokens were planned."""
        if index >= len(self.stages) or (self.stages[index].unit == "step" and self.schedule is None):
            return False
        return self.samples_left(index - 1, samples, tokens) == 0

    def samples_left(self, index: int, samples: int, tokens: int) -> int | None:
        """How many samples of stage ``index`` can be planned before the next may begin; None if there is no next.

        ``samples`` and ``tokens`` are what was planned so far.

        Raises:
            ConfigError: the next is declared by step, and the batch sizes are not known.
        """
        if index + 1 >= len(self.stages):
            return None
        stage = self.stages[index + 1]
        if stage.unit == "tokens":
            # A sample holds at most seq_length tokens, so this many samples cannot overshoot.
            left = stage.at - tokens
            return 0 if left <= 0 else max(left // self.config(index).seq_length, 1)
        return max(self._first_sample(stage) - samples, 0)

    def _first_sample(self, stage: Stage) -> int:
        if stage.unit == "samples":
            return stage.at
        if self.schedule is None:
            raise ConfigError(
                f"stage '{stage.name}' begins at a step, but the batch sizes are not known here",
                found=f"from_step: {stage.at}",
                expected="the schedule of global batch sizes",
                cause="the stream alone does not know which samples a step trains",
                action="declare the stage with from_samples or from_tokens",
            )
        return self.schedule.after(0, stage.at)

    def reached(self, index: int, sample: int) -> None:
        """Stage ``index`` begins with ``sample``."""
        if index == len(self.began):
            self.began.append(sample)

    def records(self, index: int) -> tuple[StageRecord, ...]:
        """The stages up to number ``index``, for a state: always the same object, so that its text is made once."""
        if index not in self._records:
            self._records[index] = tuple(
                StageRecord(first=first, name=stage.name, config=stage.config.to_dict())
                for first, stage in zip(self.began, self.stages[: index + 1], strict=False)
            )
        return self._records[index]


#: Documents looked at at a time, as the first few mostly decide.
FEW = 1 << 12


def check_whole(config: StreamConfig, sources: Sequence[LengthSource]) -> None:
    """Refuse a config that, now or in a declared stage, would cut a document that must not be cut.

    Args:
        config: with the stages to come.
        sources: of the config. Those that are never cut, such as images, have ``whole`` True; optional are ``longest``,
            the tokens of the longest document (default: all lengths are read), and ``advice`` for a document that is
            too long.

    Raises:
        ConfigError: packing ``split`` with such a source, or samples shorter than its longest document.
    """
    for current, where in config.over_time():
        for entry, source in zip(current.sources, sources, strict=True):
            if not entry.weight or not getattr(source, "whole", False):
                continue
            name, length = entry.name, current.seq_length
            if current.packing.traits.cuts or entry.packing == "split":
                which = "packing.mode" if entry.packing is None else f"sources.{name}.packing"
                raise ConfigError(
                    f"packing 'split' would cut documents of source '{name}' that must stay whole{where}",
                    found=f"{which} split, which cuts documents anywhere",
                    expected="knapsack, best_fit or none: whole documents",
                    action="set packing: knapsack" if entry.packing is None else f"remove packing from source '{name}'",
                )
            if (longest := _longest(source)) > length:
                raise ConfigError(
                    f"source '{name}' has documents that are longer than a sample{where}",
                    found=f"up to {longest} tokens, and samples of {length}",
                    expected=f"documents of at most {length} tokens: these are never cut",
                    cause="a long text, large or many images, or a shorter seq_length than they were prepared for",
                    action=getattr(source, "advice", None)
                    or f"raise seq_length to {longest}; or hold the documents to a sample: max_tokens: {length} "
                    "with too_long: truncate (cut the text) or drop (leave the document out); or prepare smaller "
                    "images",
                )


def _longest(source: LengthSource) -> int:
    """The length of the longest document, from the source itself or else from all lengths."""
    known = getattr(source, "longest", None)
    return max((int(source.lengths(ids).max()) for ids in chunks(source)), default=0) if known is None else int(known)


def check_trained(config: StreamConfig, sources: Sequence[LengthSource]) -> None:
    """Refuse a blend by trained tokens if a source cannot be weighed by them, now or in a declared stage.

    Args:
        config: with the stages to come.
        sources: one for each of the config's.

    Raises:
        ConfigError: a source decides what is trained only as its documents are read, or trains nothing at all.
    """
    if config.blend.unit != "trained":
        return
    drawn = {entry.name for current, _ in config.over_time() for entry in current.sources if entry.weight}
    for entry, source in zip(config.sources, sources, strict=True):
        if entry.name in drawn and not hasattr(source, "trained_spans"):
            raise ConfigError(
                f"source '{entry.name}' does not say which tokens are trained before they are read",
                found=f"blend.unit trained, and a {type(source).__name__}",
                expected="corpora of .bin and .idx, which have a .spans or are trained entirely",
                action="set blend: {unit: tokens}",
            )
        # An empty one is refused where it is drawn.
        if entry.name in drawn and len(source) and not any(_trains(source, ids) for ids in chunks(source, FEW)):
            raise ConfigError(
                f"nothing of source '{entry.name}' is trained",
                found=f"{len(source):,} documents without a trained token, and blend.unit trained",
                expected="at least one trained token, since its weight is positive",
                cause="the corpus was prepared with --train flags that mark nothing of it",
                action=f"prepare it again, or give '{entry.name}' weight 0",
            )


def _trains(source: LengthSource, ids: npt.NDArray[np.int64]) -> bool:
    return bool(count_trained(source, ids, np.zeros_like(ids), source.lengths(ids)).any())


def check_growing(config: StreamConfig, sources: Sequence[LengthSource]) -> None:
    """Refuse a source that is declared to grow and cannot.

    Raises:
        ConfigError: it is a part of a split.
    """
    for entry, source in zip(config.sources, sources, strict=True):
        if entry.append is not None and getattr(source, "is_part", False):
            raise ConfigError(
                f"source '{entry.label}' cannot grow: it is a part of a split",
                found=f"append: {entry.append}, and split (or --split)",
                expected="one of the two",
                cause="the boundaries of a split move when a corpus grows: what was held out before would be trained",
                action="leave append out and add new documents as a separate source; or hold out documents with a "
                "separate corpus, without split",
            )


def check_remaining(course: Course, sources: Mapping[str, LengthSource], state: StreamState | None) -> None:
    """Refuse lists of documents that leave a source with positive weight without any.

    Epochs in which everything is skipped are passed over, like empty documents, if others come after them. A source
    that ends in such epochs (``max_epochs``) ends as configured, if it had documents left before.

    Args:
        course: the stages and what is left out of them.
        sources: those available, by their names in the course.
        state: that the run resumes from; None if it begins.

    Raises:
        ConfigError: naming the source.
    """
    lists: dict[str, list[DocumentList]] = {}
    for skip in course.skips.documents:
        if skip.until is None and skip.documents.source in sources:
            lists.setdefault(skip.documents.source, []).append(skip.documents)
    for name, of_source in lists.items():
        epoch, cursor = 0, None if state is None else state.sources.get(name)
        if cursor is not None and cursor.exhausted:
            continue
        if cursor is not None:
            epoch = cursor.epoch
        drawn, end = _drawn(course, name, state)
        if not drawn:
            continue
        bounds = {epoch, *(b for documents in of_source for b in documents.epochs or () if b > epoch)}
        # After the last bound, all epochs are alike.
        asked = [max(bounds)] if end is None else sorted(b for b in bounds if b < end)
        if not asked:
            continue  # it has ended
        if not any(_remains(sources[name], [d for d in of_source if d.holds_in(e)]) for e in asked):
            raise ConfigError(
                f"nothing of source '{name}' is left to train on",
                found=f"{len(sources[name]):,} documents; those that have a token are skipped: "
                f"{', '.join(map(str, of_source))}",
                expected="at least one document with a token in the epochs that the run goes through, since its weight "
                "is positive",
                action=f"give '{name}' weight 0, which begins a stage, or take documents off the list",
            )


def _drawn(course: Course, name: str, state: StreamState | None) -> tuple[bool, int | None]:
    """Whether a source is drawn in the current or a later stage; and its last epoch, if it has one."""
    first = 0 if state is None else len(state.stages) - 1
    samples = 0 if state is None else state.samples
    drawn, ends = False, []
    for k in range(first, len(course.stages)):
        following = course.stages[k + 1] if k + 1 < len(course.stages) else None
        if following is not None and following.unit == "samples" and following.at <= samples:
            continue  # another stage begins right here
        entry = next(source for source in course.config(k).sources if source.name == name)
        if entry.weight > 0:
            drawn = True
            ends.append(None if entry.on_exhausted == "repeat" else entry.max_epochs)
    return drawn, None if None in ends else max((end for end in ends if end is not None), default=None)


def _remains(source: LengthSource, lists: Sequence[DocumentList]) -> bool:
    """Whether some document with tokens is in none of the lists."""
    skipped = np.unique(np.concatenate([np.array(d.numbers(), np.int64) for d in lists] or [np.zeros(0, np.int64)]))
    for documents in chunks(source, FEW):
        documents = documents[~np.isin(documents, skipped)]
        if len(documents) and (source.lengths(documents) > 0).any():
            return True
    return False
