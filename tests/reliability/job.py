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
import threading
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

import megaresume
from megaresume.checkpoint import chooser, system
from megaresume.checkpoint.load.choose import confirm_choice
from megaresume.checkpoint.lock import shared
from megaresume.stream.errors import MegaresumeError
from tests.reliability.shim import Mode, Shim

WORLD_SIZE = 2
VOCAB, WIDTH = 64, 16
BATCH = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Where a rank is stopped: at an operation below the directory of checkpoints, while it starts or saves; or at one
    below that of their copies, from its start to its end."""

    rank: int
    at: int
    mode: Mode = "kill"
    error: int = 0
    #: writes: in a process that the rank has forked in its save.
    while_it: Literal["starts", "saves", "copies", "writes"] = "saves"

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.mode} at operation {self.at} while it {self.while_it}"


#: stream: `megaresume.attach`. loader: `megaresume.attach`. pipeline: the first with a pipeline engine of two
#: stages. writer: the first with DeepSpeed's decoupled writer. The others: `megatron_job`.
Kind = Literal["stream", "loader", "pipeline", "writer", "torch", "torch_dist", "asynchronous torch_dist"]
#: of Megatron: kind of job -> format of checkpoints, and further flags.
MEGATRON: dict[Kind, tuple[str, ...]] = {
    "torch": ("torch",),
    "torch_dist": ("torch_dist",),
    "asynchronous torch_dist": ("torch_dist", "--async-save"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a job is to do."""

    kind: Kind = "stream"
    zero: int
    data: Path
    directory: Path
    #: steps after which a checkpoint is saved; the fault is in the first of them.
    saves: tuple[int, ...] = ()
    #: the last step.
    stop: int
    fault: Fault | None = None
    #: of `megaresume.attach`: the default is to take checksums, and to compare them.
    verify: bool = True
    #: what rank 1 takes for the directory; None: the same.
    other_directory: Path | None = None
    #: whether `megaresume.attach` is told the directory; otherwise the load is the first to look at it.
    is_named: bool = True
    #: checkpoints to keep; None: all.
    keep: int | None = 3
    #: where the checkpoints are copied to; the job waits for its copies at the end.
    stage_to: Path | None = None
    #: directories that are loaded from one after the other, with a step after each; no more is done then.
    loads: tuple[Path, ...] = ()
    #: file that gets all that the ranks do in the directory above `directory`, for `recording`; None: nothing does.
    recording: Path | None = None


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


def engine_of(zero: int, kind: Kind = "stream") -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(3)
    layers = [
        torch.nn.Embedding(VOCAB, WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(WIDTH, VOCAB),
    ]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    if kind == "pipeline":
        model = PipelineModule(layers=layers, num_stages=WORLD_SIZE, loss_fn=loss_of)
    more: dict[str, Any] = {}
    if kind == "writer":
        os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}
        more["checkpoint"] = {"writer": {"type": "python", "decoupled": True, "data_parallel": "replica"}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(zero) | more)
    return engine


