"""The figures of a run that was killed twice, on other ranks, with other weights in between, against the raw tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaresume.checkpoint.records.step_file import read_step_file
from tests.checkpoint.metrics.program import losses_of
from tests.checkpoint.metrics.runs import Chain, config_of, write_sources

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[np.ndarray]]]:
    directory = tmp_path_factory.mktemp("figures")
    return directory, write_sources(directory)


@pytest.fixture(scope="module")
def chain(documents: tuple[Path, Any]) -> Chain:
    """Killed after 13 steps, after 23 on two ranks, and then to its end with other weights: 35 steps."""
    directory, _ = documents
    run = Chain(directory, config_of(directory))
    slow = {"late": 0.1, "slow_save": 0.2, "pause": 0.03, "losses": True, "until": 35}
    run.run(kill=13, before_kill=0.5, status=1, **slow)
    run.run(2, kill=23, before_kill=0.3, status=1, queue=0.5, **slow)
    run.data = config_of(directory, web=1, code=1)
    run.run(micro=4, queue=0.5, **slow)
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_save_has_counted_what_was_trained(chain: Chain) -> None:
    saves = [line for line in lines(chain.save_dir / "megaresume/meter/run.jsonl") if line["event"] == "save"]
    assert [line["step"] for line in saves] == [5, 10, 15, 20, 25, 30, 35]
    for line in saves:
        assert line["counts"] == chain.counts(line["step"]), line["step"]


def test_readings_say_the_same(chain: Chain) -> None:
    readings = lines(chain.save_dir / "megaresume/meter/figures.jsonl")
    expected = {step: chain.counts(step) for step in range(36)}
    kept = [reading for reading in readings if reading["step"] not in (11, 12, 13, 21, 22, 23)]  # those were lost
    assert len(kept) > 5
    for reading in kept:
        for what in ("tokens", "trained", "documents", "cut"):
            assert reading["figures"][f"megaresume.source.{what}"] == expected[reading["step"]][what]
    last = readings[-1]["figures"]
    assert last["megaresume.step"] == 35
    assert last["megaresume.tokens"] == sum(chain.counts(35)["tokens"].values())
    assert last["megaresume.run.starts"] == 3
    assert last["megaresume.run.repeated"] == (3 + 3) * 8
    assert last["megaresume.source.weight"] == {"web": 0.5, "code": 0.5}
    assert last["megaresume.checkpoint.step"] == 35


def test_the_ledger_says_the_same(chain: Chain) -> None:
    ledger = lines(chain.save_dir / "megaresume/ledger.jsonl")
    saves = {line["step"]: line for line in lines(chain.save_dir / "megaresume/meter/run.jsonl")}
    for line in ledger:
        if line["kind"] == "checkpoint":
            assert saves[line["iteration"]]["samples"] == line["samples"]
            state = read_step_file(chain.save_dir / f"megaresume/step_{line['iteration']:07d}.json").stream
            assert sum(saves[line["iteration"]]["counts"]["tokens"].values()) == state.tokens
            assert sum(saves[line["iteration"]]["counts"]["documents"].values()) == state.documents


def test_goodput_is_that_of_the_clocks(chain: Chain) -> None:
    """Five kinds of loss; each within 1 % of the time of the run."""
    reading = lines(chain.save_dir / "megaresume/meter/figures.jsonl")[-1]["figures"]
    found, truth = reading["megaresume.badput"], chain.truth()
    total = sum(truth.values())
    first = truth.pop("first")
    assert min(truth.values()) > 0.005 * total
    assert found["startup"] + found["data"] == pytest.approx(truth["startup"] + first + truth["data"], abs=0.01 * total)
    for cause, seconds in found.items():
        least, most = truth[cause], truth[cause] + (first if cause in ("startup", "data") else 0.0)
        assert least - 0.01 * total <= seconds <= most + 0.01 * total, (cause, found, truth, first)
    assert reading["megaresume.goodput"] == pytest.approx(truth["steps"] / total, abs=0.01)


def test_losses_by_source_are_those_of_an_unpacked_computation(
    chain: Chain, documents: tuple[Path, dict[str, list[np.ndarray]]]
) -> None:
    expected: dict[str, list[float]] = {name: [0.0, 0] for name in documents[1]}
    for _, rows, masks, _ in chain.micro_batches(only=3):
        for tokens, mask in zip(rows, masks, strict=True):
            losses = losses_of(torch.tensor(tokens)).double().tolist()
            for token, counts, loss in zip(tokens, mask, losses, strict=True):
                if counts:
                    both = expected[list(documents[1])[token // 1000]]
                    both[0], both[1] = both[0] + loss, both[1] + 1
    found: dict[str, list[float]] = {name: [0.0, 0] for name in documents[1]}
    for line in lines(chain.save_dir / "megaresume/meter/rank_00000.jsonl"):
        for name, (total, tokens) in line.get("by_source", {}).items() if line["time"] > chain.lives[2][0] else ():
            found[name][0] += total
            found[name][1] += tokens
    for name, (total, tokens) in expected.items():
        assert found[name] == [pytest.approx(total, rel=1e-6), tokens]
