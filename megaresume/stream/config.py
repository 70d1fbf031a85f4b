"""What defines the order of a stream: everything in data.yaml except paths.

`StreamConfig.from_dict` reads the mapping in a data.yaml; `StreamConfig.to_dict` is the normalised form
that goes into the state: weights as the smallest integers, defaults written out, no paths.

``stages`` declare future changes: other weights, another sequence length or another packing from a number of samples,
tokens or steps on. `StreamConfig.changed_by` applies one.

A source may be renamed:

    sources: {web2: {was: web, path: ...}}

Its first name stays in everything that must not change: the keys of its permutation, the identity of its samples, its
place in a state. `SourceConfig.name` is that first name; `SourceConfig.names` are the later ones, the last of which is
the current one. A state records them, so a second rename only has to say ``web3: {was: web2}``, and ``was`` can be left
out once it was recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from megaresume.stream.arguments import checked
from megaresume.stream.data_yaml import (
    IMAGE_KINDS,
    MIN_FRAGMENT,
    Append,
    BlendConfig,
    ExhaustedPolicy,
    GroupConfig,
    PackingConfig,
    PackingMode,
    ShuffleConfig,
    SourcePacking,
    StageUnit,
    WrittenSource,
    WrittenStage,
    integer_weights,
    parse_weight,
    read_config,
)
from megaresume.stream.errors import ConfigError, StateError
from megaresume.stream.schema import check_keys, read
from megaresume.stream.skips import NO_SKIP, SkipConfig

#: What to do if the config differs from the one in a state: refuse, naming the fields, or begin a new stage.
OnChange = Literal["refuse", "stage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One source of the blend, with what the order depends on."""

    #: the source's first name, which its order, its samples' identities and its place in a state use forever.
    name: str
    #: weight in the blend; only the proportions matter. 0: present, never drawn.
    weight: int
    #: epochs after which ``on_exhausted`` applies; None: no end.
    max_epochs: int | None = None
    #: ``drop``: the others continue in their proportions; ``stop``: the stream ends; ``repeat``: continue, with a note.
    on_exhausted: ExhaustedPolicy = "drop"
    #: a shuffle in two levels; None: any document may follow any other.
    shuffle: ShuffleConfig | None = None
    #: groups documents of similar lengths; None: they stay as shuffled.
    group_by_length: GroupConfig | None = None
    #: ``split``: its documents are cut to fill gaps that whole documents leave; None: packed like all others.
    packing: SourcePacking | None = None
    #: processing steps of its images, every default written out. Does not affect the order, only what is trained.
    augment: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    #: whether the random draws of its items follow from seed, epoch and item. Does not affect the order.
    keyed: bool = False
    #: what a resume does if the corpus has grown; None: refuse. Does not affect the order: the state records growth.
    append: Append | None = field(default=None, compare=False)
    #: its later names, the last one current. See `megaresume.stream.config`.
    names: tuple[str, ...] = field(default=(), compare=False)
    #: whether its entry has ``was``.
    renamed: bool = field(default=False, compare=False)
    #: where and what the source is (path, kind, split, ...): does not affect the order, never in a state.
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        """The current name."""
        return self.names[-1] if self.names else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A declared change; None leaves a setting as it was."""

    name: str
    #: the unit of ``at``: samples, tokens of documents, or optimizer steps, since the start of the run.
    unit: StageUnit
    #: the stage begins with the first sample before which the stream has at least this many.
    at: int
    #: (source, parts of the blend), one for every source.
    weights: tuple[tuple[str, int], ...] | None = None
    seq_length: int | None = None
    packing: PackingConfig | None = None

    def to_dict(self) -> dict[str, Any]:
        """The stage as in a data.yaml, normalised."""
        changes: dict[str, Any] = {}
        if self.weights is not None:
            changes["weights"] = dict(self.weights)
        if self.seq_length is not None:
            changes["seq_length"] = self.seq_length
        if self.packing is not None:
            changes["packing"] = _packing_dict(self.packing)
        return {"name": self.name, f"from_{self.unit}": self.at} | changes


@checked("StreamConfig.from_dict({...}) takes what a data.yaml holds: docs/stream.md", types_too=False)
@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """The normalised data config. Two equal configs over the same corpora give the same stream."""

    seed: int
    #: tokens of a sample.
    seq_length: int
    packing: PackingConfig
    blend: BlendConfig
    sources: tuple[SourceConfig, ...]
    #: the declared changes, in order.
    stages: tuple[StageConfig, ...] = ()
    #: what to leave out of the stream.
    skip: SkipConfig = NO_SKIP

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, seq_length: int | None = None) -> StreamConfig:
        """Read and check the mapping of a data.yaml.

        Args:
            data: the mapping; unknown keys are errors, except that those of a source become its ``options``.
            seq_length: from a flag (``--seq-length``); must equal the mapping's if both are given.

        Raises:
            ConfigError: naming the key, what was found and what was expected.
        """
        document = read_config(data, seq_length)
        sources = _sources(document.sources or {})
        # Everywhere else in the mapping a source has its current name.
        names = {source.label: source.name for source in sources} | {source.name: source.name for source in sources}
        return cls(
            seed=document.seed,
            seq_length=document.seq_length,
            packing=read(PackingConfig, {"mode": _default_packing(sources)} | (document.packing or {}), "packing"),
            blend=document.blend or BlendConfig(),
            sources=sources,
            stages=_stages(document.stages or (), sources),
            skip=SkipConfig.from_dict(document.skip, list(names)).renamed(names),
        )._checked()

    @classmethod
    def recorded(cls, data: Mapping[str, Any]) -> StreamConfig:
        """The config in a state. The last few are cached, as a resume asks for the same ones again."""
        return _recorded(json.dumps(data))

    def without_stages(self) -> StreamConfig:
        """The config before the first declared change, without skips."""
        return replace(self, stages=(), skip=NO_SKIP)

    def changed_by(self, stage: StageConfig) -> StreamConfig:
        """This config after one declared change."""
        weights = dict(stage.weights or ())
        return replace(
            self,
            seq_length=self.seq_length if stage.seq_length is None else stage.seq_length,
            packing=self.packing if stage.packing is None else stage.packing,
            sources=tuple(replace(s, weight=weights.get(s.name, s.weight)) for s in self.sources),
            stages=(),
            skip=NO_SKIP,
        )

    def over_time(self) -> Iterator[tuple[StreamConfig, str]]:
        """The initial config and that after each declared change; and when it begins, in words for an error."""
        current = self
        yield current, ""
        for stage in self.stages:
            current = current.changed_by(stage)
            yield current, f" in stage '{stage.name}'"

    def _checked(self) -> StreamConfig:
        for current, where in self.over_time():
            current._check_fillers(where)
            align = current.packing.align
            if current.seq_length % align:
                raise ConfigError(
                    f"seq_length is not a multiple of packing.align{where}",
                    found=f"seq_length {current.seq_length}, align {align}",
                    expected=f"seq_length {-(-current.seq_length // align) * align}, for example",
                    action="change one of the two",
                )
        return self

    def _check_fillers(self, where: str) -> None:
        """Refuse a source that fills gaps unless the packing is ``best_fit``."""
        names = [source.label for source in self.sources if source.packing is not None]
        if names and not (self.packing.traits.can_be_filled or self.packing.traits.cuts):
            raise ConfigError(
                f"source '{names[0]}' cannot be packed by split if the others have packing {self.packing.mode}{where}",
                found=f"packing {self.packing.mode}, and packing: split of {', '.join(names)}",
                expected="packing best_fit for the other sources, or split for all",
                cause="only best_fit has open samples that the pieces of a source can fill",
                action="set packing: best_fit, or leave it out",
            )

    @property
    def fillers(self) -> tuple[bool, ...]:
        """Whether each source is cut to fill the gaps that whole documents of others leave."""
        return tuple(self.packing.traits.can_be_filled and source.packing == "split" for source in self.sources)

    @property
    def least_part(self) -> int:
        """Tokens of the shortest part that a filling source may be cut into."""
        given = self.packing.min_fragment
        return max(min(MIN_FRAGMENT, self.seq_length // MIN_FRAGMENT), 1) if given is None else given

    @property
    def is_of_items(self) -> bool:
        """Whether a sample is one item, whose tokens are not counted."""
        return self.packing.traits.is_one_document and self.seq_length == 1

    @property
    def unit(self) -> Literal["tokens", "items"]:
        """What is counted: each item of a map-style dataset that is not packed counts as one token."""
        return "items" if self.is_of_items else "tokens"

    @property
    def packed_by(self) -> str:
        """The packing in words: ``best_fit``; with sources that fill, ``best_fit filled with web``."""
        names = [source.label for source, fills in zip(self.sources, self.fillers, strict=True) if fills]
        return f"{self.packing.mode} filled with {', '.join(names)}" if names else self.packing.mode

    def packs_as(self, other: StreamConfig) -> bool:
        """Whether segments in the open bins of the other config, over the same sources, can stay there."""
        return (self.packing, self.seq_length, self.fillers) == (other.packing, other.seq_length, other.fillers)

    def to_dict(self) -> dict[str, Any]:
        """The normalised form, plain JSON: ``StreamConfig.from_dict(config.to_dict()) == config``."""
        return (
            {
                "seed": self.seed,
                "seq_length": self.seq_length,
                "packing": _packing_dict(self.packing),
                "blend": {"unit": self.blend.unit},
                "sources": {s.name: _source_dict(s) for s in self.sources},
            }
            | ({"skip": self.skip.to_dict()} if self.skip else {})
            | ({"stages": [stage.to_dict() for stage in self.stages]} if self.stages else {})
        )


@lru_cache(maxsize=4)
def _recorded(text: str) -> StreamConfig:
    return StreamConfig.from_dict(json.loads(text))


def _source_dict(source: SourceConfig) -> dict[str, Any]:
    data: dict[str, Any] = {"weight": source.weight}
    if source.max_epochs is not None:
        data |= {"max_epochs": source.max_epochs, "on_exhausted": source.on_exhausted}
    if source.shuffle is not None:
        data["shuffle"] = {"block": source.shuffle.block, "window": source.shuffle.window}
    if source.group_by_length is not None:
        data["group_by_length"] = {"batch": source.group_by_length.batch, "window": source.group_by_length.window}
    if source.packing is not None:
        data["packing"] = source.packing
    if source.augment:
        data["augment"] = [dict(step) for step in source.augment]
    if source.keyed:
        data["keyed"] = True
    if source.names:
        data["names"] = list(source.names)
    return data


def _default_packing(sources: Iterable[SourceConfig]) -> PackingMode:
    """``knapsack`` for images, which are never cut, so that filling a sample takes a choice among many documents."""
    if any(source.packing is not None for source in sources):
        return "best_fit"
    return "knapsack" if any(source.options.get("kind") in IMAGE_KINDS for source in sources) else "split"


def _packing_dict(packing: PackingConfig) -> dict[str, Any]:
    settings = {name: getattr(packing, name) for name in packing.used}
    return {name: value for name, value in settings.items() if value is not None}


def _sources(entries: Mapping[str, WrittenSource]) -> tuple[SourceConfig, ...]:
    weights = integer_weights({name: parse_weight(entry.weight, name) for name, entry in entries.items()})
    sources = tuple(_source(name, entry, weights[name]) for name, entry in entries.items())
    check_names(sources)
    return sources


def _source(name: str, entry: WrittenSource, weight: int) -> SourceConfig:
    if entry.on_exhausted is not None and entry.max_epochs is None:
        raise ConfigError(
            f"source '{name}' has on_exhausted without max_epochs",
            found=f"on_exhausted: {entry.on_exhausted}",
            expected="max_epochs, after which it applies",
            cause="a source without max_epochs never ends",
            action=f"add max_epochs to source '{name}' or remove on_exhausted",
        )
    first, *names = (name, *entry.names) if entry.was is None else (*entry.was, name)
    return SourceConfig(
        name=first,
        names=tuple(names),
        renamed=entry.was is not None,
        weight=weight,
        max_epochs=entry.max_epochs,
        on_exhausted=entry.on_exhausted or "drop",
        shuffle=entry.shuffle,
        packing=entry.packing,
        append=entry.append,
        augment=entry.augment or (),
        keyed=bool(entry.keyed),
        group_by_length=entry.group_by_length,
        options=entry.options,
    )


def _stages(entries: Sequence[WrittenStage], sources: tuple[SourceConfig, ...]) -> tuple[StageConfig, ...]:
    stages = tuple(_stage(entry, k, sources) for k, entry in enumerate(entries))
    for before, after in pairwise(stages):
        if before.unit == after.unit and after.at <= before.at:
            raise ConfigError(
                f"stage '{after.name}' does not come after stage '{before.name}'",
                found=f"from_{after.unit}: {after.at} after from_{before.unit}: {before.at}",
                expected="stages in the order in which they begin",
                action="correct the order of stages, or their from_ values",
            )
    if len({stage.name for stage in stages}) < len(stages):
        raise ConfigError(
            "two stages have one name",
            found=", ".join(stage.name for stage in stages),
            expected="a different name for each",
            action="rename one of them",
        )
    return stages


def _stage(entry: WrittenStage, k: int, sources: tuple[SourceConfig, ...]) -> StageConfig:
    unit, at = entry.start
    return StageConfig(
        name=entry.name or f"stage {k + 1}",
        unit=unit,
        at=at,
        weights=None if entry.weights is None else _stage_weights(entry.weights, f"stages[{k}].weights", sources),
        seq_length=entry.seq_length,
        packing=None if entry.packing is None else read(PackingConfig, entry.packing, f"stages[{k}].packing"),
    )


def _stage_weights(data: Mapping[Any, Any], where: str, sources: Sequence[SourceConfig]) -> tuple[tuple[str, int], ...]:
    names = [source.label if source.label in data else source.name for source in sources]
    check_keys(data, names, where)
    missing = [name for name in names if name not in data]
    if missing:
        raise ConfigError(
            f"{where} leaves sources out",
            found=", ".join(map(str, data)) or "nothing",
            expected=f"a weight for every source, also for {', '.join(missing)}",
            cause="weights are proportions: what is not named has none",
            action=f"add {missing[0]}: 0 to leave it out from there on",
        )
    weights = integer_weights({name: parse_weight(data[name], name) for name in names})
    return tuple((source.name, weights[name]) for source, name in zip(sources, names, strict=True))


def check_names(sources: Sequence[SourceConfig]) -> None:
    """Check that no two sources claim one name.

    Raises:
        ConfigError: an alias to itself, to a source that still exists, a cycle, or two to one.
    """
    by_label = {source.label: source for source in sources}
    seen: dict[str, str] = {}
    for source in sorted(sources, key=lambda s: s.renamed):  # those that say that they were renamed come last
        label, earlier = source.label, (source.name, *source.names[:-1])
        if source.renamed and label in earlier:
            raise ConfigError(
                f"source '{label}' is said to have been itself",
                found=f"sources.{label}.was: {', '.join(earlier)}",
                expected="the name that it had before",
                action=f"remove sources.{label}.was",
            )
        for name in earlier if source.renamed else (source.name,):
            if source.renamed and (other := by_label.get(name)):
                cycle = other.renamed and label in (other.name, *other.names)
                raise ConfigError(
                    f"source '{label}' cannot have been '{name}': that one is still there",
                    found=f"sources.{label}.was: {name}, and a source '{name}'"
                    + (f", which was '{label}': a cycle" if cycle else ""),
                    expected="a name that no source of today has",
                    action="give each source a name that was never used" if cycle else f"remove or rename '{name}'",
                )
            if name in seen:
                raise ConfigError(
                    f"two sources are said to have been '{name}'",
                    found=f"'{seen[name]}' and '{label}'",
                    expected="one source that continues where it was",
                    action=f"remove was: {name} from the new one",
                )
            seen[name] = label


def resolved(config: StreamConfig, known: Mapping[str, Mapping[str, Any]]) -> StreamConfig:
    """The config with every source under the name that the run first knew it by.

    Args:
        config: the current one.
        known: the sources of a state: ``state.config["sources"]``.

    Raises:
        StateError: an alias to an unknown source; a new source under a name that another one had.
    """
    identity = {label: name for name, entry in known.items() for label in entry.get("names", ())}
    identity |= {name: name for name in known}
    first: dict[str, str] = {}
    sources = []
    taken: dict[str, str] = {}
    for source in config.sources:
        name = identity.get(source.name, source.name)
        if source.renamed and name not in known:
            raise StateError(
                f"source '{source.label}' is said to have been one that the run never had",
                found=f"sources.{source.label}.was: {source.name}",
                expected=f"one of {', '.join([*known, *(n for n in identity if n not in known)])}",
                cause="a typing error, or the data config of another run",
                action=f"correct sources.{source.label}.was, or remove it if the source is new",
            )
        if name in taken:
            raise StateError(
                f"'{source.label}' is a name that source '{taken[name]}' had",
                found=f"'{source.label}' and '{taken[name]}' in the data config",
                expected="a new source with a name that the run has never used",
                cause=f"its samples could not be distinguished from those of '{taken[name]}'",
                action=f"rename '{source.label}'",
            )
        taken[name] = source.label
        first[source.name] = name
        names = tuple(known.get(name, {}).get("names", ()))
        if source.label != (names[-1] if names else name):
            names = (*names, source.label)
        sources.append(replace(source, name=name, names=names))
    stages = tuple(
        stage
        if stage.weights is None
        else replace(stage, weights=tuple((first[name], weight) for name, weight in stage.weights))
        for stage in config.stages
    )
    return replace(config, sources=tuple(sources), stages=stages, skip=config.skip.renamed(first))


def renames(then: StreamConfig, now: StreamConfig) -> tuple[str, ...]:
    """The sources whose names changed since a state, in words."""
    before = {source.name: source.label for source in then.sources}
    return tuple(
        f"source '{before[source.name]}' is called '{source.label}'"
        for source in now.sources
        if source.name in before and before[source.name] != source.label
    )
