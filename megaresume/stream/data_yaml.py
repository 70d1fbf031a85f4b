"""The content of a data.yaml as typed values: every key with its bounds and default; weights as exact numbers.

`StreamConfig.from_dict` turns it into the definition of the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from math import gcd, isfinite, lcm
from typing import Annotated, Any, Literal, get_args

from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Before, Items, ListOf, NotEmpty, Options, Truth, Within, check_keys, read, refused

PackingMode = Literal["best_fit", "knapsack", "split", "none"]
#: Packing of one source that differs from the others': ``split`` fills gaps that whole documents leave with its pieces.
SourcePacking = Literal["split"]
BlendUnit = Literal["tokens", "trained", "documents"]
ExhaustedPolicy = Literal["repeat", "stop", "drop"]
StageUnit = Literal["samples", "tokens", "step"]
#: When new documents of a grown corpus are first drawn: from its next epoch on, or in the current one.
Append = Literal["next_epoch", "now"]
#: kinds of sources whose documents hold images.
IMAGE_KINDS = ("webdataset", "energon", "image_folder")
#: keys of a source that only some kinds have.
OF_SOME_KINDS = {"augment": IMAGE_KINDS, "keyed": ("items",), "group_by_length": ("items",)}
MAX_OPEN_BINS = 1024
#: tokens of the shortest part that a filling source may be cut into, by default; in samples shorter than the square of
#: this, the sample length divided by it.
MIN_FRAGMENT = 64
#: A blend has at most this many parts, so that `kernel.set_dues` stays exact in 64 bits. Weights of sixteen digits stay
#: exact; rounding others shifts less than a token in 10**15, with up to a thousand sources.
MAX_PARTS = 1 << 61

Length = Annotated[int, Within(1, 1 << 30)]
Bins = Annotated[int, Within(1, MAX_OPEN_BINS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """What other files must know about a packing mode. `kernel.MODE_NUMBERS` has its number in the planning loop."""

    #: documents are concatenated, and cut at the end of a sample.
    cuts: bool = False
    #: a sample is one document; no bin stays open between samples.
    is_one_document: bool = False
    #: the setting for the number of open bins; None: at most one.
    bins: Literal["open_bins", "lookahead"] | None = None
    #: small documents wait together in a bin.
    groups: bool = False
    #: whether sources with ``packing: split`` may fill the gaps.
    can_be_filled: bool = False


#: CONTRIBUTING.md, "Adding a packing mode", lists what else a new mode needs.
MODES: Mapping[PackingMode, Mode] = {
    # whole documents, each where it fits best
    "best_fit": Mode(bins="open_bins", can_be_filled=True),
    # whole documents: of those waiting, the set that fills a sample best
    "knapsack": Mode(bins="lookahead", groups=True),
    "split": Mode(cuts=True),
    "none": Mode(is_one_document=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig(Options):
    """How documents become samples."""

    #: how documents become samples: see `MODES`.
    mode: PackingMode
    #: samples filled at the same time (``best_fit``).
    open_bins: Bins = 16
    #: documents that wait, small ones together (``knapsack``).
    lookahead: Bins = 64
    #: number of samples closed after which an open bin or waiting document must go next.
    max_age: Annotated[int, Within(1, 1 << 40)] = 1024
    #: every segment takes a multiple of this many tokens (context parallelism, FP8).
    align: Annotated[int, Within(1, 1 << 20)] = 1
    #: tokens of the shortest part that a filling source may be cut into (``best_fit``); None: see `MIN_FRAGMENT`.
    min_fragment: Annotated[int, Within(1, 1 << 20)] | None = None

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            if name not in self.used and value != setting.default:
                raise refused(
                    f"{{place}} has {name}, which does nothing in mode {self.mode}",
                    found=f"{name}: {value}",
                    expected=f"for mode {self.mode}: {', '.join(self.used[1:])}",
                    action=f"remove {name}, or name a mode that has it",
                )

    @property
    def traits(self) -> Mode:
        """What other files must know about its mode."""
        return MODES[self.mode]

    @property
    def used(self) -> tuple[str, ...]:
        """The settings that apply to its mode."""
        bins = () if self.traits.bins is None else (self.traits.bins, "max_age")
        return ("mode", "align", *bins, *(("min_fragment",) if self.traits.can_be_filled else ()))

    @property
    def num_bins(self) -> int:
        """The most bins that are open at the same time."""
        return 1 if self.traits.bins is None else getattr(self, self.traits.bins)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendConfig(Options):
    """The unit that weights count."""

    unit: BlendUnit = "tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleConfig(Options):
    """A shuffle in two levels: see ``permutation.py``."""

    #: consecutive documents that are worth one request to a store.
    block: Annotated[int, Within(1, 1 << 40)] = 32
    #: blocks read at the same time: several times the documents of a global batch, so that it gets few documents from
    #: the same block. See the table in docs/shards.md.
    window: Annotated[int, Within(1, 1 << 20)] = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig(Options):
    """Documents of similar lengths next to each other: see ``permutation.py``."""

    #: documents of a step, fixed when the run began.
    batch: Annotated[int, Within(1, 1 << 40)]
    #: batches in a window.
    window: Annotated[int, Within(1, 1 << 20)]


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
    """Move the options that only the source's kind knows (where and what it is) into a mapping of their own."""
    entry = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping):
        return entry
    ours = {key: value for key, value in entry.items() if key in SOURCE_KEYS}
    # A state does not record the kind of a source, and the word may mean something else to another kind.
    for key, kinds in OF_SOME_KINDS.items():
        if entry.get("kind", kinds[0]) in kinds:
            ours[key] = entry.get(key)
    return ours | {"options": {key: value for key, value in entry.items() if key not in ours or key in OF_SOME_KINDS}}


