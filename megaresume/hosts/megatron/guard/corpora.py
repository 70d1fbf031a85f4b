"""Corpora and their index arrays: what identifies them, and whether they hold enough.

Hashes of index arrays: by value, so that neither the dtype nor the version of Megatron that chose it matters.

What identifies the documents of a corpus: their lengths, and tokens drawn here and there. Never its path.

Splits without a token: Megatron adds up epochs of nothing forever, and the job hangs at its start.

How many samples a resumed run needs, where Megatron asks for too few.

Megatron asks for what a whole run of today's flags takes (``train_iters * global_batch_size``), and begins at
``consumed_train_samples``. A run that took larger global batches so far, or evaluated more often, would come to the
end of its datasets before the end of its steps, and die there with a bare ``StopIteration``.

What is asked for is raised by what was consumed beyond these flags, so nothing is added if nothing changed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.data.layout import HEADER_BYTES, IndexHeader, spans_path
from megaresume.hosts.megatron.arguments import schedule_from_args
from megaresume.hosts.megatron.guard.record import SPLITS, Request
from megaresume.stream.errors import ConfigError
from megaresume.stream.progress import progress

Array = npt.NDArray[Any]

#: entries hashed at once: 8 MB after the conversion.
_CHUNK = 1 << 20
#: what a dataset may hold that is not an index: what it was given, and what it keeps for speed.
_NO_INDEX = frozenset({"indices", "cached_attention_mask", "cached_loss_mask", "cached_position_ids"})
#: digests of files, and of arrays in memory (nobody writes to a built index).
_memo: dict[tuple[object, ...], str] = {}
_held: dict[int, tuple[weakref.ref[Array], str]] = {}


def array_digest(array: Array, what: str) -> str:
    """16 hex digits over the shape and the values, each as a little-endian int64.

    Hashes 10^8 entries in less than a second, if they are in memory; shows progress where it takes longer. An array,
    or a file that did not change, is not hashed twice.

    Args:
        array: integers, any shape; may be memory-mapped.
        what: named in the progress.
    """
    key = _file_key(array)
    if key is not None and key in _memo:
        return _memo[key]
    held = _held.get(id(array))
    if held is not None and held[0]() is array:
        return held[1]
    hasher = xxhash.xxh3_64(repr(array.shape).encode())
    with progress(f"hash {what}", array.size, "entries") as shown:
        for chunk in _chunks(array):
            hasher.update(np.ascontiguousarray(chunk, "<i8").data)
            shown.update(chunk.size)
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


def _file_key(array: Array) -> tuple[object, ...] | None:
    filename = getattr(array, "filename", None)
    if filename is None or not Path(filename).is_file():
        return None
    stat = Path(filename).stat()
    return str(filename), stat.st_ino, stat.st_size, stat.st_mtime_ns, array.shape


def index_arrays(dataset: Any) -> dict[str, Array]:
    """The index arrays that a dataset built or loaded, by the names of its attributes.

    ``GPTDataset`` has document_index, sample_index and shuffle_index; ``BlendedDataset`` dataset_index and
    dataset_sample_index; others have others, or none.
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


#: parts of the .bin that are read, and the size of each, in bytes: 1 MB in all, at any size of the corpus.
_PARTS = 64
_PART_BYTES = 16384


class Corpus:
    """The ``.idx`` of a corpus on a local filesystem, as a dataset class of Megatron counts it.

    ``GPTDataset`` takes every sequence for a document, ``BERTMaskedWordPieceDataset`` what the document boundaries
    enclose.
    """

    def __init__(self, path: str, dataset: Any) -> None:
        """Raises CorpusError: the .idx is damaged."""
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
        """The corpus of this path; None: generated data, or data that is not in a local .idx."""
        return cls(path, dataset) if path is not None and os.path.isfile(path + ".idx") else None

    def bounds(self, share: tuple[float, float]) -> tuple[int, int]:
        """The documents of a split, as Megatron rounds them."""
        return round(share[0] * float(self.documents)), round(share[1] * float(self.documents))

    def _sequences(self, documents: tuple[int, int]) -> tuple[int, int]:
        if self.documents == self.header.sequences:
            return documents
        first, end = documents
        return int(self._boundaries[first]), int(self._boundaries[end])

    def tokens(self, documents: tuple[int, int]) -> int:
        """Tokens of the documents [first, end)."""
        first, end = self._sequences(documents)
        return int(self.lengths[first:end].sum(dtype=np.int64))

    def is_empty(self, documents: tuple[int, int]) -> bool:
        """Whether the documents [first, end) hold no token. Looks at no more of them than it must."""
        first, end = self._sequences(documents)
        return not any(self.lengths[at : min(at + 4096, end)].any() for at in range(first, end, 4096))

    def identity(self, documents: tuple[int, int]) -> tuple[str, str | None]:
        """Hashes of lengths, and of tokens (None: no local .bin), of the documents [first, end), all there."""
        first, end = self._sequences(documents)
        lengths = array_digest(self.lengths[first:end], f"lengths of {self.path}")
        return lengths, self._token_digest(first, end)

    def _token_digest(self, first: int, end: int) -> str | None:
        if not os.path.isfile(self.path + ".bin") or first >= end:
            return None
        start = int(self._pointers[first])
        stop = int(self._pointers[end - 1]) + int(self.lengths[end - 1]) * self.header.dtype.itemsize
        hasher = xxhash.xxh3_64(f"{self.header.dtype.str} {stop - start}".encode())
        with open(self.path + ".bin", "rb") as file:
            # int: evenly spread, the first at the start, the last at the end
            for at in np.linspace(start, max(start, stop - _PART_BYTES), _PARTS).astype(np.int64):
                file.seek(int(at))
                hasher.update(file.read(min(_PART_BYTES, stop - int(at))))
                if stop - start <= _PART_BYTES:
                    break
        return hasher.hexdigest()


