"""How a run of `megaresume.Prompts` may start: a state that was not loaded, and ranks that would issue the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import megaresume
from megaresume import Prompts
from megaresume.stream.errors import StateError, UsageError
from tests.hosts.prompts.simulated import Texts
from tests.hosts.prompts.test_prompts import finish, made
from tests.hosts.torch.record import ENVIRONMENT, ROOT


def test_a_state_that_was_not_loaded(tmp_path: Path) -> None:
    ledger = tmp_path / "prompts.jsonl"
    prompts = made(ledger=ledger)
    finish(prompts, *prompts.issue(4))
    prompts.trained(7, [1, 2])
    state = json.loads(json.dumps(prompts.state_dict()))
    again = made(ledger=ledger)
    for _ in range(2):
        with pytest.raises(StateError, match=r"no state was loaded(.|\n)*1 lines of .* up to step 7"):
            again.issue(1)
    assert again.next == 0
    again.load_state_dict(state)
    assert [prompt.ordinal for prompt in again.issue(3)] == [0, 3, 4]
    ledger.unlink()
    assert [prompt.ordinal for prompt in made(ledger=ledger).issue(2)] == [0, 1]


def test_killed_before_anything_was_trained(tmp_path: Path) -> None:
    ledger = tmp_path / "prompts.jsonl"
    prompts = made(ledger=ledger)
    prompts.issue(4)
    assert not ledger.exists()  # lines are written with states alone
    assert [prompt.ordinal for prompt in made(ledger=ledger).issue(1)] == [0]
    prompts.state_dict()  # a checkpoint before the first step
    with ledger.open("a") as file:
        file.write('{"format": "megaresume.prom')  # and killed while it wrote another
    assert [prompt.ordinal for prompt in made(ledger=ledger).issue(1)] == [0]


def test_a_rank_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert len(made().issue(2)) == 2
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match=r"not rank 0(.|\n)*rank 1 of 2"):
        made()
    with pytest.raises(UsageError, match="not rank 0"):
        Prompts(megaresume.DataLoader(Texts("data", 20), 1, dp_rank=1, dp_size=2))
    # This rank alone drives the rollouts.
    assert len(Prompts(megaresume.DataLoader(Texts("data", 20), 1, dp_rank=0, dp_size=1)).issue(2)) == 2


RANK = """
import sys, torch.distributed as dist
from tests.hosts.prompts.test_prompts import made
from megaresume import MegaresumeError

early = made()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
for attempt in (lambda: early.issue(2), lambda: made().issue(2)):
    try:
        print([prompt.ordinal for prompt in attempt()])
    except MegaresumeError as error:
        print(type(error).__name__)
dist.barrier()
"""


@pytest.mark.process
def test_ranks_of_a_process_group(tmp_path: Path) -> None:
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "meeting"), str(rank)],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [start.communicate(timeout=120)[0].split("\n")[:2] for start in starts]
    assert said == [["[0, 1]", "[0, 1]"], ["UsageError", "UsageError"]]
