"""VeRL's trainers of reinforcement learning, killed and started again until they have made their steps; what they have
trained, counted.

    python -m tests.hosts.verl.killed PYTHON MODE SEEDS KILLS     with megaresume, and without; PYTHON has VeRL

A kill is of all processes of the job, at a moment that is drawn.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from megaresume import Prompts
from tests.hosts.torch.record import ENVIRONMENT, ROOT
from tests.hosts.verl.tiny_prompts import Numbers
from tests.hosts.verl.warm import interpreter

HERE = Path(__file__).parent
ROLLOUTS, STEPS, SAVES = 4, 20, 3


def processes(directory: Path, but: int) -> list[int]:
    """Of the job of this directory: each has it in its environment. Those that were forked have that of ``but``."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TINY_DIRECTORY={directory}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return [pid for pid in found if pid != but]


def kill(directory: Path, but: int) -> None:
    """All processes of the job, until there is none."""
    while left := processes(directory, but):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def lines(directory: Path) -> list[dict[str, Any]]:
    """What the recorder has written."""
    path = directory / "record.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def environment_of(directory: Path, mode: str, attach: dict[str, Any] | None, fails: float = 0.0) -> dict[str, str]:
    """Of a job."""
    found = ENVIRONMENT | {"HOME": str(Path.home()), "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}
    found |= {"VERL_USE_EXTERNAL_MODULES": "tiny_rollout", "RAY_memory_monitor_refresh_ms": "0"}
    found["PYTHONPATH"] = f"{ROOT}{os.pathsep}{HERE}"
    found |= {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}  # its own niceness is 15
    found.pop("CUDA_VISIBLE_DEVICES", None)  # Ray is told that it has GPUs
    found |= {"TINY_DIRECTORY": str(directory), "TINY_FAILS": str(fails)}
    if attach is not None:
        found["TINY_ATTACH"] = json.dumps(attach)
        if mode in ("fully_async", "one_step_off"):  # in each of their processes
            found["VERL_USE_EXTERNAL_MODULES"] += ",exact_prompts"
    return found


def start(
    python: str,
    directory: Path,
    environment: dict[str, str],
    *,
    forks: int = 0,
    until: int = 0,
    after: float = 0.0,
    **options: Any,
) -> int | None:
    """The exit status of a job that ended; None: it was killed, so many seconds after it had trained step ``until``.

    Args:
        python: an interpreter that has VeRL, or what stands in for it.
        directory: of the job.
        environment: see `environment_of`.
        forks: the process that forks for ``python``; 0: there is none.
        until, after: when it is killed; 0: never.
        options: see rl_program.py.
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray:  # a path of Ray's sockets is short
        words = [python, str(HERE / "rl_program.py"), str(directory), json.dumps(options)]
        environment = environment | {"TINY_RAY": ray, "TINY_PYTHON": python}
        before = len(lines(directory))
        with (directory / "output.log").open("w") as log:
            process = subprocess.Popen(words, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None:
                last = lines(directory)[before:][-1:]
                if until and any(line.get("step", line.get("saved", 0)) >= until for line in last):
                    time.sleep(after)
                    break
                time.sleep(0.1)
            status = process.poll()
        finally:
            kill(directory, forks)
            process.wait()
    assert status in (None, 0), (directory / "output.log").read_text()[-6000:]
    return status


def steps_of(directory: Path) -> dict[int, list[int]]:
    """The prompts of each step, one for each rollout, as the weights have seen them."""
    steps: dict[int, list[int]] = {}
    for line in lines(directory):
        if "from" in line:
            steps = {step: prompts for step, prompts in steps.items() if step <= line["from"]}
        elif "step" in line:
            if line["step"] == 1:
                steps = {}  # from the beginning
            steps[line["step"]] = line["prompts"]
    return steps


def issued_of(directory: Path) -> tuple[set[int], set[int]]:
    """By the last checkpoint: which prompts were handed out, and which are in flight."""
    at, issued, saved = 0, {0: set[int]()}, (set[int](), set[int]())
    for line in lines(directory):
        at = line.get("from", at)
        if "saved" in line:
            issued[line["saved"]] = issued[at] | set(line["handed"])
            saved = issued[line["saved"]], set(line["open"])
    return saved


def run(
    python: str,
    directory: Path,
    *,
    mode: str,
    attach: dict[str, Any] | None,
    kills: int,
    seed: int,
    steps: int = STEPS,
    fails: float = 0.0,
    **options: Any,
) -> dict[str, int]:
    """Killed so often, at moments that are drawn; then to its last step, within the first epoch.

    Returns:
        prompts ``trained``; those of which the weights have seen more than their rollouts (``repeated``); those that
        were handed out and are neither trained nor in flight (``lost``); those that are trained and in flight
        (``again``).
    """
    draw, done = random.Random(seed), 0
    directory.mkdir(parents=True)
    model(directory / "model")
    environment = environment_of(directory, mode, attach, fails)
    with interpreter(python, directory, environment) as (warm, forks):
        while True:
            # Each start goes on from the last checkpoint, and is killed some steps later.
            path = directory / "run" / "latest_checkpointed_iteration.txt"
            step = int(path.read_text()) if path.exists() else 0
            until = min(step + draw.randrange(1, 2 * SAVES + 1), steps - 1) if done < kills else 0
            job = {"until": until, "after": draw.random() * 2, "mode": mode, "steps": steps, **options}
            began = time.monotonic()
            status = start(warm, directory, environment, forks=forks, **job)
            with (directory / "progress.log").open("a") as log:
                log.write(f"kills {done} step {step} until {until} took {time.monotonic() - began:.0f} s\n")
            if status == 0:
                break
            done += 1
    times = Counter(prompt for prompts in steps_of(directory).values() for prompt in prompts)
    issued, in_flight = issued_of(directory)
    if attach is not None and mode == "fully_async":
        in_flight = in_state(directory / "run")
    return {
        "kills": done,
        "trained": len(times),
        "repeated": sum(n > ROLLOUTS for n in times.values()),
        "lost": len(issued - times.keys() - in_flight),
        "again": len(in_flight & times.keys()),
    }


def in_state(run: Path) -> set[int]:
    """The prompts that a resume from the last checkpoint would issue again."""
    step = (run / "latest_checkpointed_iteration.txt").read_text()
    state = json.loads((run / f"global_step_{step}" / "prompts.json").read_bytes())["prompts"]
    prompts = Prompts(Numbers(), rollouts=ROLLOUTS, seed=5)
    prompts.load_state_dict(state)
    return {prompt.item for prompt in prompts.issue(len(prompts.in_flight))}


def model(directory: Path) -> None:
    """A tiny model with its tokenizer, made in a process that has its packages."""
    code = "import sys; from tests.hosts.trl import tiny; from pathlib import Path; d = Path(sys.argv[1]);"
    code += "m, t = tiny.tiny_model(), tiny.tiny_tokenizer(); m.save_pretrained(d); t.save_pretrained(d)"
    subprocess.run([sys.executable, "-c", code, str(directory)], env=ENVIRONMENT, cwd=ROOT, check=True)


def main(python: str, mode: str, seeds: int, kills: int, steps: int = STEPS, first: int = 0) -> None:
    """Both ways, one after the other."""
    base = Path(tempfile.mkdtemp(prefix="verl", dir="/tmp"))
    print(base, flush=True)
    for seed in range(first, first + seeds):
        for attach in ({}, None):
            name = f"{mode}-{seed}-{attach is not None}"
            found = run(python, base / name, mode=mode, attach=attach, kills=kills, seed=seed, steps=steps)
            print(json.dumps({"mode": mode, "attached": attach is not None, "seed": seed} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
