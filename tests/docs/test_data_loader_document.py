"""docs/data-loader.md: its programs, stopped in the second epoch and gone on with."""

from __future__ import annotations

import contextlib
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.process

DOCUMENT = Path(__file__).parents[2] / "docs" / "data-loader.md"


class Stopped(Exception):
    pass


class Recorder:
    """Stands where the document's dataset, collate function and model are."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.handed: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        if self.stop == len(self.handed):
            self.stop = None
            raise Stopped
        return {}


def run(block: str, tmp_path: Path, *, stop: int | None = None, resumed: bool = False) -> list[list[int]]:
    recorder = Recorder(stop)
    # What the `...` of the document stands for.
    block = block.replace("...  # one step", "recorder.handed.append(batch)")
    if resumed:
        block = block.replace("for epoch in", 'loader.load_state_dict(torch.load(path)["data"])\nfor epoch in', 1)
    path = tmp_path / "checkpoint.pt"
    names = {"recorder": recorder, "model": recorder, "torch": torch, "path": path}
    with contextlib.suppress(Stopped):
        exec(block, names | {"dataset": list(range(100, 130)), "collate": list})
    return recorder.handed


def test_the_loop_of_the_document(tmp_path: Path) -> None:
    block, *_ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert "loader.load_state_dict(torch.load(path)" in DOCUMENT.read_text()
    whole = run(block, tmp_path)
    handed = list(chain.from_iterable(whole))
    assert sorted(handed[:30]) == sorted(handed[30:60]) == sorted(handed[60:90]) == list(range(100, 130))
    cut = run(block, tmp_path, stop=6)  # the sixth was trained, and not saved
    rest = run(block, tmp_path, resumed=True)
    assert cut[:5] + rest == whole


def test_the_blend_of_the_document() -> None:
    _, block, *_ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    import megaresume

    names: dict[str, Any] = {"megaresume": megaresume, "web": list(range(600)), "code": list(range(1000, 1050))}
    exec(block, names)
    handed = [n for _, batch in zip(range(50), names["loader"], strict=False) for n in batch.tolist()]
    assert sum(n >= 1000 for n in handed) == 100


def test_the_packing_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[4]
    import megaresume

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"megaresume": megaresume, "dataset": [{"input_ids": [n] * 1000} for n in range(30)]}
    exec(block, names)
    batch = next(iter(names["loader"]))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 8000)
    assert batch["cu_seq_lens_q"].tolist() == list(range(0, 9000, 1000)) and batch["max_length_q"] == 1000
    assert len(list((tmp_path / "lengths").iterdir())) == 1


def test_the_changes_of_the_document() -> None:
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[2]
    import megaresume

    names: dict[str, Any] = {"megaresume": megaresume, "web": list(range(900)), "code": list(range(1000, 1200))}
    exec(block, names)
    handed = [n for batch in names["loader"] for n in batch.tolist()]
    assert sum(n >= 1000 for n in handed[:384]) == 96  # 16 of the first 400 are not trained
    assert sum(n >= 1000 for n in handed[400:600]) == 100 and 17 not in handed


def test_the_keyed_loader_of_the_document() -> None:
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[3]
    import megaresume

    class Noise:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.rand(1)

    names: dict[str, Any] = {"megaresume": megaresume, "dataset": Noise()}
    exec(block, names)
    in_workers = [number for batch in names["loader"] for number in batch]
    exec(block.replace("num_workers=4", "num_workers=0"), names)
    assert [number for batch in names["loader"] for number in batch] == in_workers
