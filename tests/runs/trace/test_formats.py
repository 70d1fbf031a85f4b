"""The compiled writer writes what the rows say, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any, get_args

import numpy as np
import pytest

from megaresume.checkpoint.system import Topology
from megaresume.runs.directory import Run
from megaresume.runs.history import UNKNOWN, Span
from megaresume.runs.trace.formats import CSV_COLUMNS, Format, TraceWriter, csv_rows, heading, write_parquet
from megaresume.runs.trace.trace import Trace, TracePiece, places
from megaresume.stream.config import StreamConfig
from tests.runs.trace.conftest import ToyRun, config, segments_of

NAMES = ['we"b, 1', "code", "Wörter"]


def piece(seed: int, *, names: list[str] = NAMES, known: bool = True) -> TracePiece:
    """Numbers of every size."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *rng.integers(1, 5, 30)])
    segments = (rng.random((starts[-1], 7)) * 10.0 ** rng.integers(0, 18, (starts[-1], 7))).astype(np.int64)
    segments[:, 0] = rng.integers(0, len(names), starts[-1])
    segments[0, 1:] = 0
    segments[1, 1:] = (1 << 63) - 1
    segments[1, 3] = 1 << 62
    segments[:, 4] %= 1000
    segments[:, 6] = segments[:, 3] + segments[:, 4]
    samples = (rng.random((30, 5)) * 10.0 ** rng.integers(0, 18, (30, 5))).astype(np.int64)
    if not known:
        samples[::2, [0, 2, 3]] = UNKNOWN
    span = Span(first=0, stop=30, step_sample=0, step=1, batch_size=4, topology=Topology(dp=2, micro_batch_size=2))
    return TracePiece(
        names=names,
        stage="start",
        config=StreamConfig.from_dict(config()),
        span=span,
        past=True,
        samples=samples,
        hashes=rng.integers(0, 1 << 64, 30, np.uint64, endpoint=False),
        segments=segments,
        starts=starts,
    )


@pytest.mark.parametrize("known", [True, False])
def test_json(known: bool) -> None:
    one = piece(1, known=known)
    lines = bytes(TraceWriter("json", NAMES).write(one)).decode().splitlines()
    assert lines == [json.dumps(row) for row in one.rows()]
    assert ("null" in lines[0]) != known


@pytest.mark.parametrize("known", [True, False])
def test_csv(known: bool) -> None:
    one = piece(2, known=known)
    read = list(csv.reader(io.StringIO(bytes(TraceWriter("csv", NAMES).write(one)).decode())))
    rows = [["" if cell is None else str(cell) for cell in cells] for row in one.rows() for cells in csv_rows(row)]
    assert read == rows and len(read) == len(one.segments)


def test_text() -> None:
    one = piece(3, known=False)
    lines = bytes(TraceWriter("text", NAMES).write(one)).decode().splitlines()
    assert len(lines) == 30
    for line, row in zip(lines, one.rows(), strict=True):
        numbers = ["?" if row[n] is None else str(row[n]) for n in ("step", "sample", "rank", "micro_batch")]
        words = "step {}  sample {}  rank {}  micro-batch {}".format(*numbers)
        segments = []
        for s in row["segments"]:
            epoch = f" epoch {s['epoch']}" if s["epoch"] else ""
            segments.append(f"{s['source']}:{s['document']}[{s['offset']}:{s['offset'] + s['length']}]{epoch}")
        assert line == f"{words}  {row['tokens']} tokens  {row['hash']}  {', '.join(segments)}"
    assert heading(one) == "# trained, stage start, best_fit into 64 tokens, batch size 4, dp 2, micro-batch size 2"


@pytest.mark.parametrize("form", get_args(Format))
def test_the_largest_numbers_fit(form: Format) -> None:
    one = piece(4, names=["x" * 5000])
    for array in (one.samples, one.segments[:, 1:]):
        array[:] = (1 << 63) - 1
    assert re.fullmatch(rb"[ -~\n]+", bytes(TraceWriter(form, ["x" * 5000]).write(one)))


def test_places(toy: ToyRun) -> None:
    """As the loop that lays out batches has them."""
    from megaresume.batches.batch import lay_out

    for align in (1, 4, 16):
        packing = {"mode": "best_fit", "open_bins": 4, "align": align}
        stream = toy.stream(config(packing=packing))
        plan = stream.plan(0, 60)
        num, many = len(plan.table), np.int64
        columns, rows = np.empty(num, many), np.empty(num, many)
        bounds, num_bounds = np.empty(num + 120, np.int32), np.empty(60, many)
        order, of_source = np.empty(num, many), np.zeros(2, many)
        lay_out(plan.table, plan.starts, align, 64, rows, columns, bounds, num_bounds, order, of_source)
        assert places(plan.table[:, 4], plan.starts, align).tolist() == columns.tolist()
        assert [s["place"] for n in range(60) for s in segments_of(stream, n)] == columns.tolist()


def test_parquet(toy: ToyRun, tmp_path: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    toy.attempt(config(), stop=6, saves=(4, 6))
    trace = Trace(Run(toy.root), toy.sources)
    num = write_parquet(tmp_path / "out.parquet", trace.pieces(3, 40))
    table = parquet.read_table(tmp_path / "out.parquet")
    rows = [cells for piece in trace.pieces(3, 40) for row in piece.rows() for cells in csv_rows(row)]
    assert num == table.num_rows == len(rows) and tuple(table.column_names) == CSV_COLUMNS
    columns = [table[name].to_pylist() for name in CSV_COLUMNS[:-1]]
    assert [list(cells) for cells in zip(*columns, strict=True)] == [cells[:-1] for cells in rows]
    assert [f"{identity:016x}" for identity in table["hash"].to_pylist()] == [cells[-1] for cells in rows]
    assert [p.name for p in tmp_path.glob("*parquet*")] == ["out.parquet"]
