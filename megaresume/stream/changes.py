"""Differences between a state and the current data config, and what follows from each.

The past is immutable, the future is free: declared stages that have not begun may be edited at will. A change to the
current stage is either refused, naming the field, or begins a new stage at the resume point; `OnChange` decides.

`outlook`: per source, what was drawn, what is left of its epoch, and how many samples that will last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import OnChange, SourceConfig, StageConfig, StreamConfig, renames, resolved
from megaresume.stream.errors import ConfigError, StateError
from megaresume.stream.left_out import decide
from megaresume.stream.skips import Range, SkipConfig
from megaresume.stream.source import Growth, LengthSource, check_corpora, differences, listing
from megaresume.stream.stages import Course, Stage, declared
from megaresume.stream.state import Fingerprint, StreamState


def check_recorded(state: StreamState) -> None:
    """Check that a resume can read the data configs in a state.

    Raises:
        StateError: one cannot be read, so no run can resume from the state.
    """
    try:
        for config in (state.config, *(record.config for record in state.stages)):
            StreamConfig.recorded(config)
    except ConfigError as error:
        raise StateError(
            "the data config in the data state cannot be read",
            found=error.line,
            expected=error.expected,
            cause="the state was written by a faulty release of megaresume",
            action="resume from an older checkpoint: megaresume inspect DIR lists those that are whole",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOutlook:
    """What is left of one source at a state, under the weights that hold from there on."""

    name: str
    #: the source's part of the blend, 0 to 1.
    share: float
    #: documents and tokens drawn since the start of the run.
    documents: int
    tokens: int
    #: the epoch under way, counted from 0.
    epoch: int
    #: pieces of that epoch that are not drawn yet (documents, before the first draw; 0 after the last epoch), and all
    #: its pieces.
    remaining: int
    size: int
    #: about how many samples remain until the epoch is over; None if the source is not drawn.
    samples_left: int | None


def outlook(state: StreamState, config: StreamConfig) -> list[SourceOutlook]:
    """Every source of a state under a config.

    The number of samples left in an epoch is estimated from the average length of the source's documents and from how
    full the run's samples were so far.
    """
    total = sum(source.weight for source in config.sources)
    length = float(config.seq_length)
    if state.samples:
        length *= min(state.tokens / state.places(0, state.samples), 1.0)
    result = []
    for source in config.sources:
        cursor, fingerprint = state.sources.get(source.name), state.fingerprints.get(source.name)
        documents = 0 if fingerprint is None else fingerprint.documents
        remaining = size = documents
        documents_per_piece = 1.0
        if cursor is not None and cursor.eras:
            remaining, size = cursor.left, cursor.size
            # Of a whole epoch: an epoch that documents joined midway has fewer pieces left.
            era = next(e for e in reversed(cursor.eras) if e.first <= cursor.position and not e.rest)
            documents_per_piece = era.documents / max(era.pieces, 1)
        share = source.weight / total
        left: int | None = None
        epochs = None if source.on_exhausted == "repeat" else source.max_epochs
        if is_over := cursor is not None and epochs is not None and cursor.epoch >= epochs:
            remaining = 0
        if fingerprint is not None and documents and share and not is_over:
            # Not the size of this epoch: it may have begun with fewer documents than the corpus has now.
            tokens = fingerprint.tokens / documents * remaining * documents_per_piece
            # The source's share is of all tokens, or of all documents.
            per_sample = share * length
            if config.blend.unit == "documents":
                average = sum(
                    s.weight / total * state.fingerprints[s.name].tokens / max(state.fingerprints[s.name].documents, 1)
                    for s in config.sources
                    if s.name in state.fingerprints
                )
                per_sample = share * fingerprint.tokens / documents / max(average, 1e-9) * length
            elif config.blend.unit == "trained" and cursor is not None and cursor.tokens:
                per_sample = cursor.tokens / max(state.samples, 1)  # as it was so far
            left = round(tokens / max(per_sample, 1e-9))
        result.append(
            SourceOutlook(
                name=source.name,
                share=share,
                documents=0 if cursor is None else cursor.documents,
                tokens=0 if cursor is None else cursor.tokens,
                epoch=0 if cursor is None else cursor.epoch,
                remaining=remaining,
                size=size,
                samples_left=left,
            )
        )
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciled:
    """The result: how a stream resumes from a state."""

    #: the current config, over all sources that the run ever had.
    config: StreamConfig
    course: Course
    #: the accepted differences in words, to be recorded in the state.
    accepted: tuple[str, ...]
    #: corpora that have grown.
    grown: tuple[Growth, ...] = ()


def extended(config: StreamConfig, names: Sequence[str], last: StreamConfig | None = None) -> StreamConfig:
    """The config with these sources first, in this order; those missing from it get weight 0.

    ``last`` supplies the order of sources that were removed, in case they come back.
    """
    known = {source.name: source for source in config.sources}
    before = {source.name: source for source in last.sources} if last is not None else {}

    def gone(name: str) -> SourceConfig:
        if name not in before:
            return SourceConfig(name=name, weight=0)
        return replace(before[name], weight=0, max_epochs=None, on_exhausted="drop", options={})

    order = dict.fromkeys([*names, *known])
    return replace(
        config,
        sources=tuple(known[name] if name in known else gone(name) for name in order),
        stages=tuple(_over(stage, list(order)) for stage in config.stages),
    )


def _over(stage: StageConfig, names: Sequence[str]) -> StageConfig:
    """A declared change over these sources: those that it does not name get weight 0."""
    if stage.weights is None:
        return stage
    weights = dict(stage.weights)
    return replace(stage, weights=tuple((name, weights.get(name, 0)) for name in names))


def reconcile(
    config: StreamConfig,
    fingerprints: Mapping[str, Fingerprint],
    state: StreamState,
    on_change: OnChange,
    *,
    skip: Sequence[SkipConfig] = (),
    steps_to_samples: Callable[[Range], Range] | None = None,
    end: int | None = None,
    sources: Mapping[str, LengthSource] | None = None,
) -> Reconciled:
    """Decide how to resume from a state.

    Args:
        config: the current one.
        fingerprints: of its sources, by their names in it.
        state: the state.
        on_change: what to do if the current stage would not continue unchanged.
        skip, steps_to_samples, end: skips given outside the config; see `left_out.decide`.
        sources: by their names in ``config``, to check corpora that have grown; None if no corpus is available.

    Raises:
        StateError: a refused change, with every field that differs.
        ConfigError: an impossible skip.
    """
    today, then = resolved(config, state.config["sources"]), StreamConfig.recorded(state.config)
    names = {given.name: source.name for given, source in zip(config.sources, today.sources, strict=True)}
    before = {source.name: source for source in then.sources}
    if any((s.group_by_length is None) != (before.get(s.name, s).group_by_length is None) for s in today.sources):
        raise _refusal(*_over_all(today, state), state)  # said before other lengths are
    grown, changed = check_corpora(config, names, fingerprints, state, sources or {})
    now, course, accepted = _reconcile(today, grown, state, on_change)
    course.skips, said = decide(
        state.skips,
        state.samples,
        then=then.skip,
        now=now.skip,
        given=[s.renamed(names) for s in skip],
        steps_to_samples=steps_to_samples,
        end=end,
    )
    words = [f"at sample {state.samples}: {line}" for line in (*accepted, *grown, *changed, *renames(then, today))]
    return Reconciled(config=now, course=course, accepted=(*words, *said), grown=tuple(grown))


def _reconcile(
    config: StreamConfig, grown: Sequence[Growth], state: StreamState, on_change: OnChange
) -> tuple[StreamConfig, Course, list[str]]:
    """Decide how to resume from a state, once the corpora that have grown are known."""
    now, then = _over_all(config, state)
    order = [source.name for source in now.sources]
    history = [replace(r, config=extended(StreamConfig.recorded(r.config), order).to_dict()) for r in state.stages]
    passed = [_passed(c.stages, state) for c in (then, now)]
    to_come = now.stages[passed[1] :]
    written, today = ([stage.to_dict() for stage in c.stages] for c in (then, now))
    current = wanted = StreamConfig.recorded(history[-1].config)
    accepted = []
    if then.without_stages() == now.without_stages() and written[: passed[0]] == today[: passed[1]]:
        if written != today:
            accepted.append("the stages to come were changed")
    else:
        # A stage cannot change seed or shuffle: every epoch under way would be reordered.
        refuses = on_change == "refuse" and not _only_length(now, then)
        if refuses or now.seed != then.seed or _reshuffled(now, then):
            raise _refusal(now, then, state)
        _check_removed(config, state)
        wanted = Course.of(now).config(passed[1])
        changes = [
            f"{field} {json.dumps(before)} -> {json.dumps(after)}"
            for field, after, before in differences(_plain(wanted), _plain(current))
        ]
        accepted.append(", ".join(changes) or "past stages were declared again")
    begun = [Stage.recorded(record) for record in history]
    if grown or _plain(wanted) != _plain(current):
        now_in = frozenset(growth.source for growth in grown if growth.append == "now")
        name = f"stage {len(history) + 1}"
        begun.append(Stage(name=name, config=wanted, unit="samples", at=state.samples, grown_now=now_in))
    course = Course((*begun, *declared(begun[-1].config, to_come)), [record.first for record in history])
    return now, course, accepted


def _only_length(now: StreamConfig, then: StreamConfig) -> bool:
    """Whether only the number of epochs of the only source changed, which leaves the run's order as it is."""
    if len(now.sources) != 1:
        return False
    source, before = now.sources[0], then.sources[0]
    same = replace(source, max_epochs=before.max_epochs, on_exhausted=before.on_exhausted)
    return replace(now, sources=(same,)) == then


