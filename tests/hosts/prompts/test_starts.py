"""How a run of `megaresume.Prompts` may start: a state that was not loaded, and ranks that would issue the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megaresume
from megaresume import Prompts
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.state_text import checksum
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
    assert again.next_ordinal == 0
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


def test_a_rollout_of_lost_weights_whose_number_came_again() -> None:
    prompts = made(max_staleness=4)
    prompts.advance(1)
    kept, zombie, other = prompts.issue(3)
    state = prompts.state_dict()
    prompts.advance(2)  # of these weights there is no checkpoint
    again = made(max_staleness=4)
    again.load_state_dict(state)
    assert again.done(kept.ordinal, kept.ticket, version=1)
    new = again.issue(2)
    again.advance(2)
    assert not again.done(zombie.ordinal, zombie.ticket, version=2)
    assert again.done(new[0].ordinal, new[0].ticket, version=2)  # it is still out, and wanted
    assert again.done(other.ordinal, other.ticket, version=1)  # by weights of the checkpoint
    assert not again.done(new[1].ordinal, new[1].ticket, version=2)
    assert again.counts == {"of later weights": 1, "repeated": 1}


def test_a_rollout_of_a_start_that_saved_nothing() -> None:
    before, prompts = made(max_staleness=4), made(max_staleness=4)
    (zombie,), (prompt,) = before.issue(1), prompts.issue(1)
    assert not prompts.done(0, zombie.ticket, version=3)
    prompts.advance(3)
    assert not prompts.done(0, zombie.ticket, version=3)
    assert prompts.done(0, prompt.ticket, version=3)


def test_an_object_that_goes_back_to_its_own_state() -> None:
    prompts = made(max_staleness=4)
    (zombie,) = prompts.issue(1)
    prompts.load_state_dict(prompts.state_dict())
    prompts.advance(1)
    assert not prompts.done(0, zombie.ticket, version=1)


def from_state(state: dict[str, Any], **options: Any) -> Prompts:
    """Another start."""
    found = made(max_staleness=4, **options)
    found.load_state_dict(json.loads(json.dumps(state)))
    return found


def test_lost_weights_whose_number_is_in_a_later_checkpoint() -> None:
    first = made(max_staleness=4)
    kept, zombie, *_ = first.issue(4)
    state = first.state_dict()
    first.advance(1)  # killed: of these weights there is no checkpoint
    second = from_state(state)
    again = second.issue(4)
    second.advance(1)
    third = from_state(second.state_dict())  # whose version 1 is the second start's
    assert not third.done(zombie.ordinal, zombie.ticket, version=1)
    assert third.done(kept.ordinal, kept.ticket, version=0)
    assert third.done(again[2].ordinal, again[2].ticket, version=1)
    assert third.done(again[3].ordinal, again[3].ticket[:16], version=1)  # kept with the checkpoint
    assert third.counts == {"of later weights": 1}


def test_starts_that_were_killed_before_they_saved() -> None:
    first = made(max_staleness=4)
    first.issue(4)
    first.advance(1)
    state = first.state_dict()
    second = from_state(state)
    out = second.issue(4)
    second.advance(2)
    third = from_state(state)
    assert third.done(0, out[0].ticket, version=1)
    third.issue(3)
    third.advance(2)
    fourth = from_state(third.state_dict())
    assert fourth.done(1, out[1].ticket, version=1)
    assert not fourth.done(2, out[2].ticket, version=2)
    older = from_state(made(max_staleness=4).state_dict())  # of another branch
    older.issue(4)
    older.advance(1)
    assert not older.done(3, out[3].ticket, version=1)
    assert len(out[3].ticket) < 48


def test_a_state_that_does_not_name_its_starts() -> None:
    first = made(max_staleness=4)
    (prompt, *_) = first.issue(2)
    first.advance(1)
    body = {name: value for name, value in first.state_dict().items() if name not in ("starts", "checksum")}
    again = from_state(body | {"checksum": checksum(body)})
    assert again.done(0, prompt.ticket, version=1)
    for wrong in (3, [3], [["5be1a0d2", -1]], [["5be1a0d2", "1"]]):
        body["starts"] = wrong
        with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
            from_state(body | {"checksum": checksum(body)})


def test_a_state_names_a_few_starts_alone() -> None:
    prompts = made(max_staleness=4)
    for version in range(1, 60):
        prompts.issue(1)
        prompts.advance(version)
        prompts = from_state(prompts.state_dict())
    assert [version for _, version in prompts.state_dict()["starts"]] == list(range(28, 60))


@pytest.mark.parametrize("on_stale", ["requeue", "drop"])
def test_a_stale_rollout_that_was_asked_for_again(on_stale: Any) -> None:
    prompts = made(rollouts=2, max_staleness=0, on_stale=on_stale)
    (first,) = prompts.issue(1)
    prompts.drop(0, "slow", requeue=True, rollout=1)
    prompts.advance(1)
    assert not prompts.done(0, first.ticket, 1, version=0)  # it waits to be issued again
    (second,) = prompts.issue(1)
    assert (second.ordinal, second.rollouts) == (0, (1,))
    assert not prompts.done(0, first.ticket, 1, version=0)  # it is out again
    assert prompts.done(0, second.ticket, 1, version=1)
    assert prompts.counts == {"requeued: slow": 1, "superseded": 2}
    assert not prompts.done(0, first.ticket, 0, version=0)  # asked for once: what on_stale says
    assert [prompt.ordinal for prompt in prompts.issue(1)] == ([0] if on_stale == "requeue" else [1])


def test_what_is_out() -> None:
    prompts = made(rollouts=2)
    first, *_ = prompts.issue(3)
    prompts.done(0, first.ticket, 1)
    prompts.drop(1, "slow", requeue=True)
    prompts.advance(4)
    assert [one[:4] for one in prompts.outstanding()] == [(0, (0,), (1,), 0), (2, (0, 1), (), 0)]
    prompts.issue(1)
    found = prompts.outstanding()
    assert [one[:4] for one in found] == [(0, (0,), (1,), 0), (2, (0, 1), (), 0), (1, (0, 1), (), 4)]
    assert found[0].seconds >= found[2].seconds >= 0
    prompts.load_state_dict(prompts.state_dict())
    assert prompts.outstanding() == []
