"""Datasets that no builder of megatron-core made: recorded, compared, refused by name; never changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megaresume.hosts.megatron.arguments import Settings
from megaresume.hosts.megatron.guard.order import guarded, shared
from megaresume.hosts.megatron.host import MegatronHost
from megaresume.hosts.megatron.project import Project
from megaresume.stream.errors import StateError
from tests.hosts.megatron.guard.loads import order_loaded

PROJECT = Project(kind="megatron-deepspeed", root=Path(), version="unknown", modules={})


class GPTDataset:
    """In the way of Megatron-DeepSpeed's: three indexes, drawn from one generator."""

    def __init__(self, seed: int, samples: int) -> None:
        rng = np.random.RandomState(seed)
        self.doc_idx = rng.permutation(50).astype(np.int32)
        self.sample_idx = np.arange(2 * (samples + 1), dtype=np.int32).reshape(-1, 2)
        self.shuffle_idx = rng.permutation(samples).astype(np.uint32)

    def __len__(self) -> int:
        return len(self.shuffle_idx)


class BlendableDataset:
    """In the way of Megatron-DeepSpeed's: the greedy blend."""

    def __init__(self, datasets: list[GPTDataset], size: int) -> None:
        self.datasets, self.size = datasets, size
        self.dataset_index = (np.arange(size) % len(datasets)).astype(np.uint8)
        self.dataset_sample_index = np.arange(size) // len(datasets)

    def __len__(self) -> int:
        return self.size


def start(
    seed: int = 1, size: int = 80, samples: int = 100, loaded: Any = None, at: int = 0, accept: tuple[str, ...] = ()
) -> MegatronHost:
    """One start of a run; returns its host."""
    args = SimpleNamespace(seed=seed, consumed_train_samples=at, train_iters=size, data_path=["0.5", "a", "0.5", "b"])
    settings = Settings(mode="guard", accept=accept)
    host = MegatronHost(PROJECT, args, settings)
    if loaded is not None:
        host.session.loaded = order_loaded(loaded, at)
    built = [GPTDataset(seed, samples), GPTDataset(seed + 10, samples)]
    train, valid = BlendableDataset(built, size), GPTDataset(seed + 20, 10)
    datasets = guarded(host, lambda sizes: (train, valid, None))([size, 10, 0])
    assert datasets == (train, valid, None), "passed through as they are"
    shared(host)
    return host


def test_the_same_order(capsys: pytest.CaptureFixture[str]) -> None:
    payload = start().order.snapshot(0).to_dict()  # type: ignore[union-attr]
    assert "recorded and checked, not pinned" in capsys.readouterr().out
    again = start(loaded=payload, at=40)
    assert again.order is not None and again.order.snapshot(40).to_dict() == payload
    assert start(loaded=payload, at=40, size=90).order.snapshot(40).to_dict() == payload  # type: ignore[union-attr]
    assert start(loaded=payload, at=40, size=70).order.snapshot(40).to_dict() == payload  # type: ignore[union-attr]


def test_another_order_is_refused() -> None:
    payload = start().order.snapshot(0).to_dict()  # type: ignore[union-attr]
    with pytest.raises(StateError) as caught:
        start(loaded=payload, at=40, samples=200, size=160)
    text = str(caught.value)
    assert "from sample 40 on: train-order" in text and "corpus 0 (train) has" in text
    assert "restore: --train-iters 80" in text
    with pytest.raises(StateError, match="--seed 1"):
        start(loaded=payload, at=40, seed=2)
    names = ("train-order@40", "valid-order@40")
    accepted = start(loaded=payload, at=40, seed=2, accept=names).order.snapshot(40).to_dict()  # type: ignore[union-attr]
    assert len(accepted["accepted"]) == 2
    assert start(loaded=accepted, at=60, seed=2).order.snapshot(60).to_dict() == accepted  # type: ignore[union-attr]


def test_adopted_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(at=40).order.snapshot(40).to_dict()["since"] == 40  # type: ignore[union-attr]
    assert "order before sample 40 is not proven" in capsys.readouterr().out


def test_what_is_not_known_is_passed_through(capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(consumed_train_samples=0)
    host = MegatronHost(PROJECT, args, Settings(mode="guard"))
    assert guarded(host, lambda sizes: "loaders")([1, 2, 3]) == "loaders"
    shared(host)
    assert host.order is not None and host.order.snapshot(0).to_dict()["builders"] == []
    assert "NOT guarded" in capsys.readouterr().out