class Numbers:
    """A loader with a state of its own: its batches are numbered, and drawn from their numbers."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        size = BATCH // WORLD_SIZE
        while True:
            first = size * (WORLD_SIZE * self.at + dist.get_rank())
            self.at += 1
            tokens = torch.randint(VOCAB, (size, 33), generator=torch.Generator().manual_seed(first))
            yield {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": torch.ones(size, 32),
                "samples": torch.arange(first, first + size),
            }

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def attach(task: Task, engine: Any, checkpoints: megaresume.Checkpoints) -> Any:
    """The data of a job."""
    if task.kind == "loader":
        return megaresume.attach(engine, Numbers(), checkpoints=checkpoints)
    taken: list[int] = []

    def pair(batch: Any) -> Any:
        taken.extend(batch["samples"].tolist())
        return batch["tokens"], (batch["labels"], batch["loss_mask"])

    options = megaresume.LoaderOptions(prefetch=0, transform=pair if task.kind == "pipeline" else None)
    data = megaresume.attach(engine, task.data, checkpoints=checkpoints, loader_options=options)
    data.taken = taken
    return data


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


def loss_of(logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    labels, mask = target
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.numel()


def train_step(engine: Any, data: Any) -> tuple[list[int], str]:
    """One step; the numbers of its samples on this rank, in order, and the loss in hexadecimal. A loss tells one batch
    from another to the last bit: the numbers alone are what the code under test says."""
    if hasattr(engine, "train_batch"):
        loss = engine.train_batch()
        samples, data.taken[:] = list(data.taken), []
        return samples, loss.item().hex()
    batch = next(data)
    loss = loss_of(engine(batch["tokens"]), (batch["labels"], batch["loss_mask"]))
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
        shared.SEEN_WITHIN_SECONDS = 0.2
        chooser.confirm_choice = functools.partial(confirm_choice, timeout_seconds=0.2)  # type: ignore[assignment]
    shim, mine = Shim(), task.fault if task.fault is not None and task.fault.rank == rank else None
    if task.recording is not None:
        system.boot_id = lambda: f"node of rank {rank}"
        shim.arm(directory.parent, mode="record", log=log)
    if task.kind == "writer":  # which inherits the shim as it is; DeepSpeed would spawn it, and import all of it again
        torch.multiprocessing.set_start_method("fork")
    engine = engine_of(task.zero, task.kind)

    def armed(while_it: str) -> Any:
        if mine is None or mine.while_it != while_it:
            return nullcontext()
        return shim.armed(directory, at=mine.at, mode=mine.mode, error=mine.error, log=log)

    if task.stage_to is not None and mine is not None:
        shim.arm(task.stage_to, at=mine.at, mode=mine.mode, error=mine.error, log=log)
    if task.loads:
        system.boot_id = lambda: f"node of rank {rank}"  # which share the comparing of checksums
        load_all(task, engine, report)
        return
    # A job that is killed so often in its first save must be allowed to try again.
    checkpoints = megaresume.Checkpoints(
        save_dir=directory if task.is_named else None,
        keep_last=task.keep,
        max_starts=0,
        checksums=task.verify,
        save_retry_wait=0.01,
        stage_to=task.stage_to,
    )
    report("starts")
    with armed("starts"):
        data = attach(task, engine, checkpoints)
        engine.load_checkpoint(str(directory))
        report("restored", step=engine.global_steps, samples=data.samples_trained, content=content(engine))
        trained = train_step(engine, data) if engine.global_steps < task.stop else None
    while trained is not None:
        report("step", step=engine.global_steps, samples=trained[0], loss=trained[1], content=content(engine))
        if engine.global_steps in task.saves:
            first = engine.global_steps == task.saves[0]
            report("saves", step=engine.global_steps)
            with armed("saves") if first else nullcontext():
                engine.save_checkpoint(str(directory), client_state={"words": client_words(engine.global_steps)})
            report("saved", step=engine.global_steps)
        trained = train_step(engine, data) if engine.global_steps < task.stop else None
    # The process ends without the interpreter's own end, which waits for what is not durable yet.
    if task.kind == "writer":
        engine.destroy()
    data.close()
    if task.recording is not None:
        end_threads()
        shim.disarm()
    report("end")


def client_words(step: int) -> str:
    """What the program itself puts into the checkpoint of a step."""
    return f"client state of step {step}. " * 40


def load_all(task: Task, engine: Any, report: Report) -> None:
    """Load from every directory, in default settings, and make a step: what a start there would do."""
    for number, directory in enumerate(task.loads):
        data = megaresume.attach(engine, task.data, loader_options=megaresume.LoaderOptions(prefetch=0))
        try:
            _, client = engine.load_checkpoint(str(directory))
        except MegaresumeError as error:
            report("refused", number=number, headline=error.headline, text=str(error))
        else:
            step, words = engine.global_steps, (client or {}).get("words")
            report(
                "restored",
                number=number,
                step=step,
                samples=data.samples_trained,
                content=content(engine),
                client=words == client_words(step),
            )
            trained = train_step(engine, data)
            report("step", number=number, step=step + 1, samples=trained[0], loss=trained[1], content=content(engine))
        data.close()


def end_threads() -> None:
    """Wait for what the interpreter would wait for at its end: old checkpoints are still being deleted."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


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
