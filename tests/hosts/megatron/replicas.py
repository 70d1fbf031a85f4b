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

from megaresume.checkpoint.host import Loaded
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.hosts.megatron import iterators
from megaresume.hosts.megatron.arguments import Settings
from megaresume.hosts.megatron.host import Found, MegatronHost
from megaresume.hosts.megatron.project import Project
from megaresume.hosts.megatron.streams import StreamOrder, open_streams
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import MegaresumeError

RANK = int(os.environ["RANK"])


class Ranks(types.ModuleType):
    """The first and the last stage of a pipeline."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_rank"):
            return lambda: RANK if "pipeline" in name else 0
        raise AttributeError(name)


def host_of(corpus: Path, *, iteration: int = 0, restored: bool = False, **changes: Any) -> MegatronHost:
    sys.modules["ranks_of_two"] = Ranks("ranks_of_two")
    project = Project(kind="megatron-lm", root=Path(), version="0.16.1", modules={"parallel_state": "ranks_of_two"})
    args = kit.arguments(data_path=[str(corpus)], split="100,0,0", eval_iters=0, iteration=iteration)
    args.consumed_train_samples = iteration * 8
    args.save = None
    for name, value in changes.items():
        setattr(args, name, value)
    current = MegatronHost(project, args, Settings(mode="stream"))
    if iteration:
        current.found = Found(args=args)
    if restored:
        whole = open_streams(args, None)
        order = StreamOrder(whole, saved=None, position=0, iteration=0, schedule=BatchSchedule.constant(8))
        envelope = Envelope(state=order.snapshot(iteration * 8), iteration=iteration, framework="megatron-lm 0.16.1")
        choice = Choice(load_dir=Path(), tag="", iteration=iteration, record=None, manifest=None)
        current.session.loaded = Loaded(choice=choice, envelope=envelope, topology=None)
    return current


def never(provider: Any) -> Any:
    raise AssertionError("the data was built")


def refusal(name: str, current: MegatronHost) -> None:
    iterators.megatron_host = lambda: current  # type: ignore[assignment]
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
    refusal("last stage not restored", host_of(directory / "a", iteration=10, restored=RANK == 0))
    refusal("first stage not restored", host_of(directory / "a", iteration=10, restored=RANK == 1))
    refusal("nobody restored", host_of(directory / "a", iteration=10))
    refusal(
        "other counter", host_of(directory / "a", iteration=10, restored=True, consumed_train_samples=80 + 8 * RANK)
    )
    refusal("other corpus", host_of(mine))
    refusal("no corpus", host_of(directory / ("a" if RANK == 0 else "nowhere")))
    refusal("other flag", host_of(directory / "a", seed=5 + RANK))
    refusal("flag of one", host_of(directory / "a", mock_data=RANK == 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
