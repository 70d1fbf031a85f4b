"""Writes pieces of a trace as text, JSON lines or CSV, or as a Parquet file, which needs `pyarrow`.

A compiled loop writes rows as text from a template: a million samples in a second.

A template is a program, int64[pieces, 3] of (what, which, more):

    LITERAL i          literal i
    SAMPLE i           number i of the sample
    SEGMENT i          number i of the segment
    NAME i c           literal i + number c of the segment
    HASH               16 hex digits
    UNLESS_ZERO i n    skips the next n pieces if number i of the segment is 0
    IF_KNOWN i n       skips the next n pieces if number i of the segment is negative
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megaresume.files import written_atomically
from megaresume.runs.history import UNKNOWN
from megaresume.runs.trace.trace import ABSOLUTE, RECORD_COLUMNS, SAMPLE_COLUMNS, SEGMENT_COLUMNS, TracePiece
from megaresume.stream.compiled import compiled
from megaresume.stream.errors import CheckpointError, one_line, require

LITERAL, SAMPLE, SEGMENT, NAME, HASH, UNLESS_ZERO, IF_KNOWN = 0, 1, 2, 3, 4, 5, 6


@compiled
def _put_literal(out, at, literals, bounds, which):  # type: ignore[no-untyped-def]
    for i in range(bounds[which], bounds[which + 1]):
        out[at] = literals[i]
        at += 1
    return at


@compiled
def _put_number(out, at, value):  # type: ignore[no-untyped-def]
    end = at + 1
    rest = value // 10
    while rest:
        end += 1
        rest //= 10
    for i in range(end - 1, at - 1, -1):
        out[i] = 48 + value % 10
        value //= 10
    return end


@compiled
def _put(out, at, program, literals, bounds, sample, identity, segment):  # type: ignore[no-untyped-def]
    piece = 0
    while piece < program.shape[0]:
        what, which, more = program[piece, 0], program[piece, 1], program[piece, 2]
        piece += 1
        if what == LITERAL:
            at = _put_literal(out, at, literals, bounds, which)
        elif what == SAMPLE or what == SEGMENT:  # noqa: SIM109 - compiled
            value = sample[which] if what == SAMPLE else segment[which]
            # literal 0 is used for unknown values
            at = _put_literal(out, at, literals, bounds, 0) if value < 0 else _put_number(out, at, value)
        elif what == NAME:
            value = segment[more]
            at = _put_literal(out, at, literals, bounds, 0 if value < 0 else which + value)
        elif what == HASH:
            for i in range(16):
                digit = np.int64((identity >> np.uint64(60 - 4 * i)) & np.uint64(15))
                out[at + i] = 48 + digit if digit < 10 else 87 + digit
            at += 16
        elif (what == UNLESS_ZERO and segment[which] == 0) or (what == IF_KNOWN and segment[which] < 0):
            piece += more
    return at


@compiled
def write_rows(out, head, row, between, tail, literals, bounds, samples, hashes, segments, starts):  # type: ignore[no-untyped-def]
    """Write samples: for each its head, a row for each segment, joined by ``between``, and its tail.

    Args:
        out: uint8[enough], written.
        head, row, between, tail: programs; head and tail have no segment.
        literals, bounds: uint8[bytes], int64[literals + 1].
        samples: int64[n, k]. hashes: uint64[n]. segments: int64[s, c]. starts: int64[n + 1].

    Returns:
        The number of bytes written.
    """
    at = 0
    none = np.zeros(segments.shape[1], np.int64)
    for k in range(samples.shape[0]):
        at = _put(out, at, head, literals, bounds, samples[k], hashes[k], none)
        for s in range(starts[k], starts[k + 1]):
            if s > starts[k]:
                at = _put(out, at, between, literals, bounds, samples[k], hashes[k], none)
            at = _put(out, at, row, literals, bounds, samples[k], hashes[k], segments[s])
        at = _put(out, at, tail, literals, bounds, samples[k], hashes[k], none)
    return at


#: approximate number of segments in a Parquet row group.
ROW_GROUP = 1 << 20

Format = Literal["text", "json", "csv"]
Word = bytes | str

#: columns of the CSV, one line for each segment.
CSV_COLUMNS = (*SAMPLE_COLUMNS[:4], "place", "source", "epoch", "document", "offset", "length", "hash")


def _csv_cell(text: str) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([text])
    return line.getvalue()


def _numbers(columns: Sequence[str]) -> list[Word]:
    words: list[Word] = []
    for column in columns:
        words += [f'{", " if words else ""}"{column}": '.encode(), column]
    return words


def _if_known(words: Sequence[Word], wanted: bool) -> list[Word]:
    """The words for a record of a tar shard; leaves them out for documents of other sources."""
    return [f"+{len(words)}", *words] if wanted else []


def _sections(form: Format, numbered: bool, with_shards: bool, of_items: bool) -> tuple[Sequence[Word], ...]:
    """The parts of a sample: before its segments, for each segment, between two, after them.

    Bytes are literal; a string names a number, name or hash.
    """
    if form == "json":
        absolute: list[Word] = [b', "absolute": ', "absolute"] if numbered else []
        shard = _if_known([b', "shard": ', "shard", b", ", *_numbers(RECORD_COLUMNS[1:])], with_shards)
        return (
            [b"{", *_numbers(SAMPLE_COLUMNS), *absolute, b', "hash": "', "hash", b'", "segments": ['],
            [b'{"source": ', "source", b", ", *_numbers(SEGMENT_COLUMNS[1:-1]), *shard, b"}"],
            [b", "],
            [b"]}\n"],
        )
    if form == "csv":
        columns = [*CSV_COLUMNS, *(["absolute"] if numbered else []), *(RECORD_COLUMNS if with_shards else ())]
        words: list[Word] = [word for column in columns for word in (column, b",")]
        return [], [*words[:-1], b"\n"], [], []
    # step 5  sample 32  rank 0  micro-batch 0  64 tokens  2abc...  web:217[0:30], code:3[0:34] epoch 1
    absolute = [b" (absolute ", "absolute", b")"] if numbered else []
    head: list[Word] = [
        *(b"step ", "step", b"  sample ", "sample"),
        *absolute,
        *(b"  rank ", "rank", b"  micro-batch "),
    ]
    tokens: list[Word] = [] if of_items else ["tokens", b" tokens  "]
    part: list[Word] = [] if of_items else [b"[", "offset", b":", "end", b"]"]
    head += ["micro_batch", b"  ", *tokens, "hash", b"  "]
    row: list[Word] = ["source", b":", "document", *part, "?epoch", b" epoch ", "epoch"]
    return head, [*row, *_if_known(RECORD_WORDS, with_shards)], [b", "], [b"\n"]


#: The text for unknown values, by format.
_UNKNOWN: dict[Format, bytes] = {"json": b"null", "csv": b"", "text": b"?"}
_NAMES: dict[Format, Callable[[str], str]] = {"json": json.dumps, "csv": _csv_cell, "text": one_line}

#: The words about a record of a tar shard.
RECORD_WORDS: tuple[Word, ...] = (
    *(b" (", "shard", b" #", "record", b", images: ", "num_images", b" of ", "image_tokens", b" tokens)"),
)


class TraceWriter:
    """Writes pieces in one format.

    Args:
        form: the format.
        names: of the sources.
        numbered: include the absolute numbers of samples.
        shards: the tar shards of the run, if it has any.
        of_items: items have no tokens: as text, do not mention these.
    """

    def __init__(
        self,
        form: Format,
        names: Sequence[str],
        *,
        numbered: bool = False,
        shards: Sequence[str] = (),
        of_items: bool = False,
    ) -> None:
        self._first_shard = 1 + len(names)
        self._literals = [
            _UNKNOWN[form],
            *(_NAMES[form](name).encode("utf-8", "surrogateescape") for name in [*names, *shards]),
        ]
        self._longest_name = max((len(literal) for literal in self._literals[1:]), default=0)
        sections = _sections(form, numbered, bool(shards), of_items)
        self._programs = [self._program(words) for words in sections]
        self._bytes = [self._most_bytes(words) for words in sections]
        self._text = np.frombuffer(b"".join(self._literals), np.uint8)
        self._bounds = np.cumsum([0, *map(len, self._literals)])

    def _program(self, words: Sequence[Word]) -> npt.NDArray[np.int64]:
        program = []
        columns = (*SEGMENT_COLUMNS, *RECORD_COLUMNS)
        for word in words:
            if isinstance(word, bytes):
                program.append((LITERAL, len(self._literals), 0))
                self._literals.append(word)
            elif word == "hash":
                program.append((HASH, 0, 0))
            elif word == "source":
                program.append((NAME, 1, 0))
            elif word == "shard":
                program.append((NAME, self._first_shard, columns.index(word)))
            elif word.startswith("?"):
                program.append((UNLESS_ZERO, columns.index(word[1:]), 2))
            elif word.startswith("+"):
                program.append((IF_KNOWN, columns.index("shard"), int(word)))
            elif word == "absolute":
                program.append((SAMPLE, ABSOLUTE, 0))
            elif word in SAMPLE_COLUMNS:
                program.append((SAMPLE, SAMPLE_COLUMNS.index(word), 0))
            else:
                program.append((SEGMENT, columns.index(word), 0))
        return np.array(program, np.int64).reshape(-1, 3)

    def _most_bytes(self, words: Sequence[Word]) -> int:
        names = ("source", "shard")
        return sum(len(w) if isinstance(w, bytes) else self._longest_name if w in names else 20 for w in words)

    def write(self, piece: TracePiece) -> memoryview:
        """The lines of a piece."""
        head, row, between, tail = self._bytes
        size = len(piece.samples) * (head + tail) + len(piece.segments) * (row + between)
        out = np.empty(size, np.uint8)
        rows = piece.samples, piece.hashes, piece.segments, piece.starts
        written: int = write_rows(out, *self._programs, self._text, self._bounds, *rows)
        return out[:written].data


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