def _over_all(config: StreamConfig, state: StreamState) -> tuple[StreamConfig, StreamConfig]:
    """The current config and that of a state, over all sources that the run ever had."""
    recorded = StreamConfig.recorded(state.config)
    now = extended(config, list(state.sources), recorded)
    then = extended(recorded, [source.name for source in now.sources], now)
    return _grouped_as(then, now), then


def _grouped_as(then: StreamConfig, now: StreamConfig) -> StreamConfig:
    """The current config, grouping by length as the run has from its beginning, whatever the batch size is now."""
    sources = [
        replace(a, group_by_length=b.group_by_length) if a.group_by_length and b.group_by_length else a
        for a, b in zip(now.sources, then.sources, strict=True)
    ]
    return replace(now, sources=tuple(sources))


def changes_since(config: StreamConfig, state: StreamState) -> list[tuple[str, Any, Any]]:
    """(field, then, now) for every difference between the current data config and the one in a state."""
    return _changed(*_over_all(resolved(config, state.config["sources"]), state))


def _changed(now: StreamConfig, then: StreamConfig) -> list[tuple[str, Any, Any]]:
    return [(field, before, after) for field, after, before in differences(_plain(now), _plain(then))]


def _passed(stages: Sequence[StageConfig], state: StreamState) -> int:
    """The number of declared stages that have begun at the state."""
    for k, stage in enumerate(stages):
        if stage.unit == "tokens":
            begun = stage.at <= state.tokens
        elif stage.unit == "samples":
            begun = stage.at <= state.samples
        else:
            # Without batches the step is unknown: no step was made, or the data was not attached to an optimizer.
            begun = bool(state.batches) and BatchSchedule(state.batches).after(0, stage.at) <= state.samples
        if not begun:
            return k
    return len(stages)


