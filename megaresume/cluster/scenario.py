"""Starts a training, stops it, resumes it on another layout, and compares; for the demo and the smoke test.

    the undisturbed run   [first layout .........................]
    the run               [first layout ....x
                                      [second layout ....x
                                                  [third layout ..]

A `Scenario` runs both. A subclass decides on launches, launcher and output: the demo trains on this machine and kills
everything at once; the smoke test launches a script on any cluster and stops it in every way.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaresume.cluster.launcher import Kind, Launch, Launcher, RunningLaunch
from megaresume.cluster.records import RunRecords
from megaresume.cluster.watch import Watch
from megaresume.stream.errors import MegaresumeError, SetupError

#: seconds: between looks at the records; within which a job must end once its run is finished.
POLL, ENDING = 0.02, 300.0
_GRACEFUL = ("sigterm", "requeue", "walltime", "preempt")
#: Prints a line for people.
Say = Callable[[str], None]


class GaveUp(MegaresumeError):
    """Raised when the scenario cannot continue; results so far are still reported.

    Args:
        headline, more: as for every error.
        output: the end of the job's output.
    """

    def __init__(self, headline: str, *, output: str | None = None, **kwargs: Any) -> None:
        super().__init__(headline, **kwargs)
        self.output = output

    def __str__(self) -> str:
        lines = (self.output or "").splitlines()
        shown = ["  the end of its output:", *(f"    | {line}" for line in lines)] if lines else []
        return "\n".join([super().__str__(), *shown])


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A stop of the run."""

    kind: Kind
    #: the step after which it comes, in the middle of the next one.
    step: int


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One start of the run in the scenario."""

    number: int
    #: its layout, see `Scenario.layouts`.
    layout: Any
    #: the step that it resumed from, and its last step.
    first: int
    last: int
    #: when its first step was done, in seconds of `time.time`.
    first_step_at: float
    #: seconds of delay of the first step due to the data; None if not recorded.
    data_seconds: float | None


@dataclass(kw_only=True, slots=True)
class StopResult:
    """One stop, and how the run resumed; None if it did not."""

    kind: str
    before: Any
    after: Any
    #: the last step that was done.
    step: int
    #: seconds of `time.time`.
    at: float
    resumed_from: int | None = None
    #: seconds from the stop to the first new step; and how many of them are due to the data.
    seconds: float | None = None
    data_seconds: float | None = None

    @property
    def lost(self) -> int | None:
        """The number of steps that had to be trained again."""
        return None if self.resumed_from is None else self.step - self.resumed_from


@dataclass(kw_only=True, slots=True)
class Found:
    """The result of a run."""

    attempts: list[Attempt] = field(default_factory=list)
    stops: list[StopResult] = field(default_factory=list)
    #: what shows that it failed or proved nothing; other notes.
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Scenario:
    """The undisturbed run, and the run with its stops.

    Args:
        launcher: starts and stops the jobs.
        found: gets the results.
        layouts: of the attempts; each has its number of ``ranks``.
        undisturbed: layout of the undisturbed run.
        stops: between the attempts.
        steps: of each run.
        save_interval: steps between checkpoints.
        patience: seconds without progress after which it gives up.
    """

    #: the name of the reference's launches, also shown with the bar and in errors.
    undisturbed_name = "reference"

    def __init__(
        self,
        launcher: Launcher,
        found: Found,
        *,
        layouts: Sequence[Any],
        undisturbed: Any,
        stops: Sequence[Stop],
        steps: int,
        save_interval: int,
        patience: float,
    ) -> None:
        self.launcher, self.found = launcher, found
        self.layouts, self.undisturbed, self.stops = layouts, undisturbed, stops
        self.steps, self.save_interval, self.patience = steps, save_interval, patience
        self._jobs: list[RunningLaunch] = []

    # ---- what is launched, and what is said: of a subclass

    def launch(self, name: str, layout: Any) -> Launch:
        """A launch of the undisturbed run, or of ``run``."""
        raise NotImplementedError

    def records(self, name: str) -> Path:
        """File or directory of the recorded steps."""
        raise NotImplementedError

    def log(self, name: str, number: int) -> Path:
        """The file for the output of an attempt."""
        raise NotImplementedError

    def keep_log(self, name: str, number: int, text: str) -> None:
        """Save the output of an attempt."""
        self.log(name, number).write_text(text, encoding="utf-8", errors="surrogateescape")

    def recorded(self, layout: Any, topology: dict[str, Any]) -> Any:
        """The layout that the training itself recorded."""
        return layout

    def may_stop(self, attempt: Attempt, step: int) -> bool:
        """Whether a stop after this step would prove anything."""
        return True

    def began(self, number: int, layout: Any) -> None:
        """Called when an attempt was launched."""

    def came_back(self, attempt: Attempt, stopped: StopResult) -> None:
        """Called when an attempt has done its first step after a stop."""

    def was_stopped(self, attempt: Attempt, kind: Kind, text: str) -> None:
        """Called when an attempt was stopped; ``text`` is its output."""

    def ended(self, attempt: Attempt, text: str) -> None:
        """Called when the last attempt has ended by itself."""

    # ---- both runs

    def run_undisturbed(self) -> None:
        """Do the undisturbed run.

        Raises:
            GaveUp, SetupError: it failed, or made no progress.
        """
        name, who = self.undisturbed_name, f"the {self.undisturbed_name}"
        job = self._start(name, self.undisturbed, None)
        watch = self._watch(name)
        try:
            if not self._until(job, watch, lambda: watch.reached(self.steps), who):
                raise self._no_steps(who, name, watch, job)
            self._wait(job, who)
            watch.reached(None)
            if watch.records is not None and watch.starts > 1:
                raise GaveUp(
                    f"{who} was not left alone: it started {watch.starts} times",
                    found="starts from steps " + ", ".join(str(start["step"]) for start in watch.records.starts),
                    expected="one start, and all steps without a stop",
                    cause="a failure or a preemption, and something that starts the training again",
                    action=f"read {self.log(name, 1)}; then the test once more",
                )
        finally:
            watch.close()
            self.keep_log(name, 1, job.text())

    def run(self) -> None:
        """Do the run that is stopped in every way and resumes.

        Raises:
            GaveUp, SetupError: it could not be stopped, did not resume, or resumed as another run.
        """
        watch = self._watch("run")
        job: RunningLaunch | None = None
        try:
            for number, layout in enumerate(self.layouts, start=1):
                job = self._start("run", layout, job)
                self.began(number, layout)
                stop = self.stops[number - 1] if number <= len(self.stops) else None
                try:
                    self._attempt(number, layout, job, watch, stop)
                finally:
                    self.keep_log("run", number, job.text())
        finally:
            watch.close()

    def close(self) -> None:
        """End everything that still runs, and return what was taken, even if some of that fails."""
        for job in self._jobs:
            try:
                job.close()
            except SetupError as problem:
                self.found.problems.append(str(problem))

    def _attempt(self, number: int, layout: Any, job: RunningLaunch, watch: Watch, stop: Stop | None) -> None:
        found, name, before = self.found, f"attempt {number}", watch.step

        def first_step() -> bool:
            return watch.reached(0) and watch.starts >= number and watch.step > watch.start

        if not self._until(job, watch, first_step, name):
            raise self._no_steps(name, "run", watch, job)
        assert watch.records is not None
        attempt = self._first_step(number, layout, watch.records)
        found.attempts.append(attempt)
        if found.stops:
            self._note_return(found.stops[-1], attempt, before)
        target = self.steps if stop is None else stop.step
        if not self._until(job, watch, lambda: watch.reached(target), name):
            raise self._no_steps(name, "run", watch, job)
        if stop is None:
            self._wait(job, name)
            watch.reached(None)
            self._check_starts(number, watch)
            attempt.last = watch.step
            self.ended(attempt, job.text())
        else:
            self._stop(stop, attempt, job, watch)

    def _stop(self, stop: Stop, attempt: Attempt, job: RunningLaunch, watch: Watch) -> None:
        # When noticed late, the run may be at a checkpoint: wait a little, so that a stop without warning costs steps.
        self._until(
            job, watch, lambda: watch.reached(0) and self.may_stop(attempt, watch.step), f"attempt {attempt.number}"
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
        after = self.layouts[attempt.number]
        stopped = StopResult(kind=stop.kind, before=attempt.layout, after=after, step=watch.step, at=at)
        self.found.stops.append(stopped)
        if watch.step >= self.steps:
            raise GaveUp(
                f"{stop.kind} came too late: the run was over, and nothing was left to resume",
                found=f"step {watch.step}, asked to stop at step {stop.step}",
                expected=f"a stop before step {self.steps}",
                cause="the job does not notice it, or is faster than the stop",
                action="--steps MORE, or, where the program is megaresume.cluster.training, --min-step-seconds LONGER",
            )
        if failed is not None:
            raise GaveUp(
                f"{stop.kind} did not stop attempt {attempt.number}: {failed.headline}",
                found=failed.found,
                expected=failed.expected,
                cause=failed.cause,
                action=failed.action,
            ) from failed
        self.was_stopped(attempt, stop.kind, job.text())

    def off_checkpoint(self, step: int) -> bool:
        """Whether a stop now, without warning, costs steps."""
        near_the_end = step >= self.steps - self.save_interval
        return near_the_end or 0 < step % self.save_interval < max(self.save_interval - 1, 2)

    def _first_step(self, number: int, layout: Any, records: RunRecords) -> Attempt:
        start = records.starts[number - 1]
        self._check_ranks(number, layout, start["topology"])
        first = next(record for step, record in sorted(records.steps.items()) if step > start["step"])
        parts = (start.get("data_seconds"), first.get("data_seconds"))
        return Attempt(
            number=number,
            layout=self.recorded(layout, start["topology"]),
            first=start["step"],
            last=first["step"],
            first_step_at=datetime.datetime.fromisoformat(first["time"]).timestamp(),
            data_seconds=None if None in parts else sum(part for part in parts if part is not None),
        )

    def _note_return(self, stopped: StopResult, attempt: Attempt, before: int) -> None:
        stopped.resumed_from, stopped.after = attempt.first, attempt.layout
        stopped.seconds = attempt.first_step_at - stopped.at
        stopped.data_seconds = attempt.data_seconds
        self.came_back(attempt, stopped)
        newest_save = stopped.step // self.save_interval * self.save_interval
        if attempt.first == 0:
            raise GaveUp(
                f"attempt {attempt.number} began afresh, and did not resume",
                found=f"a start at step 0, after {stopped.step} steps",
                expected=f"a start from the checkpoint of step {newest_save}",
                cause="the launch script or the program ignores --load, or --save",
                action=f"look at {self.log('run', attempt.number)}",
            )
        if attempt.first > before:
            self.found.problems.append(
                f"attempt {attempt.number} resumed from step {attempt.first}, though the run had come to step {before}"
            )
        if stopped.kind not in _GRACEFUL and stopped.step == attempt.first == newest_save:
            self.found.notes.append(f"{stopped.kind} cost no step: it came right after a checkpoint")
        if stopped.kind in _GRACEFUL and stopped.lost:
            self.found.notes.append(
                f"{stopped.kind} cost {stopped.lost} steps: the job did not save before it ended. A script that passes "
                "the signal on to its ranks, as launch/torchrun.sh does, loses none."
            )

    def _check_starts(self, number: int, watch: Watch) -> None:
        """Check that every launch has recorded one start."""
        if watch.starts > number:
            raise GaveUp(
                f"the job continued after it was stopped: attempt {number} started {watch.starts - number + 1} times",
                found=f"{watch.starts} starts in the records, after {number} launches",
                cause="something starts the training again in place: torchrun --max-restarts, a loop in the script",
                action="MAX_RESTARTS=0 for this test",
            )

    def _check_ranks(self, number: int, layout: Any, topology: dict[str, Any]) -> None:
        """Check that it resumed on the planned number of ranks, which is what is tested."""
        # Rank records only have the data-parallel size, which divides the number of ranks.
        found = topology.get("world_size", layout.ranks if layout.ranks % topology["dp"] == 0 else topology["dp"])
        if found != layout.ranks:
            raise GaveUp(
                f"attempt {number} does not run on the ranks that were asked for",
                found=f"{found} ranks",
                expected=f"{layout.nodes} nodes x {layout.ranks_per_node} ranks = {layout.ranks}",
                cause="the launch script has its own numbers, and ignores NNODES or PROCS_PER_NODE",
                action="set both from the environment, as launch/torchrun.sh does; or --nodes and --ranks-per-node",
            )

    # ---- a job

    def _start(self, name: str, layout: Any, after: RunningLaunch | None) -> RunningLaunch:
        job = self.launcher.start(self.launch(name, layout), after=after)
        if job not in self._jobs:
            self._jobs.append(job)
        return job

    def _watch(self, name: str) -> Watch:
        return Watch(self.records(name), self.steps, f"  {name}")

    def _until(self, job: RunningLaunch, watch: Watch, condition: Callable[[], bool], who: str) -> bool:
        """Wait for a condition; False: the job ended first."""
        since = time.monotonic()
        while True:
            running = job.running()
            if condition():
                return True
            if not running:
                return False
            if time.monotonic() - max(since, watch.changed) > self.patience:
                raise GaveUp(
                    f"{who} made no progress for {self.patience:.0f} seconds",
                    found=f"step {watch.step} of {self.steps}",
                    output=_tail(job),
                    cause=None if watch.records else _IGNORED,
                    action='a launch script ends its training command with "$@"; --timeout waits longer',
                )
            time.sleep(POLL)

    def _wait(self, job: RunningLaunch, who: str) -> None:
        try:
            status = job.wait(ENDING)
        except SetupError as error:
            raise GaveUp(f"{who} did its last step, and did not end", found=error.found, action=error.action) from error
        if status:
            raise GaveUp(f"{who} failed after its last step", found=f"status {status}", output=_tail(job))

    def _no_steps(self, who: str, name: str, watch: Watch, job: RunningLaunch) -> GaveUp:
        """The error for a job that ended before its planned last step."""
        status = job.wait(ENDING)
        if watch.records is None and not status:
            return GaveUp(
                f"{who} ended, and recorded no step",
                found=f"status 0, and nothing in {self.records(name)}",
                expected="what --megaresume-log-samples writes",
                cause=_IGNORED,
                action='write "$@" after the last flag of the training command in the launch script',
            )
        return GaveUp(
            f"{who} ended too early",
            found=f"status {status} at step {watch.step} of {self.steps}",
            output=_tail(job),
            expected=f"a job that continues to step {self.steps}",
            action=f"read {self.log(name, len(self.found.attempts) + 1)}",
        )


_IGNORED = "the launch script ignores its arguments, and so --megaresume-log-samples; or the program does not know it"


def _tail(job: RunningLaunch) -> str:
    """The end of its output, without a launcher's messages after a rank has failed."""
    text = job.text()
    ends = [
        text.find(mark) for mark in ("distributed/elastic/multiprocessing/api.py", "sigkill_handler") if mark in text
    ]
    if ends:
        text = text[: text.rfind("\n", 0, min(ends)) + 1]
    return text[-2000:].strip() or "(none)"
