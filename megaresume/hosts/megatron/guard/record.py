"""What is recorded of an order: sizes, weights and hashes, as plain JSON; never the arrays themselves.

OrderRecord      what a checkpoint carries
  BuilderRecord    one ``BlendedMegatronDatasetBuilder``: what it was asked for
    SplitRecord      its train, valid or test set: how its corpora are blended
      ComponentRecord  one corpus in it: which documents, in which order
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import Field

from megaresume.checkpoint.data_state import DataState, OpaqueState
from megaresume.stream.errors import ConfigError, StateError
from megaresume.stream.schema import read

T = TypeVar("T")


#: Megatron's splits, in the order of its lists.
SPLITS = ("train", "valid", "test")
OfEach = Annotated[tuple[T, ...], Field(min_length=3, max_length=3)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Built index arrays, by content."""

    #: samples that they order.
    samples: int
    #: name of the array -> its hash.
    arrays: Mapping[str, str]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRecord:
    """The train, valid or test set of one builder."""

    #: in the order of the flags.
    components: tuple[ComponentRecord, ...]
    #: how the components are blended: a part for the recorded size, then one for each size it grew to; each covers
    #: all samples before its size. Empty: a single corpus, or several sets side by side.
    blend: tuple[Part, ...] = ()


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
    blend_per_split: OfEach[Blend | None] | None
    #: samples asked for, per split; None: one epoch.
    sizes: OfEach[int | None]
    #: what came out, per split; None: nothing there.
    splits: OfEach[SplitRecord | None]


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
            record: OrderRecord = read(cls, data, "the record")
            return record
        except ConfigError as error:
            raise StateError(
                "the recorded order of Megatron's datasets lacks a field or has one of the wrong kind",
                found=f"{error.headline}: {error.found}, in a state of kind {state.kind}",
                expected="the fields that the guard records",
                cause="the record was edited by hand",
                action="load an older checkpoint with --ckpt-step N",
            ) from error
