"""How many documents a global batch holds, beside megatron-core's `GPTDataset`, which shuffles what it cuts.

The *effective number of documents* of a batch is 1 / sum(p**2), p being a document's share of its tokens: 100 documents
of equal shares make 100, and one that fills half of the batch makes less than 4, whatever else is in it.

While no document meets itself in a batch, sum(p**2) is also what the model can look back on, per token: documents that
are never cut lower the first as much as they raise the second. So a packing of whole documents is held to the most
that it can reach, which is what batches of pieces drawn at random have.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import gpt
from benchmarks.corpora import write_corpus
from benchmarks.setup import Setup
from benchmarks.table import Row
from megaresume.data.split import IndexedSource
from megaresume.stream.config import StreamConfig
from megaresume.stream.kernel import DOCUMENT, LENGTH
from megaresume.stream.stream import Stream

BATCH = 256
MODES = ("split", "best_fit")
LEAST, MOST = 0.95, 1.1

Int64Array = npt.NDArray[np.int64]


class Corpus(NamedTuple):
    """One of the four."""

    name: str
    seq_length: int
    #: number of documents -> tokens of each, int64[n].
    lengths: Callable[[int], Int64Array]
    documents: int


class Segments(NamedTuple):
    """Runs of tokens in the order of the samples, int64[n] each."""

    sample: Int64Array
    document: Int64Array
    length: Int64Array


class Figures(NamedTuple):
    """Means over the batches."""

    documents: float
    largest: float


def rows(setup: Setup) -> Iterator[Row]:
    """Books, repositories and two kinds of web pages, in both packings that cut documents."""
    for corpus in CORPORA:
        directory = setup.directory / f"diversity-{corpus.name}"
        directory.mkdir()
        lengths = corpus.lengths(max(corpus.documents * setup.sizes.packed_documents // 200_000, 40))
        path = write_corpus(directory / "corpus", lengths.astype(np.int32), sparse=True)
        num_samples = max(int(lengths.sum()) // corpus.seq_length * 9 // 10 // BATCH, 1) * BATCH
        theirs = figures(of_megatron(path, corpus.seq_length, num_samples), num_samples)
        for mode in MODES:
            ours = figures(of_stream(path, corpus.seq_length, mode, num_samples), num_samples)
            most = ours.documents if mode == "split" else whole(lengths, corpus.seq_length)
            yield from _rows(corpus, mode, ours, theirs, most)
        shutil.rmtree(directory)


def _rows(corpus: Corpus, mode: str, ours: Figures, theirs: Figures, most: float) -> Iterator[Row]:
    where = f"in a batch of {BATCH}, {corpus.name}, {mode}"
    # Whole documents cannot do better than `most`, whoever packs them.
    bound = mode == "best_fit" and most < LEAST * theirs.documents
    least = LEAST * (most if bound else theirs.documents)
    yield Row(
        what=f"documents {where}",
        ours=ours.documents,
        unit="",
        baseline=theirs.documents,
        against=f"GPTDataset; {most:,.0f} at most with whole documents" if bound else "GPTDataset",
        ratio=ours.documents / theirs.documents,
        must=f">= {LEAST} of the most" if bound else f">= {LEAST} x",
        holds=ours.documents >= least,
    )
    yield Row(
        what=f"the largest document {where}",
        ours=100 * ours.largest,
        unit="%",
        baseline=100 * theirs.largest,
        against="GPTDataset",
        must=f"<= {MOST} x",
        holds=ours.largest <= MOST * theirs.largest,
    )


def figures(segments: Segments, num_samples: int) -> Figures:
    """Of the whole batches in so many samples."""
    num = num_samples // BATCH
    batch = segments.sample // BATCH
    keep = batch < num
    size = int(segments.document.max()) + 1
    keys, which = np.unique(batch[keep] * size + segments.document[keep], return_inverse=True)
    tokens = np.bincount(which, segments.length[keep])
    batches = keys // size
    total, squares = np.bincount(batches, tokens, num), np.bincount(batches, tokens**2, num)
    largest = np.zeros(num)
    np.maximum.at(largest, batches, tokens)
    return Figures(float((total**2 / squares).mean()), float((largest / total).mean()))


def of_stream(path: Path, seq_length: int, mode: str, num_samples: int) -> Segments:
    """What our samples hold."""
    config = StreamConfig.from_dict({"seq_length": seq_length, "packing": mode, "sources": {"corpus": {}}})
    plan = Stream(config, [IndexedSource(path)]).plan(0, num_samples)
    samples = np.repeat(np.arange(num_samples), np.diff(plan.starts))
    return Segments(samples, plan.table[:, DOCUMENT], plan.table[:, LENGTH])


def of_megatron(path: Path, seq_length: int, num_samples: int) -> Segments:
    """What those of `GPTDataset` hold, read from the indexes that it builds."""
    dataset = gpt.build_one(path, seq_length, num_samples)
    lengths = dataset.dataset.sequence_lengths
    sample_index = dataset.sample_index.astype(np.int64)
    before = np.concatenate([[0], np.cumsum(lengths[dataset.document_index], dtype=np.int64)])
    # Where each sample begins in all documents, one after another; every cut is another one's beginning.
    begins = before[sample_index[:, 0]] + sample_index[:, 1]
    cuts = np.union1d(before[before < begins[-1]], begins)
    begin, length = cuts[:-1], np.diff(cuts)
    document = dataset.document_index[before.searchsorted(begin, side="right") - 1]
    cut = begins.searchsorted(begin, side="right") - 1
    place = np.empty(len(begins) - 1, np.int64)
    place[dataset.shuffle_index[: len(place)]] = np.arange(len(place))
    return Segments(place[cut], document.astype(np.int64), length)


def whole(lengths: Int64Array, seq_length: int) -> float:
    """The most documents that a batch can hold if none that fits into a sample is cut: pieces drawn at random."""
    rng = np.random.default_rng(1)
    pieces = -(-lengths // seq_length)
    document = np.repeat(np.arange(len(lengths)), pieces)
    offset = seq_length * (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    length = np.minimum(lengths[document] - offset, seq_length)
    order = rng.permutation(len(document))
    sample = (np.cumsum(length[order]) - length[order]) // seq_length
    return figures(Segments(sample, document[order], length[order]), int(sample[-1])).documents


def _web(mean: float, sigma: float, longest: int) -> Callable[[int], Int64Array]:
    def lengths(num: int) -> Int64Array:
        drawn = np.random.default_rng(3).lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
        return np.clip(drawn, 1, longest).astype(np.int64)

    return lengths


CORPORA = (
    Corpus("books of 120k tokens", 4096, lambda num: np.full(num, 120_000), 2_000),
    Corpus("repositories of 1M tokens", 4096, lambda num: np.full(num, 1_000_000), 1_000),
    Corpus("heavy-tailed web", 2048, _web(1_800, 1.9, 2_000_000), 300_000),
    Corpus("plain web", 4096, _web(600, 1.0, 100_000), 400_000),
)
