from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.load.choose import choose, confirm_choice
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.save.commit import Commit
from megaresume.stream.errors import CheckpointError
from megaresume.stream.state import StreamState


def broadcast(root: Path, **kwargs: Any) -> Choice:
    choice = choose(root, **kwargs)
    assert choice is not None
    return pickle.loads(pickle.dumps(choice))


@pytest.fixture
def other(root: Path, tmp_path: Path) -> Path:
    """The same directory as another node sees it."""
    return Path(shutil.copytree(root, tmp_path / "other"))


def test_the_same_on_every_rank(root: Path, other: Path, state: Callable[..., StreamState]) -> None:
    record = confirm_choice(other, broadcast(root), timeout_seconds=0)
    assert record is not None
    assert record.state == state(240)


def test_nothing_on_every_rank(tmp_path: Path) -> None:
    assert confirm_choice(tmp_path, None, timeout_seconds=0) is None


def test_without_a_state(tmp_path: Path) -> None:
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "model.pt").write_bytes(b"weights")
    assert confirm_choice(tmp_path, broadcast(tmp_path), timeout_seconds=0) is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: shutil.rmtree(d), "this rank sees no directory global_step30"),
        (lambda d: shutil.rmtree(d / "global_step30"), "this rank sees no directory global_step30"),
        (lambda d: (d / "megaresume/step_0000030.json").unlink(), "no usable data state .* is missing"),
        (lambda d: (d / "megaresume/step_0000030.json").write_bytes(b"{"), "no usable data state .* is cut short"),
    ],
)
def test_a_rank_that_sees_less(root: Path, other: Path, damage: Callable[[Path], None], words: str) -> None:
    message = broadcast(root)
    damage(other)
    with pytest.raises(CheckpointError, match=words):
        confirm_choice(other, message, timeout_seconds=0)


def test_a_rank_that_sees_more(tmp_path: Path, other: Path) -> None:
    with pytest.raises(CheckpointError, match="this rank sees global_step30, where rank 0 sees no checkpoint"):
        confirm_choice(other, None, timeout_seconds=0)


@pytest.mark.parametrize("salt", [0, 1])
def test_a_rank_that_sees_another_save(root: Path, other: Path, save: Callable[..., Commit], salt: int) -> None:
    save(other, 30, salt=salt)  # salt 0: the same digest, yet another save with other weights
    with pytest.raises(CheckpointError, match="this rank sees digest") as caught:
        confirm_choice(other, broadcast(root), timeout_seconds=0)
    assert "what rank 0 chose: global_step30, 240 samples" in str(caught.value)


def test_a_cache_that_lags_behind_is_waited_for(root: Path, other: Path) -> None:
    message = broadcast(root)
    away = other.with_name("away")
    other.rename(away)
    timer = threading.Timer(0.3, lambda: away.rename(other))
    timer.start()
    assert confirm_choice(other, message, timeout_seconds=3600, poll_seconds=0.02) is not None
    timer.join()


def test_a_universal_checkpoint(root: Path) -> None:
    (root / "global_step20_universal").mkdir()
    record = confirm_choice(root, broadcast(root, tag="global_step20_universal"), timeout_seconds=0)
    assert record is not None
    assert record.iteration == 20
