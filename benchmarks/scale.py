"""What grows with the sources and with the documents of a run: processor time, memory, files looked at, pages read.

Each measured in a process of its own with few and with many sources, so that the difference is what one source adds.
Files are counted by strace, where that is installed.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import megaresume
from benchmarks.corpora import SEQ_LENGTH, document_lengths, write_corpus
from benchmarks.memory import anonymous_mb
from benchmarks.setup import Setup
from benchmarks.table import Row
from megaresume.data.layout import idx_path

#: sources of the two runs.
FEW, MANY = 100, 1000
#: documents of each source.
DOCUMENTS = 200
#: what a run does, as the lines it prints begin.
PHASES = ("open", "load", "step", "save")
#: samples of a step in which pages are counted.
STEP = 4096


def rows(setup: Setup) -> Iterator[Row]:
    """By source, then by document."""
    few, many = (10, 20) if setup.sizes.read_samples < 1000 else (FEW, MANY)
    sources = setup.directory / "sources"
    sources.mkdir()
    for i in range(many):
        write_corpus(sources / f"{i}", document_lengths(DOCUMENTS, seed=i))
    one, other = (_resumed(sources, count) for count in (few, many))
    for what, unit, factor in (
        *((f"{phase}: processor time", "us", 1e6) for phase in PHASES),
        ("memory", "KB", 1e3),
        ("state", "bytes", 1),
        ("files of corpora looked at in a start", "calls", 1),
        ("files of corpora opened in a start", "calls", 1),
    ):
        if what in one:
            ours = factor * (other[what] - one[what]) / (many - few)
            yield Row(what=f"{what}, a source", ours=max(ours, 0.0), unit=unit)
    yield from _pages(setup)


def _resumed(sources: Path, count: int) -> Counter[str]:
    """What a run over so many sources takes that continues from its second step."""
    save, trace = sources / f"run{count}", sources / f"trace{count}"
    command = [sys.executable, "-m", "benchmarks.scale", str(sources), str(count), str(save)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = Counter({what: float(value) for what, value in re.findall(r"^(.+) = (\S+)$", said, re.MULTILINE)})
    if shutil.which("strace"):
        subprocess.run(
            ["strace", "-f", "-qq", "-e", "trace=file", "-o", str(trace), *command],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        calls = re.findall(rf'(\w+)\([^"]*"{re.escape(str(sources))}/\d+\.', trace.read_text())
        found["files of corpora looked at in a start"] = sum(not call.startswith("open") for call in calls)
        found["files of corpora opened in a start"] = sum(call.startswith("open") for call in calls)
    return found


def _pages(setup: Setup) -> Iterator[Row]:
    """Pages of an index that the memory does not hold."""
    corpus = setup.directory / "large"
    write_corpus(corpus, document_lengths(setup.sizes.most_documents // 10, seed=1), sparse=True)
    for shuffle in ("documents", "blocks"):
        read = {}
        for how in ("page by page", "as it comes"):
            command = [sys.executable, "-m", "benchmarks.scale", str(corpus), shuffle, how]
            read[how] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        yield Row(
            what=f"read of a cold index in a step of {STEP:,} samples, shuffle: {shuffle}",
            ours=read["page by page"],
            unit="MB",
            baseline=read["as it comes"],
            against="with the system's own reading ahead",
            ratio=read["as it comes"] / max(read["page by page"], 1e-9),
        )


def run(sources: Path, count: int, save: Path) -> None:
    """A loop of a user's, from the start to a save."""
    config = {
        "seed": 1,
        "seq_length": SEQ_LENGTH,
        "packing": "best_fit",
        "sources": {f"s{i}": {"path": str(sources / f"{i}"), "weight": 1.0} for i in range(count)},
    }
    model = torch.nn.Embedding(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began, before = time.process_time(), anonymous_mb()

    def took(phase: str) -> None:
        nonlocal began
        print(f"{phase}: processor time = {time.process_time() - began}")
        began = time.process_time()

    stream = megaresume.open_stream(config)
    took("open")
    loader = megaresume.StreamLoader(stream, megaresume.BatchSchedule.constant(8), micro_batch_size=8)
    parts = {"model": model, "optimizer": optimizer}
    loop: Any = megaresume.attach(parts, loader, checkpoints=megaresume.Checkpoints(save_dir=save))
    loop.load()
    took("load")
    model(next(iter(loop))["tokens"] % 8).sum().backward()
    optimizer.step()
    loop.stepped()
    took("step")
    loop.save()
    took("save")
    print(f"memory = {anonymous_mb() - before}")
    print(f"state = {(save / 'megaresume' / f'step_{loop.step:07}.json').stat().st_size}")
    loop.close()


def read_pages(corpus: Path, shuffle: str, how: str) -> float:
    """MB that planning a step reads of an index that was dropped from the memory."""
    options: dict[str, Any] = {"path": str(corpus)} | ({} if shuffle == "documents" else {"shuffle": shuffle})
    config = {"seed": 1, "seq_length": SEQ_LENGTH, "packing": "best_fit", "sources": {"large": options}}
    megaresume.open_stream(config)  # leaves the list of long documents
    descriptor = os.open(idx_path(corpus), os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    stream = megaresume.open_stream(config)
    if how == "page by page":
        stream.sources[0].read_page_by_page()  # type: ignore[attr-defined]  # an index larger than the memory does it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    stream.plan(0, STEP)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * 512 / 1e6


if __name__ == "__main__":
    first, second, third = sys.argv[1:]
    if second.isdigit():
        run(Path(first), int(second), Path(third))
    else:
        print(read_pages(Path(first), second, third))
