"""A real run of the reference program: killed, its blend changed, on other ranks; verified step by step from its log,
with validation sets that stayed put, and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaresume.program import main
from tests.cluster.training.conftest import Runs, write_corpus
from tests.cluster.training.conftest import data_yaml as data_yaml

pytestmark = pytest.mark.process

SETS = "validation:\n  held_out: {part: valid}\n  books: {sources: {books: {path: books}}}\n"
CONFIG = """seed: 1234
seq_length: 64
packing: {mode: best_fit, open_bins: 8}
sources:
  web: {path: web, weight: %s}
  code: {path: code, weight: %s}
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, data_yaml: Path) -> Any:
    """The run, at its end."""
    runs = Runs(tmp_path_factory.mktemp("run"), data_yaml)
    write_corpus(data_yaml.with_name("books"), documents=100, seed=9)
    before, after = data_yaml.with_name("before.yaml"), data_yaml.with_name("after.yaml")
    before.write_text(CONFIG % (7, 3) + SETS)
    after.write_text((CONFIG % (1, 9)).replace("mode: best_fit, open_bins: 8", "mode: split") + SETS)
    flags = "--train-iters 8 --save {dir}/save --load {dir}/save --save-interval 2 --eval-iters 2 --eval-interval 2"
    flags += " --global-batch-size 4"
    runs("run", f"{flags} --micro-batch-size 1", kill_after=5, data=f"--megaresume-data {before}")
    ended = runs(
        "run",
        f"{flags} --micro-batch-size 2 --megaresume-on-change stage",
        num_processes=1,
        data=f"--megaresume-data {after}",
    )
    assert ended.status == 0, ended.text[-4000:]
    return runs.directory / "save", ended


def test_every_step_and_rank(done: Any, capsys: pytest.CaptureFixture[str]) -> None:
    save, ended = done
    assert main(["verify", str(save), "--log-samples", str(ended.log), "--content", "--json"]) == 0
    log = json.loads(capsys.readouterr().out)["log"]
    # A line of all ranks and one of each: of two ranks up to step 4, of one behind it.
    assert (log["steps"], log["lines"], log["contents"]) == (8, 4 * 3 + 4 * 2, 4 * 2 + 4)
    # Step 5, and 6 if the kill came late, were done once with the old blend, and lost.
    assert log["given_up"] == 3 * len(ended.records.lost) > 0 and log["lost"] == 0


def test_validation_stayed_put(done: Any) -> None:
    """Over a change of weights and packing, each set with a loss of its own."""
    _, ended = done
    validations = ended.records.validations
    assert list(validations) == ["held_out", "books"]
    for name, by_step in validations.items():
        assert sorted(by_step) == [2, 4, 6, 8]
        assert len({record["digest"] for record in by_step.values()}) == 1, name
        assert len({record["tokens"] for record in by_step.values()}) == 1
        assert len({record["loss"] for record in by_step.values()}) == 4
    assert validations["held_out"][2]["digest"] != validations["books"][2]["digest"]


def test_loss_of_the_log_and_of_the_output(done: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, ended = done
    printed = ended.log.with_suffix(".txt")
    assert main(["verify", "--loss", str(ended.log), str(printed)]) == 0
    assert "8 steps in both, 8 with the same loss as printed" in capsys.readouterr().out


def test_the_report(done: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save, ended = done
    assert main(["report", str(save), "--log", str(ended.log), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [stage["first_sample"] for stage in facts["stages"]] == [0, 16]
    assert [(start["step"], start["lost"], start["lost_is_exact"]) for start in facts["starts"]] == [
        (0, 0, True),
        (4, len(ended.records.lost), True),
    ]
    assert [interval["steps"] for interval in facts["intervals"]] == [[0, 2], [2, 4], [4, 6], [6, 8]]
    assert facts["intervals"][0]["share"]["web"] > 0.6 > 0.4 > facts["intervals"][3]["share"]["web"]
    assert len(facts["losses"]) == 8 and set(facts["validations"]) == {"held_out", "books"}
    page = tmp_path / "page.html"
    assert main(["report", str(save), "--log", str(ended.log), "--output", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 3 and "<script" not in text and "http" not in text.replace("http://www.w3.org", "")
    assert "<td>web</td>" in text and "stage 2" in text
