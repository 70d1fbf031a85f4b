"""``megaresume inspect`` as a whole process, from the shell and back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.corpora import config
from benchmarks.lengths import open_lengths, write_lengths
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, wall
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.checkpoint.system import Topology
from megaresume.stream.stream import Stream

NUM_CHECKPOINTS = 5
MOST_SECONDS = 0.5


def rows(setup: Setup) -> Iterator[Row]:
    """Against Python starting and doing nothing."""
    directory = setup.directory / "checkpoints"
    _checkpoints(directory)
    compared = {
        "inspect": _process("-m", "megaresume", "inspect", str(directory)),
        "nothing": _process("-c", "pass"),
    }
    seconds = interleaved(compared, setup.sizes.repetitions, clock=wall)
    yield Row(
        what="megaresume inspect, whole process",
        ours=median(seconds["inspect"]),
        unit="s",
        baseline=median(seconds["nothing"]),
        against="python -c pass",
        must="< 0.5 s",
        holds=median(seconds["inspect"]) < MOST_SECONDS,
    )


def _process(*arguments: str) -> Callable[[int], object]:
    def run(_: int) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    return run


def _checkpoints(save: Path) -> None:
    """A save directory as a short run leaves it: five checkpoints of two ranks."""
    save.mkdir()
    stream = Stream(config("best_fit"), open_lengths(write_lengths(save.with_name("few"), 10_000)))
    topology = Topology(world_size=2, dp=2, micro_batch_size=4, global_batch_size=8)
    for iteration in range(10, 10 * NUM_CHECKPOINTS + 1, 10):
        tag = f"global_step{iteration}"
        state = stream.state_at(8 * iteration, batches=[(0, 8)])
        pending = begin_save(save, tag=tag, iteration=iteration, state=state, topology=topology)
        (save / tag).mkdir()
        files = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]
        for name in files:
            (save / tag / name).write_bytes(bytes(1 << 16))
        commit_save(pending, expected_files=files)
