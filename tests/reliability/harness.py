"""Runs jobs of two ranks, forked from this process, and judges what a start after a fault does.

    warm once: torch, DeepSpeed and the data are imported and used, nothing is initialized
      fork, fork    one job: its ranks train, save, are killed; a rank that is left over is killed, as torchrun does
      judge         what the next job restored, against a twin that was never interrupted

This process must have been started with `shim.environment`, and has no threads: forking is safe, and costs a
hundredth of a start.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import select
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tests.forked import freeze
from tests.reliability import job, megatron_job
from tests.reliability.job import MEGATRON, WORLD_SIZE, Kind, Task

#: seconds after which a job that says nothing is taken to hang; generous, the machine may be busy with other things.
PATIENCE = 120.0

Outcome = Literal["resumed exactly", "refused correctly", "lost"]


class Lost(AssertionError):
    """A start that did not go on exactly where it should have, without saying so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What became of a job: for every rank, how it ended and what it said."""

    #: exit statuses; negative: the signal.
    ends: tuple[int, ...]
    reports: tuple[list[dict[str, Any]], ...]
    #: the file operations of the rank with a fault: "12 write /global_step4/...".
    operations: tuple[str, ...]
    #: whether that rank was killed in the last one of them.
    stopped: bool

    def said(self, rank: int, what: str) -> list[dict[str, Any]]:
        """What a rank reported of this kind."""
        return [line for line in self.reports[rank] if line["what"] == what]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Refusals and failures, of all ranks."""
        return [line for lines in self.reports for line in lines if line["what"] in ("refused", "failed")]

    @property
    def restored(self) -> int | None:
        """The step at which it began, 0 for a fresh start; None: it did not get there."""
        lines = self.said(0, "restored")
        return int(lines[0]["step"]) if lines else None


def newest_complete(directory: Path, kind: Kind = "stream") -> int:
    """The step of the newest checkpoint that has a manifest, by name alone; 0: there is none.

    Judged without the code under test. Right as long as no step is saved again once it is complete. Under
    Megatron a checkpoint is complete as soon as the tracker names it: Megatron would go on from there.
    """
    names = (path.name for path in (directory / "megaresume").glob("step_*.manifest.json"))
    steps = [int(name[5:12]) for name in names]
    tracker = directory / "latest_checkpointed_iteration.txt"
    if kind in MEGATRON and tracker.exists() and tracker.read_text():
        steps.append(int(tracker.read_text()))
    return max(steps, default=0)


def refusal(run: Run) -> str | None:
    """The words of a job that refused; None: it did not."""
    return next((line["headline"] for line in run.errors if line["what"] == "refused"), None)


class Harness:
    """Makes jobs in a working directory.

    Args:
        work: for corpora, checkpoints, reports.
        seed: of everything random.
    """

    def __init__(self, work: Path, *, seed: int) -> None:
        self.work = work
        self.seed = seed
        self.random = random.Random(seed)
        self._numbers = itertools.count()
        self._data: dict[int, Path] = {}
        warm(self.data(0))

    def data(self, seed: int = 0) -> Path:
        """A data.yaml, with corpora of its own; another seed is another run."""
        if seed not in self._data:
            from tests.hosts.conftest import write_corpus

            directory = self.work / f"data{seed}"
            directory.mkdir(parents=True)
            write_corpus(directory / "web", documents=300, seed=10 * seed + 1)
            write_corpus(directory / "code", documents=150, seed=10 * seed + 2)
            (directory / "data.yaml").write_text(
                "seed: 7\nseq_length: 32\npacking: {mode: best_fit, open_bins: 4}\n"
                "sources:\n  web: {path: web, weight: 0.6}\n  code: {path: code, weight: 0.4}\n"
            )
            self._data[seed] = directory / "data.yaml"
        return self._data[seed]

    def new_directory(self) -> Path:
        """For checkpoints; not there yet."""
        return self.work / f"checkpoints{next(self._numbers)}"

    def run(self, task: Task, *, kill_after: float | None = None, output: Path | None = None) -> Run:
        """Run a job to its end.

        When one rank ends by a signal or an error, the others are killed a little later, as under torchrun.

        Args:
            task: what it does.
            kill_after: kill all ranks this many seconds after the first save began.
            output: file that gets what rank 0 prints.
        """
        if task.kind in MEGATRON:
            megatron_job.warm()
        base = self.work / f"job{next(self._numbers)}"
        base.mkdir()
        paths = [base / f"rank{rank}" for rank in range(WORLD_SIZE)]
        pids = [_fork(task, rank, base, output if rank == 0 else None) for rank in range(WORLD_SIZE)]
        ends = _watch(pids, paths, base / "operations", self.random, kill_after)
        reports = tuple(_lines(path) for path in paths)
        for rank, end in enumerate(ends):  # refused by what ends the process itself, after it has printed why
            if end > 0 and (base / f"output{rank}").exists():
                text = (base / f"output{rank}").read_text()[-3000:]
                reports[rank].append({"what": "refused", "headline": text.strip().partition("\n")[0], "text": text})
        operations = (base / "operations").read_text().splitlines() if (base / "operations").exists() else []
        _remove(base)
        stopped = "stopped" in operations
        if stopped:  # what another process of the rank still did is no matter
            operations = operations[: operations.index("stopped")]
        return Run(ends=tuple(ends), reports=reports, operations=tuple(operations), stopped=stopped)

    @cache  # noqa: B019  one harness a process
    def twin(self, zero: int, stop: int, kind: Kind = "stream") -> Run:
        """A job that is never interrupted, and saves nothing."""
        directory = self.new_directory()
        run = self.run(Task(kind=kind, zero=zero, data=self.data(0), directory=directory, stop=stop))
        if any(run.ends):
            raise RuntimeError(f"the twin failed: {run}")
        return run

    def check_resumed(
        self, run: Run, twin: Run, expected: int, *, complete: bool = False, killed_early: bool = False
    ) -> None:
        """Hold a job against its twin: where it began, with which weights, and on what it went on to train.

        Args:
            run: the job.
            twin: of the same ZeRO stage.
            expected: the step from which it must have resumed; 0: from the beginning.
            complete: every rank must have come to its end.
            killed_early: a rank may have been killed, with another, before it had restored anything.

        Raises:
            Lost: it is not the same.
        """
        for rank in range(WORLD_SIZE):
            begun = run.said(rank, "restored")
            if not begun and killed_early and run.ends[rank] == -9:
                continue
            if not begun:
                raise Lost(f"rank {rank} restored nothing; {[e['text'] for e in run.errors]}")
            if begun[0]["step"] != expected:
                raise Lost(f"rank {rank} went on from step {begun[0]['step']}, expected {expected}")
            if begun[0]["samples"] != expected * job.BATCH:
                raise Lost(f"rank {rank} is at sample {begun[0]['samples']} in step {expected}")
            steps = {line["step"]: line for line in twin.said(rank, "step")}
            contents = {0: twin.said(rank, "restored")[0]["content"], **{s: x["content"] for s, x in steps.items()}}
            if begun[0]["content"] != contents[expected]:
                raise Lost(f"rank {rank} restored other weights or moments than step {expected} had")
            trained = run.said(rank, "step")
            if [line["step"] for line in trained] != list(range(expected + 1, expected + 1 + len(trained))):
                raise Lost(f"rank {rank} made the steps {[line['step'] for line in trained]} after {expected}")
            for line in trained:
                if line != steps[line["step"]]:
                    raise Lost(f"rank {rank} trained {line}, the twin {steps[line['step']]}")
            if complete and not run.said(rank, "end"):
                raise Lost(f"rank {rank} did not come to its end: {run.ends}, {run.errors}")


