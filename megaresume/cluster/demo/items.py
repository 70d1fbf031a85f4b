"""The demo of Hugging Face's Trainer: functions, docstrings and articles of this machine's Python, and a small Llama.

Each source is a map-style dataset, as users have them: a text by its number, nothing converted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from megaresume.checkpoint.paths import data_path
from megaresume.cluster.demo.scenario import GLOBAL_BATCH_SIZE, Attempt, Say, Scenario, as_words
from megaresume.cluster.demo.text import SOURCES, write_texts

#: bytes of a text that are trained; padding has a token of its own.
LENGTH, PADDING = 128, 256


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """The texts of a file of JSON lines, one byte a token.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._lines = path.read_text(encoding="utf-8").splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """``input_ids``: a list of 1 to `LENGTH` numbers below 256."""
        return {"input_ids": list(json.loads(self._lines[i])["text"].encode()[:LENGTH])}


def datasets_in(directory: Path) -> dict[str, tuple[Texts, str]]:
    """What ``megaresume.attach`` takes as data: {name: (dataset, weight)}."""
    return {name: (Texts(directory / f"{name}.jsonl"), weight) for name, (_, weight) in SOURCES.items()}


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Items, padded to `LENGTH`: ``input_ids``, ``attention_mask`` and ``labels``, int64[n, LENGTH]."""
    rows = [torch.tensor(item["input_ids"]) for item in items]
    tokens = torch.stack([torch.nn.functional.pad(row, (0, LENGTH - len(row)), value=PADDING) for row in rows])
    there = tokens != PADDING
    return {"input_ids": tokens, "attention_mask": there.long(), "labels": tokens.where(there, -100)}


def _prepare(out: Path, say: Say) -> Path:
    for name, path in write_texts(out / "texts").items():
        say(f"   {name}: {len(Texts(path)):,} items, weight {SOURCES[name][1]}")
    return out / "texts"


def _flags(out: Path, steps: int) -> list[str]:
    return as_words({"global-batch-size": GLOBAL_BATCH_SIZE, "train-iters": steps, "save-interval": max(steps // 8, 3)})


TRAINER = Scenario(
    title="megaresume demo --trainer",
    program="megaresume.cluster.demo.trainer",
    packages=("megaresume", "torch", "transformers", "accelerate"),
    steps=60,
    attempts=(
        Attempt(processes=2, workers=0, micro_batch_size=4, killed_after=0.29),
        Attempt(processes=1, workers=2, micro_batch_size=8, killed_after=0.63),
        Attempt(processes=2, workers=1, micro_batch_size=2),
    ),
    data="three datasets from the texts of this machine's Python",
    content="tokens, as the model was given them",
    unit="items",
    prepare=_prepare,
    flags=_flags,
    # Written beside the first checkpoint: the datasets by the numbers of their items.
    config=lambda out, _: data_path(out / "run"),
)
