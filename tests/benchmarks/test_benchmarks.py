"""The benchmarks run through on tiny sizes and print every row. What they measure is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.release import release

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

#: A word of every requirement in docs/performance.md, as it stands in its row.
REQUIRED = (
    "planning, best_fit",
    "planning, split",
    "tokens in a sample",
    "documents cut",
    "first batch",
    "assembly, batches of 8",
    "loader, in process",
    "loader, prefetch thread",
    "DataLoader, made anew and resumed",
    "Megatron's loader, in process",
    "Megatron's loader, 2 workers",
    "resume at the start",
    "resume deep in the eighth epoch",
    "taking the state",
    "size of the state",
    "DeepSpeed save of",
    "checksums of a checkpoint",
    "memory to plan",
    "simulated starts",
    "planning a step of",
    "image-text records, decoded and encoded, no packing",
    "image-text records, decoded and encoded, packed",
    "image-text record, read",
    "image-text data, resume",
    "records 30 ms away, shuffled, read ahead",
    "tokens that are not in memory",
    "megaresume inspect",
)


@release(
    "every benchmark, short",
    "`::test_one_benchmark_alone`; what they measure has tests of its own",
)
def test_every_row_is_printed(tmp_path: Path) -> None:
    """``make bench`` with ``--quick``: the rows, in the table and as JSON, and nothing left behind."""
    result = tmp_path / "result.json"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", str(result), "--directory", str(scratch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    data = json.loads(result.read_text())
    assert data["machine"]["Python"] and data["quick"] is True
    for words in REQUIRED:
        rows = [row for row in data["rows"] if row["what"].startswith(words)]
        assert any(row["must"] for row in rows), f"no requirement for '{words}'"
        assert all(row["ours"] >= 0 for row in rows)
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == len(data["rows"]) + 2
    assert all(row["what"] in line for row, line in zip(data["rows"], table[2:], strict=True))
    assert not any(" NO " in line for line in table), "tiny sizes are not judged"
    assert list(scratch.iterdir()) == []


def test_one_benchmark_alone(tmp_path: Path) -> None:
    """``--only`` runs one, an unknown name is bad usage."""
    command = [sys.executable, "-m", "benchmarks", "--quick", "--directory", str(tmp_path), "--only"]
    done = subprocess.run([*command, "packing"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens in a sample" in done.stdout and "planning" not in done.stdout
    assert subprocess.run([*command, "nothing"], cwd=ROOT, capture_output=True, check=False).returncode == 2
