"""TRL's asynchronous GRPO, killed and started again until it has made its steps; what it has trained, counted.

python -m tests.hosts.trl.killed SEEDS KILLS [FIRST]     the table of docs/rl.md: with megaresume, and without
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from megaresume import Prompts
from tests.hosts.torch.record import ENVIRONMENT, ROOT
from tests.hosts.trl.tiny import PROMPTS

HERE = Path(__file__).parent
ROLLOUTS, STEPS = 4, 40


@contextlib.contextmanager
def server(directory: Path) -> Iterator[int]:
    """The port of a server, whose weights lie in ``directory``."""
    words = [sys.executable, str(HERE / "server.py"), str(directory / "port"), str(directory / "weights.pt")]
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(words, env=ENVIRONMENT, cwd=ROOT, stdout=log, stderr=log)
    try:
        while not (directory / "port").exists():
            assert process.poll() is None, (directory / "server.log").read_text()
            time.sleep(0.2)
        yield int((directory / "port").read_text())
    finally:
        process.kill()
        process.wait()


def start(directory: Path, *, ranks: int = 1, **options: Any) -> int:
    """The exit status of one process, or of torchrun; what it has left of its own processes is killed with it."""
    words = [sys.executable, str(HERE / "program.py"), str(directory), json.dumps(options)]
    if ranks > 1:
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [sys.executable, *several, *words[1:]]
    environment = ENVIRONMENT | {"HOME": str(Path.home()), "TRL_EXPERIMENTAL_SILENCE": "1"}
    with (directory / "output.log").open("w") as log:
        process = subprocess.Popen(words, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        status = process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    said = (directory / "output.log").read_text()
    assert status in (0, -9) or (ranks > 1 and "Signal 9 (SIGKILL)" in said), said[-6000:]
    return status


def steps_of(directory: Path) -> dict[int, list[int]]:
    """The prompts of each step, one for each rollout, as the weights have seen them."""
    steps: dict[tuple[int, int], list[int]] = {}
    for line in (directory / "trained.jsonl").read_text().splitlines():
        found = json.loads(line)
        here = found["rank"], found["step"]
        steps = {one: prompts for one, prompts in steps.items() if one[0] != here[0] or one < here}
        steps[here] = found["prompts"]
    together: dict[int, list[int]] = {}
    for (_, step), prompts in steps.items():
        together.setdefault(step, []).extend(prompts)
    return together


def lose_machine(run: Path) -> None:
    """Leave what a user would have copied of a run's directory: the newest checkpoint, and the ledger."""
    copied = run.with_name("copied")
    copied.mkdir()
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    shutil.copytree(newest, copied / newest.name)
    shutil.copy(run / "prompts.jsonl", copied)
    shutil.rmtree(run)
    copied.rename(run)


def run(
    directory: Path, port: int, *, attached: bool, kills: int, seed: int, ranks: int = 1, on_new_machines: bool = False
) -> dict[str, int]:
    """Killed so often, at steps that are drawn; then to its last step, within the first epoch.

    Args:
        on_new_machines: see `lose_machine`, after each kill.

    Returns:
        prompts ``trained``; those of which the weights have seen more than their rollouts (``repeated``); those that
        are not trained, and a resume from the last checkpoint would not train (``lost``); those that are, and it would
        train once more (``again``).
    """
    draw, done, step = random.Random(seed), 0, 0
    directory.mkdir(parents=True)
    options: dict[str, Any] = {"attached": attached, "port": port, "seed": seed, "max_steps": STEPS}
    options |= {"ranks": ranks, "per_device_train_batch_size": 2 * ROLLOUTS // ranks}
    while True:
        resume = step > 0
        kill = min(step + draw.randrange(2, 2 + 2 * STEPS // (kills + 1)), STEPS) if done < kills else 0
        if start(directory, resume=resume, kill=kill, **options) == 0:
            break
        done += 1
        if on_new_machines and any(directory.glob("run/checkpoint-*")):
            lose_machine(directory / "run")
        step = max((int(path.name.rpartition("-")[2]) for path in directory.glob("run/checkpoint-*")), default=0)
    times = Counter(prompt for prompts in steps_of(directory).values() for prompt in prompts)
    whole = {prompt for prompt, n in times.items() if n >= ROLLOUTS}
    issued, left = (_issued if attached else _its_own)(directory / "run" / f"checkpoint-{STEPS}", set(times))
    return {
        "kills": done,
        "trained": len(times),
        "repeated": sum(n > ROLLOUTS for n in times.values()),
        "lost": issued - len(whole | left),
        "again": len(whole & left),
    }


def _issued(checkpoint: Path, trained: set[int]) -> tuple[int, set[int]]:
    """How many prompts were issued, and which a resume would issue again."""
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": f"p{k}"}]} for k in range(PROMPTS)])
    state = json.loads((checkpoint / "prompts.json").read_bytes())["prompts"]
    prompts = Prompts(data, rollouts=ROLLOUTS, seed=int(checkpoint.parents[1].name.partition("-")[0]))
    prompts.load_state_dict(state)
    again = prompts.issue(len(prompts.in_flight))
    return state["next"], {int(prompt.content["prompt"][0]["content"][1:]) for prompt in again}


def _its_own(checkpoint: Path, trained: set[int]) -> tuple[int, set[int]]:
    """The same of TRL's own position, from which it goes through the dataset again."""
    position = json.loads((checkpoint / "rollout_state.json").read_bytes())["prompt_index"]
    issued = max(position, max(trained) + 1)
    return issued, set(range(position, issued))


def main(seeds: int, kills: int, first: int = 0) -> None:
    """Both ways, and without a kill."""
    base = Path(tempfile.mkdtemp())
    with server(base) as port:
        for seed in range(first, first + seeds):
            for attached in (True, False):
                for often in (0, kills) if seed == 0 else (kills,):
                    found = run(base / f"{seed}-{attached}-{often}", port, attached=attached, kills=often, seed=seed)
                    print(json.dumps({"attached": attached, "seed": seed} | found), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
