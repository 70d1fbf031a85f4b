"""`megaresume demo --trainer`: its program in this process; and, slow, all of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megaresume.cluster.demo.command import run_demo
from megaresume.cluster.demo.hugging_face import LENGTH, PADDING, TRAINER, Texts, collate
from megaresume.cluster.records import read_records
from tests.cluster.training.compare import compare
from tests.release import release


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few texts of each source."""
    directory = tmp_path_factory.mktemp("texts")
    for name in ("code", "docstrings", "manual"):
        lines = [json.dumps({"text": f"{name} {k} " * (k % 30 + 1)}) for k in range(60)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
    return directory


def train(monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, micro_batch: int, steps: int = 6) -> Any:
    """One process, to its end; its records."""
    from megaresume.cluster.demo.hugging_face import main

    flags = [*TRAINER.flags(out, steps), "--megaresume-data", data, "--save", out, "--load", out]
    flags += ["--micro-batch-size", micro_batch, "--num-workers", 0, "--megaresume-log-samples", f"{out}.jsonl"]
    monkeypatch.setattr(sys, "argv", ["trainer", *map(str, flags)])
    main()
    return read_records(f"{out}.jsonl")


@pytest.mark.process
def test_the_program_notes_what_the_model_was_given(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = train(monkeypatch, data, tmp_path / "whole", 16)
    first = train(monkeypatch, data, tmp_path / "run", 4, steps=3)
    assert sorted(first.steps) == [1, 2, 3]
    run = train(monkeypatch, data, tmp_path / "run", 8)
    assert [start["step"] for start in run.starts] == [0, 3]
    assert [start["topology"]["micro_batch_size"] for start in run.starts] == [4, 8]
    assert compare(whole, run) is None and sorted(run.steps) == [1, 2, 3, 4, 5, 6]
    assert "repeated 0 skipped 0" in capfd.readouterr().out
    (data / "code.jsonl").write_text((data / "code.jsonl").read_text().replace("code 4 ", "CODE 4 "))
    other = compare(whole, train(monkeypatch, data, tmp_path / "other", 16))
    assert other is not None and other.field == "content"


def test_a_batch_is_padded_and_its_padding_is_no_label(data: Path) -> None:
    texts = Texts(data / "manual.jsonl")
    batch = collate([texts[0], texts[29]])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, LENGTH)
    assert batch["attention_mask"].sum(1).tolist() == [len("manual 0 "), LENGTH]
    assert bytes(batch["input_ids"][0][:9].tolist()) == b"manual 0 " and batch["input_ids"][0][9] == PADDING
    assert batch["labels"][0].tolist() == [*b"manual 0 ", *[-100] * (LENGTH - 9)]


@release(
    "a minute of training",
    "`::test_the_program_notes_what_the_model_was_given`, "
    "`tests/cluster/demo/test_demo.py::test_it_proves_a_run_that_was_killed_twice`",
)
@pytest.mark.process
def test_all_of_it_short(tmp_path: Path) -> None:
    result = run_demo(TRAINER, tmp_path / "out", steps=24, overwrite=False, quiet=True)
    assert result["holds"] and result["steps"] == 24 and result["losses"]["largest"] < 1e-4
    assert result["different_samples"] == result["different_content"] == result["missing"] == []
    records = read_records(tmp_path / "out" / "run.jsonl")
    assert [(s["topology"]["dp"], s["topology"]["num_workers"]) for s in records.starts] == [(2, 0), (1, 2), (2, 1)]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2 and "share of items" in page and "Packing" not in page
