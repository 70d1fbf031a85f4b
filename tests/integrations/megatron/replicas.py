"""Two ranks that do not agree, in several ways one after the other; run by test_iterators.py over gloo.

Every rank must raise, and say the same: one that raises alone leaves the other waiting for ever.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.integrations.megatron import iterators
from megaresume.integrations.megatron.arguments import Settings
from megaresume.integrations.megatron.data import open_streams
from megaresume.integrations.megatron.order import StreamOrder
from megaresume.integrations.megatron.project import Project
from megaresume.integrations.megatron.session import Loaded, Session
from megaresume.integrations.megatron.state import read_state, write_state
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import MegaresumeError

RANK = int(os.environ["RANK"])


class Ranks(types.ModuleType):
    """The first and the last stage of a pipeline."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_rank"):
            return lambda: RANK if "pipeline" in name else 0
        raise AttributeError(name)


def session_of(corpus: Path, *, iteration: int = 0, restored: bool = False, **changes: Any) -> Session:
    sys.modules["ranks_of_two"] = Ranks("ranks_of_two")
    project = Project(kind="megatron-lm", root=Path(), version="0.16.1", modules={"parallel_state": "ranks_of_two"})
    args = kit.arguments(data_path=[str(corpus)], split="100,0,0", eval_iters=0, iteration=iteration)
    args.consumed_train_samples = iteration * 8
    args.save = None
    for name, value in changes.items():
        setattr(args, name, value)
    current = Session(project=project, args=args, settings=Settings(mode="stream"))
    if iteration:
        current.loaded_from = Loaded(load_dir=Path(), iteration=iteration, args=args)
    if restored:
        whole = open_streams(args, None)
        order = StreamOrder(whole, saved=None, position=0, iteration=0, schedule=BatchSchedule.constant(8))
        body = {"project": "megatron-lm", "version": "0.16.1", "iteration": iteration, "samples": iteration * 8}
        current.loaded = read_state(write_state(**body, kind="stream", payload=order.payload(iteration * 8)))
    return current


def never(provider: Any) -> Any:
    raise AssertionError("the data was built")


def refusal(name: str, current: Session) -> None:
    iterators.session = lambda: current  # type: ignore[assignment]
    try:
        iterators.around_build_data_iterators(never)(lambda nums: None)
    except MegaresumeError as error:
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
    else:
        said = "nothing"
    answers: list[Any] = [None, None]
    dist.all_gather_object(answers, said)
    if RANK == 0:
        for rank, answer in enumerate(answers):
            print(f"{name} | rank {rank} | {answer}", flush=True)


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    mine = directory / ("one" if RANK == 0 else "other") / "text"
    refusal("last stage not restored", session_of(directory / "a", iteration=10, restored=RANK == 0))
    refusal("first stage not restored", session_of(directory / "a", iteration=10, restored=RANK == 1))
    refusal("nobody restored", session_of(directory / "a", iteration=10))
    refusal(
        "other counter", session_of(directory / "a", iteration=10, restored=True, consumed_train_samples=80 + 8 * RANK)
    )
    refusal("other corpus", session_of(mine))
    refusal("no corpus", session_of(directory / ("a" if RANK == 0 else "nowhere")))
    refusal("other flag", session_of(directory / "a", seed=5 + RANK))
    refusal("flag of one", session_of(directory / "a", mock_data=RANK == 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
