"""The test from beginning to end: the reference, the run with its stops, the comparison."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.cluster.job import Kind, Launch, Launcher
from megaresume.cluster.local import ask
from megaresume.cluster.records import RunRecords, compare_runs, read_any, with_losses
from megaresume.cluster.scenario import Attempt, GaveUp, Say, Scenario, StopResult
from megaresume.cluster.smoke.plan import LaunchLayout, SmokePlan, model_flags, prepare_data
from megaresume.cluster.smoke.report import Result
from megaresume.stream.errors import SetupError


def run_smoke(plan: SmokePlan, launcher: Launcher, *, tolerance: float, patience: float, say: Say) -> Result:
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
    result = Result(plan=plan, where=launcher.description)
    test = _Test(plan, launcher, result, patience, say)
    try:
        say(f"reference, uninterrupted: {plan.layouts[0]}, {plan.steps} steps")
        before = time.monotonic()
        test.run_undisturbed()
        result.reference_seconds = time.monotonic() - before
        say(f"  done in {result.reference_seconds:.0f} s")
        say(f"the run: {len(plan.stops)} stops")
        test.run()
    except (GaveUp, SetupError) as problem:
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


class _Test(Scenario):
    """What `run_smoke` runs."""

    def __init__(self, plan: SmokePlan, launcher: Launcher, result: Result, patience: float, say: Say) -> None:
        super().__init__(
            launcher,
            result,
            layouts=plan.layouts,
            undisturbed=plan.layouts[0],
            stops=plan.stops,
            steps=plan.steps,
            save_interval=plan.save_interval,
            patience=patience,
        )
        self.plan, self.say = plan, say
        self._data, self._model = plan.options.data, list[str]()
        if plan.own:
            self._model = model_flags(plan.options.model, plan.steps)
            if self._data is None:
                say(f"preparing a small corpus for a small {plan.options.model.upper()}")
                self._data = prepare_data(plan.options.model, plan.out / "data")

    def launch(self, name: str, layout: LaunchLayout) -> Launch:
        """See `Scenario`."""
        return self.plan.launch(name, layout, data=self._data, model=self._model)

    def records(self, name: str) -> Path:
        """See `Scenario`."""
        return self.plan.records(name)

    def log(self, name: str, number: int) -> Path:
        """See `Scenario`."""
        return self.plan.out / f"{name}.{number}.log"

    def recorded(self, layout: LaunchLayout, topology: dict[str, Any]) -> LaunchLayout:
        """A requeued job keeps its flags: what the training says of itself counts."""
        return replace(
            layout,
            workers=topology.get("num_workers", layout.workers),
            micro_batch_size=topology.get("micro_batch_size", layout.micro_batch_size),
        )

    def may_stop(self, attempt: Attempt, step: int) -> bool:
        """See `Scenario`."""
        return self.off_checkpoint(step)

    def came_back(self, attempt: Attempt, stopped: StopResult) -> None:
        """See `Scenario`."""
        self.say(
            f"  attempt {attempt.number}: went on from step {attempt.first}, first step after {stopped.seconds:.1f} s"
        )

    def was_stopped(self, attempt: Attempt, kind: Kind, text: str) -> None:
        """See `Scenario`."""
        done = f"steps {attempt.first + 1} to {attempt.last}"
        self.say(f"  attempt {attempt.number}: {attempt.layout}: {done}, then {kind}")

    def ended(self, attempt: Attempt, text: str) -> None:
        """See `Scenario`."""
        done = f"steps {attempt.first + 1} to {attempt.last}"
        self.say(f"  attempt {attempt.number}: {attempt.layout}: {done}, ended by itself")


def _final(plan: SmokePlan, name: str) -> RunRecords | None:
    records = read_any(plan.records(name))
    if records is None or not records.steps:
        return None
    logs = sorted(plan.out.glob(f"{name}.*.log"), key=lambda path: int(path.suffixes[-2][1:]))
    together = plan.out / f"{name}.log"
    together.write_text("".join(log.read_text(encoding="utf-8", errors="replace") for log in logs), encoding="utf-8")
    return with_losses(records, together)


def _refuse_unproved(plan: SmokePlan, result: Result) -> None:
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


def _verify(plan: SmokePlan, result: Result) -> bool | None:
    """Plan the stream of the run again on this CPU."""
    try:
        found: dict[str, Any] = ask(
            "verify", str(plan.run_dir("run") / "checkpoints"), "--log-samples", str(plan.records("run")), "--content"
        )
    except SetupError as error:
        result.notes.append(f"megaresume verify could not be asked: {error.found}")
        return None
    return bool(found["holds"])
