"""Memory that planning takes, by the number of documents."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import gpt
from benchmarks.corpora import SEQ_LENGTH, config
from benchmarks.lengths import open_lengths
from benchmarks.setup import Setup
from benchmarks.table import Row
from megaresume.stream.stream import Stream

#: Parts of `Sizes.most_documents`.
PARTS = (1000, 10, 1)
#: Samples planned: more than a stream keeps.
NUM_SAMPLES, STEP = 100_000, 100
#: How much more a thousand times the documents may take.
MOST_GROWTH_MB = 4


def rows(setup: Setup) -> Iterator[Row]:
    """Each size in a process of its own, against the indexes that `GPTDataset` builds."""
    per_document = _megatron_bytes(setup) / setup.sizes.index_documents
    num_samples = min(NUM_SAMPLES, setup.sizes.most_documents // 60)
    least = 0.0
    for part in PARTS:
        num_documents = setup.sizes.most_documents // part
        command = [sys.executable, "-m", "benchmarks.memory", str(setup.lengths), str(num_documents), str(num_samples)]
        peak = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        least = least or peak
        yield Row(
            what=f"memory to plan {num_documents:,} documents",
            ours=peak,
            unit="MB",
            baseline=per_document * num_documents / 1e6,
            against=f"GPTDataset's indexes, {per_document:.1f} bytes a document",
            must="" if part == PARTS[0] else f"<= {MOST_GROWTH_MB} MB more than the first",
            holds=None if part == PARTS[0] else peak - least <= MOST_GROWTH_MB,
        )


def _megatron_bytes(setup: Setup) -> int:
    """Bytes of all the indexes of one epoch: document, sample and shuffle index, and the two of the blend."""
    blend = gpt.build(setup.index_corpora, setup.sizes.index_documents * 600 // SEQ_LENGTH * 9 // 10)
    gpt.forget_index(setup.index_corpora)
    arrays = [blend.dataset_index, blend.dataset_sample_index]
    for part in blend.datasets:
        arrays += [part.document_index, part.sample_index, part.shuffle_index]
    return sum(array.nbytes for array in arrays)


def anonymous_mb() -> float:
    """Memory of this process that is no file's, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) / 1e3


def peak(lengths: Path, num_documents: int, num_samples: int) -> float:
    """How much planning added at its highest, in MB."""
    # What is there without any document: the compiled loops, loaded.
    Stream(config("best_fit"), open_lengths(lengths, 1000)).plan(0, STEP)
    before = highest = anonymous_mb()
    stream = Stream(config("best_fit"), open_lengths(lengths, num_documents))
    for sample in range(0, num_samples, STEP):
        stream.plan(sample, sample + STEP)
        highest = max(highest, anonymous_mb())
    return highest - before


if __name__ == "__main__":
    print(peak(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
