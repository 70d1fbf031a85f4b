"""Writes pieces of a trace as text, JSON lines or CSV, or as a Parquet file, which needs `pyarrow`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megaresume.files import written_atomically
from megaresume.runs.history import UNKNOWN
from megaresume.runs.trace.trace import ABSOLUTE, RECORD_COLUMNS, SAMPLE_COLUMNS, SEGMENT_COLUMNS, TracePiece
from megaresume.stream.errors import CheckpointError, require

#: approximate number of segments in a Parquet row group.
ROW_GROUP = 1 << 20

Format = Literal["text", "json", "csv"]

#: columns of the CSV, one line for each segment.
CSV_COLUMNS = (*SAMPLE_COLUMNS[:4], "place", "source", "epoch", "document", "offset", "length", "hash")


def csv_rows(row: dict[str, object], more: Sequence[str] = ()) -> list[list[object]]:
    """A sample of `TracePiece.rows` as rows of CSV, with a column for text or tokens if its segments have them.

    Args:
        row: the sample.
        more: further columns, if segments have them.
    """
    rows: list[list[object]] = []
    for segment in row["segments"]:  # type: ignore[attr-defined]
        cells = [segment[c] if c in segment else row[c] for c in CSV_COLUMNS]
        cells += [row["absolute"]] if "absolute" in row else []
        cells += [segment.get(c) for c in more]
        cells += [segment["text"]] if "text" in segment else []
        cells += [" ".join(map(str, segment["token_ids"]))] if "token_ids" in segment else []
        rows.append(cells)
    return rows


def heading(piece: TracePiece) -> str:
    """The heading of a piece: what its samples have in common, for people."""
    span, config = piece.span, piece.config
    when = (
        ("left out" if piece.past else "to be left out") if piece.left_out else "trained" if piece.past else "to come"
    )
    parts = [when, f"stage {piece.stage}"]
    if config.is_of_items:
        parts.append("an item a sample")
    elif config.packing.traits.is_one_document:
        parts.append(f"a document a sample, of {config.seq_length} tokens at most")
    else:
        parts.append(f"{config.packed_by} into {config.seq_length} tokens")
    if piece.left_out:
        return "# " + ", ".join(parts)
    parts.append("batch size ?" if span.batch_size is None else f"batch size {span.batch_size}")
    if span.topology is None:
        parts.append("layout ?")
    else:
        micro = span.topology.micro_batch_size
        parts.append(f"dp {span.topology.dp}, micro-batch size {'?' if micro is None else micro}")
        if span.topology.balance is not None:
            parts.append(f"balanced by {span.topology.balance.objective}")
    return "# " + ", ".join(parts)


def require_pyarrow() -> Any:
    """Import ``pyarrow``, or raise an error that explains how to install it.

    Raises:
        SetupError: it is not installed.
    """
    require("pyarrow.parquet", "it writes Parquet files", "pip install pyarrow, or write --csv or --json")
    import pyarrow

    return pyarrow


def write_parquet(path: Path, pieces: Iterable[TracePiece]) -> int:
    """Write a Parquet file; it is renamed into place when complete.

    Returns:
        The number of rows written.

    Raises:
        SetupError: pyarrow is missing.
        CheckpointError: the file cannot be written.
    """
    pyarrow = require_pyarrow()
    writer, waiting, rows = None, [], 0
    try:
        with written_atomically(path) as file:
            for piece in pieces:
                table = _table(pyarrow, piece)
                rows += table.num_rows
                if writer is None:
                    writer = pyarrow.parquet.ParquetWriter(file, table.schema, compression="zstd")
                waiting.append(table)
                if sum(t.num_rows for t in waiting) >= ROW_GROUP:
                    writer.write_table(pyarrow.concat_tables(waiting))
                    waiting = []
            if writer is not None:
                if waiting:
                    writer.write_table(pyarrow.concat_tables(waiting))
                writer.close()
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}", found=error.strerror or str(error), action="check the directory and its free space"
        ) from error
    return rows


def _table(pyarrow: Any, piece: TracePiece) -> Any:
    counts = np.diff(piece.starts)
    columns: dict[str, Any] = {}
    for name in SAMPLE_COLUMNS[:4]:
        values = np.repeat(piece.column(name), counts)
        columns[name] = pyarrow.array(values, mask=values == UNKNOWN)
    columns["place"] = pyarrow.array(piece.column("place"))
    if piece.numbered:
        columns["absolute"] = pyarrow.array(np.repeat(piece.samples[:, ABSOLUTE], counts))
    # The same dictionary in every row group, so that Parquet stores small numbers instead of names.
    indices = pyarrow.array(piece.column("source").astype(np.int32))
    columns["source"] = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(piece.names))
    for name in ("epoch", "document", "offset", "length"):
        columns[name] = pyarrow.array(piece.column(name))
    if piece.shards:
        columns |= _records(pyarrow, piece)
    columns["hash"] = pyarrow.array(np.repeat(piece.hashes, counts))
    return pyarrow.table(columns)


def _records(pyarrow: Any, piece: TracePiece) -> dict[str, Any]:
    """Columns of records in tar shards; null for documents of other sources."""
    numbers = piece.segments[:, len(SEGMENT_COLUMNS) :]
    none = numbers == UNKNOWN
    columns = {n: pyarrow.array(numbers[:, k], mask=none[:, k]) for k, n in enumerate(RECORD_COLUMNS)}
    indices = pyarrow.array(numbers[:, 0].astype(np.int32), mask=none[:, 0])
    columns["shard"] = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(list(piece.shards)))
    return columns
