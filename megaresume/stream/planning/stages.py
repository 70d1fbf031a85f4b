"""The stages of a run: those that were, and those that are declared to come.

A stage is a range of the stream with one blend and one packing. Where one ends and the next begins (`arrays.enter`),
every source resumes at its own position and the deficits of the blend start at zero, so that a new weight causes no
burst of catch-up. Documents in open bins are kept: as they are where the packing stays the same, else they are taken
out, in the order in which they were put in, and are the first to be packed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StageConfig, StreamConfig
from megaresume.stream.data_yaml import StageUnit
from megaresume.stream.errors import ConfigError
from megaresume.stream.left_out import NO_SKIPS, Skips
from megaresume.stream.state import StageRecord, StreamState

if TYPE_CHECKING:
    # Compiled code, half a second to import: `megaresume plan` decides about stages without it.
    from megaresume.stream.documents.order import Orders
    from megaresume.stream.planning.feed import Masks

#: name of the stage at the beginning of a run.
FIRST = "start"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage; its config has no stages of its own."""

    name: str
    config: StreamConfig
    #: it begins with the first sample before which the stream holds ``at`` of these.
    unit: StageUnit
    at: int
    #: sources whose corpora have grown, and take part with all their documents at once.
    grown_now: frozenset[str] = frozenset()

    @classmethod
    def recorded(cls, record: StageRecord) -> Stage:
        """One that was."""
        return cls(name=record.name, config=StreamConfig.recorded(record.config), unit="samples", at=record.first)


def declared(before: StreamConfig, changes: Sequence[StageConfig]) -> list[Stage]:
    """The stages that follow one with the config ``before``, change by change."""
    stages = []
    for change in changes:
        before = before.changed_by(change)
        stages.append(Stage(name=change.name, config=before, unit=change.unit, at=change.at))
    return stages


@dataclass
class Course:
    """The stages of a stream, in order, and where those that were reached began.

    Shared by all planners of a stream, which find the same beginnings.
    """

    stages: tuple[Stage, ...]
    #: first sample of each stage that was reached.
    began: list[int]
    #: maps steps to samples, for stages that are declared by step.
    schedule: BatchSchedule | None = None
    #: what is left out.
    skips: Skips = NO_SKIPS
    #: of the sources in each stage that was reached, by its number.
    orders: dict[int, Orders] = field(default_factory=dict)
    #: a state of the run that has gone through the first stages: its sources know which pieces their epochs had.
    past: StreamState | None = None
    #: of the sources, as that state knows them.
    past_orders: Orders | None = None
    _masks: dict[tuple[int, ...], Mapping[int, Masks]] = field(default_factory=dict)
    _plain: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: StreamConfig) -> Course:
        """The stages that a config declares, from sample 0."""
        first = Stage(name=FIRST, config=config.without_stages(), unit="samples", at=0)
        return cls((first, *declared(first.config, config.stages)), [0])

    @classmethod
    def recorded(cls, past: StreamState) -> Course:
        """What led to a state, to be planned again from sample 0."""
        return cls(tuple(Stage.recorded(record) for record in past.stages), [0], skips=past.skips, past=past)

    def config(self, index: int) -> StreamConfig:
        """Of the stage with this number."""
        return self.stages[index].config

    def index_at(self, sample: int) -> int:
        """Number of the stage that a sample which was planned belongs to."""
        return max(k for k, first in enumerate(self.began) if first <= sample)

    def masks_at(self, sample: int) -> Mapping[int, Masks]:
        """The documents that are passed over from a sample on, by source number: one object for each such set."""
        return self._masks_of(tuple(k for k, d in enumerate(self.skips.documents) if d.holds_at(sample)))

    def masks_from(self, sample: int) -> Mapping[int, Masks]:
        """Of those, the ones that were declared right there."""
        return self._masks_of(tuple(k for k, d in enumerate(self.skips.documents) if d.at == sample))

    def _masks_of(self, which: tuple[int, ...]) -> Mapping[int, Masks]:
        from megaresume.stream.planning.feed import masks_of

        if which not in self._masks:
            names = [source.name for source in self.config(0).sources]
            self._masks[which] = masks_of([self.skips.documents[k].documents for k in which], names)
        return self._masks[which]

    def is_due(self, index: int, samples: int, tokens: int) -> bool:
        """Whether stage ``index`` begins where so many samples, of so many tokens, were planned."""
        if index >= len(self.stages) or (self.stages[index].unit == "step" and self.schedule is None):
            return False
        return self.samples_left(index - 1, samples, tokens) == 0

    def samples_left(self, index: int, samples: int, tokens: int) -> int | None:
        """Samples of stage ``index`` that can be planned before the next one may begin; None if there is no next.

        ``samples`` and ``tokens`` are what was planned so far.

        Raises:
            ConfigError: the next is declared by step, and the batch sizes are not known.
        """
        if index + 1 >= len(self.stages):
            return None
        stage = self.stages[index + 1]
        if stage.unit == "tokens":
            # A sample holds at most seq_length tokens: so many cannot go too far.
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
        """The stages up to number ``index``, for a state."""
        return tuple(
            StageRecord(first=first, name=stage.name, config=self._plain_config(number))
            for number, (first, stage) in enumerate(zip(self.began, self.stages[: index + 1], strict=False))
        )

    def _plain_config(self, index: int) -> Mapping[str, Any]:
        """Always the same object, so that its text is made once."""
        if index not in self._plain:
            self._plain[index] = self.config(index).to_dict()
        return self._plain[index]
