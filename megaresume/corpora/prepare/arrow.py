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
#: where the stream begins that a file in the file format is, but for this start and the footer.
_START = 8


#: place of a record batch that cannot be read without others.
NOT_ALONE = -1


def read_schema(file: Any) -> Any:
    """Of an Arrow file; the next message follows."""
    from pyarrow import ipc

    file.seek(0)
    file.seek(_START if file.read(len(_FILE)) == _FILE else 0)
    return ipc.read_schema(ipc.read_message(file))


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
        #: after the last batch and the end marker.
        self._end = _footer(file, size) if is_file else size
        file.seek(max(self._end - len(_END), 0))
        if file.read(len(_END)) != _END:
            raise pyarrow.ArrowInvalid("no end marker")
        file.seek(_START if is_file else 0)
        self._source = file
        self._reader = ipc.open_stream(pyarrow.PythonFile(file, mode="r"))
        super().__init__(self._reader.schema, self._read())

    def raw_position(self) -> int:
        """Bytes of the file that were read (about)."""
        return int(self._source.tell())

    def _read(self) -> Iterator[bytes]:
        # What a dictionary means stands elsewhere than in the batch.
        alone = not any("dictionary<" in str(field.type) for field in self._reader.schema)
        rows, at = 0, self._source.tell()
        for batch in self._reader:
            batch.validate(full=True)
            self.chunks.append((rows, at if alone else NOT_ALONE))
            for start in range(0, batch.num_rows, ROWS):
                yield self.lines(batch.slice(start, ROWS).select(self.columns))
            rows, at = rows + batch.num_rows, self._source.tell()
        if self._source.tell() != self._end:
            raise load_pyarrow().ArrowInvalid("something follows its end, such as another file of Arrow")


def _footer(file: Any, size: int) -> int:
    """Where the footer of a file in the file format begins."""
    file.seek(max(size - len(_FILE) - 4, 0))
    nbytes, magic = int.from_bytes(file.read(4), "little", signed=True), file.read()
    if magic != _FILE or not 0 < nbytes < size:
        raise load_pyarrow().ArrowInvalid("no footer")
    return size - len(_FILE) - 4 - nbytes


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
