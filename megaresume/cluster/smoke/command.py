"""``megaresume smoke``: stops the real training in every way, resumes it on other layouts, compares every step."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.cluster.launcher import Kind, Launch, Launcher
from megaresume.cluster.local import LocalLauncher
from megaresume.cluster.own_directory import own_directory
from megaresume.cluster.processes import ask
from megaresume.cluster.records import RunRecords, compare_runs, read_any, with_losses
from megaresume.cluster.scenario import Attempt, GaveUp, Say, Scenario, StopResult
from megaresume.cluster.smoke.interrupted import cleaned_up
from megaresume.cluster.smoke.plan import LaunchLayout, SmokeOptions, SmokePlan, make_plan, model_flags, prepare_data
from megaresume.cluster.smoke.report import Result, summary, table, write_report
from megaresume.cluster.smoke.slurm import SlurmLauncher
from megaresume.command_line import need_packages
from megaresume.shipped import launch_script
from megaresume.stream.errors import SetupError, UsageError

#: Marks the directory of a test, so that --overwrite removes nothing else.
MARK = ".megaresume-smoke"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("smoke"), help="directory for all output (default: smoke)"
    )
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier test left in DIR")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_launch(parser.add_argument_group("how it is launched"))
    _add_stops(parser.add_argument_group("what happens to the run; entry k of a list, in turn, is that of attempt k"))
    _add_training(parser.add_argument_group("what is trained"))


def _add_launch(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--launcher", choices=["local", "slurm"], default="local", help="where to run (default: on this machine)"
    )
    group.add_argument(
        "--launch", choices=["torchrun", "deepspeed"], default="torchrun", help="which of our launch scripts"
    )
    group.add_argument(
        "--script", metavar="S", type=Path, help='your launch script; its training command ends with "$@"'
    )
    group.add_argument("--partition", metavar="P", help="Slurm partition")
    group.add_argument(
        "--urgent-partition", metavar="Q", help="Slurm partition whose jobs preempt those of P, for preempt"
    )
    group.add_argument("--sbatch-options", metavar="WORDS", default="", help="more sbatch options, as one quoted word")
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_above_zero,
        help="longest time without a new step, including the queue (default 600, Slurm 3600)",
    )


def _add_stops(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kill",
        dest="kinds",
        type=_words,
        default=("sigkill", "sigterm"),
        metavar="KINDS",
        help="default: sigkill,sigterm",
    )
    group.add_argument("--nodes", type=_numbers, default=(), metavar="2,1,3", help="default: 2,1; with --script 1")
    group.add_argument("--ranks-per-node", type=_numbers, default=(), metavar="R,...", help="default: GPUs here, or 1")
    group.add_argument("--workers", type=_numbers, default=(), metavar="W,...", help="default: 0,1")
    group.add_argument(
        "--micro-batch-size", dest="micro_batch_sizes", type=_numbers, default=(), metavar="M,...", help="default: 2,1"
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", choices=["gpt", "vlm"], default="gpt", help="our small model, without --script")
    group.add_argument(
        "--data", metavar="DATA.yaml", type=Path, help="default: a small corpus; with --script, the script's own"
    )
    group.add_argument(
        "--global-batch-size", type=int, metavar="G", help="default: a size that divides for all layouts"
    )
    group.add_argument("--steps", type=int, metavar="N", help="length of the run (default: enough for the stops)")
    group.add_argument("--save-interval", type=int, metavar="K", help="steps between checkpoints (default: 4)")
    group.add_argument("--zero-stage", type=int, choices=[0, 1, 2, 3], help="default: that of the launch script")
    group.add_argument(
        "--min-step-seconds",
        type=_from_zero,
        metavar="S",
        help="shortest step of our program (default 0.3, Slurm 1; --script: none)",
    )
    group.add_argument(
        "--loss-tolerance",
        type=_from_zero,
        default=1e-3,
        metavar="REL",
        help="relative difference allowed between layouts (default 1e-3)",
    )


def options(args: argparse.Namespace) -> SmokeOptions:
    """The options in the flags."""
    given = {name: value for name, value in vars(args).items() if name in SmokeOptions.__dataclass_fields__}
    if args.min_step_seconds is None and args.script is None:
        given["min_step_seconds"] = 1.0 if args.launcher == "slurm" else 0.3
    if args.data is not None and not args.data.is_file():
        raise UsageError(
            "there is no such data config", found=f"--data {args.data}", expected="a data.yaml", action="check the path"
        )
    paths = {name: None if given[name] is None else given[name].absolute() for name in ("out", "script", "data")}
    return SmokeOptions(**{**given, **paths})


def run(args: argparse.Namespace) -> int:
    """Run the test."""
    plan = make_plan(options(args))
    launcher = _launcher(args, plan)
    launches = [plan.launch("run", layout, data=plan.options.data, model=()) for layout in plan.layouts]
    launcher.check(launches, [stop.kind for stop in plan.stops])
    if args.script is None and args.launcher == "local":  # under Slurm, the nodes need them
        packages = ("torch", "deepspeed", "megatron.core", *(("PIL",) if args.model == "vlm" else ()))
        need_packages("our own model", packages, extra="demo")
    own_directory(plan.out, mark=MARK, what="test", overwrite=args.overwrite)
    timeout = args.timeout or (3600.0 if args.launcher == "slurm" else 600.0)

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    with cleaned_up():
        result = run_smoke(plan, launcher, tolerance=args.loss_tolerance, patience=timeout, say=say)
    found = summary(result)
    (plan.out / "result.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    report = plan.out / "report.html"
    write_report(report, result)
    say(table(result))
    say(f"report: {report}")
    if args.json:
        print(json.dumps(found))
    return 0 if result.holds else 1


def _launcher(args: argparse.Namespace, plan: SmokePlan) -> Launcher:
    if args.launcher == "slurm":
        slurm: Launcher = SlurmLauncher(
            script=plan.options.script,  # None: our own
            launch=plan.options.launch,
            partition=args.partition,
            urgent_partition=args.urgent_partition,
            options=_split(args.sbatch_options),
        )
        return slurm
    for flag in ("partition", "urgent_partition", "sbatch_options"):
        if getattr(args, flag):
            name = f"--{flag.replace('_', '-')}"
            raise UsageError(f"{name} is for Slurm", found="--launcher local", action=f"--launcher slurm, or no {name}")
    most = max(layout.ranks for layout in plan.layouts)
    return LocalLauncher(plan.options.script or launch_script(f"{args.launch}.sh"), most=most)


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            "cannot split --sbatch-options into words",
            found=f"{text!r}: {error}",
            expected="words as in a shell, every quote closed",
            action="--sbatch-options '--account=x --comment=\"two words\"'",
        ) from error


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,1,3") from error


def _from_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


def _above_zero(text: str) -> float:
    if _from_zero(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


def run_smoke(plan: SmokePlan, launcher: Launcher, *, tolerance: float, patience: float, say: Say) -> Result:
    """Run the smoke test.

    Args:
        plan: what to run.
        launcher: starts and stops the jobs.
        tolerance: relative difference of losses allowed for another order of summation.
        patience: seconds without progress after which it gives up.
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
    """The scenario of `run_smoke`."""

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
        """The layout from the training's own record, as a requeued job keeps its flags."""
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
            f"  attempt {attempt.number}: resumed from step {attempt.first}, first step after {stopped.seconds:.1f} s"
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
    """Refuse hashes of ranks on another layout: without ``verify``, they prove neither order nor content."""
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
    """Plan the stream of the run again on this CPU; returns whether it agrees."""
    try:
        found: dict[str, Any] = ask(
            "verify", str(plan.run_dir("run") / "checkpoints"), "--log-samples", str(plan.records("run")), "--content"
        )
    except SetupError as error:
        result.notes.append(f"megaresume verify could not be asked: {error.found}")
        return None
    return bool(found["holds"])
