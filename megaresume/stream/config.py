"""What defines the order of a stream: everything in data.yaml that is not a place.

`StreamConfig.from_dict` reads the mapping that a data.yaml holds; `StreamConfig.to_dict` is the normalised form
that goes into the state: weights as the smallest integers, defaults written out, no paths.

``stages`` declare changes to come: from a number of samples, tokens or steps on, other weights, another sequence length
or another packing. `StreamConfig.changed_by` applies one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from megaresume.stream.aliases import check_names
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Items, ListOf, Options, Truth, Within, check_keys, read, refused
from megaresume.stream.skips import NO_SKIP, SkipConfig
from megaresume.stream.weights import integer_weights, parse_weight

PackingMode = Literal["best_fit", "knapsack", "split", "none"]
#: How one source is packed where the others are not: ``split`` fills with its pieces what whole documents leave free.
SourcePacking = Literal["split"]
BlendUnit = Literal["tokens", "trained", "documents"]
ExhaustedPolicy = Literal["repeat", "stop", "drop"]
StageUnit = Literal["samples", "tokens", "step"]
#: When documents that a corpus has won take part: from its next epoch on, or in the one that has begun.
Append = Literal["next_epoch", "now"]
#: Where the config is not the one that a state was made with: an error that names the fields, or a new stage there.
OnChange = Literal["refuse", "stage"]

#: kinds of sources whose documents hold images.
IMAGE_KINDS = ("webdataset", "energon", "image_folder")
#: keys of a source that only some kinds have.
OF_SOME_KINDS = {"augment": IMAGE_KINDS, "keyed": ("items",)}
MAX_OPEN_BINS = 1024

Length = Annotated[int, Within(1, 1 << 30)]
Bins = Annotated[int, Within(1, MAX_OPEN_BINS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig(Options):
    """How documents become samples."""

    #: ``best_fit``: whole documents into open bins; ``knapsack``: whole documents, those of some that wait which fill a
    #: sample best; ``split``: concatenate and cut; ``none``: one document a sample.
    mode: PackingMode = "split"
    #: samples that are being filled at the same time (``best_fit``).
    open_bins: Bins = 16
    #: documents that wait, small ones together (``knapsack``).
    lookahead: Bins = 64
    #: samples closed since a bin was opened, or a document began to wait, after which it goes next.
    max_age: Annotated[int, Within(1, 1 << 40)] = 1024
    #: every segment takes a multiple of this many tokens (context parallelism, FP8).
    align: Annotated[int, Within(1, 1 << 20)] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendConfig(Options):
    """What the weights count."""

    unit: BlendUnit = "tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleConfig(Options):
    """A shuffle in two levels: see ``documents/permutation.py``."""

    #: documents that lie together and are worth one request to a store.
    block: Annotated[int, Within(1, 1 << 40)] = 32
    #: blocks that are read at the same time: several times the documents of a global batch, so that few of one block
    #: meet in it. See the table in docs/shards.md.
    window: Annotated[int, Within(1, 1 << 20)] = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One source of the blend."""

    #: its first name: what its order, its part in a sample's identity, and its place in a state go by, for ever.
    name: str
    #: parts of the blend; only the proportions matter. 0: present, never drawn.
    weight: int
    #: epochs after which ``on_exhausted`` applies; None: no end.
    max_epochs: int | None = None
    #: ``drop``: the others go on in their proportions; ``stop``: the stream ends; ``repeat``: go on, with a note.
    on_exhausted: ExhaustedPolicy = "drop"
    #: in two levels; None: any document may follow any other.
    shuffle: ShuffleConfig | None = None
    #: ``split``: its documents are cut, to fill the samples of whole ones; None: as all are.
    packing: SourcePacking | None = None
    #: steps by which its images are changed, every default written out. No part of the order, but of what is trained.
    augment: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    #: whether what its items draw at random follows from seed, epoch and item. No part of the order either.
    keyed: bool = False
    #: what a resume does if the corpus has grown; None: it is refused. No part of the order: the state knows what came.
    append: Append | None = field(default=None, compare=False)
    #: names that it was given since, the last one is that of today. See `megaresume.stream.aliases`.
    names: tuple[str, ...] = field(default=(), compare=False)
    #: whether it says by ``was`` that it was renamed.
    renamed: bool = field(default=False, compare=False)
    #: where and what it is (path, kind, split, ...): not part of the order, never in a state.
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        """The name of today."""
        return self.names[-1] if self.names else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A declared change: what it leaves None stays as it was."""

    name: str
    #: what ``at`` counts: samples, tokens of documents, or optimizer steps, since the start of the run.
    unit: StageUnit
    #: the stage begins with the first sample before which the stream holds at least so many.
    at: int
    #: (source, parts of the blend), one for every source.
    weights: tuple[tuple[str, int], ...] | None = None
    seq_length: int | None = None
    packing: PackingConfig | None = None

    def to_dict(self) -> dict[str, Any]:
        """As in a data.yaml, normalised."""
        changes: dict[str, Any] = {}
        if self.weights is not None:
            changes["weights"] = dict(self.weights)
        if self.seq_length is not None:
            changes["seq_length"] = self.seq_length
        if self.packing is not None:
            changes["packing"] = _packing_dict(self.packing)
        return {"name": self.name, f"from_{self.unit}": self.at} | changes


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """The normalised data config. Two equal configs over the same corpora give the same stream."""

    seed: int
    #: tokens a sample.
    seq_length: int
    packing: PackingConfig
    blend: BlendConfig
    sources: tuple[SourceConfig, ...]
    #: changes to come, in the order in which they come.
    stages: tuple[StageConfig, ...] = ()
    #: what is not to be trained.
    skip: SkipConfig = NO_SKIP

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, seq_length: int | None = None) -> StreamConfig:
        """Read and check the mapping of a data.yaml.

        Args:
            data: the mapping; unknown keys are errors, keys of a source that are none of ours become its ``options``.
            seq_length: from a flag (``--seq-length``); must agree with the mapping's where both are given.

        Raises:
            ConfigError: naming the key, what was found and what was expected.
        """
        if isinstance(data, Mapping):
            data = _with_flag(data, seq_length)
        document: _Document = read(_Document, data, "data.yaml", inside="")
        sources = _sources(document.sources or {})
        packing = document.packing or PackingConfig(mode=_default_packing(sources))
        said = data.get("packing")
        if isinstance(said, Mapping) and "mode" not in said and any(s.packing is not None for s in sources):
            packing = replace(packing, mode="best_fit")
        # Everywhere else in the mapping a source goes by its name of today.
        names = {source.label: source.name for source in sources} | {source.name: source.name for source in sources}
        return cls(
            seed=document.seed,
            seq_length=document.seq_length,
            packing=_used(packing),
            blend=document.blend or BlendConfig(),
            sources=sources,
            stages=_stages(document.stages or (), sources),
            skip=SkipConfig.from_dict(document.skip, list(names)).renamed(names),
        )._checked()

    @classmethod
    def recorded(cls, data: Mapping[str, Any]) -> StreamConfig:
        """The same of one that a state knows. The last few are remembered: a resume asks for the same ones again."""
        return _recorded(json.dumps(data))

    def without_stages(self) -> StreamConfig:
        """What holds before the first declared change, whatever is skipped."""
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
        """What holds at first and after each declared change; and when, in words for an error."""
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
        """Refuse a source that is to fill what another packing than ``best_fit`` leaves free."""
        names = [source.label for source in self.sources if source.packing is not None]
        if names and self.packing.mode not in ("best_fit", "split"):
            raise ConfigError(
                f"source '{names[0]}' cannot be packed by split beside packing {self.packing.mode}{where}",
                found=f"packing {self.packing.mode}, and packing: split of {', '.join(names)}",
                expected="packing best_fit for the other sources, or split for all",
                cause="only best_fit has open samples that the pieces of a source can fill",
                action="set packing: best_fit, or leave it out",
            )

    @property
    def fillers(self) -> tuple[bool, ...]:
        """Which sources are cut to fill what the whole documents of the others leave free."""
        return tuple(self.packing.mode == "best_fit" and source.packing == "split" for source in self.sources)

    @property
    def packed_by(self) -> str:
        """The packing in words: ``best_fit``; with sources that fill, ``best_fit filled with web``."""
        names = [source.label for source, fills in zip(self.sources, self.fillers, strict=True) if fills]
        return f"{self.packing.mode} filled with {', '.join(names)}" if names else self.packing.mode

    def packs_as(self, other: StreamConfig) -> bool:
        """Whether what waits in the open bins of the other, over the same sources, can stay there."""
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
    """Images must never be cut, and leave gaps that only a choice among many documents fills, or pieces of text do."""
    if any(source.packing is not None for source in sources):
        return "best_fit"
    return "knapsack" if any(source.options.get("kind") in IMAGE_KINDS for source in sources) else "split"


def _packing_dict(packing: PackingConfig) -> dict[str, Any]:
    used = {"best_fit": ("open_bins", "max_age"), "knapsack": ("lookahead", "max_age")}.get(packing.mode, ())
    return {name: getattr(packing, name) for name in ("mode", "align", *used)}


def _used(packing: PackingConfig) -> PackingConfig:
    """Without what the mode does not use: it would only be a number without a meaning."""
    return PackingConfig(**_packing_dict(packing))


# -- as it is written


def _short(value: Any) -> Any:
    return {"mode": value} if isinstance(value, str) else value


def _whole_or_blocks(value: Any) -> Any:
    return {None: None, "full": None, "blocks": {}}.get(value, value) if isinstance(value, str | None) else value


def _source_name(name: Any) -> Any:
    if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable():
        raise refused(
            "bad name of a source",
            expected="non-empty text without control characters or surrounding spaces",
            action="rename the source (quote it if YAML reads it as a number)",
        )
    return name


def _stage_name(name: Any) -> Any:
    if not isinstance(name, str | None) or (name is not None and not (name.strip() and name.isprintable())):
        raise refused("bad name: {place}", expected="a text")
    return name


def _parted(entry: Any) -> Any:
    """What says where and what a source is goes apart: only its kind knows those keys."""
    entry = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping):
        return entry
    ours = {key: value for key, value in entry.items() if key in SOURCE_KEYS}
    # A state does not say of which kind a source is; another kind may mean something else by the word.
    for key, kinds in OF_SOME_KINDS.items():
        if entry.get("kind", kinds[0]) in kinds:
            ours[key] = entry.get(key)
    return ours | {"options": {key: value for key, value in entry.items() if key not in ours or key in OF_SOME_KINDS}}


Packing = Annotated[PackingConfig, BeforeValidator(_short)]
#: a stage begins with the first sample before which the stream holds at least so many.
Start = Annotated[int, Within(1, 1 << 62)] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source(Options):
    options: dict[Any, Any]
    weight: Any = 1
    max_epochs: Annotated[int, Within(1, 1 << 32)] | None = None
    on_exhausted: ExhaustedPolicy | None = None
    shuffle: Annotated[ShuffleConfig | None, BeforeValidator(_whole_or_blocks)] = None
    append: Append | None = None
    packing: SourcePacking | None = None
    augment: Annotated[tuple[Any, ...], ListOf("a list of steps, in order")] | None = None
    keyed: Truth | None = None
    was: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1)], ...],
            Items("the name that the source had before; or all that it had, the first one first"),
        ]
        | None
    ) = None
    #: in a state: the names that it was given since.
    names: tuple[str, ...] = ()


#: keys of a source that say nothing of its place or kind.
SOURCE_KEYS = tuple(f.name for f in fields(_Source) if f.name not in ("options", *OF_SOME_KINDS))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage(Options):
    name: Annotated[str | None, BeforeValidator(_stage_name)] = None
    from_samples: Start = None
    from_tokens: Start = None
    from_step: Start = None
    weights: dict[Any, Any] | None = None
    seq_length: Length | None = None
    packing: Packing | None = None

    def __post_init__(self) -> None:
        said = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        begins = sum(name.startswith("from_") for name in said)
        if begins != 1 or not {"weights", "seq_length", "packing"} & set(said):
            raise refused(
                f"{{place}} does not say {'when it begins' if begins != 1 else 'what it changes'}",
                found=", ".join(said) or "nothing",
                expected="one of from_samples, from_tokens and from_step, and weights, seq_length or packing",
            )

    @property
    def start(self) -> tuple[StageUnit, int]:
        return next((u, at) for u in get_args(StageUnit) if (at := getattr(self, f"from_{u}")) is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document(Options):
    seq_length: Length
    seed: Annotated[int, Within(-(1 << 63), (1 << 64) - 1)] = 1234
    packing: Packing | None = None
    blend: BlendConfig | None = None
    sources: (
        dict[Annotated[str, BeforeValidator(_source_name)], Annotated[_Source, BeforeValidator(_parted)]] | None
    ) = None
    stages: (
        Annotated[tuple[_Stage, ...], ListOf("a list of changes: [{from_tokens: 1000000, weights: {...}}, ...]")] | None
    ) = None
    skip: Any = None


# -- from that to the config


def _with_flag(data: Mapping[str, Any], flag: int | None) -> Mapping[str, Any]:
    configured = data.get("seq_length")
    if configured is None and flag is None:
        raise ConfigError(
            "no sequence length",
            found="neither seq_length in the data config nor --seq-length",
            expected="tokens a sample",
            action="add seq_length to the data config or pass --seq-length",
        )
    if configured is not None and flag is not None and configured != flag:
        raise ConfigError(
            "two sequence lengths",
            found=f"seq_length {configured} in the data config, --seq-length {flag}",
            expected="the same number",
            action="remove one of the two",
        )
    return {**data, "seq_length": flag if configured is None else configured}


def _sources(entries: Mapping[str, _Source]) -> tuple[SourceConfig, ...]:
    weights = integer_weights({name: parse_weight(entry.weight, name) for name, entry in entries.items()})
    sources = tuple(_source(name, entry, weights[name]) for name, entry in entries.items())
    check_names(sources)
    return sources


def _source(name: str, entry: _Source, weight: int) -> SourceConfig:
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
        options=entry.options,
    )


def _stages(entries: Sequence[_Stage], sources: tuple[SourceConfig, ...]) -> tuple[StageConfig, ...]:
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


def _stage(entry: _Stage, k: int, sources: tuple[SourceConfig, ...]) -> StageConfig:
    unit, at = entry.start
    return StageConfig(
        name=entry.name or f"stage {k + 1}",
        unit=unit,
        at=at,
        weights=None if entry.weights is None else _stage_weights(entry.weights, f"stages[{k}].weights", sources),
        seq_length=entry.seq_length,
        packing=None if entry.packing is None else _used(entry.packing),
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
