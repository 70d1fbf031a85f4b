"""What changed in the data config, and the consequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaresume.checkpoint.records.names import data_path
from megaresume.data.catalog import open_sources
from megaresume.data.data_config import DataConfig
from megaresume.data.source import Source
from megaresume.hosts.megatron.load_rules import check_stages
from megaresume.runs.plan.start import PlannedLaunch
from megaresume.stream.changes import Reconciled, changes_since, check_recorded, reconcile
from megaresume.stream.config import OnChange, StreamConfig, resolved
from megaresume.stream.errors import (
    ConfigError,
    CorpusError,
    MegaresumeError,
    SetupError,
    StateError,
    UsageError,
)
from megaresume.stream.left_out import check_documents, no_schedule
from megaresume.stream.skips import Range
from megaresume.stream.source import fingerprint_of, same_corpora
from megaresume.stream.stages import Stage, check_remaining
from megaresume.stream.state import Fingerprint

if TYPE_CHECKING:
    from megaresume.stream.stream import Stream


#: The outcome of a change. nothing: the order continues; new stage: from the resume point on; refused: cannot launch.
Outcome = Literal["nothing", "new stage", "refused"]


@dataclass(kw_only=True)
class PlannedData:
    """The data that the launch would train on."""

    outcome: Outcome = "nothing"
    #: the file that was read; None: the config in the state, without opening any corpus.
    path: Path | None = None
    #: the changes as (field, then, now).
    changes: list[tuple[str, Any, Any]] = field(default_factory=list)
    #: the differences that would be recorded in the state for good, in words.
    accepted: tuple[str, ...] = ()
    #: corpora that have grown, in words.
    grown: tuple[str, ...] = ()
    #: what ``--megaresume-on-change stage`` would do with a change that is refused without it; None: also refused.
    with_stage: tuple[str, ...] | None = None
    #: the current config, as given.
    config: StreamConfig | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    #: the config from the resume point on, over all sources that the run ever had.
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
        """The stream that the launch would train on; None if no corpora were opened."""
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
        launch: if its schedule is unknown, no step can be skipped.
        end: samples trained at the end of the run; None if unknown: then any of them can be skipped.
    """
    data = PlannedData()
    try:
        _open(data, launch)
    except (ConfigError, CorpusError, SetupError, StateError, UsageError) as error:
        if launch.flags.data is not None:
            launch.findings.refuse(error)
            data.outcome = "refused"
            return data
        # The state does not know where the corpora are; the launch has its own data config.
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
    if flags.data is None:  # the file recorded it
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
    """``--split`` of the launch that saved, if all of its sources agree."""
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
            # Find out now, rather than at the next start, whether the flag alone would be enough.
            try:
                data.with_stage = _go_on(data, launch, "stage", end).accepted
            except MegaresumeError as other:
                if other.headline != error.headline:
                    findings.refuse(other)
        return
    begun, stages = len(state.stages), going_on.course.stages
    following = stages[begun] if begun < len(stages) else None
    # Declared stages begin later: only the new stage begins at the resume point.
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
    """Continue the state with the launch's stream. Raises the error that would refuse the launch."""

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
    check_recorded(launch.state.replace(config=going_on.config.to_dict()))  # that of the next state
    return going_on
