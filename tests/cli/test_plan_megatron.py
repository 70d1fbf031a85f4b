"""The plan in directories of Megatron-LM: held against the real megatron-core, and against real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megaresume.batches.open import open_stream
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.checkpoint.system import Topology
from megaresume.program import main
from tests.hosts.conftest import data_yaml  # noqa: F401  a fixture
from tests.hosts.megatron.conftest import mini, ramp_calculator  # noqa: F401  a fixture
from tests.hosts.megatron.guard.conftest import Corpora, build, common_prefix, corpora  # noqa: F401  fixtures
from tests.hosts.megatron.guard.loads import order_state


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(*words: object) -> dict[str, Any]:
        status = main(["plan", str(tmp_path / "save"), "--json", *map(str, words)])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert status == report["refused"]
        return report

    return ask


def guarded_run(save: Path, payload: dict[str, Any]) -> None:
    """A directory as a run under guard leaves it."""
    tag, iteration = "iter_0000025", 25
    pending = begin_save(save, tag=tag, iteration=iteration, state=order_state(payload, 8 * iteration), latest=False)
    (save / tag).mkdir(parents=True)
    (save / tag / "common.pt").write_bytes(b"weights")
    commit_save(pending)


SIZES = [250, 299, 301, 310, 320, 330, 345, 360, 400, 450, 500, 600, 700, 900]


@pytest.mark.parametrize("weights", [None, [0.6, 0.3, 0.1]], ids=["one corpus", "blend"])
def test_what_stock_megatron_would_do(
    build: Any,  # noqa: F811
    corpora: Corpora,  # noqa: F811
    plan: Any,
    tmp_path: Path,
    weights: list[float] | None,
) -> None:
    paths = corpora.paths[:1] if weights is None else corpora.paths
    spec: dict[str, Any] = {"paths": paths, "weights": weights}
    base = build(**spec)
    guarded_run(tmp_path / "save", base["payload"])
    said, happened = {}, {}
    for size in SIZES:
        report = plan("--train-samples", size)
        assert not report["refused"] and report["guard"]["samples"] == size
        said[size] = report["guard"]["stock_reshuffles"]
        stock = build(**spec, sizes=[size, 20, 20], guard=False)
        happened[size] = common_prefix(stock["train"], base["train"]) < min(250, size)
    assert said == happened
    assert set(said.values()) == {True, False}


def test_the_flip_is_named(build: Any, corpora: Corpora, plan: Any, tmp_path: Path) -> None:  # noqa: F811
    guarded_run(tmp_path / "save", build(paths=corpora.paths, weights=[0.6, 0.3, 0.1])["payload"])
    report = plan("--train-iters", 75, "--global-batch-size", 8)
    assert report["guard"]["recorded_samples"] == 300 and report["guard"]["samples"] == 600
    epochs = [(c["before"]["epochs"], c["now"]["epochs"]) for c in report["guard"]["components"]]
    assert any(before < now for before, now in epochs)
    assert report["end"] == {"step": 75, "samples": None}
    assert any("continues after its 300 recorded samples, up to 600" in f["headline"] for f in report["findings"])
    assert plan("--train-iters", 25, "--global-batch-size", 8)["verdict"] == "finished"


def test_what_the_guard_refuses(build: Any, corpora: Corpora, plan: Any, tmp_path: Path, capsys: Any) -> None:  # noqa: F811
    guarded_run(tmp_path / "save", build(paths=corpora.paths, weights=[0.6, 0.3, 0.1])["payload"])
    report = plan("--seq-length", 64)
    assert "seq-length" in report["headline"] and "--seq-length 32" in report["findings"][0]["action"]
    corpora.write("b", 50, seed=9)
    assert plan()["headline"].endswith(": corpus")
    assert main(["plan", str(tmp_path / "save"), "--train-iters", "30"]) == 2
    assert "--global-batch-size B" in capsys.readouterr().err


def test_modes_do_not_mix(build: Any, corpora: Corpora, plan: Any, tmp_path: Path, data_yaml: Path) -> None:  # noqa: F811
    save = tmp_path / "save"
    guarded_run(save, build(paths=corpora.paths)["payload"])
    report = plan("--data", data_yaml)
    assert report["headline"] == "the checkpoint was trained in mode guard, and this is mode stream"
    shutil.rmtree(save / "megaresume")
    assert plan("--data", data_yaml)["headline"] == "training continues, but no data state was restored"
    assert plan()["verdict"] == "resumes", "the guard adopts it"
    (save / "latest_checkpointed_iteration.txt").write_text("")
    assert plan()["headline"] == "latest_checkpointed_iteration.txt names nothing that can be loaded"


def flags(data: Path, save: Path, *more: object) -> list[object]:
    words: list[object] = ["--megaresume-data", data, "--seed", 7, "--seq-length", 32, "--vocab-size", 65]
    words += ["--micro-batch-size", 2, "--save", save, "--load", save, "--save-interval", 3, "--ckpt-format", "torch"]
    return [*words, *more]


def test_real_runs_on_our_stream(mini: Any, data_yaml: Path, plan: Any, tmp_path: Path) -> None:  # noqa: F811
    save, new = tmp_path / "save", data_yaml.with_name("plan_new.yaml")
    new.write_text(data_yaml.read_text().replace("0.6", "0.2"))
    first = mini(*flags(data_yaml, save), "--train-iters", 12, "--global-batch-size", 8, "--exit-interval", 6)
    assert first.status == 0, first.output

    report = plan("--data", new, "--seed", 7)
    assert report["checkpoint"]["samples"] == 48 and report["refused"]
    refused = mini(*flags(new, save), "--train-iters", 12, "--global-batch-size", 8, num_processes=1)
    assert refused.status not in (0, -9) and report["headline"] in refused.output

    report = plan("--global-batch-size", 16, "--train-iters", 10, "--dp", 1)
    assert not report["refused"] and report["end"] == {"step": 10, "samples": 48 + 4 * 16}
    second = mini(*flags(data_yaml, save), "--train-iters", 10, "--global-batch-size", 16, num_processes=1)
    assert second.status == 0, second.output
    assert sorted(second.steps()) == [7, 8, 9, 10] and len(second.steps()[10]) == 16

    # Fewer samples a step than before: the stream goes on all the same.
    report = plan("--global-batch-size", 4, "--train-iters", 30)
    third = mini(*flags(data_yaml, save), "--train-iters", 30, "--global-batch-size", 4, num_processes=1)
    assert third.status == 0 and report["findings"] == [], third.output
    assert report["end"]["step"] == max(third.steps()) == 30

    # By samples, Megatron counts steps as if today's size had been that from the start.
    report = plan("--global-batch-size", 16, "--train-samples", 600)
    assert report["verdict"] == "resumes" and report["end"] == {"step": 37, "samples": 192 + 7 * 16}
    (warning,) = report["findings"]
    assert warning["headline"] == "Megatron would end before all samples are trained"
    assert warning["action"] == f"--train-iters {30 + (600 - 192) // 16} in place of --train-samples"


def test_a_ramp_up_after_steps_of_another_size(plan: Any, data_yaml: Path, tmp_path: Path) -> None:  # noqa: F811
    """Megatron takes the size of a step from the samples trained so far, whatever the steps were that trained them."""
    save = tmp_path / "save"
    state = open_stream(data_yaml).state_at(60, batches=[(0, 12)])
    layout = Topology(dp=2, world_size=2, micro_batch_size=2, global_batch_size=12)
    pending = begin_save(save, tag="iter_0000005", iteration=5, state=state, topology=layout, latest=False)
    (save / "iter_0000005").mkdir(parents=True)
    (save / "iter_0000005" / "common.pt").write_bytes(b"weights")
    commit_save(pending)
    (save / "latest_checkpointed_iteration.txt").write_text("5")
    ramp = ("--rampup-batch-size", 8, 8, 132, "--global-batch-size", 24, "--train-iters", 20)
    report = plan("--data", data_yaml, *ramp)
    theirs = ramp_calculator(24, 2, 2, False, 5, 8, 8, 132)
    sample = 60
    for _ in range(15):
        theirs.update(sample, False)
        size = [size for first, size in report["batches"] if first <= sample][-1]
        assert size == theirs.get_current_global_batch_size()
        sample += size
    assert report["end"] == {"step": 20, "samples": sample}
    gain = plan("--data", data_yaml, *ramp, "--balance", "step", "--balance-token-cost", 0)["balance"]
    assert 1 <= gain["after"] < gain["before"]
