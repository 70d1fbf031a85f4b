"""From a state to the first sample, over a billion documents, wherever the position."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import gpt
from benchmarks.corpora import SEQ_LENGTH, WEIGHTS, config
from benchmarks.lengths import LengthsOnDisk, open_lengths
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, wall
from megaresume.batches.assemble import Assembler, make_batch
from megaresume.batches.batch import Batch
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

#: Where the run was killed, in epochs over all documents.
POSITIONS = {"at the start": 0.0, "in mid-epoch": 0.5, "deep in the eighth epoch": 7.5}
MOST_SECONDS = 0.05


def rows(setup: Setup) -> Iterator[Row]:
    """With lengths in memory and with lengths on disk; then a whole new process; against Megatron's index."""
    sizes = setup.sizes
    states = {
        where: [_state(setup.lengths, epochs, r) for r in range(sizes.repetitions + 1)]
        for where, epochs in POSITIONS.items()
    }
    index = _megatron_index(setup)
    scale = sizes.most_documents / sizes.index_documents
    # All from memory first: what comes after drops the file from it.
    for what, cold in (("index in memory", False), ("index on disk", True)):
        for where, texts in states.items():
            seconds = median(_resumed(setup.lengths, texts, cold=cold))
            yield Row(
                what=f"resume {where}, {sizes.most_documents:,} documents, {what}",
                ours=seconds * 1e3,
                unit="ms",
                baseline=index["build"] * scale * 1e3,
                against=f"GPTDataset builds its index: {sizes.index_documents:,} documents x {scale:.0f}",
                ratio=index["build"] * scale / seconds,
                must="< 50 ms",
                holds=seconds < MOST_SECONDS,
            )
    yield Row(
        what=f"GPTDataset where its index is there already, {sizes.index_documents:,} documents",
        ours=index["load"] * 1e3,
        unit="ms",
    )
    yield _process(setup, states["deep in the eighth epoch"][0])


def resume(lengths: Path, text: str) -> Batch:
    """What a restarted process does once its modules are loaded: open, restore, plan, read one sample."""
    sources = open_lengths(lengths)
    stream = Stream(config("best_fit"), sources, state=StreamState.from_json(text))
    assembler = Assembler(sources, seq_length=stream.config.seq_length)
    return make_batch(stream.plan(stream.start, stream.start + 1), assembler)


def _resumed(lengths: Path, texts: list[str], *, cold: bool) -> list[float]:
    resume(lengths, texts[0])
    seconds = []
    for text in texts[1:]:
        if cold:
            for path in lengths.parent.iterdir():
                _forget(path)
        begin = wall()
        resume(lengths, text)
        seconds.append(wall() - begin)
    return seconds


def _forget(path: Path) -> None:
    """Drop a file that nobody has mapped from memory, where the system lets us."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _state(lengths: Path, epochs: float, repetition: int) -> str:
    """The state of a run that went so far, each time a little further, so that it meets pages of the index anew."""
    sources = open_lengths(lengths)
    stream = Stream(config("best_fit"), sources)
    if epochs:
        stream.restore(_after(stream, sources, epochs + repetition / 1000))
    return stream.state_at(stream.start + 300 + repetition).to_json()


def _after(stream: Stream, sources: list[LengthsOnDisk], epochs: float) -> StreamState:
    """A state after so many epochs' tokens, made up: all documents of mean length, and nothing in open bins."""
    start = stream.state_at(0)
    total = int(epochs * 600 * sum(len(source) for source in sources))
    cursors = {}
    for name, share in WEIGHTS.items():
        position = int(total * share) // 600
        before = start.sources[name]
        cursors[name] = before._replace(
            position=position,
            epoch=position // before.size,
            documents=position,
            tokens=600 * position,
            drawn_in_stage=600 * position,
        )
    return start.replace(
        samples=total // SEQ_LENGTH,
        documents=sum(c.documents for c in cursors.values()),
        tokens=sum(c.tokens for c in cursors.values()),
        sources=cursors,
    )


def _megatron_index(setup: Setup) -> dict[str, float]:
    """Seconds that `GPTDataset` takes without and with the indexes of an earlier run."""
    paths = setup.index_corpora
    num_samples = setup.sizes.index_documents * 600 // SEQ_LENGTH * 9 // 10
    gpt.forget_index(paths)
    seconds = interleaved(
        {
            "build": lambda _: (gpt.forget_index(paths), gpt.build(paths, num_samples)),
            "load": lambda _: gpt.build(paths, num_samples),
        },
        setup.sizes.slow_repetitions,
        clock=wall,
    )
    gpt.forget_index(paths)
    return {name: median(values) for name, values in seconds.items()}


def _process(setup: Setup, text: str) -> Row:
    state = setup.directory / "state.json"
    state.write_text(text)

    def run(*arguments: str) -> Callable[[int], object]:
        return lambda _: subprocess.run([sys.executable, *arguments], check=True)

    compared = {
        "ours": run("-m", "benchmarks.resume", str(setup.lengths), str(state)),
        "imports": run("-c", "import torch, numba"),
    }
    seconds = interleaved(compared, setup.sizes.slow_repetitions, clock=wall, warm_up=False)
    return Row(
        what="resume, whole process: start, imports, compiled loops from their cache, first sample",
        ours=median(seconds["ours"]),
        unit="s",
        baseline=median(seconds["imports"]),
        against="python -c 'import torch, numba'",
    )


if __name__ == "__main__":
    resume(Path(sys.argv[1]), Path(sys.argv[2]).read_text())
