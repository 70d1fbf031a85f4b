"""What changed in the data, and what follows: for a data config, and for Megatron's own datasets under guard.

Of a data config also what balanced ranks would gain in the steps to come, from the lengths of the run's own data. Of
a guarded run, what differs from the recorded order, and what stock Megatron would make of the new flags.

Stock Megatron derives the order of its own datasets again at every start, from their sizes. ``GPTDataset``
(megatron/core/datasets/gpt_dataset.py, the same from 0.8 on) shuffles all epochs of a corpus jointly, the last one
apart if less than 80 % of it is needed. Both depend on the samples asked for, and both decide how often the generator
is drawn from: another number of epochs, or the other side of 80 %, and every sample is another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megaresume.checkpoint.records.names import data_path
from megaresume.data.catalog import open_sources
from megaresume.data.data_config import DataConfig
from megaresume.data.source import Source
from megaresume.hosts.megatron.guard.compare import compare, grown_too_far
from megaresume.hosts.megatron.guard.pinned import extendable
from megaresume.hosts.megatron.guard.record import BuilderRecord, ComponentRecord, Corpus, OrderRecord, Request
from megaresume.hosts.megatron.load_rules import check_stages
from megaresume.runs.answer import told
from megaresume.runs.plan.start import Finding, Findings, Flags, PlannedLaunch
from megaresume.stream.batches import Balance, BatchSchedule, Objective
from megaresume.stream.changes import Reconciled, changes_since, check_recorded, reconcile
from megaresume.stream.config import OnChange, StreamConfig, resolved
from megaresume.stream.errors import (
    ConfigError,
    CorpusError,
    MegaresumeError,
    SetupError,
    StateError,
    StreamExhausted,
    UsageError,
)
from megaresume.stream.left_out import check_documents, no_schedule
from megaresume.stream.skips import Range
from megaresume.stream.source import fingerprint_of, same_corpora
from megaresume.stream.stages import Stage, check_remaining
from megaresume.stream.state import Fingerprint

if TYPE_CHECKING:
    from megaresume.stream.stream import Stream


#: The outcome of a change. nothing: the order continues; new stage: from the resume point on; refused: no launch.
Outcome = Literal["nothing", "new stage", "refused"]


@dataclass(kw_only=True)
class PlannedData:
    """The data that the launch would train on."""

    outcome: Outcome = "nothing"
    #: the file that was read; None: the config in the state, and no corpus was looked at.
    path: Path | None = None
    #: the changes as (field, then, now).
    changes: list[tuple[str, Any, Any]] = field(default_factory=list)
    #: the differences that the state would keep forever, in words.
    accepted: tuple[str, ...] = ()
    #: corpora that have grown, in words.
    grown: tuple[str, ...] = ()
    #: what ``--megaresume-on-change stage`` would make of a change that is refused without it; None: refused as well.
    with_stage: tuple[str, ...] | None = None
    #: the config of today, as given.
    config: StreamConfig | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    #: the config that holds from the resume point on, over all sources that the run ever had.
    in_force: StreamConfig | None = None
    to_come: tuple[Stage, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The data as plain JSON."""
        return {
            "config": None if self.path is None else str(self.path),
            "changes": [{"field": name, "before": then, "after": now} for name, then, now in self.changes],
            "outcome": self.outcome,
            "accepted": list(self.accepted),
            "stages_to_come": [{"name": stage.name, f"from_{stage.unit}": stage.at} for stage in self.to_come],
            "with_on_change_stage": None if self.with_stage is None else list(self.with_stage),
        }

    def stream(self, launch: PlannedLaunch) -> Stream | None:
        """The stream that the launch would train on; None if the corpora were not opened."""
        if not self.sources or self.config is None:
            return None
        from megaresume.stream.stream import Stream  # deferred: the compiled planner takes a second to import

        flags = launch.flags
        stream = Stream(self.config, list(self.sources.values()), state=launch.state, on_change=flags.on_change)
        if launch.schedule is not None:
            stream.schedule = launch.schedule
        stream.skip(flags.skip)
        return stream


