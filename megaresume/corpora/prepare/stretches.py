"""The input cut into stretches of about equal size, one for each machine of ``--part K/N``; without it there is one.

    files   |---- a.jsonl ----|-- b.jsonl.gz --|-- c.jsonl --|
    N = 3   |---- 1 ----|----------- 2 --------|----- 3 -----|

A stretch is a function of the files and of N alone. It starts with a file, or with a line of one that can be read from
the middle on. Its blocks follow from where it starts, so that no machine needs to know what the others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaresume.corpora.prepare.documents import MAX_DOCUMENT_BYTES, Position, TextUnit, unit_of
from megaresume.corpora.prepare.inputs import InputFile, InputStream
from megaresume.stream.errors import UsageError

#: machines, as names have five digits.
MOST = 99_999


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What one machine makes."""

    #: from 1, of how many.
    number: int
    of: int
    #: where its first block starts; ``line`` is not counted yet.
    start: Position
    #: where the next stretch starts.
    stop: Position
    #: bytes on disk (about).
    size: int

    @property
    def directory(self) -> str:
        """Of its blocks, in the directory of the whole prepare."""
        return "" if self.of == 1 else f"{self.number:05d}-of-{self.of:05d}"

    def name(self, index: int) -> str:
        """Of a block; the order of the names is the order of the input."""
        block = f"part-{index:08d}"
        return block if self.of == 1 else f"{self.directory}/{block}"


def cut(files: Sequence[InputFile], text_unit: TextUnit, of: int) -> list[Stretch]:
    """All stretches, in order; some are empty if there is too little to cut.

    Args:
        files: the input.
        text_unit: what a document is in a text file.
        of: how many.

    Raises:
        CorpusError: a file is gone, or changed.
    """
    total = sum(file.size for file in files)
    starts = [Position(), *(_start(files, text_unit, total * k // of) for k in range(1, of)), Position(file=len(files))]
    return [Stretch(number=k + 1, of=of, start=starts[k], stop=starts[k + 1], size=total // of) for k in range(of)]


def _start(files: Sequence[InputFile], text_unit: TextUnit, target: int) -> Position:
    """Where a stretch can start, close to a byte of the whole input; in the order of the bytes."""
    for number, file in enumerate(files):
        if target <= 0:
            return Position(file=number)
        if target < file.size:
            if file.compressed or unit_of(file, text_unit) not in ("jsonl", "line"):
                return Position(file=number if 2 * target < file.size else number + 1)
            stream = InputStream(file, target - 1)
            try:
                offset = target - 1 + len(stream.readline(MAX_DOCUMENT_BYTES + 1))
            finally:
                stream.close()
            return Position(file=number, offset=offset) if offset < file.size else Position(file=number + 1)
        target -= file.size
    return Position(file=len(files))


def check_part(part: tuple[int, int]) -> None:
    """Refuse a part that there cannot be.

    Raises:
        UsageError: not 1 <= K <= N.
    """
    number, of = part
    if not 1 <= number <= of <= MOST:
        raise UsageError(
            "bad --part",
            found=f"{number}/{of}",
            expected=f"K/N with K from 1 to N, N at most {MOST}",
            action="for a Slurm array: --array=1-N and --part $SLURM_ARRAY_TASK_ID/N",
        )
