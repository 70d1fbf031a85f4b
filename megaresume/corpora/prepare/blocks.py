"""Which blocks have no part yet, and encoding them: here, or in worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing

from megaresume.corpora.prepare.documents import Block, BlockReader, TextUnit
from megaresume.corpora.prepare.encode import BlockSpec, Encoder, Part, PartFiles, encode_in_worker, start_worker
from megaresume.corpora.prepare.inputs import InputFile
from megaresume.corpora.prepare.stretches import Stretch
from megaresume.corpora.prepare.workers import run_in_processes
from megaresume.stream.progress import Progress, progress


def make_parts(
    files: Sequence[InputFile],
    text_unit: TextUnit,
    size: int,
    stretches: Sequence[Stretch],
    spec: BlockSpec,
    workers: int,
) -> tuple[dict[str, Part], int]:
    """All parts of some stretches by their names, in order, and how many of them were there already.

    Args:
        files: the input.
        text_unit: what a document is in a text file.
        size: bytes a block holds at least.
        stretches: what to make.
        spec: how.
        workers: processes.

    Raises:
        CorpusError: damaged input.
        SetupError: a part cannot be written, or a worker died.
    """
    parts: dict[str, Part] = {}
    made = 0
    with progress("tokenizing", sum(stretch.size for stretch in stretches), "B") as bar:
        work = (
            item
            for stretch in stretches
            for item in _blocks_to_do(BlockReader(files, text_unit, size, stretch.stop), stretch, spec, parts, bar)
        )
        if workers == 1:
            encoder: Encoder | None = None
            for name, block in work:
                encoder = encoder or Encoder(spec)
                parts[name] = encoder.encode(name, block)
                bar.update(block.raw_bytes)
                made += 1
        else:
            made = _encode_in_processes(work, parts, spec, workers, bar)
    return dict(sorted(parts.items())), len(parts) - made


def _blocks_to_do(
    reader: BlockReader, stretch: Stretch, spec: BlockSpec, parts: dict[str, Part], bar: Progress
) -> Iterator[tuple[str, Block]]:
    """Blocks that have no part yet; the parts that are there are added to ``parts``."""
    parts_files = PartFiles(spec.prefix)
    position, index = stretch.start, 0
    with closing(reader):
        while True:
            name = stretch.name(index)
            part = parts_files.find_part(name)
            if part is not None:
                parts[name] = part
                position = part.end
                bar.update(part.raw_bytes)
            else:
                block = reader.read(position if index else reader.with_line(position))
                if block is None:
                    return
                position = block.end
                yield name, block
            index += 1


def _encode_in_processes(
    work: Iterator[tuple[str, Block]], parts: dict[str, Part], spec: BlockSpec, workers: int, bar: Progress
) -> int:
    """Encode by worker processes; returns the number of blocks encoded. Errors come in the order of the input."""
    names: deque[tuple[str, int]] = deque()
    count = 0

    def items() -> Iterator[tuple[str, Block]]:
        nonlocal count
        for name, block in work:
            names.append((name, block.raw_bytes))
            count += 1
            yield name, block

    def done(part: Part) -> None:
        name, raw_bytes = names.popleft()
        parts[name] = part
        bar.update(raw_bytes)

    run_in_processes(items(), encode_in_worker, done, workers=workers, initializer=start_worker, spec=spec)
    return count
