"""Real runs through the launcher on Megatron's own datasets: killed, resumed on other ranks and made longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaresume.checkpoint.load.choose import choose
from tests.hosts.megatron.guard.conftest import Corpora


def flags(corpora: Corpora, cache: Path, *weights: object, iterations: int = 36, micro: int = 2) -> list[object]:
    blend = [word for pair in zip(weights, corpora.paths, strict=True) for word in pair]
    data = ["--data-path", *blend, "--split", "80,10,10", "--data-cache-path", cache, "--seed", 7, "--seq-length", 32]
    sizes = ["--train-iters", iterations, "--micro-batch-size", micro, "--global-batch-size", 8]
    return [*data, *sizes, "--vocab-size", 1000]


def places(directory: Path) -> list[object]:
    return ["--save", directory, "--load", directory, "--save-interval", 6, "--ckpt-format", "torch"]


def test_killed_resumed_prolonged_and_refused(mini: Any, corpora: Corpora, tmp_path: Path) -> None:
    weights, where = (0.6, 0.3, 0.1), places(tmp_path / "save")
    stock = mini(*flags(corpora, tmp_path / "cache", *weights), num_processes=1, hooks=False).steps()
    assert sorted(stock) == list(range(1, 37))

    first = mini(*flags(corpora, tmp_path / "cache", *weights), *where, env={"MINI_KILL": "step:20"})
    assert first.status == -9, first.output
    trained = first.steps()
    assert {step: trained[step] for step in range(1, 20)} == {step: stock[step] for step in range(1, 20)}

    longer = flags(corpora, tmp_path / "cold", 6, 3, 1, iterations=84, micro=4)
    second = mini(*longer, *where, "--exit-interval", 42, num_processes=1)
    assert second.status == 0, second.output
    assert "continues after its 288 recorded samples up to 672" in second.output
    steps = second.steps()
    assert sorted(steps) == list(range(19, 43))
    assert {step: steps[step] for step in range(19, 37)} == {step: stock[step] for step in range(19, 37)}

    refused = mini(*flags(corpora, tmp_path / "cold", 0.6, 0.31, 0.1), *where)
    assert refused.status not in (0, -9)
    assert "--megaresume-accept data-path@336" in refused.output
    assert f"--data-path 0.6 {corpora.path('a')}" in refused.output

    third = mini(*flags(corpora, tmp_path / "cold", *weights, iterations=84), *where, "--exit-interval", 45)
    assert third.status == 0, third.output
    assert sorted(third.steps()) == [43, 44, 45]
    seen = [sample for step in range(37, 43) for sample in steps[step]]
    seen += [sample for step in (43, 44, 45) for sample in third.steps()[step]]
    assert len(set(seen)) > 0.8 * len(seen), "no batch is repeated"
    choice = choose(tmp_path / "save")
    assert choice is not None and choice.state is not None and choice.state.kind == "order"
    assert choice.state.to_dict()["since"] == 0


def test_adopted_in_the_middle(mini: Any, corpora: Corpora, tmp_path: Path) -> None:
    command, where = flags(corpora, tmp_path / "cache", 0.6, 0.3, 0.1), places(tmp_path / "save")
    stock = mini(*command, num_processes=1, hooks=False).steps()
    assert mini(*command, *where, "--exit-interval", 12, num_processes=1, hooks=False).status == 0
    adopted = mini(*command, *where)
    assert adopted.status == 0, adopted.output
    assert adopted.output.count("order before sample 96 is not proven") == 1
    assert adopted.steps() == {step: stock[step] for step in range(13, 37)}
