"""A trace as a Parquet file, one segment a row, for large ranges: needs `pyarrow`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.runs.steps import UNKNOWN
from megaresume.stream.errors import CheckpointError, SetupError
from megaresume.trace.trace import ABSOLUTE, RECORD_COLUMNS, SAMPLE_COLUMNS, SEGMENT_COLUMNS, Piece

__all__ = ["require_pyarrow", "write_parquet"]

#: Segments of a row group, about.
ROW_GROUP = 1 << 20


def require_pyarrow() -> Any:
    """The library.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SetupError(
            "the library 'pyarrow' is missing",
            found=str(error),
            expected="it writes Parquet files",
            action="pip install pyarrow, or write --csv or --json",
        ) from error
    return pyarrow


def write_parquet(path: Path, pieces: Iterable[Piece]) -> int:
    """Write a file; it takes its name when it is complete.

    Returns:
        Rows written.

    Raises:
        SetupError: no pyarrow.
        CheckpointError: the disk refuses.
    """
    pyarrow = require_pyarrow()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    writer, waiting, rows = None, [], 0
    try:
        try:
            for piece in pieces:
                table = _table(pyarrow, piece)
                rows += table.num_rows
                if writer is None:
                    writer = pyarrow.parquet.ParquetWriter(temporary, table.schema, compression="zstd")
                waiting.append(table)
                if sum(t.num_rows for t in waiting) >= ROW_GROUP:
                    writer.write_table(pyarrow.concat_tables(waiting))
                    waiting = []
            if writer is not None and waiting:
                writer.write_table(pyarrow.concat_tables(waiting))
        finally:
            if writer is not None:
                writer.close()
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}", found=error.strerror or str(error), action="check the directory and its free space"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _table(pyarrow: Any, piece: Piece) -> Any:
    counts = np.diff(piece.starts)
    columns: dict[str, Any] = {}
    for k, name in enumerate(SAMPLE_COLUMNS[:4]):
        values = np.repeat(piece.samples[:, k], counts)
        columns[name] = pyarrow.array(values, mask=values == UNKNOWN)
    columns["place"] = pyarrow.array(piece.segments[:, SEGMENT_COLUMNS.index("place")])
    if piece.numbered:
        columns["absolute"] = pyarrow.array(np.repeat(piece.samples[:, ABSOLUTE], counts))
    # The same dictionary in every row group: Parquet then stores a small number for a name.
    indices = pyarrow.array(piece.segments[:, 0].astype(np.int32))
    columns["source"] = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(piece.names))
    for name in ("epoch", "document", "offset", "length"):
        columns[name] = pyarrow.array(piece.segments[:, SEGMENT_COLUMNS.index(name)])
    if piece.shards:
        columns |= _records(pyarrow, piece)
    columns["hash"] = pyarrow.array(np.repeat(piece.hashes, counts))
    return pyarrow.table(columns)


def _records(pyarrow: Any, piece: Piece) -> dict[str, Any]:
    """Columns of records in tar shards; null for documents of other sources."""
    numbers = piece.segments[:, len(SEGMENT_COLUMNS) :]
    none = numbers == UNKNOWN
    columns = {n: pyarrow.array(numbers[:, k], mask=none[:, k]) for k, n in enumerate(RECORD_COLUMNS)}
    indices = pyarrow.array(numbers[:, 0].astype(np.int32), mask=none[:, 0])
    columns["shard"] = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(list(piece.shards)))
    return columns
