"""`Finding`: something that whoever launches the run should know; `Findings`: all of them; and what the launch says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megaresume.stream.batches import TOKEN_COST, Balance, Objective
from megaresume.stream.config import OnChange
from megaresume.stream.errors import MegaresumeError
from megaresume.stream.skips import NO_SKIP, SkipConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Flags of a training program, by Megatron's names; None: as it was when the checkpoint was saved."""

    #: data config; None: the one that the run was last saved with.
    data: Path | None = None
    split: str | None = None
    seed: int | None = None
    seq_length: int | None = None
    on_change: OnChange = "refuse"
    #: what is to be left out, in addition to what the data config says.
    skip: SkipConfig = NO_SKIP
    #: load this iteration and no other.
    ckpt_step: int | None = None
    universal_checkpoint: bool = False
    #: the job converts a ZeRO checkpoint of another number of ranks.
    elastic: bool = False
    #: data-parallel size; None: what the nodes make of it, if they are given.
    dp: int | None = None
    nodes: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    #: start, increment, samples of the ramp-up.
    rampup_batch_size: tuple[int, int, int] | None = None
    num_workers: int | None = None
    zero_stage: int | None = None
    #: how ranks are balanced; None: as recorded, and nothing is planned to tell what it gains.
    balance: Objective | None = None
    balance_token_cost: int = TOKEN_COST
    #: the length of the run, once: in steps or in samples. None: not said, and not recorded anywhere.
    train_iters: int | None = None
    train_samples: int | None = None

    @property
    def config(self) -> dict[str, int]:
        """What they say of the data config."""
        given = {"seq_length": self.seq_length, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def balanced(self) -> Balance | None:
        """How ranks are to be balanced. Raises UsageError for a bad cost of a token."""
        return None if self.balance is None else Balance(objective=self.balance, token_cost=self.balance_token_cost)


T = TypeVar("T")

#: refused: the launch would stop with this. warning: it would run, and probably not as it is meant. note: just so.
Kind = Literal["refused", "warning", "note"]
#: fields of an error, and of a finding, besides its headline.
_WORDS = ("found", "expected", "cause", "action")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Fields as in `MegaresumeError`."""

    kind: Kind
    headline: str
    found: str | None = None
    expected: str | None = None
    cause: str | None = None
    #: the flag or command that solves it.
    action: str | None = None

    def lines(self) -> list[str]:
        """For people."""
        words = {name: getattr(self, name) for name in _WORDS}
        return str(MegaresumeError(self.headline, **words)).splitlines()


class Findings(list[Finding]):
    """What the launch would be told."""

    def warn(self, headline: str, **words: str | None) -> None:
        """It would run, and probably not as it is meant; ``words`` are fields of `Finding`."""
        self.append(Finding(kind="warning", headline=headline, **words))

    def note(self, headline: str, **words: str | None) -> None:
        """Just so."""
        self.append(Finding(kind="note", headline=headline, **words))

    def refuse(self, error: MegaresumeError, kind: Kind = "refused") -> None:
        """What an error says."""
        words: dict[str, Any] = {name: None if (v := getattr(error, name)) is None else str(v) for name in _WORDS}
        self.append(Finding(kind=kind, headline=error.headline, **words))

    def attempt(self, rule: Callable[[], T]) -> T | None:
        """Ask a rule of the real resume; what it refuses becomes a finding."""
        try:
            return rule()
        except MegaresumeError as error:
            self.refuse(error)
            return None

    @property
    def refused(self) -> bool:
        """Whether the launch would stop before its first step."""
        return any(finding.kind == "refused" for finding in self)
