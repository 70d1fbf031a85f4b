"""Corpora for the tests, written byte by byte: independent of our own writer and of Megatron's."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_corpus(
    prefix: Path,
    documents: Sequence[Sequence[npt.ArrayLike]],
    dtype: str = "int32",
    modes: Sequence[int] | None = None,
) -> Path:
    """Documents, each a list of sequences of tokens, as Megatron's format says."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = np.zeros(len(sequences), "<i8")
    if len(sequences):
        pointers[1:] = np.cumsum(lengths[:-1].astype(np.int64) * np.dtype(dtype).itemsize)
    boundaries = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(boundaries))
    body = lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    tail = b"" if modes is None else np.asarray(modes, np.int8).tobytes()
    Path(f"{prefix}.idx").write_bytes(header + body + tail)
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    return prefix


def simple_corpus(prefix: Path, lengths: Sequence[int], dtype: str = "int32") -> Path:
    """One sequence a document; token k of document d is (10 d + k) % 100."""
    return write_corpus(prefix, [[[(10 * d + k) % 100 for k in range(n)]] for d, n in enumerate(lengths)], dtype)


def progressions(
    prefix: Path, documents: int, seed: int, *, lengths: tuple[int, int], strides: tuple[int, int], vocabulary: int
) -> Path:
    """Arithmetic progressions of uint16 tokens, of random length and stride (from, to): easy to learn."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(*lengths, documents)
    starts, steps = rng.integers(0, vocabulary, documents), rng.integers(*strides, documents)
    tokens = [(a + b * np.arange(n)) % vocabulary for a, b, n in zip(starts, steps, sizes, strict=True)]
    return write_corpus(prefix, [[document] for document in tokens], "uint16")


def write_spans(prefix: Path, lengths: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]]) -> Path:
    """The .spans of documents of these lengths, as `megaresume.data.spans` says."""
    flat = [number for document in spans for span in document for number in span]
    bounds = np.cumsum([0, *(len(document) for document in spans)]).tolist()
    body = struct.pack(f"<{len(bounds)}q", *bounds) + struct.pack(f"<{len(flat)}i", *flat)
    trained = sum(max(b - a, 0) for document in spans for a, b in document)
    numbers = (1, len(spans), len(flat) // 2, sum(lengths), trained, xxhash.xxh3_64_intdigest(body))
    path = Path(f"{prefix}.spans")
    path.write_bytes(b"MGRSPANS" + struct.pack("<6Q", *numbers) + body)
    return path
