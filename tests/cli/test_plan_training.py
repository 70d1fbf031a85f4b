"""What the plan says is what then happens: real launches of the reference program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaresume.program import main
from tests.cluster.training.conftest import data_yaml, runs, write_corpus  # noqa: F401  fixtures

SIZES = "--micro-batch-size 2 --zero-stage 1"


class Planner:
    """Plans and launches in one directory, with the same flags."""

    def __init__(self, launches: Any, capsys: pytest.CaptureFixture[str], name: str) -> None:
        self.runs, self.capsys, self.name = launches, capsys, name
        self.directory = launches.directory / name
        self.where = f"{SIZES} --save {self.directory} --load {self.directory}"

    def plan(self, flags: str) -> dict[str, Any]:
        status = main(["plan", str(self.directory), "--json", *flags.split()])
        report: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        assert status == report["refused"]
        return report

    def launch(self, flags: str, num_processes: int = 2, **more: Any) -> Any:
        return self.runs(self.name, f"{self.where} {flags}", num_processes=num_processes, **more)


@pytest.fixture
def planner(runs: Any, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Planner:  # noqa: F811
    return Planner(runs, capsys, request.node.name)


def test_refusals_and_the_end(planner: Planner, data_yaml: Path) -> None:  # noqa: F811
    slow = "--megaresume-min-step-seconds 1"  # the kill comes before step 8
    planner.launch(f"--train-iters 8 --global-batch-size 4 --save-interval 4 {slow}", kill_after=5)

    # Other ranks for ZeRO, batches that do not divide, another mixture.
    new = data_yaml.with_name("plan_new.yaml")
    new.write_text(data_yaml.read_text().replace("0.7", "0.2"))
    changed = f"--megaresume-data {new}"
    for plan_flags, launch_flags, ranks, status, data in [
        ("--dp 1", "", 1, 1, None),
        ("--micro-batch-size 3", "--micro-batch-size 3", 2, 2, None),
        (f"--data {new}", "", 2, 1, changed),
    ]:
        report = planner.plan(f"{plan_flags} --train-iters 8")
        assert report["refused"] and report["checkpoint"]["iteration"] == 4
        flags = f"--train-iters 8 --global-batch-size 4 {launch_flags}"
        done = planner.launch(flags, num_processes=ranks, data=data)
        assert done.status == status, done.text[-3000:]
        assert done.text.count(report["headline"]) == 1
        finding = next(f for f in report["findings"] if f["kind"] == "refused")
        assert finding["action"] in done.text and finding["found"] in done.text

    # Another batch size and length: it ends where the plan says, in a new stage that the plan announces.
    flags = "--train-samples 42 --global-batch-size 8"
    report = planner.plan(f"{flags} --data {new} --on-change stage")
    assert report["verdict"] == "resumes" and report["end"] == {"step": 8, "samples": 48}
    done = planner.launch(f"{flags} --megaresume-on-change stage", data=changed)
    assert done.status == 0, done.text[-3000:]
    assert max(done.records.steps) == 8 and done.records.steps[8]["samples"] == [40, 48]
    assert f"megaresume: {report['data']['accepted'][0]}" in done.text
    # The plan's table of sources is the one that the launch prints.
    for source in report["sources"]:
        line = next(line for line in done.text.splitlines() if line.split()[:2] == ["megaresume:", source["name"]])
        assert f"about sample {source['sample']:,}, {source['step'] - 4:,} steps from here" in line

    # And then it is over.
    report = planner.plan(f"--train-samples 42 --data {new}")
    assert report["verdict"] == "finished" and not report["refused"]
    done = planner.launch(flags, data=changed)
    assert done.status == 0 and "megaresume: the run is over: 8 steps, 48 samples trained" in done.text


def test_a_stream_that_ends(planner: Planner, data_yaml: Path) -> None:  # noqa: F811
    write_corpus(data_yaml.with_name("short"), documents=40, seed=4)
    data = data_yaml.with_name("short.yaml")
    data.write_text(
        "seed: 1234\nseq_length: 64\npacking: {mode: best_fit, open_bins: 8}\n"
        "sources:\n  short: {path: short, max_epochs: 1}\n"
    )
    given = f"--megaresume-data {data}"
    first = planner.launch("--train-iters 2 --global-batch-size 4", data=given)
    assert first.status == 0, first.text[-3000:]
    report = planner.plan(f"--data {data} --train-iters 100")
    assert not report["refused"] and report["findings"][0]["headline"] == "the stream ends before the run does"
    done = planner.launch("--train-iters 100 --global-batch-size 4", data=given)
    assert done.status == 0 and "the stream has ended, and with it the run" in done.text
    assert max(done.records.steps) == report["end"]["step"] > 2
    assert done.records.steps[report["end"]["step"]]["samples"][1] == report["end"]["samples"]
