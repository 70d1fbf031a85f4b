"""One rank of a training job: a real DeepSpeed engine, a real corpus, killed in its save or left to go on.

    process group -> engine -> attach -> load -> what was restored -> steps, saves -> end

Forked from a process that has imported everything (`harness`). Whatever it finds goes line by line into a report file
outside the checkpoints, written at once: what was said before a SIGKILL is there after it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

import megaresume
from megaresume.checkpoint import confirm_choice
from megaresume.integrations import session, shared
from megaresume.stream.errors import MegaresumeError
from tests.reliability.shim import Mode, Shim

WORLD_SIZE = 2
VOCAB, WIDTH = 64, 16
BATCH = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Where a rank is stopped: at an operation below the directory of checkpoints, while it starts or saves."""

    rank: int
    at: int
    mode: Mode = "kill"
    error: int = 0
    while_it: Literal["starts", "saves"] = "saves"

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.mode} at operation {self.at} while it {self.while_it}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a job is to do."""

    zero: int
    data: Path
    directory: Path
    #: steps after which a checkpoint is saved; the fault is in the first of them.
    saves: tuple[int, ...] = ()
    #: the last step.
    stop: int
    fault: Fault | None = None
    #: of `megaresume.attach`.
    verify: bool = False
    #: what rank 1 takes for the directory; None: the same.
    other_directory: Path | None = None
    #: whether `megaresume.attach` is told the directory; otherwise the load is the first to look at it.
    is_named: bool = True
    #: checkpoints to keep; None: all.
    keep: int | None = 3


class Report:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what: str, **values: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **values}).encode() + b"\n")


def config(zero: int) -> dict[str, Any]:
    """Of DeepSpeed. Its own buckets are for models of some other size."""
    return {
        "train_micro_batch_size_per_gpu": BATCH // WORLD_SIZE,
        "train_batch_size": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
        "steps_per_print": 1 << 40,
    }


def engine_of(zero: int) -> Any:
    import deepspeed

    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, VOCAB)
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(zero))
    return engine


def content(engine: Any) -> str:
    """Hash of everything that this rank trains: its weights or partition of them, master weights, moments."""
    digest = hashlib.blake2b(digest_size=16)
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    tensors = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors.append(parameter)
            state = optimizer.state.get(parameter, {})
            tensors += [state[name] for name in sorted(state, key=repr) if torch.is_tensor(state[name])]
    for tensor in tensors:
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def train_step(engine: Any, data: Any) -> tuple[list[int], str]:
    """One step; the numbers of its samples on this rank, in order, and the loss in hexadecimal."""
    batch = next(data)
    logits = engine(batch["tokens"])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    loss = (losses * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].numel()
    engine.backward(loss)
    engine.step()
    return batch["samples"].tolist(), loss.item().hex()


def join(rank: int, meeting: Path) -> None:
    """Become a rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD_SIZE)
    deepspeed.init_distributed("gloo", verbose=False)


def run(task: Task, rank: int, meeting: Path, report: Report, log: int) -> None:
    """The job. Raises what a user's job would raise."""
    join(rank, meeting)
    directory = task.directory if rank == 0 or task.other_directory is None else task.other_directory
    if task.other_directory is not None:
        # A rank waits half a minute for a filesystem whose cache lags behind.
        shared.PATIENCE_SECONDS = 0.2
        session.confirm_choice = functools.partial(confirm_choice, timeout_seconds=0.2)  # type: ignore[assignment]
    engine = engine_of(task.zero)
    shim, mine = Shim(), task.fault if task.fault is not None and task.fault.rank == rank else None

    def armed(while_it: str) -> Any:
        if mine is None or mine.while_it != while_it:
            return nullcontext()
        return shim.armed(directory, at=mine.at, mode=mine.mode, error=mine.error, log=log)

    # A job that is killed so often in its first save must be allowed to try again.
    checkpoints = megaresume.Checkpoints(
        save_dir=directory if task.is_named else None, keep_last=task.keep, max_starts=0, verify=task.verify
    )
    report("starts")
    with armed("starts"):
        data = megaresume.attach(engine, task.data, checkpoints=checkpoints, loader=megaresume.Loader(prefetch=0))
        engine.load_checkpoint(str(directory))
        report("restored", step=engine.global_steps, samples=data.samples_trained, content=content(engine))
        trained = train_step(engine, data) if engine.global_steps < task.stop else None
    while trained is not None:
        report("step", step=engine.global_steps, samples=trained[0], loss=trained[1], content=content(engine))
        if engine.global_steps in task.saves:
            first = engine.global_steps == task.saves[0]
            report("saves", step=engine.global_steps)
            with armed("saves") if first else nullcontext():
                engine.save_checkpoint(str(directory))
            report("saved", step=engine.global_steps)
        trained = train_step(engine, data) if engine.global_steps < task.stop else None
    report("end")


def main(task: Task, rank: int, meeting: Path, reports: Path, log: int) -> None:
    """In a forked child; does not return."""
    report = Report(reports)
    status = 1
    try:
        run(task, rank, meeting, report, log)
        status = 0
    except MegaresumeError as error:
        report("refused", headline=error.headline, text=str(error))
    except BaseException as error:  # noqa: BLE001  whatever it is, it goes into the report
        report("failed", headline=f"{type(error).__name__}: {error}"[:500], text=traceback.format_exc())
    finally:
        os._exit(status)