def _map(idx: Path, dtype: str, offset: int, shape: tuple[int]) -> Any:
    # An empty range cannot be mapped.
    return np.memmap(idx, dtype, "r", offset, shape) if shape[0] else np.zeros(0, dtype)


def refuse_spans(request: Request) -> None:
    """Raise a ConfigError for corpora that say which of their tokens are trained: Megatron's datasets do not ask."""
    blends = [blend for split in range(len(SPLITS)) if (blend := request.blend_of(split)) is not None]
    spans = [path for paths, _ in blends for path in paths if spans_path(Path(path)).is_file()]
    if spans:
        raise ConfigError(
            "Megatron's own datasets would train every token of conversations",
            found=f"{spans_path(Path(spans[0]))}, which says which tokens are trained",
            expected="corpora without spans, or the stream in the place of Megatron's datasets",
            action="pass --megaresume-data data.yaml with these corpora; or, if every token is meant to be trained, "
            "leave the .spans file out",
        )


def refuse_empty_splits(request: Request) -> None:
    """Raise a ConfigError that names the corpus and its split. Reads the indexes, so: on one rank."""
    if not hasattr(request.cls, "_build_document_sample_shuffle_indices"):
        return
    for split, (name, share, size) in enumerate(zip(SPLITS, request.shares, request.sizes, strict=True)):
        blend = request.blend_of(split)
        if share is None or size is None or blend is None:
            continue
        paths, weights = blend
        if weights is None and len(paths) > 1:
            continue  # one epoch of each: nothing is added up
        corpora = [corpus for path in paths if (corpus := Corpus.at(path, request.cls)) is not None]
        for corpus in corpora:
            if corpus.is_empty(corpus.bounds(share)):
                raise _empty(request, corpora, corpus, name, split, corpus.bounds(share))


def _empty(
    request: Request, corpora: Sequence[Corpus], corpus: Corpus, name: str, split: int, documents: tuple[int, int]
) -> ConfigError:
    cause, actions = "an empty corpus", [f"leave {corpus.path} out of the {name} set"]
    if request.blend_per_split is None:
        cause = f"--split {request.settings.get('split')} of a small corpus"
        wanted = [share is not None for share in request.shares]
        enough = _enough(corpora, wanted)
        if enough is not None:
            actions.insert(0, f"--split {enough} gives every set of every corpus some documents")
        if split > 0:
            shares = [f"{share[1] - share[0]:g}" if share is not None else "0" for share in request.shares]
            shares[split] = "0"
            actions.insert(-1, f"--split {','.join(shares)} does without a {name} set")
    return ConfigError(
        f"the {name} set of {corpus.path} has no tokens, and Megatron would loop for ever looking for some",
        found=f"documents {documents[0]}:{documents[1]} of {corpus.documents}",
        expected="at least one token in every set that is sampled",
        cause=cause,
        action="; or ".join(actions),
    )


def _enough(corpora: Sequence[Corpus], wanted: Sequence[bool]) -> str | None:
    """The value of --split with the smallest sets beside the first that leaves no set empty; None if there is none."""
    fewest = min(corpus.documents for corpus in corpora)
    for documents in range(1, min(fewest, 64)):
        parts = [fewest - documents * sum(wanted[1:]), documents * wanted[1], documents * wanted[2]]
        if parts[0] <= 0:
            return None
        ends = [sum(parts[: i + 1]) / fewest for i in range(3)]
        shares = [(end - part / fewest, end) for part, end in zip(parts, ends, strict=True) if part]
        if not any(corpus.is_empty(corpus.bounds(share)) for corpus in corpora for share in shares):
            return ",".join(map(str, parts))
    return None


def needed_sizes(args: Any, project: Any, asked: Sequence[int | None]) -> tuple[int | None, ...]:
    """Samples of the train, validation and test set that last until the end of the run.

    Args:
        args: Megatron's arguments, after a checkpoint was loaded.
        project: which Megatron; None: what is known from the arguments alone.
        asked: what a builder is asked for; None (one epoch) and 0 (no such set) stay.

    Raises:
        UsageError: a schedule of batch sizes that Megatron would refuse too.
    """
    # --skip-train evaluates from sample 0 on; the cyclic sampler goes round, and shuffles by the size.
    if getattr(args, "skip_train", False) or getattr(args, "dataloader_type", None) == "cyclic":
        return tuple(asked)
    extra = (_train(args, project), _valid(args), 0)
    return tuple(size + more if size else size for size, more in zip(asked, extra, strict=True))


def _train(args: Any, project: Any) -> int:
    # With --train-samples, Megatron-LM derives the number of iterations before the data is built, and counts them.
    iterations = getattr(args, "train_iters", None)
    if not iterations:
        return 0
    consumed, left = _number(args, "consumed_train_samples"), max(int(iterations) - _number(args, "iteration"), 0)
    planned = _number(args, "train_samples") or int(iterations) * int(args.global_batch_size)
    return max(schedule_from_args(args, project, consumed).after(consumed, left) - planned, 0)


def _valid(args: Any) -> int:
    interval, iterations = _number(args, "eval_interval"), _number(args, "train_iters")
    if not interval or not iterations:
        return 0
    passed = min(_number(args, "iteration"), iterations) // interval
    passed = max(passed - _number(args, "start_eval_at_iter") // interval, 0)
    size = _number(args, "eval_global_batch_size") or int(args.global_batch_size)
    return max(_number(args, "consumed_valid_samples") - passed * _number(args, "eval_iters") * size, 0)


def _number(args: Any, name: str) -> int:
    return int(getattr(args, name, None) or 0)
