"""What a test has found: its attempts, its stops, the comparison, and whether it all holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from megaresume.smoke.compare import Outcome
from megaresume.smoke.plan import Layout, Plan
from megaresume.training.records import RunRecords

__all__ = ["Attempt", "Result", "Stopped"]


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One start of the run."""

    number: int
    layout: Layout
    #: the step that it went on from, and the last one that it did.
    first: int
    last: int
    #: seconds of `time.time` at which its first step was done.
    first_step_at: float
    #: seconds that its first step was late because of the data; None: not recorded.
    data_seconds: float | None


@dataclass(kw_only=True, slots=True)
class Stopped:
    """One stop, and how the run came back; None: it did not."""

    kind: str
    before: Layout
    after: Layout
    #: the last step that was done.
    step: int
    #: seconds of `time.time`.
    at: float
    resumed_from: int | None = None
    #: from the stop to the first new step; of these due to the data.
    seconds: float | None = None
    data_seconds: float | None = None

    @property
    def lost(self) -> int | None:
        """Steps that had to be trained again."""
        return None if self.resumed_from is None else self.step - self.resumed_from


@dataclass(kw_only=True, slots=True)
class Result:
    """Everything that was found."""

    plan: Plan
    #: see `Launcher.description`.
    where: str
    attempts: list[Attempt] = field(default_factory=list)
    stops: list[Stopped] = field(default_factory=list)
    #: what proves that the test failed, or proved nothing; what is worth knowing besides.
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: RunRecords | None = None
    run: RunRecords | None = None
    outcome: Outcome | None = None
    #: what ``megaresume verify`` found of the run; None: it could not be asked.
    verified: bool | None = None
    seconds: float = 0.0
    reference_seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the run trained exactly on what the reference trained on, through every stop."""
        return not self.problems and self.outcome is not None and self.outcome.holds and self.verified is not False

    @property
    def first_difference(self) -> str | None:
        """What to look at first."""
        if self.holds:
            return None
        if self.outcome is not None and self.outcome.first is not None:
            return self.outcome.first
        return self.problems[0] if self.problems else "megaresume verify does not hold"
