"""Arrow files: their rows as JSON lines; and those of a dataset that Hugging Face's ``save_to_disk`` wrote.

What is damaged ends the run: unlike a row group of Parquet, a part of such a file does not say how many rows it had.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaresume.corpora.prepare.parquet import ROWS, TableLines, load_pyarrow
from megaresume.stream.errors import CorpusError, UsageError

_FILE = b"ARROW1"
#: how a stream ends that is whole; pyarrow reads one that was cut between two batches as if it were.
_END = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowLines(TableLines):
    """A stream of JSON lines of an Arrow file, in the file format or the stream format.

    Args:
        file: open for reading, seekable.
        size: bytes of it.

    Raises:
        SetupError: the library `pyarrow` is missing.
        pyarrow.ArrowException: it is no Arrow file, or it is damaged.
    """

    def __init__(self, file: Any, size: int) -> None:
        pyarrow = load_pyarrow()
        from pyarrow import ipc

        is_file = file.read(len(_FILE)) == _FILE
        if not is_file:
            file.seek(max(size - len(_END), 0))
            if file.read() != _END:
                raise pyarrow.ArrowInvalid("no end marker")
        file.seek(0)
        self._source = file
        source = pyarrow.PythonFile(file, mode="r")
        self._reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
        super().__init__(self._reader.schema, self._read(is_file))

    def raw_position(self) -> int:
        """Bytes of the file that were read (about)."""
        return int(self._source.tell())

    def _read(self, is_file: bool) -> Iterator[bytes]:
        reader = self._reader
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        for batch in batches:
            batch.validate(full=True)
            for start in range(0, batch.num_rows, ROWS):
                yield self.lines(batch.slice(start, ROWS).select(self.columns))


def saved_dataset(directory: Path) -> list[Path] | None:
    """The files of a dataset that ``save_to_disk`` wrote, in its order; None: the directory holds none.

    Raises:
        UsageError: several datasets.
        CorpusError: rows were selected or moved without being written; a file is missing.
    """
    if (directory / "dataset_dict.json").is_file():
        splits = json.loads((directory / "dataset_dict.json").read_bytes())["splits"]
        raise UsageError(
            f"{directory} holds several datasets",
            found=", ".join(splits),
            expected="one, as a directory with state.json",
            action=f"name it: {os.fspath(directory / splits[0])}",
        )
    if not ((state := directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()):
        return None
    said = json.loads(state.read_bytes())
    files = [directory / entry["filename"] for entry in said["_data_files"]]
    missing = [file.name for file in files if not file.is_file()]
    if said.get("_indices_files") or missing:
        raise CorpusError(
            f"{directory} is not a whole dataset",
            found=f"without {', '.join(missing)}" if missing else "rows that were selected and not written",
            expected="the files that state.json names, and no others",
            cause="an interrupted copy" if missing else "an old version of datasets",
            action="copy the directory again" if missing else "load it and write it again: save_to_disk",
        )
    return files
