"""Run by two processes: saves that fail, on a disk that is full or on one rank alone. See test_full_disk.py.

full_disk.py DATA ROOT   ROOT is a disk of its own, of some MB
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import toy

import megaresume
from megaresume.checkpoint.load.choose import choose

toy.WIDTH = 64  # files of the model are larger than what is beside them
ballast = toy.ROOT / "ballast"


def fill(room: int) -> None:
    """Leave so many bytes on the disk. On rank 0; all wait."""
    if dist.get_rank() == 0:
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                file.truncate(max(file.tell() - room, 0))
    dist.barrier()


class CleanedAfter:
    """Standard output; somebody who reads there of a save that failed makes room, after so many failures."""

    def __init__(self, stream: TextIO, failures: int) -> None:
        self.stream, self.failures = stream, failures
        self.said: list[str] = []

    def write(self, text: str) -> int:
        if " was not saved: " in text:
            self.said.append(text.strip())
            if len(self.said) == self.failures:
                ballast.unlink()
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


def listen(function: Callable[[], Any], failures: int) -> tuple[Any, list[str]]:
    """What a call gives or raises, and what was said of failures."""
    before, listener = sys.stdout, CleanedAfter(sys.stdout, failures)
    sys.stdout = listener  # type: ignore[assignment]
    try:
        return function(), listener.said
    except megaresume.MegaresumeError as error:
        return [type(error).__name__, error.headline, str(error.found)], listener.said
    finally:
        sys.stdout = before


def engine_and_data(root: Path, *, stage: int = 1, **options: Any) -> tuple[Any, Any]:
    engine = toy.engine_of(stage=stage)
    checkpoints = megaresume.Checkpoints(save_dir=root, save_retry_wait=0.01, **options)
    data = megaresume.attach(engine, toy.DATA, checkpoints=checkpoints)
    engine.load_checkpoint(str(root))
    return engine, data


def newest(root: Path) -> str | None:
    dist.barrier()
    choice = choose(root, checksums=True)
    return None if choice is None else choice.tag


def one_rank(alone: int, stage: int) -> None:
    """One rank may write no file above 40 KB: the program catches the error on both ranks, and goes on."""
    root = toy.ROOT / f"alone{alone}"
    engine, data = engine_and_data(root, stage=stage, save_retries=1)
    toy.train(engine, data, 2, save=root)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    toy.train(engine, data, 4)
    if dist.get_rank() == alone:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    raised, said = listen(lambda: engine.save_checkpoint(str(root)), 99)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found = {"raised": raised, "said": said, "newest": newest(root)}
    found["again"] = [engine.save_checkpoint(str(root)), newest(root)]
    toy.train(engine, data, 6)
    found["next"] = [engine.save_checkpoint(str(root)), newest(root)]
    toy.result(f"alone{alone}", found)
    data.close()


def cleaned() -> None:
    """The disk is full in the save, with less and more room, and is cleaned while the save waits."""
    root = toy.ROOT / "cleaned"
    engine, data = engine_and_data(root)
    found = []
    for number, room in enumerate((0, 8_000, 40_000, 90_000, 160_000), start=1):
        toy.train(engine, data, number)
        fill(room)
        saved, said = listen(lambda: engine.save_checkpoint(str(root)), 1 + number % 3)
        found.append([saved, said, newest(root)])
        ballast.unlink(missing_ok=True)
        dist.barrier()
    toy.result("cleaned", found)
    data.close()


class Numbers:
    """A loader with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((2, 32), 2 * self.at + dist.get_rank())

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": bytes(30_000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def loader() -> None:
    """As `cleaned`, with a loader in the place of a stream; then it goes on from the last save."""

    def attached() -> tuple[Any, Any]:
        engine = toy.engine_of(stage=1)
        checkpoints = megaresume.Checkpoints(save_dir=root, save_retry_wait=0.01)
        return engine, megaresume.attach(engine, Numbers(), checkpoints=checkpoints)

    def train(steps: int) -> list[int]:
        seen = []
        while engine.global_steps < steps:
            batch = next(data)
            seen.append(int(batch[0, 0]))
            engine.backward(engine(batch % toy.VOCAB).square().mean())
            engine.step()
        return seen

    root, found = toy.ROOT / "loader", []
    engine, data = attached()
    for number, room in enumerate((0, 20_000, 50_000, 160_000), start=1):
        train(number)
        fill(room)
        saved, said = listen(lambda: engine.save_checkpoint(str(root)), 2)
        found.append([saved, said, newest(root)])
        ballast.unlink(missing_ok=True)
        dist.barrier()
    data.close()
    engine, data = attached()
    engine.load_checkpoint(str(root))
    toy.result("loader", [found, train(5)])
    data.close()


def full(on_save_failure: str) -> None:
    """Nobody makes room."""
    root = toy.ROOT / on_save_failure
    engine, data = engine_and_data(root, on_save_failure=on_save_failure, save_retries=2)
    toy.train(engine, data, 2, save=root)
    fill(90_000)
    same, _ = listen(lambda: engine.save_checkpoint(str(root)), 99)
    found = {"same step": [same, newest(root)]}
    toy.train(engine, data, 3)
    fill(90_000)
    saved, said = listen(lambda: engine.save_checkpoint(str(root)), 99)
    found |= {"saved": saved, "said": said, "newest": newest(root), "there": (root / "global_step3").exists()}
    dist.barrier()
    ballast.unlink(missing_ok=True)
    toy.train(engine, data, 4)
    found["next"] = [engine.save_checkpoint(str(root)), newest(root)]
    data.close()
    engine, data = engine_and_data(root)
    found["resumed"] = [engine.global_steps, toy.train(engine, data, 5)]
    data.close()
    toy.result(on_save_failure, found)


def twin() -> None:
    engine = toy.engine_of(stage=1)
    toy.result("twin", toy.train(engine, megaresume.attach(engine, toy.DATA), 5))


toy.start()
one_rank(1, stage=1)
one_rank(0, stage=3)
cleaned()
loader()
full("end")
full("continue")
twin()
toy.finish()