#: The mapping that `PackingConfig` is read from once the mode is known, since a default depends on the sources.
WrittenPacking = Annotated[dict[Any, Any], Before(_short)]
#: a stage begins with the first sample before which the stream has at least this many.
Start = Annotated[int, Within(1, 1 << 62)] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenSource(Options):
    """One entry of ``sources`` as written; keys that only its kind knows are in ``options``."""

    options: dict[Any, Any]
    weight: Any = 1
    max_epochs: Annotated[int, Within(1, 1 << 32)] | None = None
    on_exhausted: ExhaustedPolicy | None = None
    shuffle: Annotated[ShuffleConfig | None, Before(_whole_or_blocks)] = None
    append: Append | None = None
    packing: SourcePacking | None = None
    augment: Annotated[tuple[Any, ...], ListOf("a list of steps, in order")] | None = None
    keyed: Truth | None = None
    group_by_length: GroupConfig | None = None
    was: (
        Annotated[
            tuple[Annotated[str, NotEmpty()], ...],
            Items("the name that the source had before; or all that it had, the first one first"),
        ]
        | None
    ) = None
    #: in a state: the source's later names.
    names: tuple[str, ...] = ()


#: keys of a source that do not depend on its kind or location.
SOURCE_KEYS = tuple(f.name for f in fields(WrittenSource) if f.name not in ("options", *OF_SOME_KINDS))


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenStage(Options):
    """One entry of ``stages`` as written."""

    name: Annotated[str | None, Before(_stage_name)] = None
    from_samples: Start = None
    from_tokens: Start = None
    from_step: Start = None
    weights: dict[Any, Any] | None = None
    seq_length: Length | None = None
    packing: WrittenPacking | None = None

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
        """The (unit, value) at which the stage begins."""
        return next((u, at) for u in get_args(StageUnit) if (at := getattr(self, f"from_{u}")) is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenConfig(Options):
    """A whole data.yaml as written."""

    seq_length: Length
    seed: Annotated[int, Within(-(1 << 63), (1 << 64) - 1)] = 1234
    packing: WrittenPacking | None = None
    blend: BlendConfig | None = None
    sources: dict[Annotated[str, Before(_source_name)], Annotated[WrittenSource, Before(_parted)]] | None = None
    stages: (
        Annotated[tuple[WrittenStage, ...], ListOf("a list of changes: [{from_tokens: 1000000, weights: {...}}, ...]")]
        | None
    ) = None
    skip: Any = None


def read_config(data: Mapping[str, Any], seq_length: int | None) -> WrittenConfig:
    """Check the mapping of a data.yaml; ``seq_length`` comes from a flag.

    Raises:
        ConfigError: naming the key, what was found and what was expected.
    """
    if isinstance(data, Mapping):
        # First, because an unknown key may be a misspelt seq_length.
        check_keys(data, [f.name for f in fields(WrittenConfig)], "data.yaml", WrittenConfig.ALSO)
        data = _with_flag(data, seq_length)
    config: WrittenConfig = read(WrittenConfig, data, "data.yaml", inside="")
    return config


def _with_flag(data: Mapping[str, Any], flag: int | None) -> Mapping[str, Any]:
    configured = data.get("seq_length")
    if configured is None and flag is None:
        raise ConfigError(
            "no sequence length",
            found="no seq_length in the data config, and none given separately",
            expected="tokens a sample",
            action="add seq_length to the data config, or pass seq_length= (Megatron, plan: --seq-length)",
        )
    if configured is not None and flag is not None and configured != flag:
        raise ConfigError(
            "two sequence lengths",
            found=f"seq_length {configured} in the data config, {flag} given separately (--seq-length, seq_length=)",
            expected="the same number",
            action="remove one of the two",
        )
    return {**data, "seq_length": flag if configured is None else configured}


def parse_weight(value: object, source: str) -> Fraction:
    """A weight as written by a user (``3``, ``0.3``, ``"3/10"``) as an exact fraction, the same on every machine.

    A float means its shortest decimal form: 0.1 is one tenth.

    Raises:
        ConfigError: not a number, NaN, infinite or negative.
    """
    expected = "a non-negative number, for example 0.3, 3 or '3/10'"
    action = f"correct the weight of source '{source}'"
    weight: Fraction | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        weight = Fraction(value)
    elif isinstance(value, float) and isfinite(value):
        weight = Fraction(Decimal(repr(value)))
    elif isinstance(value, str):
        try:
            weight = Fraction(value.strip())
        except (ValueError, ZeroDivisionError):
            weight = None
    if weight is None or weight < 0:
        raise ConfigError(f"bad weight of source '{source}'", found=repr(value), expected=expected, action=action)
    return weight


def integer_weights(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Turn weights into the smallest integers of the same proportions; doing it twice changes nothing.

    Proportions that need more than `MAX_PARTS` parts are rounded one by one, so that the order of the sources does not
    matter; a positive weight stays positive.

    Raises:
        ConfigError: all weights are zero.
    """
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError(
            "the blend is empty",
            found="every weight is 0" if weights else "no source",
            expected="at least one source with a positive weight",
            action="give a source a positive weight",
        )
    scale = lcm(*(w.denominator for w in weights.values()))
    parts = [int(w * scale) for w in weights.values()]
    divisor = gcd(*parts)
    parts = [p // divisor for p in parts]
    if sum(parts) > MAX_PARTS:
        parts = _rounded(parts)
    return dict(zip(weights, parts, strict=True))


def _rounded(parts: Sequence[int]) -> list[int]:
    """Round integers down to half of `MAX_PARTS` parts, leaving room for rounding others up, in lowest terms."""
    total = sum(parts)
    rounded = [max((p * MAX_PARTS + total) // (2 * total), 1) if p > 0 else 0 for p in parts]
    divisor = gcd(*rounded)
    return [r // divisor for r in rounded]
