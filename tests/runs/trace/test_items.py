"""A run over the items of a dataset: what is traced of it names items, and no tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megaresume
from megaresume.program import main


class Items(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of four items, saved at the last."""
    save = tmp_path_factory.mktemp("items") / "run"
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = megaresume.DataLoader(Items(), batch_size=4, max_epochs=2)
    checkpoints = megaresume.Checkpoints(save_dir=save)
    loop = megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints=checkpoints)
    for batch in loop:
        model(batch).sum().backward()
        optimizer.step()
        loop.stepped()
    loop.save()
    return save


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    capsys.readouterr()
    assert main(["trace", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("flags", [(), ("--records",)])
def test_steps(run: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    title, *lines = shown(capsys, run, "--steps", "1:4", *flags)
    assert title == "# trained, stage start, an item a sample, batch size 4, dp 1, micro-batch size 4"
    items = [line.split("data:")[1] for line in lines if "data:" in line]
    assert sorted(map(int, items)) == list(range(12))
    assert not [line for line in lines if "token" in line or "[" in line]


def test_when_an_item_is_seen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, epoch, place, *_ = shown(capsys, run, "--find", "data:3")
    assert (first, epoch) == ("data:3", "  epoch 0  trained")
    assert place.startswith("    step ") and "token" not in place