def read_data(launch: PlannedLaunch, *, end: int | None) -> PlannedData:
    """Open the data as the launch would, and reconcile it with the state.

    Args:
        launch: without a schedule no step can be skipped.
        end: samples trained at the end of the run; None if not known, so that anything can be skipped.
    """
    data = PlannedData()
    try:
        _open(data, launch)
    except (ConfigError, CorpusError, SetupError, StateError, UsageError) as error:
        if launch.flags.data is not None:
            launch.findings.refuse(error)
            data.outcome = "refused"
            return data
        # Nobody has said where the corpora are now: the launch has a data config of its own.
        launch.findings.refuse(error, "note")
        _from_state(data, launch)
    _reconcile(data, launch, end)
    return data


def _open(data: PlannedData, launch: PlannedLaunch) -> None:
    state, flags, recorded = launch.state, launch.flags, data_path(launch.root)
    path = flags.data or (recorded if recorded.is_file() else None)
    if path is None:
        _from_state(data, launch)
        return
    data.path = path
    named = DataConfig.of(path)
    if flags.data is None:  # the file says what it was
        named = replace(named, mapping={**named.mapping, **flags.config})
    length = flags.seq_length
    if length is None and named.mapping.get("seq_length") is None:
        length = int(state.config["seq_length"])
    config = named.stream_config(seq_length=length, seed=flags.seed)
    data.config = resolved(config, state.config["sources"])
    specs = {source.name: source.options for source in data.config.sources}
    data.sources = open_sources(specs, base_dir=named.directory, split=flags.split or _recorded_split(recorded))
    if launch.is_megatron:
        check_stages(data.config, data.config.seq_length)
    data.fingerprints = {name: fingerprint_of(source, name) for name, source in data.sources.items()}


def _recorded_split(recorded: Path) -> str | None:
    """``--split`` of the launch that saved, if its sources say all the same."""
    if not recorded.is_file():
        return None
    sources = DataConfig.of(recorded).mapping_for("train").get("sources", {})
    splits = {entry.get("split") for entry in sources.values() if isinstance(entry, Mapping)}
    return splits.pop() if len(splits) == 1 else None


def _from_state(data: PlannedData, launch: PlannedLaunch) -> None:
    state = launch.state
    data.path, data.sources = None, {}
    data.config = StreamConfig.from_dict({**state.config, **launch.flags.config})
    data.fingerprints = state.fingerprints


def _reconcile(data: PlannedData, launch: PlannedLaunch, end: int | None) -> None:
    assert data.config is not None
    state, findings = launch.state, launch.findings
    data.changes = changes_since(data.config, state)
    try:
        going_on = _go_on(data, launch, launch.flags.on_change, end)
    except MegaresumeError as error:
        data.outcome = "refused"
        findings.refuse(error)
        if launch.flags.on_change == "refuse":
            # Whether the flag alone would do: found out now, and not at the next start.
            try:
                data.with_stage = _go_on(data, launch, "stage", end).accepted
            except MegaresumeError as other:
                if other.headline != error.headline:
                    findings.refuse(other)
        return
    begun, stages = len(state.stages), going_on.course.stages
    following = stages[begun] if begun < len(stages) else None
    # What is to come begins later than here: only the new stage begins at the resume point.
    is_new = following is not None and following.unit == "samples" and following.at == state.samples
    data.outcome = "new stage" if is_new else "nothing"
    data.accepted, data.grown = going_on.accepted, tuple(map(str, going_on.grown))
    for line in same_corpora(data.fingerprints):
        findings.warn(line)
    new = len(state.skips.log)
    skips = going_on.course.skips
    for record in skips.log[new:]:
        (findings.warn if record.late else findings.note)(str(record))
    begin = f"from sample {state.samples:,} on"
    for skip, known in zip_longest(skips.documents, state.skips.documents):
        if known is None:
            findings.note(f"skip {skip.documents} {begin}")
        elif skip.until != known.until:
            findings.note(f"do not skip {skip.documents} any more, {begin}")
    current = begun + is_new
    data.in_force, data.to_come = stages[current - 1].config, stages[current:]


