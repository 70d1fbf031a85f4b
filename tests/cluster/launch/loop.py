"""The training of the scenarios: a plain torch loop on several ranks, with a host and a recorder of its own.

    CONTROL/rank-R.txt   one line a step: number, hash of the samples, their number, loss   written by each rank
    CONTROL/last         the step after which the run is over; missing: it goes on
    CONTROL/raise        the last rank removes it, and fails

The recorder looks at the batches themselves: neither it nor what compares its lines uses megaresume.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.checkpoint.host import Restored, change_lines
from megaresume.checkpoint.random_state import RandomState
from megaresume.checkpoint.records.envelope import Envelope, stream_of
from megaresume.checkpoint.records.names import deepspeed_tag
from megaresume.checkpoint.session import Session
from megaresume.checkpoint.stopping import StopConditions
from megaresume.checkpoint.system import Topology
from megaresume.stream.batches import BatchSchedule

BATCH, VOCAB, SAVE_INTERVAL = 4, 256, 5
SCHEDULE = BatchSchedule.constant(BATCH)


class Loop:
    """The host."""

    framework = f"torch {torch.__version__}"
    forgotten = "session.load was not called"
    load = "session.load({directory!r}, ...)"
    begin_anew = "torch.load(...)['model'] by hand"

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(1)
        layers = torch.nn.Embedding(VOCAB, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, VOCAB)
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.rank, self.world, self.step = rank, world, 0

    def iteration(self) -> int:
        return self.step

    def samples(self) -> int:
        return self.step * BATCH

    def topology(self) -> Topology:
        return Topology(world_size=self.world, dp=self.world, global_batch_size=BATCH)

    def expected_files(self, save_dir: Path, tag: str) -> list[str]:
        return ["weights.pt"] if self.rank == 0 else []

    def settle(self) -> None:
        """Nothing is written in the background."""

    def is_saving(self) -> bool:
        return False

    def committed(self, save_dir: Path) -> None:
        """Nothing to do."""

    def write(self, save: Any) -> None:
        if self.rank == 0:
            held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
            (save.save_dir / save.tag).mkdir(exist_ok=True)
            torch.save(held | {"data": save.envelope.to_text()}, save.save_dir / save.tag / "weights.pt")

    def read(self, choice: Any, beside: object) -> Restored:
        held = torch.load(choice.tag_dir / "weights.pt", weights_only=True)
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.step = held["step"]
        return Restored(envelope=Envelope.read(held["data"]), iteration=self.step, samples=self.samples())

    def train(self, batch: dict[str, torch.Tensor]) -> float:
        """One step; the loss of this rank."""
        logits = self.model(batch["tokens"])
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = (losses * batch["loss_mask"].flatten()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        for weights in self.model.parameters():
            dist.all_reduce(weights.grad)
        self.optimizer.step()
        self.step += 1
        return loss.item()


class Samples:
    """The data."""

    changed = ()
    counts_by = ""

    def __init__(self, stream: Any) -> None:
        self.stream, self.origin = stream, stream.origin

    def next_sample(self) -> int:
        return self.stream.start

    def prepare(self) -> None:
        """Every rank plans the whole stream."""

    def snapshot(self, samples: int) -> Any:
        return self.stream.state_at(samples, batches=SCHEDULE.until(samples))

    def read_back(self, state: Any) -> None:
        self.stream.read_back(stream_of(state))

    def write_files(self, save_dir: Path, iteration: int, tag: str) -> tuple[()]:
        return ()

    def restore(self, state: Any, choice: object) -> None:
        self.stream.restore(stream_of(state))

    def describe(self) -> list[str]:
        return change_lines(self.stream, BATCH)


def go_wrong(fault: str, restarts: int) -> None:
    """Before the training."""
    if fault == "nothing":
        sys.exit(0)
    if fault == "hang":
        time.sleep(600)
    if fault == f"on {os.environ.get('SLURMD_NODENAME')}":
        raise OSError("this node is broken")
    if fault == f"task {os.environ.get('SLURM_ARRAY_TASK_ID')}" and restarts == 0:
        raise OSError("no luck the first time")


def goes_on(control: Path, step: int) -> bool:
    """Whether there is another step: all ranks agree with the first one."""
    last = control / "last"
    words = last.read_text() if last.exists() else ""
    said = torch.tensor(int(not words or step < int(words)))
    dist.broadcast(said, 0)
    return bool(said)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("data", "control", "save", "load", "megaresume-stop-file", "megaresume-log-samples"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("exit-signal-handler", "megaresume-elastic"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--fault", default="")
    parser.add_argument("--pace", type=float, default=0.1)
    args = parser.parse_args()
    go_wrong(args.fault, int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    loop, stream = Loop(rank, world), open_stream(args.data)
    random = RandomState(loop.iteration, torch.device("cpu"), replica=lambda: f"rank {rank}")
    session = Session(loop, Samples(stream), save_dir=args.save, random=random)

    def save() -> None:
        session.save(args.save, loop.write, tag=deepspeed_tag(loop.step))

    session.stop_when(StopConditions(file=str(args.megaresume_stop_file)), save)
    session.start()
    session.load(args.load, loop.read)
    where = {"dp_rank": rank, "dp_size": world, "start": loop.samples()}
    batches = iter(StreamLoader(stream, SCHEDULE, micro_batch_size=BATCH // world, **where))
    record = open(args.control / f"rank-{rank}.txt", "a", buffering=1)  # noqa: SIM115  until the process ends
    while goes_on(args.control, loop.step):
        session.step_begins()
        if rank == world - 1 and (args.control / "raise").exists():
            (args.control / "raise").unlink()
            raise RuntimeError("a rank fails")
        tokens = next(batches)
        seen = hashlib.sha256(tokens["tokens"].numpy().tobytes()).hexdigest()[:16]
        loss = loop.train(tokens)
        record.write(f"{loop.step} {seen} {len(tokens['tokens'])} {loss.hex()}\n")
        time.sleep(args.pace)
        if loop.step % SAVE_INTERVAL == 0:
            save()
    if loop.step != session.settled_step:
        save()
    session.finish()
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
