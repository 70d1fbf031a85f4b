"""Synthetic corpora: log-normal document lengths with a mean of 600 tokens, in Megatron's ``.bin/.idx`` format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.data.layout import IndexHeader, bin_path, idx_path
from megaresume.stream.config import StreamConfig

#: Tokens a sample.
SEQ_LENGTH = 4096
#: Name of each source -> its share of the tokens, and of the documents.
WEIGHTS = {"web": 0.5, "code": 0.3, "books": 0.2}
MEAN_TOKENS, SIGMA = 600, 1.0
#: Larger than 16 bits hold, as the vocabularies of today's models are: tokens are int32.
VOCABULARY = 128_000
#: The last token of every document, as Megatron's ``preprocess_data.py --append-eod`` writes it.
END_OF_DOCUMENT = 0
#: Tokens written at a time.
CHUNK = 1 << 22


def document_lengths(num_documents: int, seed: int) -> npt.NDArray[np.int32]:
    """Tokens of each document: int32[num_documents], log-normal, mean 600, median 364; never 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, num_documents)
    return np.maximum(lengths, 1).astype(np.int32)


def write_corpus(prefix: Path, lengths: npt.NDArray[np.int32], *, sparse: bool = False) -> Path:
    """Write a corpus of one sequence a document.

    Args:
        prefix: path without .bin and .idx.
        lengths: int32[documents], tokens of each.
        sparse: leave the .bin a hole of the right size (zeros that take no disk), for what reads lengths alone.
    """
    num, num_tokens = len(lengths), int(lengths.sum(dtype=np.int64))
    ends = np.cumsum(lengths, dtype=np.int64) * 4
    with open(idx_path(prefix), "wb") as idx:
        idx.write(IndexHeader(dtype=np.dtype("<i4"), sequences=num, documents=num).pack())
        lengths.astype("<i4").tofile(idx)
        (ends - lengths * np.int64(4)).tofile(idx)
        np.arange(num + 1, dtype="<i8").tofile(idx)
    with open(bin_path(prefix), "wb") as bin_:
        if sparse:
            bin_.truncate(4 * num_tokens)
        else:
            rng = np.random.default_rng(num)
            last = ends // 4 - 1
            for first in range(0, num_tokens, CHUNK):
                tokens = rng.integers(1, VOCABULARY, min(CHUNK, num_tokens - first), np.int32)
                a, b = np.searchsorted(last, [first, first + len(tokens)])
                tokens[last[a:b] - first] = END_OF_DOCUMENT
                tokens.tofile(bin_)
    return prefix


def write_corpora(directory: Path, num_documents: int, *, sparse: bool = False) -> dict[str, Path]:
    """The three sources, ``num_documents`` in all: name -> prefix."""
    directory.mkdir(parents=True, exist_ok=True)
    return {
        name: write_corpus(directory / name, document_lengths(int(num_documents * share), seed), sparse=sparse)
        for seed, (name, share) in enumerate(WEIGHTS.items())
    }


def config(packing: str, paths: dict[str, Path] | None = None, *, sources: Sequence[str] = ()) -> StreamConfig:
    """The data config over the three sources, or over others of equal weights."""
    weights: dict[str, float] = dict.fromkeys(sources, 1.0) if sources else WEIGHTS
    entries: dict[str, dict[str, Any]] = {name: {"weight": weight} for name, weight in weights.items()}
    for name, path in (paths or {}).items():
        entries[name]["path"] = str(path)
    return StreamConfig.from_dict({"seed": 1234, "seq_length": SEQ_LENGTH, "packing": packing, "sources": entries})