def _go_on(data: PlannedData, launch: PlannedLaunch, on_change: OnChange, end: int | None) -> Reconciled:
    """Continue the state with the stream of the launch. Raises what the launch would be refused with."""

    def samples_of(steps: Range) -> Range:
        if launch.schedule is None:
            raise no_schedule(steps)
        return launch.schedule.after(0, steps[0] - 1), launch.schedule.after(0, steps[1])

    assert data.config is not None
    going_on = reconcile(
        data.config,
        data.fingerprints,
        launch.state,
        on_change,
        skip=(launch.flags.skip,),
        steps_to_samples=samples_of,
        end=end,
        sources=data.sources,
    )
    check_documents(going_on.course.skips, {name: f.documents for name, f in data.fingerprints.items()})
    check_remaining(going_on.course, data.sources, launch.state)
    check_recorded(launch.state.replace(config=going_on.config.to_dict()))  # of the next state
    return going_on


#: difference that shows in the time of steps: on a GPU they follow the prediction to about this (docs/performance.md).
NOTICEABLE = 0.01
#: steps that are planned for it, and samples at most.
_STEPS, _SAMPLES = 20, 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How much the slowest rank has to do, by the costs of its samples, in units of the mean over ranks."""

    objective: Objective
    token_cost: int
    #: the number of steps that were planned.
    steps: int
    #: the cost of the slowest rank, in the order of the stream; and balanced.
    before: float
    after: float

    def __str__(self) -> str:
        waits = "a step" if self.objective == "step" else "a micro-step"
        return (
            f"the slowest rank of {waits} has {self.before:.3f} times the work of the mean in the order of the stream, "
            f"{self.after:.3f} with --balance {self.objective} (next {self.steps:,} steps)"
            + ("" if self.before - self.after >= NOTICEABLE else ": too little to notice in the time of a step")
        )


def gain(launch: PlannedLaunch, data: PlannedData) -> Gain | None:
    """Plan the next steps with and without balanced ranks. None, and a note, if something needed is not known."""
    now, balance = launch.now, launch.findings.attempt(lambda: launch.flags.balanced)
    if balance is None:
        return None
    stream = None if launch.schedule is None else data.stream(launch)
    if now.micro_batch_size is None or launch.schedule is None or stream is None:
        launch.findings.note(
            "what balanced ranks gain is not known: the corpora were not opened, or the batches are not recorded",
            action="--data DATA.yaml --micro-batch-size M --global-batch-size B",
        )
        return None
    first, micro = launch.state.samples, now.micro_batch_size
    return _expected(stream, launch.schedule, balance, sample=first, micro=micro, dp=now.dp)


def _expected(
    stream: Stream, schedule: BatchSchedule, balance: Balance, *, sample: int, micro: int, dp: int
) -> Gain | None:
    """The gain of the steps from a sample on; None if there are none, which other findings report."""
    from megaresume.stream.dealing import costs, dealt_order

    waited, means, steps, first = [0, 0], 0.0, 0, sample
    while steps < _STEPS and (not steps or sample - first < _SAMPLES):
        size = schedule.size_at(sample)
        if size % (micro * dp):
            break
        try:
            plan = stream.plan(sample, sample + size)
        except StreamExhausted:
            break
        cost = costs(plan, balance)
        for k, how in enumerate((None, balance)):
            order = dealt_order(plan, how, micro_batch_size=micro, dp_size=dp) - sample
            parts = cost[order].reshape(-1, dp, micro).sum(axis=2)
            waited[k] += int(parts.sum(axis=0).max() if balance.objective == "step" else parts.max(axis=1).sum())
        means += float(cost.sum()) / dp
        steps, sample = steps + 1, sample + size
    if not steps:
        return None
    return Gain(
        objective=balance.objective,
        token_cost=balance.token_cost,
        steps=steps,
        before=waited[0] / means,
        after=waited[1] / means,
    )


#: The threshold in ``_build_document_index``: which share of an epoch makes the last one a shuffle of its own.
_THRESHOLD = 0.80


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """How a corpus is shuffled."""

    epochs: int
    #: the last epoch by itself.
    last_apart: bool

    def __str__(self) -> str:
        if self.epochs == 1:
            return "1 epoch"
        return f"{self.epochs} epochs, the last one " + ("shuffled apart" if self.last_apart else "among the others")


def epochs_of(tokens: int, samples: int | None, *, seq_length: int, extra: int) -> Epochs:
    """How stock Megatron shuffles a corpus.

    Args:
        tokens: in one epoch.
        samples: asked for; None: one epoch.
        seq_length: tokens a sample.
        extra: 1 where a sample needs the token after it (``add_extra_token_to_sequence``).
    """
    epochs = 1 if samples is None else max(ceil((samples * seq_length + extra) / tokens), 1)
    if epochs == 1 or samples is None:
        return Epochs(epochs=1, last_apart=False)
    from_last = samples - ((epochs - 1) * tokens - extra) // seq_length
    return Epochs(epochs=epochs, last_apart=from_last < int(_THRESHOLD * ((tokens - extra) // seq_length)))


#: samples of a corpus with this share of a blend of so many: alone, from 0.11 on, up to 0.10.
_SIZES: tuple[Callable[[int, float], int], ...] = (
    lambda size, weight: size,
    lambda size, weight: ceil(ceil(size * weight) * (1 + 0.005)),
    lambda size, weight: ceil(size * weight * 1.005),
)


def requested_of(recorded: int, old: int, new: int, weight: float, *, alone: bool) -> int | None:
    """How many samples stock Megatron would ask a corpus for.

    Args:
        recorded: what it asked for when the whole set had ``old`` samples.
        new: samples of the whole set now.
        weight: normalised.
        alone: a single corpus without a weight.

    Returns:
        None if the recorded number comes from no rule that is known (``--mid-level-dataset-surplus``).
    """
    for rule in _SIZES[:1] if alone else _SIZES[1:]:
        if rule(old, weight) == recorded:
            return rule(new, weight)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One corpus of the training set, as stock Megatron would build it."""

    path: str | None
    #: the epochs when the order was recorded, and with the new flags; None if not known.
    before: Epochs | None
    now: Epochs | None

    @property
    def is_reshuffled(self) -> bool:
        """Whether its samples would come in another order."""
        return self.before != self.now


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarded:
    """What happens to Megatron's own datasets."""

    #: training samples asked for, when they were recorded and now; None: one epoch.
    recorded_samples: int | None
    samples: int | None
    #: the corpora of the training set; None if stock Megatron's order cannot be told, as it is not GPTDataset's.
    components: tuple[Component, ...] | None

    @told
    def stock_reshuffles(self) -> bool | None:
        """Whether stock Megatron would train another order, silently; None if not known."""
        if self.components is None:
            return None
        if any(c.is_reshuffled for c in self.components if c.before is not None and c.now is not None):
            return True
        return None if any(c.before is None or c.now is None for c in self.components) else False


