"""Live figures under Megatron-LM's own loop, by a flag: every save has counted what its samples hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaresume.checkpoint.records.step_file import read_step_file
from tests.cli.conftest import megaresume
from tests.corpora import write_corpus
from tests.release import release

pytest.importorskip("megatron.core")

SIZES = ["--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 10, "--global-batch-size", 8]


def test_figures_by_a_flag(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    where = ["--save", tmp_path / "save", "--load", tmp_path / "save", "--save-interval", 3, "--ckpt-format", "torch"]
    flags = ["--megaresume-data", data_yaml, *SIZES, *where, "--megaresume-metrics", "jsonl", "every=0.05"]
    first = mini(*flags, "--micro-batch-size", 2, env={"MINI_KILL": "step:8"})
    assert first.status == -9, first.output
    second = mini(*flags, "--micro-batch-size", 1)
    assert second.status == 0, second.output
    lines = [json.loads(line) for line in (tmp_path / "save/megaresume/meter/run.jsonl").open()]
    assert [line["step"] for line in lines if line["event"] == "start"] == [0, 6]
    saves = [line for line in lines if line["event"] == "save"]
    assert [line["step"] for line in saves] == [3, 6, 9, 10]
    for line in saves:
        assert line["samples"] == 8 * line["step"]
        state = read_step_file(tmp_path / f"save/megaresume/step_{line['step']:07d}.json").stream
        assert sum(line["counts"]["tokens"].values()) == state.tokens
        assert sum(line["counts"]["documents"].values()) == state.documents


#: source -> its tokens.
TOKENS = {"web": range(32), "code": range(32, 64)}
WIDTH, STEPS = 8, 6


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data config of two corpora whose tokens say which one they are of."""
    directory = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(3)
    for name, tokens in TOKENS.items():
        documents = [rng.integers(tokens.start, tokens.stop, rng.integers(4, 60)) for _ in range(120)]
        write_corpus(directory / name, [[document] for document in documents])
    path = directory / "data.yaml"
    path.write_text(
        "seed: 7\nseq_length: 32\npacking: {mode: best_fit, open_bins: 4}\n"
        "sources:\n  web: {path: web, weight: 0.6}\n  code: {path: code, weight: 0.4}\n"
    )
    return path


def trained(mini: Any, data: Path, directory: Path, *flags: object, ranks: int = 1, **env: str) -> Any:
    """Six steps by the schedules of megatron-core."""
    where = ["--save", directory / "save", "--save-interval", STEPS, "--ckpt-format", "torch", "--train-iters", STEPS]
    sizes = ["--seed", 7, "--seq-length", 32, "--vocab-size", 64, "--global-batch-size", 8, "--micro-batch-size", 2]
    figures = ["--megaresume-data", data, "--megaresume-metrics", "jsonl", "every=0.05"]
    rest = ["--lr", 0.0, *figures, *flags]
    env["PYTHONPATH"] = str(Path(__file__).parents[3])
    return mini(*where, *sizes, *rest, script="pretrain_schedule.py", num_processes=ranks, env=env)


def unpacked(log: Path) -> dict[str, list[float]]:
    """source -> sum of losses, tokens: of one token and its label after the other, as each rank wrote them down."""
    generator = torch.Generator().manual_seed(1)
    embedding, out = (torch.randn(64, WIDTH, generator=generator).double() for _ in range(2))
    found: dict[str, list[float]] = {name: [0.0, 0] for name in TOKENS}
    for path in log.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["is_evaluation"]:
                continue
            for token, label, counts in zip(*(np.ravel(part).tolist() for part in row["rows"]), strict=True):
                if counts:
                    loss = -torch.log_softmax(out @ embedding[token], 0)[label]
                    both = found[next(name for name, tokens in TOKENS.items() if token in tokens)]
                    both[0], both[1] = both[0] + float(loss), both[1] + 1
    return found


#: processes, flags, and the loss function of the script.
LAYOUTS: dict[str, tuple[int, list[object], str]] = {
    "one rank": (1, [], "mean"),
    "two ranks": (2, [], "sum"),
    "two stages": (2, ["--pipeline-model-parallel-size", 2], "sum"),
    "balanced": (2, ["--megaresume-balance", "step"], "sum"),
    "two tensor ranks": (2, ["--tensor-model-parallel-size", 2], "sum"),
    "with evaluations": (1, ["--eval-interval", 2, "--eval-iters", 1, "--split", "80,10,10"], "sum"),
}
_more = release(
    "`[balanced]`, `[two tensor ranks]`, `[with evaluations]`: further layouts",
    "the same, `[two ranks]`, `[two stages]`",
)


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        "one rank",
        "two ranks",
        "two stages",
        pytest.param("balanced", marks=_more),
        pytest.param("two tensor ranks", marks=_more),
        pytest.param("with evaluations", marks=_more),
    ],
)
def test_losses_by_source_without_a_call(layout: str, mini: Any, two_sources: Path, tmp_path: Path) -> None:
    ranks, flags, loss = LAYOUTS[layout]
    run = trained(mini, two_sources, tmp_path, "losses", *flags, ranks=ranks, MINI_LOSS=loss)
    assert run.status == 0, run.output
    expected = unpacked(run.log)
    assert min(tokens for _, tokens in expected.values()) > 100
    answer = megaresume("trace", tmp_path / "save", "--steps", f"1:{STEPS + 1}", "--by-loss", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["found"] == 8 * STEPS
    for name, (total, tokens) in expected.items():
        found = json.loads(answer.stdout)["sources"][name]
        assert found["tokens"] == tokens
        assert found["loss"] == pytest.approx(total / tokens, rel=1e-6)
    by_source: dict[str, list[float]] = {name: [0.0, 0] for name in TOKENS}
    for path in (tmp_path / "save/megaresume/meter").glob("rank_*.jsonl"):
        for line in path.read_text().splitlines():
            for name, (total, tokens) in json.loads(line).get("by_source", {}).items():
                by_source[name] = [by_source[name][0] + total, by_source[name][1] + tokens]
    assert {name: tokens for name, (_, tokens) in by_source.items()} == {n: t for n, (_, t) in expected.items()}


def test_a_loss_that_is_not_that_of_the_tokens_is_said(mini: Any, two_sources: Path, tmp_path: Path) -> None:
    run = trained(mini, two_sources, tmp_path, "losses", MINI_LOSS="other")
    assert run.status == 0, run.output
    assert run.output.count("the loss of the loss function is not that of its tokens, masked") == 1
    assert "by_source" not in (tmp_path / "save/megaresume/meter/rank_00000.jsonl").read_text()


def test_a_step_that_no_schedule_made_is_said(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    where = ["--save", tmp_path / "save", "--save-interval", 10, "--ckpt-format", "torch"]
    flags = ["--megaresume-data", data_yaml, *SIZES, *where, "--megaresume-metrics", "losses", "every=0.05"]
    run = mini(*flags, "--micro-batch-size", 2, num_processes=1)
    assert run.status == 0, run.output
    assert run.output.count("the step was not made by a schedule of megatron-core") == 1


@pytest.mark.parametrize("case", ["context parallelism", "Megatron's own datasets"])
def test_where_losses_are_not_taken(case: str, mini: Any, two_sources: Path) -> None:
    flags = ["--megaresume-data", two_sources, "--context-parallel-size", 2]
    if case != "context parallelism":
        flags = ["--data-path", two_sources.with_name("web")]
    run = mini(*SIZES, *flags, "--micro-batch-size", 2, "--megaresume-metrics", "losses")
    assert run.status not in (0, -9)
    assert "metrics: losses by source" in run.output and "docs/metrics.md" in run.output
