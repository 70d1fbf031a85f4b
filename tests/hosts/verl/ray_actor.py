"""`megaresume.Prompts` as a Ray actor: workers ask it for prompts, and it is killed in the middle.

    python ray_actor.py

Prints what was trained, by prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import ray

import megaresume

PROMPTS, WORKERS, AT_A_TIME = 240, 3, 8
DATA = [f"prompt {number}" for number in range(PROMPTS)]


@ray.remote(num_cpus=0)
class Worker:
    """Asks for prompts, and answers twice each."""

    def __init__(self, account: Any) -> None:
        self._account = account

    def work(self) -> list[tuple[int, str]]:
        """The next prompts, rolled out: ordinal and answer of those that are wanted."""
        done = []
        for prompt in ray.get(self._account.issue.remote(AT_A_TIME)):
            wanted = [self._account.done.remote(prompt.ordinal, prompt.ticket, k) for k in prompt.rollouts]
            if all(ray.get(wanted)):
                done.append((prompt.ordinal, f"{prompt.content}: an answer"))
        return done


def main() -> None:
    """Train all prompts of one epoch; the account and its workers die at step 6 and come again from the last save."""
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False)
    weights: list[str] = []
    saved: Any = ({}, [])
    for stop in (6, None):
        account = ray.remote(num_cpus=0)(megaresume.Prompts).remote(DATA, rollouts=2, max_epochs=1, seed=3)
        if saved[1]:
            ray.get(account.load_state_dict.remote(saved[0]))
            weights = list(saved[1])
        workers = [Worker.remote(account) for _ in range(WORKERS)]
        step = len(weights) // (WORKERS * AT_A_TIME)
        while batch := [one for part in ray.get([worker.work.remote() for worker in workers]) for one in part]:
            step += 1
            if step == stop:
                break
            weights += [answer for _, answer in batch]
            ray.get(account.trained.remote(step, [ordinal for ordinal, _ in batch]))
            if step % 2 == 0:
                saved = json.loads(json.dumps(ray.get(account.state_dict.remote()))), list(weights)
        for actor in (account, *workers):
            ray.kill(actor)
    print(json.dumps(Counter(Counter(weights).values())))


if __name__ == "__main__":
    main()
