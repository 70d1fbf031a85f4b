"""What is recorded of an order: sizes, weights and hashes, as plain JSON; never the arrays themselves.

OrderRecord      what a checkpoint carries
  BuilderRecord    one ``BlendedMegatronDatasetBuilder``: what it was asked for
    SplitRecord      its train, valid or test set: how its corpora are blended
      ComponentRecord  one corpus in it: which documents, in which order
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import xxhash

from megaresume.checkpoint.data_state import DataState, OpaqueState
from megaresume.stream.errors import StateError

T = TypeVar("T")


#: Megatron's splits, in the order of its lists.
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Built index arrays, by content."""

    #: samples that they order.
    samples: int
    #: name of the array -> its hash.
    arrays: Mapping[str, str]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Part:
        return cls(samples=int(data["samples"]), arrays=dict(data["arrays"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentRecord:
    """One corpus in one split."""

    #: as given by the flags; None: generated data. For messages only: a corpus may move.
    path: str | None
    #: the documents [first, end) of the file that this split draws from.
    documents: tuple[int, int]
    #: documents in the file when it was recorded.
    total: int
    #: samples that the builder asked this corpus for; None: one epoch.
    requested: int | None
    #: what the dataset built from it.
    built: Part
    #: hash of the documents' lengths; None: no local .idx.
    lengths: str | None
    #: hash of tokens drawn here and there from the documents; None: no local .bin.
    tokens: str | None
    #: further epochs after the built ones, as far as they were needed.
    epochs: tuple[Part, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ComponentRecord:
        first, end = data["documents"]
        return cls(
            path=data["path"],
            documents=(int(first), int(end)),
            total=int(data["total"]),
            requested=None if data["requested"] is None else int(data["requested"]),
            built=Part.from_dict(data["built"]),
            lengths=data["lengths"],
            tokens=data["tokens"],
            epochs=tuple(Part.from_dict(part) for part in data["epochs"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRecord:
    """The train, valid or test set of one builder."""

    #: in the order of the flags.
    components: tuple[ComponentRecord, ...]
    #: how the components are blended: a part for the recorded size, then one for each size it grew to; each covers
    #: all samples before its size. Empty: a single corpus, or several sets side by side.
    blend: tuple[Part, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SplitRecord:
        return cls(
            components=tuple(ComponentRecord.from_dict(component) for component in data["components"]),
            blend=tuple(Part.from_dict(part) for part in data["blend"]),
        )


#: (paths, weights as given or None); weights are exact: float.hex().
Blend = tuple[tuple[str, ...], tuple[str, ...] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuilderRecord:
    """One builder: what it was asked for, and what it built."""

    #: name of the dataset class.
    dataset: str
    #: what enters the order or the samples, by the name of the field in Megatron's dataset config.
    settings: Mapping[str, Any]
    #: one blend for all splits (--data-path); None: one for each split, or generated data.
    blend: Blend | None
    #: a blend for each split (--train-data-path, ...); None: one for all, or generated data.
    blend_per_split: tuple[Blend | None, ...] | None
    #: samples asked for, per split; None: one epoch.
    sizes: tuple[int | None, ...]
    #: what came out, per split; None: nothing there.
    splits: tuple[SplitRecord | None, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuilderRecord:
        per_split = data["blend_per_split"]
        return cls(
            dataset=data["dataset"],
            settings=dict(data["settings"]),
            blend=_blend(data["blend"]),
            blend_per_split=None if per_split is None else tuple(_blend(blend) for blend in per_split),
            sizes=_of_each_split(None if size is None else int(size) for size in data["sizes"]),
            splits=_of_each_split(None if split is None else SplitRecord.from_dict(split) for split in data["splits"]),
        )


def _blend(data: Sequence[Any] | None) -> Blend | None:
    if data is None:
        return None
    paths, weights = data
    return tuple(paths), None if weights is None else tuple(weights)


def _of_each_split(values: Iterable[T]) -> tuple[T, ...]:
    """ValueError unless there is one for train, valid and test."""
    found = tuple(values)
    if len(found) != len(SPLITS):
        raise ValueError(f"{len(found)} entries, not one for each of {', '.join(SPLITS)}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderRecord:
    """What a checkpoint carries: all builders of the data provider, in the order in which it runs them."""

    #: version of megatron-core that built first.
    megatron: str
    #: samples trained when the record began: the order before that is not proven.
    since: int
    builders: tuple[BuilderRecord, ...]
    #: differences that a user accepted, in words, for ever.
    accepted: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def digest(self) -> str:
        """16 hex digits over everything."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.to_dict(), sort_keys=True).encode())

    def to_state(self, samples: int) -> OpaqueState:
        """As the state of a run that has trained so many samples."""
        return OpaqueState(kind="order", samples=samples, digest=self.digest(), content=self.to_dict())

    @classmethod
    def from_state(cls, state: DataState) -> OrderRecord:
        """Read what `to_state` made.

        Raises:
            StateError: a state of another kind, or a field is missing or of the wrong kind.
        """
        data = state.content if isinstance(state, OpaqueState) and state.kind == "order" else {}
        try:
            return cls(
                megatron=data["megatron"],
                since=int(data["since"]),
                builders=tuple(BuilderRecord.from_dict(builder) for builder in data["builders"]),
                accepted=tuple(data["accepted"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                "the recorded order of Megatron's datasets lacks a field or has one of the wrong kind",
                found=f"{type(error).__name__}: {error}, in a state of kind {state.kind}",
                expected="the fields that the guard records",
                cause="the record was edited by hand",
                action="load an older checkpoint with --ckpt-step N",
            ) from error