def train_size(flags: Flags) -> int | None:
    """Training samples that Megatron asks its datasets for; None if the flags do not say.

    Raises:
        UsageError: steps without a batch size: the guard does not record any.
    """
    if flags.train_samples is not None:
        return flags.train_samples
    if flags.train_iters is None:
        return None
    if flags.global_batch_size is None:
        raise UsageError(
            "the global batch size is not known",
            found=f"--train-iters {flags.train_iters}",
            expected="--global-batch-size as well: a run under guard does not record it",
            action="--global-batch-size B",
        )
    return flags.train_iters * flags.global_batch_size


def compare_with_record(record: OrderRecord, flags: Flags, findings: Findings) -> Guarded | None:
    """Compare the flags with the record; None if nothing is recorded."""
    if not record.builders:
        return None
    size = train_size(flags)
    for ordinal, builder in enumerate(record.builders):
        # Only the first builder makes the training set of a run.
        _compare(builder, size if ordinal == 0 else None, flags, findings)
    builder = record.builders[0]
    wanted = builder.sizes[0] if size is None else size
    guarded = Guarded(recorded_samples=builder.sizes[0], samples=wanted, components=_components(builder, wanted))
    if guarded.recorded_samples is not None and wanted is not None and wanted > guarded.recorded_samples:
        split = builder.splits[0]
        if split is not None and extendable(split):
            findings.note(
                f"the run continues after its {guarded.recorded_samples} recorded samples, up to {wanted}",
                cause="each corpus that runs out continues with further epochs; what is recorded does not move",
            )
    return guarded