def warm(data: Path) -> None:
    """Import and use what a job needs, without a thread and without a process group."""
    warnings.simplefilter("ignore")
    gc.disable()
    import torch

    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.module_inject.auto_ep_layer  # as the others, by each engine
    import deepspeed.runtime.superoffload.superoffload_stage3
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.runtime.zero.stage3
    import deepspeed.runtime.zero.stage_1_and_2

    import megaresume.hosts.deepspeed.attach  # noqa: F401  as the others: a job shall find it
    from megaresume.batches.loader import StreamLoader
    from megaresume.batches.open import open_stream
    from megaresume.stream.batches import BatchSchedule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    torch.optim.Adam([torch.zeros(1)])  # imports a compiler
    stream = open_stream(data)
    loader = StreamLoader(
        stream, BatchSchedule.constant(8), micro_batch_size=4, dp_rank=0, dp_size=2, stop=16, prefetch=0
    )
    assert len(list(loader)) == 2
    assert len(os.listdir("/proc/self/task")) == 1, "forking a process with threads is not safe"
    gc.collect()
    freeze()  # ZeRO 3 collects garbage when it begins: not that of all modules in every child
    gc.enable()


_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def _fork(task: Task, rank: int, base: Path, output: Path | None) -> int:
    sys.stdout.flush()
    # What a signal raises in what Python runs after a fork is ignored.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.setsid()
        quiet = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        log = -1
        if task.fault is not None and task.fault.rank == rank:
            log = os.open(base / "operations", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if task.recording is not None:
            log = os.open(task.recording, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        main = megatron_job.main if task.kind in MEGATRON else job.main
        main(task, rank, base / "meeting", base / f"rank{rank}", log)
    finally:
        os._exit(3)


def _watch(
    pids: list[int], paths: list[Path], operations: Path, rng: random.Random, kill_after: float | None
) -> list[int]:
    """Wait for the ranks; when one of them or a process of theirs ends badly, or the time has come, kill the others.
    Their exit statuses."""
    ends: dict[int, int] = {}
    watches = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    silent_since, size = time.monotonic(), -1
    saving_since: float | None = None
    try:
        while len(ends) < len(pids):
            wait = 0.002 if kill_after is not None else 0.1
            for descriptor in select.select(list(watches), [], [], wait)[0]:
                rank = watches.pop(descriptor)
                os.close(descriptor)
                ends[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
            stopped = operations.exists() and b"stopped\n" in operations.read_bytes()
            if (stopped or any(end != 0 for end in ends.values())) and watches:
                time.sleep(rng.choice((0.0, 0.0, 0.005, 0.02)))  # how long a launcher takes to notice
                _kill(pids, ends)
                kill_after = None
            if kill_after is not None and watches:
                if saving_since is None and any(b'"saves"' in path.read_bytes() for path in paths if path.exists()):
                    saving_since = time.monotonic()
                if saving_since is not None and time.monotonic() - saving_since >= kill_after:
                    _kill(pids, ends)
                    kill_after = None
            now = sum(path.stat().st_size for path in paths if path.exists())
            if now != size:
                silent_since, size = time.monotonic(), now
            elif time.monotonic() - silent_since > PATIENCE:
                raise Lost(f"a job hangs; it said last: {[_lines(path)[-1:] for path in paths]}")
    finally:
        _kill(pids, ends)
        for descriptor, rank in watches.items():
            os.close(descriptor)
            os.waitpid(pids[rank], 0)
    return [ends[rank] for rank in range(len(pids))]


def _kill(pids: list[int], ends: dict[int, int]) -> None:
    for rank, pid in enumerate(pids):
        if rank not in ends:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it has forked


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # the last one, of a rank that was killed
    return lines


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
