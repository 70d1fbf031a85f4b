"""What defines the order of a stream: everything in data.yaml that is not a place.

`StreamConfig.from_dict` reads the mapping that a data.yaml holds; `StreamConfig.to_dict` is the normalised form
that goes into the state: weights as the smallest integers, defaults written out, no paths.

``stages`` declare changes to come: from a number of samples, tokens or steps on, other weights, another sequence length
or another packing. `StreamConfig.changed_by` applies one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, cast, get_args

from megaresume.stream.aliases import check_names
from megaresume.stream.errors import ConfigError
from megaresume.stream.skips import NO_SKIP, SkipConfig
from megaresume.stream.weights import integer_weights, parse_weight

__all__ = [
    "Append",
    "BlendConfig",
    "ExhaustedPolicy",
    "OnChange",
    "PackingConfig",
    "ShuffleConfig",
    "SourceConfig",
    "StageConfig",
    "StageUnit",
    "StreamConfig",
]

PackingMode = Literal["best_fit", "knapsack", "split", "none"]
BlendUnit = Literal["tokens", "documents"]
ExhaustedPolicy = Literal["repeat", "stop", "drop"]
StageUnit = Literal["samples", "tokens", "step"]
#: When documents that a corpus has won take part: from its next epoch on, or in the one that has begun.
Append = Literal["next_epoch", "now"]
#: Where the config is not the one that a state was made with: an error that names the fields, or a new stage there.
OnChange = Literal["refuse", "stage"]

#: kinds of sources whose documents hold images.
IMAGE_KINDS = ("webdataset", "energon")
MAX_SEQ_LENGTH = 1 << 30
MAX_OPEN_BINS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """How documents become samples."""

    #: ``best_fit``: whole documents into open bins; ``knapsack``: whole documents, those of some that wait which fill a
    #: sample best; ``split``: concatenate and cut; ``none``: one document a sample.
    mode: PackingMode = "split"
    #: samples that are being filled at the same time (``best_fit``).
    open_bins: int = 16
    #: documents that wait, small ones together (``knapsack``).
    lookahead: int = 64
    #: samples closed since a bin was opened, or a document began to wait, after which it goes next.
    max_age: int = 1024
    #: every segment takes a multiple of this many tokens (context parallelism, FP8).
    align: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendConfig:
    """What the weights count."""

    unit: BlendUnit = "tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleConfig:
    """A shuffle in two levels: see ``block_shuffle.py``."""

    #: documents that lie together and are worth one request to a store.
    block: int = 32
    #: blocks that are read at the same time: several times the documents of a global batch, so that few of one block
    #: meet in it. See the table in docs/shards.md.
    window: int = 2048


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
    #: steps by which its images are changed, every default written out. No part of the order, but of what is trained.
    augment: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
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
        data = _mapping(data, "data.yaml")
        _known_keys(data, {"seed", "seq_length", "packing", "blend", "sources", "stages", "skip"}, "data.yaml")
        sources = _sources(data.get("sources"))
        # Everywhere else in the mapping a source goes by its name of today.
        names = {source.label: source.name for source in sources} | {source.name: source.name for source in sources}
        return cls(
            seed=_integer(data.get("seed", 1234), "seed", low=-(1 << 63), high=(1 << 64) - 1),
            seq_length=_seq_length(data.get("seq_length"), seq_length),
            packing=_packing(_default_packing(sources) if data.get("packing") is None else data["packing"], "packing"),
            blend=_blend({} if data.get("blend") is None else data["blend"]),
            sources=sources,
            stages=_stages(data.get("stages"), sources),
            skip=SkipConfig.from_dict(data.get("skip"), list(names)).renamed(names),
        )._checked()

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

    def _checked(self) -> StreamConfig:
        current = self
        for stage in (None, *self.stages):
            current = current if stage is None else current.changed_by(stage)
            where = "" if stage is None else f" in stage '{stage.name}'"
            align = current.packing.align
            if current.seq_length % align:
                raise ConfigError(
                    f"seq_length is not a multiple of packing.align{where}",
                    found=f"seq_length {current.seq_length}, align {align}",
                    expected=f"seq_length {-(-current.seq_length // align) * align}, for example",
                    action="change one of the two",
                )
        return self

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


def _source_dict(source: SourceConfig) -> dict[str, Any]:
    data: dict[str, Any] = {"weight": source.weight}
    if source.max_epochs is not None:
        data |= {"max_epochs": source.max_epochs, "on_exhausted": source.on_exhausted}
    if source.shuffle is not None:
        data["shuffle"] = {"block": source.shuffle.block, "window": source.shuffle.window}
    if source.augment:
        data["augment"] = [dict(step) for step in source.augment]
    if source.names:
        data["names"] = list(source.names)
    return data


def _default_packing(sources: Iterable[SourceConfig]) -> PackingMode:
    """Images must never be cut, and leave gaps that only a choice among many documents fills."""
    return "knapsack" if any(source.options.get("kind") in IMAGE_KINDS for source in sources) else "split"


def _packing_dict(packing: PackingConfig) -> dict[str, Any]:
    data: dict[str, Any] = {"mode": packing.mode, "align": packing.align}
    if packing.mode == "best_fit":
        data |= {"open_bins": packing.open_bins, "max_age": packing.max_age}
    elif packing.mode == "knapsack":
        data |= {"lookahead": packing.lookahead, "max_age": packing.max_age}
    return data


def _packing(value: object, where: str) -> PackingConfig:
    value = {"mode": value} if isinstance(value, str) else value
    data = _mapping(value, where)
    _known_keys(data, {"mode", "open_bins", "lookahead", "max_age", "align"}, where)
    default = PackingConfig()
    mode = cast(PackingMode, _choice(data.get("mode", default.mode), get_args(PackingMode), f"{where}.mode"))
    packing = PackingConfig(
        mode=mode,
        open_bins=_integer(data.get("open_bins", default.open_bins), f"{where}.open_bins", low=1, high=MAX_OPEN_BINS),
        lookahead=_integer(data.get("lookahead", default.lookahead), f"{where}.lookahead", low=1, high=MAX_OPEN_BINS),
        max_age=_integer(data.get("max_age", default.max_age), f"{where}.max_age", low=1, high=1 << 40),
        align=_integer(data.get("align", default.align), f"{where}.align", low=1, high=1 << 20),
    )
    # What a mode does not use would only be a number without a meaning.
    if mode == "best_fit":
        return replace(packing, lookahead=default.lookahead)
    if mode == "knapsack":
        return replace(packing, open_bins=default.open_bins)
    return PackingConfig(mode=mode, align=packing.align)


def _blend(value: object) -> BlendConfig:
    data = _mapping(value, "blend")
    _known_keys(data, {"unit"}, "blend")
    return BlendConfig(unit=cast(BlendUnit, _choice(data.get("unit", "tokens"), get_args(BlendUnit), "blend.unit")))


def _sources(value: object) -> tuple[SourceConfig, ...]:
    data = _mapping(value if value is not None else {}, "sources")
    entries: dict[str, Mapping[str, Any]] = {}
    for name, entry in data.items():
        if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable():
            raise ConfigError(
                "bad name of a source",
                found=repr(name),
                expected="a text that is not empty, without control characters and without spaces around it",
                action="rename the source (quote it if YAML reads it as a number)",
            )
        entries[name] = _mapping({"path": entry} if isinstance(entry, str) else entry, f"sources.{name}")
    weights = integer_weights({n: parse_weight(e.get("weight", 1), n) for n, e in entries.items()})
    sources = tuple(_source(name, entry, weights[name]) for name, entry in entries.items())
    check_names(sources)
    return sources


def _source(name: str, entry: Mapping[str, Any], weight: int) -> SourceConfig:
    max_epochs = entry.get("max_epochs")
    if max_epochs is not None:
        max_epochs = _integer(max_epochs, f"sources.{name}.max_epochs", low=1, high=1 << 32)
    policy = entry.get("on_exhausted", "drop")
    policy = cast(ExhaustedPolicy, _choice(policy, get_args(ExhaustedPolicy), f"sources.{name}.on_exhausted"))
    if "on_exhausted" in entry and max_epochs is None:
        raise ConfigError(
            f"source '{name}' has on_exhausted without max_epochs",
            found=f"on_exhausted: {policy}",
            expected="max_epochs, after which it applies",
            cause="a source without max_epochs never ends",
            action=f"add max_epochs to source '{name}' or remove on_exhausted",
        )
    append = entry.get("append")
    if append is not None:
        append = _choice(append, get_args(Append), f"sources.{name}.append")
    ours = {"weight", "max_epochs", "on_exhausted", "shuffle", "append", "was", "names"}
    first, *names = [name, *_names(entry, name)] if "was" not in entry else [*_was(entry["was"], name), name]
    return SourceConfig(
        name=first,
        names=tuple(names),
        renamed="was" in entry,
        weight=weight,
        max_epochs=max_epochs,
        on_exhausted=policy,
        shuffle=_shuffle(entry.get("shuffle"), f"sources.{name}.shuffle"),
        append=cast("Append | None", append),
        augment=_augment(entry, f"sources.{name}.augment"),
        options={key: value for key, value in entry.items() if key not in ours},
    )


def _augment(entry: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    # A state does not say of which kind a source is; another kind may mean something else by the word.
    if entry.get("augment") is None or entry.get("kind", IMAGE_KINDS[0]) not in IMAGE_KINDS:
        return ()
    from megaresume.images.augment import augmentation_from_options, augmentation_options

    return tuple(augmentation_options(augmentation_from_options(entry["augment"], where)))


def _was(value: object, name: str) -> list[str]:
    """Earlier names of a source, the first one first."""
    earlier = [value] if isinstance(value, str) else value
    if not isinstance(earlier, list | tuple) or not earlier or not all(isinstance(n, str) and n for n in earlier):
        raise ConfigError(
            f"bad value of sources.{name}.was",
            found=repr(value),
            expected="the name that the source had before; or all that it had, the first one first",
            action=f"correct sources.{name}.was",
        )
    return [str(n) for n in earlier]


def _names(entry: Mapping[str, Any], name: str) -> list[str]:
    names = entry.get("names", [])
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
        raise ConfigError(
            f"bad value of sources.{name}.names",
            found=repr(names),
            expected="the names that a state records",
            action="to rename a source: was: OLD NAME",
        )
    return [str(n) for n in names]


def _shuffle(value: object, where: str) -> ShuffleConfig | None:
    if value is None or value == "full":
        return None
    standard = ShuffleConfig()
    if value == "blocks":
        return standard
    data = _mapping(value, where)
    _known_keys(data, {"block", "window"}, where)
    block = _integer(data.get("block", standard.block), f"{where}.block", low=1, high=1 << 40)
    window = _integer(data.get("window", standard.window), f"{where}.window", low=1, high=1 << 20)
    return ShuffleConfig(block=block, window=window)


def _stages(value: object, sources: tuple[SourceConfig, ...]) -> tuple[StageConfig, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ConfigError(
            "stages is not a list",
            found=f"{type(value).__name__}: {value!r:.60}",
            expected="a list of changes: [{from_tokens: 1000000, weights: {...}}, ...]",
            action="correct stages",
        )
    stages = tuple(_stage(entry, k, sources) for k, entry in enumerate(value))
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
            expected="a name of its own for each",
            action="rename one of them",
        )
    return stages


def _stage(value: object, k: int, sources: tuple[SourceConfig, ...]) -> StageConfig:
    where = f"stages[{k}]"
    data = _mapping(value, where)
    units = get_args(StageUnit)
    _known_keys(data, {"name", "weights", "seq_length", "packing", *(f"from_{unit}" for unit in units)}, where)
    given = [unit for unit in units if f"from_{unit}" in data]
    changes = [key for key in ("weights", "seq_length", "packing") if data.get(key) is not None]
    if len(given) != 1 or not changes:
        raise ConfigError(
            f"{where} does not say {'when it begins' if len(given) != 1 else 'what it changes'}",
            found=", ".join(map(str, data)) or "nothing",
            expected="one of from_samples, from_tokens and from_step, and weights, seq_length or packing",
            action=f"correct {where}",
        )
    name = data.get("name", f"stage {k + 1}")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigError(f"bad name of {where}", found=repr(name), expected="a text", action=f"correct {where}.name")
    at = _integer(data[f"from_{given[0]}"], f"{where}.from_{given[0]}", low=1, high=(1 << 62))
    length, packing = data.get("seq_length"), data.get("packing")
    return StageConfig(
        name=name,
        unit=cast(StageUnit, given[0]),
        at=at,
        weights=None if data.get("weights") is None else _stage_weights(data["weights"], f"{where}.weights", sources),
        seq_length=None if length is None else _integer(length, f"{where}.seq_length", low=1, high=MAX_SEQ_LENGTH),
        packing=None if packing is None else _packing(packing, f"{where}.packing"),
    )


def _stage_weights(value: object, where: str, sources: tuple[SourceConfig, ...]) -> tuple[tuple[str, int], ...]:
    data = _mapping(value, where)
    names = [source.label if source.label in data else source.name for source in sources]
    _known_keys(data, names, where)
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


def _seq_length(configured: object, flag: int | None) -> int:
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
    return _integer(configured if configured is not None else flag, "seq_length", low=1, high=MAX_SEQ_LENGTH)


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ConfigError(
        f"{where} is not a mapping",
        found=f"{type(value).__name__}: {value!r:.60}",
        expected="keys and values",
        action=f"correct {where}",
    )


def _known_keys(data: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = sorted(known)
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            raise ConfigError(
                f"unknown key '{key}' in {where}",
                found=repr(key),
                expected=f"one of {', '.join(known)}",
                cause=f"did you mean '{close[0]}'?" if close else None,
                action="correct or remove the key",
            )


def _integer(value: object, where: str, *, low: int, high: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise ConfigError(
        f"bad value of {where}",
        found=repr(value),
        expected=f"an integer from {low} to {high}",
        action=f"correct {where}",
    )


def _choice(value: object, choices: tuple[str, ...], where: str) -> str:
    if isinstance(value, str) and value in choices:
        return value
    # YAML reads an unquoted `none` as text but `null` and `~` as nothing.
    raise ConfigError(
        f"bad value of {where}",
        found=repr(value),
        expected=f"one of {', '.join(choices)}",
        action=f"correct {where}",
    )
