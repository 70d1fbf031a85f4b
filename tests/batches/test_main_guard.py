"""A script without ``if __name__ == "__main__":`` that wants spawned workers is told so, before one is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.conftest import write_corpus

pytestmark = pytest.mark.process

#: prints the first tokens of three batches, and a line whenever it is run.
SCRIPT = """
import megaresume

print("run by", "a worker" if __name__ == "__mp_main__" else "the user", flush=True)


def stream_loader(workers=2):
    schedule = megaresume.BatchSchedule.constant(4)
    stream = megaresume.open_stream("data.yaml")
    return megaresume.StreamLoader(stream, schedule, micro_batch_size=4, num_workers=workers, start_method="spawn")


def data_loader(workers=2):
    spawn = {"multiprocessing_context": "spawn"} if workers else {}
    return megaresume.DataLoader(range(100), 4, num_workers=workers, **spawn)


def train(loader):
    for batch, _ in zip(loader, range(3)):
        print(batch["tokens"][:, 0].tolist() if isinstance(batch, dict) else batch.tolist(), flush=True)

"""
Run = Callable[..., tuple[int, list[str], str]]
GUARD = 'if __name__ == "__main__":\n    '


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_corpus(tmp_path / "web", documents=50, seed=1)
    (tmp_path / "data.yaml").write_text("seed: 1\nseq_length: 16\nsources:\n  web: {path: web}\n")

    def run(end: str, *words: str) -> tuple[int, list[str], str]:
        (tmp_path / "train.py").write_text(SCRIPT + end)
        path = {"PYTHONPATH": f"{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"}
        command = [sys.executable, *(words or ("train.py",))]
        done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        pytest.param("stream_loader()", ("train.py",), marks=pytest.mark.cold),
        ("data_loader()", ("-m", "train")),  # which workers import by its name
        ("stream_loader()", ("-m", "megaresume.run", "train.py")),
    ],
)
def test_it_is_told_so_and_ends(run: Run, loader: str, words: tuple[str, ...]) -> None:
    status, printed, said = run(f"train({loader})\n", *words)
    assert (status, printed) == (1, ["run by the user"])
    line = len(SCRIPT.splitlines()) + 1
    assert said.startswith("megaresume: error: worker processes would begin the training again\n")
    assert f'train.py, line {line}, is not under if __name__ == "__main__":, and a worker' in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["stream_loader", "data_loader"])
def test_under_the_guard_the_batches_are_the_same(run: Run, name: str) -> None:
    """The loader may be made anywhere: only the loop starts workers."""
    status, printed, said = run(f"loader = {name}()\n{GUARD}train({name}(0))\n    train(loader)\n")
    assert status == 0, said
    assert printed.count("run by a worker") == 2
    batches = [line for line in printed if not line.startswith("run by ")]
    assert len(batches) == 6 and batches[:3] == batches[3:]
