"""One rank of a Megatron job: megatron-core and a stand-in for the training package, under ``megaresume.run``.

Forked from `harness`, it reports what `job` reports. The samples are hashes of the tokens that the model gets, and the
weights are hashed here: nothing of it is what megaresume says. A save's files are written by the rank or, with
torch_dist, by processes that it forks; a fault is in the one or in the others (`Fault.while_it`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaresume import run
from megaresume.checkpoint import system
from megaresume.hosts.megatron.host import latest_host
from tests.reliability.job import BATCH, MEGATRON, WORLD_SIZE, Report, Task, end_threads
from tests.reliability.shim import Shim

MINI = Path(__file__).parents[1] / "hosts" / "megatron" / "mini"
#: what the script of a forked rank tells its steps.
CURRENT: list[Steps] = []


@functools.cache
def warm() -> None:
    """Import what a rank needs, without a thread."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name in ("dist_checkpointing", "parallel_state", "rerun_state_machine", "datasets.gpt_dataset"):
        importlib.import_module(f"megatron.core.{name}")
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("megatron-core has started a thread: forking is not safe")


def arguments(task: Task) -> list[str]:
    """Of the script. A job that saves ends with its last save, and has then waited for it."""
    last = task.saves[-1] if task.saves else task.stop
    words: list[object] = ["--megaresume-data", task.data, "--seed", 7, "--seq-length", 32, "--vocab-size", 65]
    words += ["--micro-batch-size", BATCH // WORLD_SIZE, "--global-batch-size", BATCH, "--train-iters", last]
    if task.saves:
        form, *more = MEGATRON[task.kind]
        interval = last if len(task.saves) == 1 else task.saves[1] - task.saves[0]
        words += ["--save", task.directory, "--load", task.directory, "--save-interval", interval]
        words += ["--ckpt-format", form, *more, "--megaresume-max-starts", 0]
        if task.recording is not None:
            words += ["--megaresume-keep-last", task.keep]
    return [str(word) for word in words]


class Steps:
    """Reports the steps of a rank, and arms the shim when a save is about to begin."""

    def __init__(self, task: Task, rank: int, report: Report, log: int) -> None:
        self.task, self.report, self.log = task, report, log
        self.fault = task.fault if task.fault is not None and task.fault.rank == rank else None
        self.shim, self.model, self.saves = Shim(), None, False
        os.register_at_fork(after_in_child=self._forked)
        if task.recording is not None:
            system.boot_id = lambda: f"node of rank {rank}"
            self._record()

    def begins(self, args: Any, model: Any) -> None:
        """Before the forward pass of a step."""
        if self.model is None:
            self.model = model
            step, samples = args.iteration, args.consumed_train_samples
            self.report("restored", step=step, samples=samples, content=self._content())

    def has_trained(self, _: object, *, iteration: int, micro: object, loss: float, **__: object) -> None:
        """After a step, before its save."""
        self.report("step", step=iteration, samples=micro, loss=loss.hex(), content=self._content())
        if self.task.saves and iteration == self.task.saves[0]:
            self.report("saves", step=iteration)
            self.saves = True
            if self.fault is not None and self.fault.while_it == "saves":
                self._arm()

    def ends(self) -> None:
        """The job is over."""
        if self.task.recording is not None and (host := latest_host()) is not None:
            host.session.close()  # which waits until all is durable
            end_threads()
        self.shim.disarm()
        if self.saves:
            self.report("saved", step=self.task.saves[0])
        self.report("end")

    def _arm(self) -> None:
        assert self.fault is not None
        self.shim.arm(self.task.directory, at=self.fault.at, mode=self.fault.mode, log=self.log)

    def _record(self) -> None:
        self.shim.arm(self.task.directory.parent, mode="record", log=self.log)

    def _forked(self) -> None:
        if self.task.recording is not None:
            self._record()
            return
        self.shim.disarm()
        if self.saves and self.fault is not None and self.fault.while_it == "writes":
            self._arm()

    def _content(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        assert self.model is not None
        for name, weight in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + weight.numpy().tobytes())
        return digest.hexdigest()


def main(task: Task, rank: int, meeting: Path, reports: Path, log: int) -> None:
    """In a forked child; does not return. What it prints is in the report if it fails."""
    report = Report(reports)
    output = meeting.with_name(f"output{rank}")
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ["MEGARESUME_CACHE"] = str(task.data.parent)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD_SIZE)
        CURRENT[:] = [Steps(task, rank, report, log)]
        sys.argv[:] = ["megaresume.run", str(MINI / "pretrain_reporting.py"), *arguments(task)]
        try:
            sys.exit(run.main())
        except SystemExit as end:
            if end.code:
                raise
        CURRENT[0].ends()
        status = 0
    except BaseException as error:  # noqa: BLE001  whatever it is, it goes into the report
        sys.stdout.flush()
        text = traceback.format_exc() + output.read_text()[-3000:]
        report("failed", headline=f"{type(error).__name__}: {error}"[:500], text=text)
    finally:
        os._exit(status)
