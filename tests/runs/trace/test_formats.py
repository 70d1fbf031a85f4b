"""Where segments lie in their sample; the Parquet file says what the rows say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megaresume.runs.directory import Run
from megaresume.runs.trace.formats import CSV_COLUMNS, csv_rows, write_parquet
from megaresume.runs.trace.trace import Trace, places
from tests.runs.trace.conftest import ToyRun, config, segments_of


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
