"""The record of an order: sizes, weights and hashes, as plain JSON; never the arrays themselves.

OrderRecord      what a checkpoint carries
  BuilderRecord    one ``BlendedMegatronDatasetBuilder``: what it was asked for
    SplitRecord      its train, valid or test set: how its corpora are blended
      ComponentRecord  one corpus in it: which documents, in which order

Index arrays are hashed by value, so neither their dtype nor the version of Megatron that chose it matters. The
documents of a corpus are identified by their lengths and a sample of their tokens, those of a file without .idx (JSON
lines) by a sample of its bytes, never by path.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.checkpoint.records.envelope import DataState, OpaqueState
from megaresume.data.layout import HEADER_BYTES, IndexHeader
from megaresume.stream.errors import ConfigError, StateError
from megaresume.stream.progress import progress
from megaresume.stream.schema import read

T = TypeVar("T")


#: Megatron's splits, in the order of its lists.
SPLITS = ("train", "valid", "test")


class _OfEach:
    """Requires one item per split in a tuple. Like pydantic's ``Field(min_length=3, max_length=3)``, whose import would
    slow the start of every run under Megatron.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler(source) | {"min_length": len(SPLITS), "max_length": len(SPLITS)}


OfEach = Annotated[tuple[T, ...], _OfEach()]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayHashes:
    """Built index arrays, by content."""

    #: Number of samples that they order.
    samples: int
    #: Array name -> hash.
    arrays: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentRecord:
    """One corpus in one split."""

    #: As given by the flags; None: generated data. For messages only, as a corpus may move.
    path: str | None
    #: The documents [first, end) of the file that this split draws from.
    documents: tuple[int, int]
    #: Number of documents in the file when it was recorded.
    total: int
    #: Samples that the builder requested from this corpus; None: one epoch.
    requested: int | None
    #: What the dataset built from it.
    built: ArrayHashes
    #: Hash of the document lengths; None: no local .idx.
    lengths: str | None
    #: Hash of a sample of the documents' tokens; None: no local .bin.
    tokens: str | None
    #: Additional epochs after the built ones, as far as they were needed.
    epochs: tuple[ArrayHashes, ...] = ()
    #: Of a file without .idx, as JSON lines are: its size in bytes, and a hash of a sample of them; None: no such file.
    contents: tuple[int, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRecord:
    """The train, valid or test set of one builder."""

    #: In the order of the flags.
    components: tuple[ComponentRecord, ...]
    #: How the components are blended: one part for the recorded size, then one for each size it grew to; each covers
    #: all samples up to its size. Empty: a single corpus, or several sets side by side.
    blend: tuple[ArrayHashes, ...] = ()


#: (paths, weights as given or None); weights are exact, as float.hex().
Blend = tuple[tuple[str, ...], tuple[str, ...] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuilderRecord:
    """What one builder was asked for, and what it built."""

    #: Name of the dataset class.
    dataset: str
    #: What affects the order or the samples, by field name in Megatron's dataset config.
    settings: Mapping[str, Any]
    #: One blend for all splits (--data-path); None: one per split, or generated data.
    blend: Blend | None
    #: One blend per split (--train-data-path, ...); None: one for all, or generated data.
    blend_per_split: OfEach[Blend | None] | None
    #: Samples asked for, per split; None: one epoch.
    sizes: OfEach[int | None]
    #: What was built, per split; None: nothing.
    splits: OfEach[SplitRecord | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderRecord:
    """The record in a checkpoint: all builders of the data provider, in the order in which it runs them."""

    #: Version of megatron-core that built first.
    megatron: str
    #: Samples trained when the record began; the order before that is unproven.
    since: int
    builders: tuple[BuilderRecord, ...]
    #: Differences that a user has ever accepted, in words.
    accepted: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def digest(self) -> str:
        """16 hex digits over everything."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.to_dict(), sort_keys=True).encode())

    def to_state(self, samples: int) -> OpaqueState:
        """The record as the state of a run that has trained ``samples`` samples."""
        return OpaqueState(kind="order", samples=samples, digest=self.digest(), content=self.to_dict())

    @classmethod
    def from_state(cls, state: DataState) -> OrderRecord:
        """Read a state that `to_state` made.

        Raises:
            StateError: a state of another kind, or a field is missing or has the wrong type.
        """
        data = state.content if isinstance(state, OpaqueState) and state.kind == "order" else {}
        try:
            record: OrderRecord = read(cls, data, "the record")
            return record
        except ConfigError as error:
            raise StateError.misshapen(
                "the recorded order of Megatron's datasets",
                error,
                "the fields that the guard records",
                at=f"a state of kind {state.kind}",
                action="load an older checkpoint with --ckpt-step N",
            ) from error


# What a builder is asked to build, read from attributes whose names have been the same since megatron-core 0.8


#: Fields of Megatron's dataset config that affect the order or the samples, with the flag for each.
FLAGS = {
    "random_seed": "--seed",
    "sequence_length": "--seq-length",
    "split": "--split",
    "reset_position_ids": "--reset-position-ids",
    "reset_attention_mask": "--reset-attention-mask",
    "eod_mask_loss": "--eod-mask-loss",
    "add_extra_token_to_sequence": None,
    "drop_last_partial_validation_sequence": None,
    "multiple_validation_sets": "--multiple-validation-sets",
    "inter_document_masking": "--dataloader-inter-document-masking",
    "fim_rate": "--fim-rate",
    "fim_spm_rate": "--fim-spm-rate",
    "fim_split_sample": "--fim-split-sample",
    "fim_fragment_rate": "--fim-fragment-rate",
    "fim_no_prefix": "--fim-no-prefix",
    "masking_probability": "--mask-prob",
    "short_sequence_probability": "--short-seq-prob",
    "masking_max_ngram": None,
    "masking_do_full_word": None,
    "masking_do_permutation": None,
    "masking_use_longer_ngrams": None,
    "masking_use_geometric_distribution": None,
    "classification_head": None,
    "sequence_length_encoder": "--encoder-seq-length",
    "sequence_length_decoder": "--decoder-seq-length",
}
#: Tokenizer properties that affect the samples.
_TOKENIZER = ("eod", "pad", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The datasets that a builder is asked for."""

    #: The dataset class.
    cls: Any
    settings: dict[str, Any]
    #: One blend for all splits; None: one per split, or generated data.
    blend: Blend | None
    blend_per_split: tuple[Blend | None, ...] | None
    #: Samples asked for, per split; None: one epoch.
    sizes: tuple[int | None, ...]
    #: Shares of the documents, per split; None if the split is not built. The whole of each file if blends are per
    #: split.
    shares: tuple[tuple[float, float] | None, ...]

    @property
    def dataset(self) -> str:
        """Name of the dataset class."""
        return str(self.cls.__name__)

    def blend_of(self, split: int) -> Blend | None:
        """The blend of a split; None if not built, or generated."""
        if self.blend_per_split is not None:
            return self.blend_per_split[split]
        return self.blend if self.shares[split] is not None else None

    @classmethod
    def of(cls, builder: Any) -> Request:
        """Read a builder. Raises AttributeError, TypeError or ValueError if it is of another kind."""
        config = builder.config
        sizes = tuple(None if size is None else int(size) for size in builder.sizes)
        per_split = config.blend_per_split if config.blend_per_split and any(config.blend_per_split) else None
        shares: tuple[tuple[float, float] | None, ...]
        if per_split is not None:
            shares = tuple(None if blend is None else (0.0, 1.0) for blend in per_split)
        else:
            shares = tuple(
                None if share is None else (float(share[0]), float(share[1])) for share in config.split_matrix
            )
        if len(sizes) != 3 or len(shares) != 3:
            raise ValueError(f"{len(sizes)} sizes and {len(shares)} splits instead of three")
        return cls(
            cls=builder.cls,
            settings=_settings(config),
            blend=_exact(config.blend) if config.blend else None,
            blend_per_split=None if per_split is None else tuple(_exact(blend) for blend in per_split),
            sizes=sizes,
            shares=shares,
        )


def _exact(blend: Sequence[Any] | None) -> Blend | None:
    if blend is None:
        return None
    paths, weights = blend
    return tuple(str(p) for p in paths), None if weights is None else tuple(float(w).hex() for w in weights)


def _settings(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FLAGS:
        value = getattr(config, name, _ABSENT)
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    for name in _TOKENIZER:
        try:
            value = getattr(config.tokenizer, name)
        except Exception:  # noqa: BLE001  a tokenizer may lack any of them, and says so in its own way
            continue
        if isinstance(value, int):
            found[f"tokenizer.{name}"] = int(value)
    return found


_ABSENT = object()


Array = npt.NDArray[Any]


#: Entries hashed at once: 8 MB after conversion.
_CHUNK = 1 << 20


#: Attributes of a dataset that are not an index: what it was given, and what it caches.
_NO_INDEX = frozenset({"indices", "cached_attention_mask", "cached_loss_mask", "cached_position_ids"})


#: Digests of files, and of arrays in memory (a built index is never written to).
_memo: dict[tuple[object, ...], str] = {}


_held: dict[int, tuple[weakref.ref[Array], str]] = {}


def array_digest(array: Array, what: str) -> str:
    """16 hex digits over the shape and the values, each as a little-endian int64.

    Hashes 10^8 entries in under a second if they are in memory, and shows progress if it takes longer. An array, or an
    unchanged file, is hashed only once.

    Args:
        array: integers of any shape; may be memory-mapped.
        what: its name in the progress display.
    """
    key = _file_key(getattr(array, "filename", None), array.shape)
    if key is not None and key in _memo:
        return _memo[key]
    held = _held.get(id(array))
    if held is not None and held[0]() is array:
        return held[1]
    hasher = xxhash.xxh3_64(repr(array.shape).encode())
    with progress(f"hash {what}", array.size, "entries") as advance:
        for chunk in _chunks(array):
            hasher.update(np.ascontiguousarray(chunk, "<i8").data)
            advance(chunk.size)
    digest = hasher.hexdigest()
    if key is not None:
        _memo[key] = digest
    else:
        _held[id(array)] = weakref.ref(array), digest
    return digest


def _chunks(array: Array) -> Iterator[Array]:
    rows = max(1, _CHUNK // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _file_key(path: Any, what: object) -> tuple[object, ...] | None:
    """The key of a digest of a part of a file, as the file is now; None: there is no such file."""
    if path is None or not Path(path).is_file():
        return None
    stat = Path(path).stat()
    return str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, what


def index_arrays(dataset: Any) -> dict[str, Array]:
    """The index arrays that a dataset built or loaded, by attribute name.

    ``GPTDataset`` has document_index, sample_index and shuffle_index; ``BlendedDataset`` dataset_index and
    dataset_sample_index; other classes have others, or none.
    """
    found: dict[str, Array] = {}
    held = getattr(dataset, "__dict__", {})
    for name, value in held.items():
        if isinstance(value, np.ndarray) and name not in _NO_INDEX and value.dtype.kind in "iub":
            found[name] = value
        elif value is None and isinstance(path := held.get(f"path_to_{name}"), str):
            # --dataloader-defer-npy-index-mmap: opened at the first access
            found[name] = np.load(path, mmap_mode="r")
    return found


#: Number of parts of a file to read, and the bytes of each: 1 MiB in all, for any size of corpus.
_PARTS = 64


_PART_BYTES = 16384


#: Bytes of the largest file without .idx that is read as a whole, which takes a few seconds; and those read at once.
_WHOLE, _BLOCK = 4 << 30, 8 << 20


class Corpus:
    """The ``.idx`` of a corpus on a local filesystem, counted the way a dataset class of Megatron does.

    For ``GPTDataset`` every sequence is a document; for ``BERTMaskedWordPieceDataset``, what the document boundaries
    enclose.
    """

    def __init__(self, path: str, dataset: Any) -> None:
        """Raises CorpusError if the .idx is damaged."""
        self.path = path
        idx = Path(path + ".idx")
        with idx.open("rb") as file:
            self.header = IndexHeader.unpack(file.read(HEADER_BYTES), idx, os.path.getsize(idx))
        header = self.header
        sequences = (header.sequences,)
        self.lengths = _map(idx, "<i4", header.lengths_at, sequences)
        self._pointers = _map(idx, "<i8", header.pointers_at, sequences)
        self._boundaries = _map(idx, "<i8", header.boundaries_at, (header.documents + 1,))
        try:
            stand_in = SimpleNamespace(sequence_lengths=self.lengths, document_indices=self._boundaries)
            self.documents = int(dataset.numel_low_level_dataset(stand_in))
        except Exception:  # noqa: BLE001  a class that wants more than the index is taken to count sequences
            self.documents = header.sequences

    @classmethod
    def at(cls, path: str | None, dataset: Any) -> Corpus | None:
        """The corpus at this path; None: generated data, or data without a local .idx."""
        return cls(path, dataset) if path is not None and os.path.isfile(path + ".idx") else None

    def bounds(self, share: tuple[float, float]) -> tuple[int, int]:
        """The documents [first, end) of a split, rounded as Megatron does."""
        return round(share[0] * float(self.documents)), round(share[1] * float(self.documents))

    def _sequences(self, documents: tuple[int, int]) -> tuple[int, int]:
        if self.documents == self.header.sequences:
            return documents
        first, end = documents
        return int(self._boundaries[first]), int(self._boundaries[end])

    def tokens(self, documents: tuple[int, int]) -> int:
        """Number of tokens in the documents [first, end)."""
        first, end = self._sequences(documents)
        return int(self.lengths[first:end].sum(dtype=np.int64))

    def is_empty(self, documents: tuple[int, int]) -> bool:
        """Whether the documents [first, end) have no tokens. Stops reading at the first token."""
        first, end = self._sequences(documents)
        return not any(self.lengths[at : min(at + 4096, end)].any() for at in range(first, end, 4096))

    def identity(self, documents: tuple[int, int]) -> tuple[str, str | None]:
        """Hashes of the lengths of the documents [first, end), and of their tokens (None: no local .bin)."""
        first, end = self._sequences(documents)
        lengths = array_digest(self.lengths[first:end], f"lengths of {self.path}")
        return lengths, self._token_digest(first, end)

    def _token_digest(self, first: int, end: int) -> str | None:
        if not os.path.isfile(self.path + ".bin") or first >= end:
            return None
        start = int(self._pointers[first])
        stop = int(self._pointers[end - 1]) + int(self.lengths[end - 1]) * self.header.dtype.itemsize
        hasher = xxhash.xxh3_64(f"{self.header.dtype.str} {stop - start}".encode())
        _sample(hasher, self.path + ".bin", start, stop)
        return hasher.hexdigest()


def contents_of(path: str | None, size: int | None = None) -> tuple[int, str] | None:
    """The size in bytes of a file without .idx, and a hash of all its bytes; of parts, if there are more than `_WHOLE`.
    An unchanged file is hashed only once.

    Bytes that are appended change nothing if the size before is passed.

    Args:
        path: of a corpus; None: generated data.
        size: take only so many bytes from the start; None: all.

    Returns:
        None if there is no such file, or it has an .idx.
    """
    if path is None or not os.path.isfile(path) or os.path.isfile(path + ".idx"):
        return None
    found = os.path.getsize(path)
    size = found if size is None else min(size, found)
    key = _file_key(path, size)
    if key is not None and key in _memo:
        return size, _memo[key]
    hasher = xxhash.xxh3_64()
    if size > _WHOLE:
        _sample(hasher, path, 0, size)
    else:
        with open(path, "rb") as file, progress(f"hash {path}", size, "bytes") as advance:
            while block := file.read(min(_BLOCK, size - file.tell())):
                hasher.update(block)
                advance(len(block))
    digest = hasher.hexdigest()
    if key is not None:
        _memo[key] = digest
    return size, digest


def _sample(hasher: xxhash.xxh3_64, path: str, start: int, stop: int) -> None:
    """Add parts of the bytes [start, stop) of a file: evenly spread, the first at the start, the last at the end."""
    with open(path, "rb") as file:
        for at in np.linspace(start, max(start, stop - _PART_BYTES), _PARTS).astype(np.int64):
            file.seek(int(at))
            hasher.update(file.read(min(_PART_BYTES, stop - int(at))))
            if stop - start <= _PART_BYTES:
                break


def _map(idx: Path, dtype: str, offset: int, shape: tuple[int]) -> Any:
    # An empty range cannot be mapped.
    return np.memmap(idx, dtype, "r", offset, shape) if shape[0] else np.zeros(0, dtype)
