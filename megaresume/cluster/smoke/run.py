"""The test from beginning to end: the reference, the run with its stops, the comparison."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.cluster.demo.run import ask
from megaresume.cluster.demo.scenario import Say
from megaresume.cluster.jobs import Watch
from megaresume.cluster.records import RunRecords
from megaresume.cluster.smoke.compare import compare_runs, read_any, with_losses
from megaresume.cluster.smoke.job import Job, Launcher
from megaresume.cluster.smoke.model import model_flags, prepare_data
from megaresume.cluster.smoke.plan import Layout, Plan, Stop
from megaresume.cluster.smoke.report import Attempt, Result, Stopped
from megaresume.stream.errors import MegaresumeError, SetupError

#: seconds: how often the records are looked at; within which a job that is told to be over has to be.
POLL, ENDING = 0.02, 300.0
_GRACEFUL = ("sigterm", "requeue", "walltime", "preempt")


class _GaveUp(MegaresumeError):
    """The test cannot go on; what was found so far is still reported.

    Args:
        headline, more: of every error.
        output: the end of what the job has printed.
    """

    def __init__(self, headline: str, *, output: str | None = None, **more: Any) -> None:
        super().__init__(headline, **more)
        self.output = output

    def __str__(self) -> str:
        lines = (self.output or "").splitlines()
        shown = ["  the end of its output:", *(f"    | {line}" for line in lines)] if lines else []
        return "\n".join([super().__str__(), *shown])


def run_smoke(plan: Plan, launcher: Launcher, *, tolerance: float, patience: float, say: Say) -> Result:
    """Run it.

    Args:
        plan: what to run.
        launcher: how.
        tolerance: relative difference of losses that another order of sums may make.
        patience: seconds without anything new after which it gives up.
        say: prints a line for people.

    Raises:
        UsageError, SetupError: the launcher cannot do what the plan asks.
    """
    began = time.monotonic()
    test = _Test(plan, launcher, patience, say)
    result = test.result
    try:
        test.reference()
        test.run()
    except (_GaveUp, SetupError) as problem:
        result.problems.append(str(problem))
    finally:
        test.close()
    result.reference, result.run = (_final(plan, name) for name in ("reference", "run"))
    if result.reference is not None and result.run is not None:
        result.outcome = compare_runs(
            result.reference,
            result.run,
            steps=plan.steps,
            done=max(result.run.steps) if result.problems else plan.steps,
            tolerance=tolerance,
            exact=plan.own,
            nodes=[attempt.layout.nodes for attempt in result.attempts],
        )
        if (plan.run_dir("run") / "checkpoints" / "megaresume").is_dir():
            result.verified = _verify(plan, result)
        _refuse_unproved(plan, result)
    result.seconds = time.monotonic() - began
    return result


class _Test:
    """What `run_smoke` does."""

    def __init__(self, plan: Plan, launcher: Launcher, patience: float, say: Say) -> None:
        self.plan, self.launcher, self.patience, self.say = plan, launcher, patience, say
        self.result = Result(plan=plan, where=launcher.description)
        self._jobs: list[Job] = []
        self._data, self._model = plan.options.data, list[str]()
        if plan.own:
            self._model = model_flags(plan.options.model, plan.steps)
            if self._data is None:
                say(f"preparing a small corpus for a small {plan.options.model.upper()}")
                self._data = prepare_data(plan.options.model, plan.out / "data")

    def reference(self) -> None:
        """The run that nobody disturbs."""
        plan, layout = self.plan, self.plan.layouts[0]
        self.say(f"reference, uninterrupted: {layout}, {plan.steps} steps")
        began = time.monotonic()
        job = self._start("reference", layout, None)
        watch = self._watch("reference")
        try:
            if not self._until(job, watch, lambda: watch.reached(plan.steps), "the reference"):
                raise self._no_steps("the reference", "reference", watch, job)
            self._ended(job, "the reference")
            watch.reached(None)
            if watch.records is not None and watch.starts > 1:
                raise _GaveUp(
                    f"the reference was not left alone: it started {watch.starts} times",
                    found="starts from steps " + ", ".join(str(start["step"]) for start in watch.records.starts),
                    expected="one start, and all steps without a stop",
                    cause="a failure or a preemption, and something that starts the training again",
                    action=f"read {self._log('reference', 1)}; then the test once more",
                )
        finally:
            watch.close()
            self._keep_log("reference", 1, job)
        self.result.reference_seconds = time.monotonic() - began
        self.say(f"  done in {self.result.reference_seconds:.0f} s")

    def run(self) -> None:
        """The run that is stopped in every way, and comes back."""
        plan = self.plan
        self.say(f"the run: {len(plan.stops)} stops")
        watch = self._watch("run")
        job: Job | None = None
        try:
            for number, layout in enumerate(plan.layouts, start=1):
                job = self._start("run", layout, job)
                stop = plan.stops[number - 1] if number <= len(plan.stops) else None
                try:
                    self._attempt(number, layout, job, watch, stop)
                finally:
                    self._keep_log("run", number, job)
        finally:
            watch.close()

    def close(self) -> None:
        """End whatever still runs, and give back what was taken: all of it, whatever fails."""
        for job in self._jobs:
            try:
                job.close()
            except SetupError as problem:
                self.result.problems.append(str(problem))

    def _attempt(self, number: int, layout: Layout, job: Job, watch: Watch, stop: Stop | None) -> None:
        plan, result = self.plan, self.result
        name = f"attempt {number}"
        before = watch.step

        def first_step() -> bool:
            return watch.reached(0) and watch.starts >= number and watch.step > watch.start

        if not self._until(job, watch, first_step, name):
            raise self._no_steps(name, "run", watch, job)
        assert watch.records is not None
        attempt = self._came_back(number, layout, watch.records)
        result.attempts.append(attempt)
        if result.stops:
            self._note_return(result.stops[-1], attempt, before)
        target = plan.steps if stop is None else stop.step
        if not self._until(job, watch, lambda: watch.reached(target), name):
            raise self._no_steps(name, "run", watch, job)
        if stop is None:
            self._ended(job, name)
            watch.reached(None)
            self._check_starts(number, watch)
            attempt.last = watch.step
            self.say(f"  attempt {number}: {layout}: steps {attempt.first + 1} to {attempt.last}, ended by itself")
        else:
            self._stop(stop, attempt, job, watch)

    def _stop(self, stop: Stop, attempt: Attempt, job: Job, watch: Watch) -> None:
        # Seen late, the run may be just at a checkpoint: a little later, so that a stop without warning costs steps.
        self._until(
            job, watch, lambda: watch.reached(0) and self._off_checkpoint(watch.step), f"attempt {attempt.number}"
        )
        # In the middle of the next step: its samples are read, its gradients half computed.
        time.sleep(0.4 * min(watch.step_seconds, 5.0))
        failed: SetupError | None = None
        at = time.time()
        try:
            at = job.stop(stop.kind)
        except SetupError as error:
            failed = error
        watch.reached(None)
        self._check_starts(attempt.number, watch)
        attempt.last = watch.step
        after = self.plan.layouts[attempt.number]
        stopped = Stopped(kind=stop.kind, before=attempt.layout, after=after, step=watch.step, at=at)
        self.result.stops.append(stopped)
        if watch.step >= self.plan.steps:
            raise _GaveUp(
                f"{stop.kind} came too late: the run was over, and nothing was left to resume",
                found=f"step {watch.step}, asked to stop at step {stop.step}",
                expected=f"a stop before step {self.plan.steps}",
                cause="the job does not notice it, or is faster than the stop",
                action="--steps MORE, or, where the program is megaresume.cluster.training, --min-step-seconds LONGER",
            )
        if failed is not None:
            raise _GaveUp(
                f"{stop.kind} did not stop attempt {attempt.number}: {failed.headline}",
                found=failed.found,
                expected=failed.expected,
                cause=failed.cause,
                action=failed.action,
            ) from failed
        done = f"steps {attempt.first + 1} to {attempt.last}"
        self.say(f"  attempt {attempt.number}: {attempt.layout}: {done}, then {stop.kind}")

    def _off_checkpoint(self, step: int) -> bool:
        interval = self.plan.save_interval
        near_the_end = step >= self.plan.steps - interval
        return near_the_end or 0 < step % interval < max(interval - 1, 2)

    def _came_back(self, number: int, layout: Layout, records: RunRecords) -> Attempt:
        start = records.starts[number - 1]
        self._check_ranks(number, layout, start["topology"])
        first = next(record for step, record in sorted(records.steps.items()) if step > start["step"])
        parts = (start.get("data_seconds"), first.get("data_seconds"))
        return Attempt(
            number=number,
            layout=_recorded(layout, start["topology"]),
            first=start["step"],
            last=first["step"],
            first_step_at=_seconds(first["time"]),
            data_seconds=None if None in parts else sum(part for part in parts if part is not None),
        )

    def _note_return(self, stopped: Stopped, attempt: Attempt, before: int) -> None:
        stopped.resumed_from, stopped.after = attempt.first, attempt.layout
        stopped.seconds = attempt.first_step_at - stopped.at
        stopped.data_seconds = attempt.data_seconds
        self.say(
            f"  attempt {attempt.number}: went on from step {attempt.first}, first step after {stopped.seconds:.1f} s"
        )
        if attempt.first == 0:
            raise _GaveUp(
                f"attempt {attempt.number} began afresh, and did not resume",
                found=f"a start at step 0, after {stopped.step} steps",
                expected=f"a start from the checkpoint of step {self._newest_save(stopped.step)}",
                cause="the launch script or the program ignores --load, or --save",
                action=f"look at {self._log('run', attempt.number)}",
            )
        if attempt.first > before:
            self.result.problems.append(
                f"attempt {attempt.number} went on from step {attempt.first}, though the run had come to step {before}"
            )
        if stopped.kind not in _GRACEFUL and stopped.step == attempt.first == self._newest_save(stopped.step):
            self.result.notes.append(f"{stopped.kind} cost no step: it came right after a checkpoint")
        if stopped.kind in _GRACEFUL and stopped.lost:
            self.result.notes.append(
                f"{stopped.kind} cost {stopped.lost} steps: the job did not save before it ended. A script that passes "
                "the signal on to its ranks, as launch/torchrun.sh does, loses none."
            )

    def _check_starts(self, number: int, watch: Watch) -> None:
        """Every launch has one start."""
        if watch.starts > number:
            raise _GaveUp(
                f"the job went on after it was stopped: attempt {number} started {watch.starts - number + 1} times",
                found=f"{watch.starts} starts in the records, after {number} launches",
                cause="something starts the training again in place: torchrun --max-restarts, a loop in the script",
                action="MAX_RESTARTS=0 for this test",
            )

    def _check_ranks(self, number: int, layout: Layout, topology: dict[str, Any]) -> None:
        """The resume on other ranks is what is tested."""
        # Of records of ranks only the data-parallel size is known, which divides the ranks.
        found = topology.get("world_size", layout.ranks if layout.ranks % topology["dp"] == 0 else topology["dp"])
        if found != layout.ranks:
            raise _GaveUp(
                f"attempt {number} does not run on the ranks that were asked for",
                found=f"{found} ranks",
                expected=f"{layout.nodes} nodes x {layout.ranks_per_node} ranks = {layout.ranks}",
                cause="the launch script has numbers of its own, and ignores NNODES or PROCS_PER_NODE",
                action="set both from the environment, as launch/torchrun.sh does; or --nodes and --ranks-per-node",
            )

    def _newest_save(self, step: int) -> int:
        return step // self.plan.save_interval * self.plan.save_interval

    def _start(self, name: str, layout: Layout, after: Job | None) -> Job:
        launch = self.plan.launch(name, layout, data=self._data, model=self._model)
        job = self.launcher.start(launch, after=after)
        if job not in self._jobs:
            self._jobs.append(job)
        return job

    def _watch(self, name: str) -> Watch:
        return Watch(self.plan.records(name), self.plan.steps, f"  {name}", read=read_any)

    def _until(self, job: Job, watch: Watch, condition: Callable[[], bool], who: str) -> bool:
        """Wait for it; False: the job ended before."""
        since = time.monotonic()
        while True:
            running = job.running()
            if condition():
                return True
            if not running:
                return False
            if time.monotonic() - max(since, watch.changed) > self.patience:
                raise _GaveUp(
                    f"{who} did not get on for {self.patience:.0f} seconds",
                    found=f"step {watch.step} of {self.plan.steps}",
                    output=_tail(job),
                    cause=None if watch.records else _IGNORED,
                    action='a launch script ends its training command with "$@"; --timeout waits longer',
                )
            time.sleep(POLL)

    def _ended(self, job: Job, who: str) -> None:
        try:
            status = job.wait(ENDING)
        except SetupError as error:
            raise _GaveUp(
                f"{who} did its last step, and did not end", found=error.found, action=error.action
            ) from error
        if status:
            raise _GaveUp(f"{who} failed after its last step", found=f"status {status}", output=_tail(job))

    def _no_steps(self, who: str, name: str, watch: Watch, job: Job) -> _GaveUp:
        """The job has ended, and its last step is not that of the plan."""
        status = job.wait(ENDING)
        if watch.records is None and not status:
            return _GaveUp(
                f"{who} ended, and recorded no step",
                found=f"status 0, and nothing in {self.plan.records(name)}",
                expected="what --megaresume-log-samples writes",
                cause=_IGNORED,
                action='write "$@" after the last flag of the training command in the launch script',
            )
        return _GaveUp(
            f"{who} ended too early",
            found=f"status {status} at step {watch.step} of {self.plan.steps}",
            output=_tail(job),
            expected=f"a job that continues to step {self.plan.steps}",
            action=f"read {self._log(name, len(self.result.attempts) + 1)}",
        )

    def _log(self, name: str, number: int) -> Path:
        return self.plan.out / f"{name}.{number}.log"

    def _keep_log(self, name: str, number: int, job: Job) -> None:
        self._log(name, number).write_text(job.text(), encoding="utf-8", errors="surrogateescape")


_IGNORED = "the launch script ignores its arguments, and so --megaresume-log-samples; or the program does not know it"


def _recorded(layout: Layout, topology: dict[str, Any]) -> Layout:
    """A requeued job keeps its flags: what the training says of itself counts."""
    return replace(
        layout,
        workers=topology.get("num_workers", layout.workers),
        micro_batch_size=topology.get("micro_batch_size", layout.micro_batch_size),
    )


def _tail(job: Job, characters: int = 2000) -> str:
    """The end of its output, without what a launcher adds when a rank has failed."""
    text = job.text()
    ends = [
        text.find(mark) for mark in ("distributed/elastic/multiprocessing/api.py", "sigkill_handler") if mark in text
    ]
    if ends:
        text = text[: text.rfind("\n", 0, min(ends)) + 1]
    return text[-characters:].strip() or "(none)"


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def _final(plan: Plan, name: str) -> RunRecords | None:
    records = read_any(plan.records(name))
    if records is None or not records.steps:
        return None
    logs = sorted(plan.out.glob(f"{name}.*.log"), key=lambda path: int(path.suffixes[-2][1:]))
    together = plan.out / f"{name}.log"
    together.write_text("".join(log.read_text(encoding="utf-8", errors="replace") for log in logs), encoding="utf-8")
    return with_losses(records, together)


def _refuse_unproved(plan: Plan, result: Result) -> None:
    """Hashes of ranks on another layout say nothing: without ``verify`` their order and content are unknown."""
    outcome = result.outcome
    if outcome is None or result.verified is not None or outcome.hashed == outcome.compared:
        return
    problem = SetupError(
        f"order and content of {outcome.compared - outcome.hashed} steps were not compared",
        found="records of ranks, whose hashes say the same on one layout only; megaresume verify could not be asked",
        expected=f"the data state of the run in {plan.run_dir('run') / 'checkpoints' / 'megaresume'}",
        cause='a program without a stream of megaresume, or the script\'s own --save after "$@"',
        action="one number each in --nodes, --ranks-per-node and --micro-batch-size; or a data config (a stream)",
    )
    result.problems.append(str(problem))


def _verify(plan: Plan, result: Result) -> bool | None:
    """Plan the stream of the run again on this CPU."""
    try:
        found: dict[str, Any] = ask(
            "verify", str(plan.run_dir("run") / "checkpoints"), "--log-samples", str(plan.records("run")), "--content"
        )
    except SetupError as error:
        result.notes.append(f"megaresume verify could not be asked: {error.found}")
        return None
    return bool(found["holds"])
