"""Train, kill in the middle of a step, resume on another number of ranks; compare with an uninterrupted run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.upstream.compare import difference, read_steps
from tests.upstream.launch import GLOBAL_BATCH, REPOSITORY, Outcome, Setup, train
from tests.upstream.results import Result
from tests.upstream.trees import environment

__all__ = ["resume_series", "unpatched"]


def resume_series(setup: Setup, stock: dict[int, list[str]] | None, layouts: list[tuple[int, int]]) -> list[Result]:
    """An uninterrupted run, and for every (ranks before, ranks after) one that is killed and resumed.

    Args:
        setup: the series.
        stock: what the script trains without megaresume; guard mode must not change it. None: not compared.
        layouts: DP sizes.
    """
    what = f"{setup.mode}{' ' + ' '.join(setup.flags) if setup.flags else ''}"
    if setup.tree.kind != "megatron-lm":
        what += f", ZeRO {setup.zero}"
    if setup.script is not None:
        what += ", patched script"
    end, size = setup.iterations * GLOBAL_BATCH, GLOBAL_BATCH
    before = layouts[0][0]
    whole = train(setup, "uninterrupted", dp=before, save=setup.folder / "uninterrupted" / "checkpoints")
    title = f"{what}: uninterrupted, DP {before}"
    if whole.status:
        return [Result.failed(setup.tree.name, title, whole.last_error(), whole.seconds)]
    expected = read_steps(whole.batches)
    wrong = difference(expected, expected, 0, end, size)
    if wrong is None and stock is not None and (found := difference(expected, stock, 0, end, size)):
        wrong = f"not what the script trains by itself: {found}"
    results = [Result.of(setup.tree.name, title, wrong, whole.seconds)]
    for first, then in layouts:
        results.append(_killed_and_resumed(setup, what, expected, first, then))
    if setup.mode == "stream":
        results.append(_proved(setup, what, whole))
    return results


def _killed_and_resumed(setup: Setup, what: str, expected: dict[int, list[str]], first: int, then: int) -> Result:
    title = f"{what}: SIGKILL in step {setup.save_interval + 2}, DP {first} to {then}"
    size, saved = GLOBAL_BATCH, setup.save_interval * GLOBAL_BATCH
    save = setup.folder / f"killed-{first}-{then}" / "checkpoints"
    victim = f"{first - 1}:{saved + size}:0"
    killed = train(setup, f"killed-{first}-{then}", dp=first, save=save, kill=victim)
    if killed.status == 0 or "SIGKILL" not in killed.text:
        return Result.failed(setup.tree.name, title, f"the kill did not come: {killed.last_error()}", killed.seconds)
    resumed = train(setup, f"resumed-{first}-{then}", dp=then, save=save)
    seconds = killed.seconds + resumed.seconds
    if resumed.status:
        return Result.failed(setup.tree.name, title, resumed.last_error(), seconds)
    wrong = difference(read_steps(resumed.batches), expected, saved, setup.iterations * size, size)
    line = f"megaresume: resumed at sample {saved} "
    if wrong is None and not (line in resumed.text and "repeated 0 skipped 0" in resumed.text):
        wrong = f"no line {line!r} with 'repeated 0 skipped 0'"
    return Result.of(setup.tree.name, title, wrong, seconds)


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


def unpatched(setup: Setup) -> tuple[Result, dict[int, list[str]] | None]:
    """The script by itself, without megaresume: that this machine can run it, and what it trains."""
    outcome = train(setup.but(mode="stock"), "stock", dp=2, save=setup.folder / "stock" / "checkpoints")
    wrong = None if outcome.status == 0 else outcome.last_error()
    result = Result.of(setup.tree.name, "stock script, without megaresume", wrong, outcome.seconds)
    return result, read_steps(outcome.batches) if wrong is None else None


def clean(folder: Path) -> None:
    """Remove the checkpoints of a series; logs stay."""
    for path in folder.glob("*/checkpoints"):
        shutil.rmtree(path, ignore_errors=True)
