"""Losses by source and by document of a run, and what the commands say of it while it trains and after."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megaresume
from megaresume import BatchSchedule, Checkpoints, StreamLoader, open_stream
from megaresume.checkpoint.metrics.goodput import CAUSES
from megaresume.checkpoint.metrics.losses import SegmentSums
from megaresume.checkpoint.metrics.meter import Meter
from megaresume.runs.top import look
from megaresume.stream.errors import UsageError
from tests.checkpoint.metrics.runs import config_of, write_sources
from tests.cli.conftest import megaresume as command
from tests.corpora import write_corpus

BAD, STEPS = 100, 70


@dataclass
class Trained:
    directory: Path
    documents: dict[str, list[np.ndarray]]
    #: source -> sum of losses, tokens, of every token that counts.
    expected: dict[str, list[float]]
    meter: Meter
    #: what `look` said in the middle.
    during: Any


def losses_of(tokens: torch.Tensor) -> torch.Tensor:
    """High for the tokens of bad documents, which end with 900 to 999."""
    return (tokens % 97).double() / 97 + 5 * (tokens % 1000 >= 900)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run over two corpora; 100 documents of the first are bad."""
    directory = tmp_path_factory.mktemp("losses")
    documents = write_sources(directory)
    rng = np.random.default_rng(5)
    for name, texts in documents.items():
        for i, text in enumerate(texts):
            is_bad = name == "web" and i in bad_of(documents)
            text[1:-1] = text[1] // 1000 * 1000 + (rng.integers(900, 1000) if is_bad else rng.integers(3, 900))
        write_corpus(directory / name, [[text] for text in texts])
    model = torch.nn.Linear(2, 2)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    loader = StreamLoader(open_stream(config_of(directory)), BatchSchedule.constant(8), micro_batch_size=4)
    checkpoints = Checkpoints(save_dir=directory / "run")
    loop = megaresume.attach(objects, loader, checkpoints=checkpoints, metrics="jsonl every=0.05")
    expected: dict[str, list[float]] = {name: [0.0, 0] for name in documents}
    during: Any = None
    for batch in loop:
        losses = losses_of(batch["tokens"])
        loop.meter.losses(batch, losses)
        flat = [of.flatten().tolist() for of in (batch["tokens"], losses, batch["loss_mask"])]
        for token, loss, counts in zip(*flat, strict=True):
            if counts:
                both = expected[list(documents)[token // 1000]]
                both[0], both[1] = both[0] + loss, both[1] + 1
        if not loop.ends_step:
            continue
        loop.stepped()
        if loop.step % 30 == 0:
            loop.save()
        if loop.step == 45:
            deadline = time.monotonic() + 60
            while (during := look(directory / "run")).step < 45 or not during.sources[0].loss:
                assert time.monotonic() < deadline
        if loop.step == STEPS:
            loop.save()
            break
    meter = loop.meter
    loop.finish()
    return Trained(directory, documents, expected, meter, during)


def bad_of(documents: dict[str, list[np.ndarray]]) -> list[int]:
    long = [i for i, text in enumerate(documents["web"]) if len(text) > 3]
    return long[:: len(long) // BAD][:BAD]


def test_losses_by_source_are_those_of_an_unpacked_computation(trained: Trained) -> None:
    found = json.loads(
        command("trace", trained.directory / "run", "--steps", f"1:{STEPS + 1}", "--by-loss", "--json").stdout
    )
    assert found["found"] == 8 * STEPS
    for name, (total, tokens) in trained.expected.items():
        assert found["sources"][name]["tokens"] == tokens
        assert found["sources"][name]["loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert trained.meter.latest is not None
    averages: Any = trained.meter.latest.figures["megaresume.source.loss"]
    assert averages["web"] > 1.5 > averages["code"] > 0


def test_bad_documents_come_first(trained: Trained) -> None:
    words = ["trace", trained.directory / "run", "--steps", f"1:{STEPS + 1}", "--by-loss", "--most", str(BAD + 1)]
    found = json.loads(command(*words, "--json").stdout)["documents"]
    assert sorted(one["document"] for one in found[:BAD]) == bad_of(trained.documents)
    assert {one["source"] for one in found[:BAD]} == {"web"}
    assert found[BAD]["loss"] < 1.5 < found[BAD - 1]["loss"]


def test_their_text(trained: Trained) -> None:
    done = command("trace", trained.directory / "run", "--samples", "0:80", "--by-loss", "--most", "1", "--text")
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()
    [line] = [line for line in first if line.startswith("  web:")]
    document = int(line.split()[0].removeprefix("web:"))
    assert f"web:{document}[" in done.stdout
    assert str(trained.documents["web"][document][1]) in done.stdout


@pytest.mark.parametrize("words", [["--by-loss", "--csv"], ["--most", "3"]])
def test_flags_that_do_not_go_together(words: list[str], trained: Trained) -> None:
    assert command("trace", trained.directory / "run", "--steps", "1:3", *words).returncode == 2


def test_no_losses(trained: Trained) -> None:
    done = command("trace", trained.directory / "run", "--samples", "5000:5002", "--by-loss")
    assert done.returncode == 1
    assert "there are no losses of these samples" in done.stderr


def test_top_of_a_run_that_trains(trained: Trained) -> None:
    now = trained.during
    assert (now.life, now.measured, now.checkpoint, now.starts) == ("runs", True, 30, 1)
    assert now.step == 45
    assert now.samples == 8 * now.step
    assert {source.name: source.weight for source in now.sources} == {"web": 0.75, "code": 0.25}
    assert now.sources[0].share == pytest.approx(0.75, abs=0.02)
    assert now.sources[0].loss > now.sources[1].loss
    assert [words.split(" ends ")[0] for words in now.next] in (
        ["epoch 1 of web", "epoch 0 of code"],
        ["epoch 0 of code", "epoch 1 of web"],
        ["epoch 0 of web", "epoch 0 of code"],
    )


def test_top_of_a_run_that_has_ended(trained: Trained) -> None:
    found = json.loads(command("top", trained.directory / "run", "--json").stdout)
    assert (found["life"], found["step"], found["samples"], found["checkpoint"]) == ("ended", STEPS, 8 * STEPS, STEPS)
    text = command("top", trained.directory / "run", "--once").stdout
    assert "goodput" in text
    [line] = command("top", trained.directory / "run").stdout.splitlines()
    assert line.startswith(f"step {STEPS}  samples {8 * STEPS}")


def test_top_of_a_run_that_nobody_measures(trained: Trained, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained.directory / "run", tmp_path / "run", ignore=shutil.ignore_patterns("meter"))
    found = json.loads(command("top", tmp_path / "run", "--json").stdout)
    assert (found["measured"], found["step"], found["checkpoint"]) == (False, STEPS, STEPS)
    assert [source["name"] for source in found["sources"]] == ["web", "code"]
    assert "not measured" in command("top", tmp_path / "run", "--once").stdout


def test_they_are_in_the_report(trained: Trained) -> None:
    run = trained.directory / "run"
    figures = json.loads(command("report", run, "--json").stdout)["figures"]
    lines = [json.loads(line) for line in (run / "megaresume/meter/figures.jsonl").open()]
    for name in trained.documents:
        expected = {line["step"]: line["figures"].get("megaresume.source.loss", {}).get(name) for line in lines}
        points = {step: loss for step, loss in expected.items() if loss is not None}
        assert [tuple(point) for point in figures["losses"][name]] == sorted(points.items())
    assert 0 < figures["goodput"] < 1 and set(figures["badput"]) == set(CAUSES)
    spent = sum(figures["badput"].values()) + figures["goodput"] * figures["seconds"]
    assert spent == pytest.approx(figures["seconds"], abs=0.01)
    assert command("report", run).returncode == 0
    page = (run / "report.html").read_text()
    assert "Where the time went" in page and "Loss by source" in page and "startup " in page


def test_a_report_without_figures(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained.directory / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/megaresume/meter")
    assert "figures" not in json.loads(command("report", tmp_path / "run", "--json").stdout)


def test_losses_of_another_shape(trained: Trained) -> None:
    sums = SegmentSums(open_stream(config_of(trained.directory)))
    with pytest.raises(UsageError, match="these losses are not those of the micro-batch"):
        sums.add([0, 1], torch.zeros(2, 32), None)


def test_losses_that_wait_too_long_are_dropped_and_logged_once(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megaresume.checkpoint.metrics.losses.MAX_WAITING", 2)
    sums = SegmentSums(open_stream(config_of(trained.directory)))
    for sample in range(5):
        sums.add([sample], torch.zeros(1, 64), None)
    assert [one.samples.tolist() for one in sums.take()] == [[3], [4]]
    assert [record.message.split(": ")[2] for record in caplog.records] == [
        "losses of 2 micro-batches wait to be counted, and the oldest are dropped"
    ]


def test_one_row_of_all_samples(trained: Trained) -> None:
    """As packed attention takes them."""
    stream = open_stream(config_of(trained.directory))
    [batch] = StreamLoader(stream, BatchSchedule.constant(4), micro_batch_size=4, stop=4, prefetch=0)
    sums = SegmentSums(stream)
    losses = losses_of(batch["tokens"])
    sums.add(range(4), losses, batch["loss_mask"])
    sums.add(range(4), losses.reshape(1, -1), batch["loss_mask"].reshape(1, -1))
    first, second = sums.take()
    assert first.sums.tolist() == second.sums.tolist()
    assert first.tokens.tolist() == second.tokens.tolist()