def _refusal(now: StreamConfig, then: StreamConfig, state: StreamState) -> StateError:
    changed = _changed(now, then)
    if now.seed != then.seed:
        cause = "a different seed reorders every source: documents that were seen would be repeated"
        action = (
            f"use seed {then.seed} again (data.yaml: seed; DataLoader(seed={then.seed}); Trainer: data_seed or seed; "
            f"Megatron: --seed {then.seed}), or save to another directory"
        )
    elif names := _reshuffled(now, then):
        cause = f"another shuffle orders {', '.join(names)} differently: what was seen of an epoch would be repeated"
        action = "set shuffle as under 'expected', or save to another directory"
        if any("group_by_length" in field for field, *_ in changed):
            action = (
                "give group_by_length the value that it had (under a Trainer, train_sampling_strategy); or start a "
            )
            action += "new run in another directory"
    else:
        cause = "data.yaml or a flag was changed between save and resume"
        action = (
            "resume with the values under 'expected'; or begin a new stage at the resume point (sample "
            f"{state.samples}) with --megaresume-on-change stage, on_change='stage' in Python"
        )
    return StateError(
        "the data config is not the one that the state was made with",
        found=listing((field, value) for field, _, value in changed),
        expected=listing((field, value) for field, value, _ in changed),
        cause=cause,
        action=action,
    )


def _reshuffled(now: StreamConfig, then: StreamConfig) -> list[str]:
    """Sources whose documents would come in another order. Both configs have the same sources."""
    return [
        a.name
        for a, b in zip(now.sources, then.sources, strict=True)
        if (a.shuffle, a.group_by_length) != (b.shuffle, b.group_by_length)
    ]


def _plain(config: StreamConfig) -> dict[str, Any]:
    """`to_dict` with the declared stages keyed by number, for comparison field by field."""
    data = config.to_dict()
    stages = {str(k): stage for k, stage in enumerate(data.pop("stages", []))}
    data.pop("skip", None)  # which never stands in the way of a resume
    for source in data["sources"].values():
        source.pop("names", None)
    return data | ({"stages": stages} if stages else {})


def _check_removed(config: StreamConfig, state: StreamState) -> None:
    """Refuse to remove a source while segments of it wait to be trained."""
    here = {source.name for source in config.sources}
    names = list(state.sources)
    waiting = [names[s.source] for s in state.waiting]
    for name in names:
        if name not in here and name in waiting:
            raise StateError(
                f"source '{name}' cannot be removed yet",
                found=f"{waiting.count(name)} waiting segments of '{name}', which is not in the data config",
                expected="the source, until what was drawn of it is trained",
                cause="documents drawn from it are waiting in open bins, or for a later sample",
                action=f"keep '{name}' in the data config with weight 0; it can go at a later resume",
            )
