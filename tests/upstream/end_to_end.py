"""Train, kill in the middle of a step, resume on another layout; compare with an uninterrupted run."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from tests.upstream.compare import Steps, difference, read_steps
from tests.upstream.launch import REPOSITORY, SAMPLES, Layout, Outcome, Setup, train
from tests.upstream.results import Result
from tests.upstream.trees import environment


def resume_series(setup: Setup, what: str, stock: Steps | None, layouts: list[tuple[Layout, Layout]]) -> list[Result]:
    """An uninterrupted run, and for every (layout before, layout after) one that is killed and resumed.

    Args:
        setup: the series.
        what: in words, for the table.
        stock: what the script trains without megaresume; guard mode must not change it. None: not compared.
        layouts: of the processes.
    """
    before = layouts[0][0]
    whole = train(setup, "uninterrupted", layout=before, save=setup.folder / "uninterrupted" / "checkpoints")
    title = f"{what}: uninterrupted, {before}"
    expected, wrong = _steps(whole)
    if whole.status or wrong is not None:
        return [Result.failed(setup.tree.name, title, wrong or whole.last_error(), whole.seconds)]
    wrong = difference(expected, expected, 0, SAMPLES)
    if wrong is None and stock is not None and (found := difference(expected, stock, 0, SAMPLES)):
        wrong = f"not what the script trains by itself: {found}"
    results = [Result.of(setup.tree.name, title, wrong, whole.seconds)]
    for index, (first, then) in enumerate(layouts):
        results.append(_killed_and_resumed(setup, what, expected, first, then, index))
    if setup.mode == "stream":
        results.append(_proved(setup, what, whole))
    clean(setup.folder)
    return results


def _steps(outcome: Outcome) -> tuple[Steps, str | None]:
    try:
        return read_steps(outcome.batches, SAMPLES), None
    except ValueError as error:
        return {}, str(error)


def _killed_and_resumed(setup: Setup, what: str, expected: Steps, first: Layout, then: Layout, index: int) -> Result:
    title = f"{what}: SIGKILL in step {setup.save_interval + 2}, {first} to {then}"
    name = setup.tree.name
    save = setup.folder / f"killed-{index}" / "checkpoints"
    # Before the step after the save, and before the one in which it dies.
    saved, dies = sorted(expected)[setup.save_interval : setup.save_interval + 2]
    victim = f"{first.dp - 1 if first.size == first.dp else 0}:{dies}:0"
    killed = train(setup, f"killed-{index}", layout=first, save=save, kill=victim)
    if killed.status == 0 or "SIGKILL" not in killed.text:
        return Result.failed(name, title, f"the kill did not come: {killed.last_error()}", killed.seconds)
    resumed = train(setup, f"resumed-{index}", layout=then, save=save)
    seconds = killed.seconds + resumed.seconds
    found, wrong = _steps(resumed)
    if resumed.status or wrong is not None:
        return Result.failed(name, title, wrong or resumed.last_error(), seconds)
    wrong = difference(found, expected, saved, SAMPLES)
    line = f"megaresume: resumed at sample {saved} "
    if wrong is None and not (line in resumed.text and "repeated 0 skipped 0" in resumed.text):
        wrong = f"no line {line!r} with 'repeated 0 skipped 0'"
    return Result.of(name, title, wrong, seconds)


def _proved(setup: Setup, what: str, whole: Outcome) -> Result:
    """`megaresume inspect` and `verify` on the directory that Megatron wrote."""
    save = whole.log.parent / "checkpoints"
    for command in ("inspect", "verify"):
        done = subprocess.run(
            [str(setup.python), "-m", "megaresume", command, str(save)],
            cwd=REPOSITORY,
            env=environment(setup.python),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            text = (done.stderr or done.stdout).strip().replace("\n", " ")[-250:]
            return Result.failed(setup.tree.name, f"{what}: megaresume {command}", text, 0.0)
    return Result.of(setup.tree.name, f"{what}: megaresume inspect, verify", None, 0.0)


def unpatched(setup: Setup) -> tuple[Result, Steps | None]:
    """The script by itself, without megaresume: that this machine can run it, and what it trains."""
    save = setup.folder / "stock" / "checkpoints"
    outcome = train(setup.but(mode="stock"), "stock", layout=Layout(dp=2), save=save)
    steps, wrong = _steps(outcome)
    wrong = wrong if outcome.status == 0 else outcome.last_error()
    result = Result.of(setup.tree.name, "stock script, without megaresume", wrong, outcome.seconds)
    clean(setup.folder)
    return result, steps if wrong is None else None


def refused(setup: Setup, what: str) -> Result:
    """A fork whose loop does not call what we wrap: the launcher must stop before it saves anything of its own."""
    save = setup.folder / "refused" / "checkpoints"
    outcome = train(setup, "refused", layout=Layout(dp=2), save=save)
    saved = [path.name for path in save.glob("iter_*")]
    said = outcome.last_error()
    wrong = None
    if outcome.status == 0 or saved:
        wrong = f"it went on: exit status {outcome.status}, checkpoints {saved}"
    elif "megaresume" not in said and not said.startswith("error:"):
        wrong = f"it ended by something else: {said}"
    result = Result.of(setup.tree.name, what, wrong, outcome.seconds)
    return replace(result, status="refused", detail=said) if wrong is None else result


def clean(folder: Path) -> None:
    """Remove the checkpoints of a series; logs stay."""
    for path in folder.glob("*/checkpoints"):
        shutil.rmtree(path, ignore_errors=True)
