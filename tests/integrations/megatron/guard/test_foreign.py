"""Datasets that no builder of megatron-core made: recorded, compared, refused by name; never changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megaresume.integrations.megatron.arguments import Settings
from megaresume.integrations.megatron.guard import guarded, shared
from megaresume.integrations.megatron.session import Session
from megaresume.integrations.megatron.state import read_state, write_state
from megaresume.stream.errors import StateError


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
) -> Session:
    """One start of a run; returns its session."""
    if loaded is not None:
        text = write_state(
            project="megatron-deepspeed", version=None, iteration=1, samples=at, kind="guard", payload=loaded
        )
        loaded = read_state(text)
    args = SimpleNamespace(seed=seed, consumed_train_samples=at, train_iters=size, data_path=["0.5", "a", "0.5", "b"])
    settings = Settings(mode="guard", accept=accept)
    session = Session(project=None, args=args, settings=settings, loaded=loaded)  # type: ignore[arg-type]
    built = [GPTDataset(seed, samples), GPTDataset(seed + 10, samples)]
    train, valid = BlendableDataset(built, size), GPTDataset(seed + 20, 10)
    datasets = guarded(session, lambda sizes: (train, valid, None))([size, 10, 0])
    assert datasets == (train, valid, None), "passed through as they are"
    shared(session)
    return session


def test_the_same_order(capsys: pytest.CaptureFixture[str]) -> None:
    payload = start().order.payload(0)  # type: ignore[union-attr]
    assert "recorded and checked, not pinned" in capsys.readouterr().out
    again = start(loaded=payload, at=40)
    assert again.order is not None and again.order.payload(40) == payload
    assert start(loaded=payload, at=40, size=90).order.payload(40) == payload  # type: ignore[union-attr]
    assert start(loaded=payload, at=40, size=70).order.payload(40) == payload  # type: ignore[union-attr]


def test_another_order_is_refused() -> None:
    payload = start().order.payload(0)  # type: ignore[union-attr]
    with pytest.raises(StateError) as caught:
        start(loaded=payload, at=40, samples=200, size=160)
    text = str(caught.value)
    assert "from sample 40 on: train-order" in text and "of corpus 0" in text
    assert "restore: --train-iters 80" in text
    with pytest.raises(StateError, match="--seed 1"):
        start(loaded=payload, at=40, seed=2)
    names = ("train-order@40", "valid-order@40")
    accepted = start(loaded=payload, at=40, seed=2, accept=names).order.payload(40)  # type: ignore[union-attr]
    assert len(accepted["accepted"]) == 2
    assert start(loaded=accepted, at=60, seed=2).order.payload(60) == accepted  # type: ignore[union-attr]


def test_adopted_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(at=40).order.payload(40)["since"] == 40  # type: ignore[union-attr]
    assert "order before sample 40 is not proven" in capsys.readouterr().out


def test_what_is_not_known_is_passed_through(capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(consumed_train_samples=0)
    session = Session(project=None, args=args, settings=Settings(mode="guard"))  # type: ignore[arg-type]
    assert guarded(session, lambda sizes: "loaders")([1, 2, 3]) == "loaders"
    shared(session)
    assert session.order is not None and session.order.payload(0)["builders"] == []
    assert "NOT guarded" in capsys.readouterr().out
