"""Losses by source without a call: of the models of transformers under DeepSpeed, and what labels do not tell."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megaresume
from megaresume.hosts.token_losses import LogitLosses
from megaresume.stream.errors import UsageError
from tests.cli.conftest import megaresume as command
from tests.corpora import write_corpus
from tests.release import release

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

PROGRAM, STEPS = str(Path(__file__).with_name("token_losses.py")), 4
#: source -> its tokens; 64 ends a document.
TOKENS = {"web": range(32), "code": range(32, 64)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that are not cut, whose tokens say which source they are of."""
    directory = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(3)
    for name, tokens in TOKENS.items():
        documents = [[*rng.integers(tokens.start, tokens.stop, rng.integers(4, 28)), 64] for _ in range(120)]
        write_corpus(directory / name, [[document] for document in documents])
    path = directory / "data.yaml"
    path.write_text(
        "seed: 7\nseq_length: 32\npacking: {mode: best_fit, open_bins: 4}\n"
        "sources:\n  web: {path: web, weight: 0.6}\n  code: {path: code, weight: 0.4}\n"
    )
    return path


def by_source(directory: Path) -> dict[str, list[float]]:
    """source -> sum of losses, tokens, of documents that were computed alone."""
    found: dict[str, list[float]] = {name: [0.0, 0] for name in TOKENS}
    for path in directory.glob("alone.*"):
        for line in path.read_text().splitlines():
            tokens, losses = json.loads(line)
            if tokens[-1] == 64:  # else it is padding
                name = next(name for name, of in TOKENS.items() if tokens[0] in of)
                found[name] = [found[name][0] + sum(losses), found[name][1] + len(losses)]
    return found


_more = release(
    "`[plain-1]`, `[zero-2]`, `[weighted-1]`: further ways of training", "the same, `[plain-2]`, `[evaluates-1]`"
)


def meter_files(directory: Path) -> list[Path]:
    return sorted((directory / "run/megaresume/meter").glob("rank_*.jsonl"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("plain", 2),
        ("evaluates", 1),
        ("other tokens", 1),
        pytest.param("plain", 1, marks=_more),
        pytest.param("zero", 2, marks=_more),
        pytest.param("weighted", 1, marks=_more),
    ],
)
def test_deepspeed(case: str, ranks: int, launch: Any, data: Path, tmp_path: Path) -> None:
    status, output = launch(PROGRAM, data, tmp_path, case, STEPS, num_processes=ranks)
    assert status == 0, output
    answer = command("trace", tmp_path / "run", "--steps", f"1:{STEPS + 1}", "--by-loss", "--json")
    assert answer.returncode == 0, answer.stderr
    for name, (total, tokens) in by_source(tmp_path).items():
        found = json.loads(answer.stdout)["sources"][name]
        assert tokens > 100 and found["tokens"] == tokens
        assert found["loss"] == pytest.approx(total / tokens, rel=1e-6)
    lines = [json.loads(line) for path in meter_files(tmp_path) for line in path.read_text().splitlines()]
    counted = [line["by_source"].get(name, (0, 0))[1] for line in lines if "by_source" in line for name in TOKENS]
    assert sum(counted) == sum(tokens for _, tokens in by_source(tmp_path).values())


@pytest.mark.process
def test_a_model_that_is_given_no_labels_is_said(launch: Any, data: Path, tmp_path: Path) -> None:
    status, output = launch(PROGRAM, data, tmp_path, "no labels", STEPS, num_processes=1)
    assert status == 0, output
    assert output.count("metrics: losses: the model gives no logits and loss, or is given no labels") == 1
    assert "by_source" not in (tmp_path / "run/megaresume/meter/rank_00000.jsonl").read_text()


def test_a_loader_without_a_data_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="losses are not taken by themselves"):
        megaresume.attach(
            {"model": torch.nn.Linear(1, 1)},
            megaresume.DataLoader([1, 2, 3, 4], batch_size=2),
            checkpoints=megaresume.Checkpoints(save_dir=tmp_path),
            metrics="losses",
        )


class Taken:
    """What is taken of micro-batches."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.looks = LogitLosses(1, lambda losses, counts: self.losses.append(losses * counts), instead="do it")

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        assert self.looks.wants()
        self.looks.look({"labels": labels}, loss, SimpleNamespace(logits=logits))
        return self.losses[-1]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


@pytest.mark.parametrize("is_shifted", [True, False])
def test_weights_that_know_nothing_do_not_decide_whether_labels_are_shifted(is_shifted: bool) -> None:
    """The losses of both ways are within 1 %: the nearer one is right."""
    generator = torch.Generator().manual_seed(5)
    taken = Taken()
    for scale in (1e-3, 1e-3, 3.0):
        logits = scale * torch.randn(2, 16, 50, generator=generator)
        labels = torch.randint(0, 50, (2, 16), generator=generator)
        if is_shifted:
            expected = torch.zeros(2, 16)
            expected[:, 1:] = cross_entropy(logits[:, :-1].contiguous(), labels[:, 1:].contiguous())
            loss = expected[:, 1:].mean()
        else:
            expected = cross_entropy(logits, labels)
            loss = expected.mean()
        assert torch.allclose(taken(logits, labels, loss), expected, rtol=1e-6)
