"""`Finding`, a fact to know before a launch; `Findings`, a list of them; and the checkpoint that a launch starts from.

`PlannedLaunch`: where the launch would continue: its checkpoint, ranks and batches.

Under DeepSpeed we choose the checkpoint (`Run.choose`). Megatron-LM loads the one that its tracker names, and we check
beforehand that it is complete (`hosts.megatron.load_rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from megaresume.checkpoint.host import without_state
from megaresume.checkpoint.load.search import Choice, ForeignCheckpoint
from megaresume.checkpoint.records.envelope import stream_of
from megaresume.checkpoint.records.names import TRACKER, deepspeed_tag, megatron_tag
from megaresume.checkpoint.system import Topology
from megaresume.hosts.deepspeed.load_rules import BEGIN_ANEW, Partitions, check_zero, choose_to_load
from megaresume.hosts.megatron import load_rules
from megaresume.hosts.megatron.arguments import schedule_from_args
from megaresume.hosts.megatron.guard.record import OrderRecord
from megaresume.runs.directory import Run
from megaresume.stream.batches import TOKEN_COST, Balance, BatchSchedule, Objective, check_sizes
from megaresume.stream.config import OnChange
from megaresume.stream.errors import CheckpointError, MegaresumeError, UsageError
from megaresume.stream.skips import NO_SKIP, SkipConfig
from megaresume.stream.state import StreamState


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Flags of a training program, by Megatron's names; None: as when the checkpoint was saved."""

    #: data config; None: that of the run's last save.
    data: Path | None = None
    split: str | None = None
    seed: int | None = None
    seq_length: int | None = None
    on_change: OnChange = "refuse"
    #: samples and documents to leave out, in addition to those in the data config.
    skip: SkipConfig = NO_SKIP
    #: load this iteration and no other.
    ckpt_step: int | None = None
    universal_checkpoint: bool = False
    #: whether the job can convert a ZeRO checkpoint to its number of ranks.
    elastic: bool = False
    #: data-parallel size; None: computed from the nodes, if given.
    dp: int | None = None
    nodes: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    #: start, increment, samples of the ramp-up.
    rampup_batch_size: tuple[int, int, int] | None = None
    num_workers: int | None = None
    zero_stage: int | None = None
    #: the rule for balancing ranks; None: as recorded, without planning to compute the gain.
    balance: Objective | None = None
    balance_token_cost: int = TOKEN_COST
    #: the length of the run, either in steps or in samples. None if not given, and not recorded.
    train_iters: int | None = None
    train_samples: int | None = None

    @property
    def config(self) -> dict[str, int]:
        """The flags that override the data config."""
        given = {"seq_length": self.seq_length, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def balanced(self) -> Balance | None:
        """The rule for balancing ranks. Raises UsageError for a bad cost of a token."""
        return None if self.balance is None else Balance(objective=self.balance, token_cost=self.balance_token_cost)


T = TypeVar("T")

#: refused: the launch would stop with this. warning: it would run, but probably not as intended. note: information.
FindingKind = Literal["refused", "warning", "note"]
#: fields of an error, and of a finding, other than its headline.
_WORDS = ("found", "expected", "cause", "action")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fact to know before a launch. Has the fields of `MegaresumeError`."""

    kind: FindingKind
    headline: str
    found: str | None = None
    expected: str | None = None
    cause: str | None = None
    #: the flag or command that solves the problem.
    action: str | None = None

    def lines(self) -> list[str]:
        """The lines to print."""
        words = {name: getattr(self, name) for name in _WORDS}
        return str(MegaresumeError(self.headline, **words)).splitlines()


class Findings(list[Finding]):
    """All findings about a launch."""

    def warn(self, headline: str, **words: str | None) -> None:
        """Add a warning: it would run, but probably not as intended. ``words`` are fields of `Finding`."""
        self.append(Finding(kind="warning", headline=headline, **words))

    def note(self, headline: str, **words: str | None) -> None:
        """Add a note."""
        self.append(Finding(kind="note", headline=headline, **words))

    def refuse(self, error: MegaresumeError, kind: FindingKind = "refused") -> None:
        """Add a refusal, worded as an error."""
        words: dict[str, Any] = {name: None if (v := getattr(error, name)) is None else str(v) for name in _WORDS}
        self.append(Finding(kind=kind, headline=error.headline, **words))

    def attempt(self, rule: Callable[[], T]) -> T | None:
        """Apply a rule of the real resume, and turn a refusal into a finding."""
        try:
            return rule()
        except MegaresumeError as error:
            self.refuse(error)
            return None

    @property
    def refused(self) -> bool:
        """Whether the launch would stop before its first step."""
        return any(finding.kind == "refused" for finding in self)


#: stream: our samples. guard: Megatron's own datasets in a recorded order. adopt: the same, not yet recorded. inside:
#: the state is only in the checkpoint itself. fresh: nothing to load. None: refused.
Kind = Literal["stream", "guard", "adopt", "inside", "fresh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """What the launch would resume from."""

    kind: Kind | None
    #: whether Megatron-LM wrote the directory.
    is_megatron: bool
    choice: Choice | None
    #: the recorded order of a guarded run.
    record: OrderRecord | None
    #: the number of optimizer steps done.
    iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLaunch:
    """A launch that resumes from a state of a stream: everything that the questions about it need."""

    root: Path
    flags: Flags
    findings: Findings
    choice: Choice
    state: StreamState
    is_megatron: bool
    #: the number of optimizer steps done.
    step: int
    #: the current layout.
    now: Topology
    #: planned global batch sizes of the whole run, including the past; None if unknown.
    schedule: BatchSchedule | None = None

    def steps_until(self, target: int) -> int | None:
        """The last step that ends at or before a sample; None if unknown."""
        return None if self.schedule is None else self.step + steps_until(self.schedule, self.state.samples, target)


def steps_until(schedule: BatchSchedule, sample: int, target: int) -> int:
    """The number of whole steps from ``sample`` on that end at or before ``target``."""
    high = 1
    while schedule.after(sample, high) <= target:
        high *= 2
    low = 0
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if schedule.after(sample, middle) <= target else (low, middle)
    return low


def find_start(run: Run, flags: Flags, findings: Findings) -> StartingPoint:
    """Decide as the launch would; adds what it would refuse to the findings."""
    is_megatron = any(c.iteration is not None and c.tag == megatron_tag(c.iteration) for c in run.candidates)
    before = len(findings)
    choice, kind, record = None, None, None
    if is_megatron:
        choice, kind, record = _megatron(run, flags, findings)
    else:
        choice = findings.attempt(lambda: _deepspeed(run, flags))
        if choice is not None and choice.state is None:
            findings.refuse(without_state(choice, BEGIN_ANEW))
        elif len(findings) == before:
            kind = "fresh" if choice is None else _streamed(choice, findings)
    return StartingPoint(
        kind=kind if not Findings(findings[before:]).refused else None,
        is_megatron=is_megatron,
        choice=choice,
        record=record,
        iteration=0 if choice is None or choice.iteration is None else choice.iteration,
    )


def _streamed(choice: Choice, findings: Findings) -> Kind | None:
    """``stream`` if the launch can continue a stream; otherwise None, and a finding."""
    state = choice.state
    return "stream" if state is not None and findings.attempt(lambda: bool(stream_of(state))) else None


def _deepspeed(run: Run, flags: Flags) -> Choice | None:
    if not flags.universal_checkpoint:
        return run.choose(flags.ckpt_step)
    tag = None if flags.ckpt_step is None else f"{deepspeed_tag(flags.ckpt_step)}_universal"
    return choose_to_load(str(run.root), tag, universal=True)


def _megatron(run: Run, flags: Flags, findings: Findings) -> tuple[Choice | None, Kind | None, OrderRecord | None]:
    from megaresume.hosts.megatron.load_rules import check_content, check_tracker

    root, iteration = run.root, flags.ckpt_step
    chosen: list[Choice] = []

    def check() -> bool:
        found = check_tracker(SimpleNamespace(load=str(root), save=str(root), ckpt_step=flags.ckpt_step))
        if isinstance(found, Choice):
            chosen.append(found)
        elif isinstance(found, ForeignCheckpoint) and (root / TRACKER).is_file():
            check_content(root / TRACKER)
        return True

    if not findings.attempt(check):
        return None, None, None
    for found in chosen:
        iteration = found.iteration
        for words in (*(f"passed over {rejected}" for rejected in found.rejected), *found.notes):
            findings.warn(words)
    if iteration is None:
        iteration = run.pointers[1].iteration
    if iteration is None:
        return None, "fresh", None
    try:
        choice = run.choose(iteration)
    except CheckpointError as error:
        if not (root / megatron_tag(iteration)).is_dir():
            findings.refuse(error)
            return None, None, None
        # Complete for Megatron, whose tracker moved; the kill came before our records were written.
        findings.note(
            "the data state is inside the checkpoint only, so that nothing can be said about the data",
            found=f"{megatron_tag(iteration)}: {error.found}",
            cause="the save was killed between Megatron's tracker and the records beside the checkpoint",
            action="the next start writes the records; then plan again",
        )
        return None, "inside", None
    except MegaresumeError as error:
        findings.refuse(error)
        return None, None, None
    if choice is None:
        return None, "fresh", None
    state, mode = choice.state, "guard" if flags.data is None else "stream"
    if state is None:
        if mode == "stream":
            findings.refuse(load_rules.without_state(iteration, 0))
        return choice, "adopt", None
    if state.kind != "order":
        return choice, _streamed(choice, findings), None
    findings.attempt(lambda: load_rules.check_mode("order", mode))
    return choice, "guard", findings.attempt(lambda: OrderRecord.from_state(state))


def topology(before: Topology, flags: Flags) -> Topology:
    """The layout of the launch.

    Raises:
        UsageError: nodes are given whose number of ranks is unknown; or the numbers do not divide.
    """
    model = before.tp * before.pp * before.cp
    dp, nodes = flags.dp, flags.nodes
    if dp is None and nodes is not None:
        if before.nodes is None or before.world_size % before.nodes:
            raise UsageError(
                "how many ranks a node has is not recorded",
                found=f"--nodes {nodes}; the checkpoint was saved by {before.world_size} ranks",
                expected="the data-parallel size",
                action="--dp D in place of --nodes",
            )
        world = nodes * (before.world_size // before.nodes)
        if world % model:
            raise UsageError(
                "the ranks do not divide over model parallelism",
                found=f"{nodes} nodes with {before.world_size // before.nodes} ranks each",
                expected=f"a multiple of {model} ranks: tp {before.tp}, pp {before.pp}, cp {before.cp}",
                action="another number of --nodes",
            )
        dp = world // model
    now = before.dp if dp is None else dp
    return replace(
        before,
        dp=now,
        world_size=now * model,
        nodes=nodes if nodes is not None else before.nodes if now == before.dp else None,
        num_workers=before.num_workers if flags.num_workers is None else flags.num_workers,
        micro_batch_size=flags.micro_batch_size or before.micro_batch_size,
        global_batch_size=flags.global_batch_size or before.global_batch_size,
        zero_stage=before.zero_stage if flags.zero_stage is None else flags.zero_stage,
        balance=flags.balanced or before.balance,
    )


def planned_sizes(now: Topology, flags: Flags, *, is_megatron: bool, start: int = 0) -> BatchSchedule | None:
    """The global batch sizes by the flags, from a step on that begins at ``start``; None if unknown.

    Raises:
        UsageError: a bad ramp-up.
    """
    if now.global_batch_size is None:
        return None
    if flags.rampup_batch_size is None:
        return BatchSchedule.constant(now.global_batch_size)
    if is_megatron:
        sizes = SimpleNamespace(global_batch_size=now.global_batch_size, rampup_batch_size=flags.rampup_batch_size)
        return schedule_from_args(sizes, start=start)
    return BatchSchedule.ramp_up(*flags.rampup_batch_size, now.global_batch_size)


def check_layout(launch: PlannedLaunch) -> None:
    """Check that batches divide by the ranks, and that ZeRO's partitions fit."""
    now, schedule = launch.now, launch.schedule
    micro = now.micro_batch_size
    if schedule is not None and micro is not None:
        sizes, first = schedule, launch.state.samples
        launch.findings.attempt(lambda: check_sizes(sizes, first, micro_batch_size=micro, dp_size=now.dp))
    partitions = Partitions(ranks=now.dp * now.cp, zero_stage=now.zero_stage or 0)
    if not launch.flags.universal_checkpoint:
        launch.findings.attempt(lambda: check_zero(launch.choice, partitions, elastic=launch.flags.elastic))
