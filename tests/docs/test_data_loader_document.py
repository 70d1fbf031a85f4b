"""docs/data-loader.md: its programs, stopped in the second epoch, and resumed."""

from __future__ import annotations

import contextlib
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

import megaresume

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
    names: dict[str, Any] = {"megaresume": megaresume, "web": list(range(600)), "code": list(range(1000, 1050))}
    exec(block, names)
    handed = [n for _, batch in zip(range(50), names["loader"], strict=False) for n in batch.tolist()]
    assert sum(n >= 1000 for n in handed) == 100


def test_the_packing_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[4]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"megaresume": megaresume, "dataset": [{"input_ids": [n] * 1000} for n in range(30)]}
    exec(block, names)
    batch = next(iter(names["loader"]))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 8000)
    assert batch["cu_seq_lens_q"].tolist() == list(range(0, 9000, 1000)) and batch["max_length_q"] == 1000
    assert len(list((tmp_path / "lengths").iterdir())) == 1


def test_the_changes_of_the_document() -> None:
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[2]
    names: dict[str, Any] = {"megaresume": megaresume, "web": list(range(900)), "code": list(range(1000, 1200))}
    exec(block, names)
    handed = [n for batch in names["loader"] for n in batch.tolist()]
    assert sum(n >= 1000 for n in handed[:384]) == 96  # 16 of the first 400 are not trained
    assert sum(n >= 1000 for n in handed[400:600]) == 100 and 17 not in handed


def test_the_keyed_loader_of_the_document() -> None:
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[3]

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


def test_the_batches_of_like_lengths_of_the_document() -> None:
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[5]

    class Table:
        def __len__(self) -> int:
            return 800

        def __getitem__(self, key: Any) -> Any:
            return [n * 37 % 100 for n in range(800)] if key == "length" else key * 37 % 100

    names: dict[str, Any] = {"megaresume": megaresume, "dataset": Table(), "pad": list}
    exec(block, names)
    batches = list(names["loader"])
    assert len(batches) == 100 and max(max(batch) - min(batch) for batch in batches) <= 10


def test_the_json_lines_and_images_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[6]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    lines = Path("cats.jsonl")

    def row(number: int, text: str) -> str:
        image = PIL.Image.new("RGB", (number + 1, 2), (number, 0, 0))
        image.save(f"images/{number}.png")
        return json.dumps({"image": f"{number}.png", "text": text}, ensure_ascii=False) + "\n"

    def taken(state: Any = None, most: int = 10_000) -> tuple[list[tuple[int, int, str]], Any]:
        names: dict[str, Any] = {}
        exec(block, names)
        loader = names["loader"]
        if state is not None:
            loader.load_state_dict(state)
        items = []
        for batch in chain(loader, loader):
            items += [(int(item["image"][0, 0, 0]), item["image"].shape[1], item["text"]) for item in batch]
            if len(items) >= most:
                break
        return items, loader.state_dict()

    first = [row(number, f"cat \u00e9 {number}") for number in range(20)]
    lines.write_text("".join(first))
    whole, _ = taken(most=32)
    assert sorted(whole[:20]) == [(n, n + 1, f"cat \u00e9 {n}") for n in range(20)]
    head, state = taken(most=8)
    assert head + taken(state, most=24)[0] == whole
    lines.write_text("".join([*first, *(row(n, "more") for n in range(20, 24))]))
    grown, _ = taken(state, most=36)
    assert grown[:12] == whole[8:20]
    assert sorted(number for number, *_ in grown[12:36]) == list(range(24))
    lines.write_text("".join([*first[:7], row(7, "dog!! 7"), *first[8:]]))
    with pytest.raises(megaresume.MegaresumeError, match="cats"):
        taken(state)