def _compare(builder: BuilderRecord, size: int | None, flags: Flags, findings: Findings) -> None:
    now: dict[str, Any] = {"sequence_length": flags.seq_length, "random_seed": flags.seed, "split": flags.split}
    settings = dict(builder.settings) | {name: value for name, value in now.items() if value is not None}
    request = Request(
        cls=type(builder.dataset, (), {}),
        settings=settings,
        blend=builder.blend,
        blend_per_split=builder.blend_per_split,
        sizes=builder.sizes if size is None else (size, *builder.sizes[1:]),
        shares=(None, None, None),
    )
    found = compare(builder, request)
    differences = found.differences + grown_too_far(builder, request.sizes[0])
    findings += [
        Finding(
            kind="refused",
            headline=f"this would change the order of Megatron's datasets: {difference.name}",
            found=difference.found,
            expected=difference.recorded,
            cause="without a guard, samples would silently be repeated and skipped",
            action=f"restore: {difference.restore}. Or, if it is meant: --megaresume-accept {difference.name}",
        )
        for difference in differences
    ]
    for words in found.notes:
        findings.note(words)


def _components(builder: BuilderRecord, wanted: int | None) -> tuple[Component, ...] | None:
    split, size = builder.splits[0], builder.sizes[0]
    if split is None or not split.components or not extendable(split):
        return None
    blend = builder.blend if builder.blend is not None else (builder.blend_per_split or (None,))[0]
    weights: list[float] | None = None
    if blend is not None and blend[1] is not None:
        given = np.array([float.fromhex(weight) for weight in blend[1]])
        weights = (given / given.sum()).tolist()  # as Megatron: Python's own sum rounds otherwise from 3.12 on
    result = []
    for number, component in enumerate(split.components):
        alone = weights is None and len(split.components) == 1
        weight = 1.0 if weights is None else weights[number]
        result.append(_component(builder, component, size, wanted, weight, alone))
    return tuple(result)


def _component(
    builder: BuilderRecord, component: ComponentRecord, size: int | None, wanted: int | None, weight: float, alone: bool
) -> Component:
    unknown = Component(path=component.path, before=None, now=None)
    corpus = Corpus.at(component.path, None)
    if corpus is None or corpus.documents < component.documents[1]:
        return unknown
    tokens, settings = corpus.tokens(component.documents), builder.settings
    length = settings.get("sequence_length")
    if not tokens or not isinstance(length, int):
        return unknown
    extra = int(bool(settings.get("add_extra_token_to_sequence", True)))
    before = epochs_of(tokens, component.requested, seq_length=length, extra=extra)
    asked: int | None = None  # a blend without weights is one epoch, whatever is asked for
    if component.requested is not None and size is not None and wanted is not None:
        asked = requested_of(component.requested, size, wanted, weight, alone=alone)
        if asked is None:
            return replace(unknown, before=before)
    return Component(path=component.path, before=before, now=epochs_of(tokens, asked, seq_length=length, extra=extra))
