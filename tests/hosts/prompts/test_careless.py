"""`megaresume.Prompts` in careless hands: odd numbers, late calls, a full disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaresume import DataLoader, Prompts
from megaresume.checkpoint.records.prompt_ledger import PromptHistory
from megaresume.stream.errors import CheckpointError, StateError, UsageError
from tests.hosts.prompts.simulated import Texts
from tests.hosts.prompts.test_prompts import bare, finish, made, resumed


@pytest.mark.parametrize("ticket", [None, ""])
def test_a_rollout_without_a_ticket_is_not_matched_after_a_resume(ticket: Any) -> None:
    prompts = made()
    prompts.issue(2)
    again = resumed(prompts)
    with pytest.raises(StateError, match="of another prompt"):
        again.done(0, ticket)
    assert [prompt.ordinal for prompt in again.issue(2)] == [0, 1]


@pytest.mark.parametrize("number", [np.uint8, np.int8, np.int32, np.int64, torch.tensor])
def test_numbers_of_numpy_and_torch_mean_what_they_say(number: Any) -> None:
    prompts = made(rollouts=40)
    first, second = prompts.issue(2)
    for rollout in range(40):
        assert prompts.done(number(0), first.ticket, number(rollout), version=number(0))
    prompts.trained(number(1), [(number(0), number(39))])
    prompts.trained(number(2), [number(0)])
    prompts.drop(number(1), "failed", requeue=True, rollout=number(9))
    (again,) = prompts.issue(number(1))
    assert (again.ordinal, again.rollouts, again.ticket) == (1, (9,), second.ticket.replace(".0", ".1"))
    assert type(again.ordinal) is int
    assert prompts.in_flight == [1]
    json.dumps(prompts.state_dict())


@pytest.mark.parametrize(
    "call",
    [
        lambda p, d: p.done(0.0, d),
        lambda p, d: p.done(0.5, d),
        lambda p, d: p.done("0", d),
        lambda p, d: p.done(0, d, 0.0),
        lambda p, d: p.done(0, d, version=0.5),
        lambda p, d: p.done(0, d, version=float("nan")),
        lambda p, d: p.trained(1, ["0"]),
        lambda p, d: p.trained(1.5, [0]),
        lambda p, d: p.trained(True, [0]),
        lambda p, d: p.drop(0.0, "failed", requeue=True),
        lambda p, d: p.issue(-1),
        lambda p, d: p.issue("3"),
        lambda p, d: p.advance(0.5),
    ],
)
def test_what_is_no_whole_number_is_refused(call: Any) -> None:
    prompts = made()
    (prompt,) = prompts.issue(1)
    with pytest.raises(UsageError, match=r"^bad "):
        call(prompts, prompt.ticket)
    finish(prompts, prompt)
    prompts.trained(1, [0])


def test_what_a_full_disk_kept_out_of_the_ledger_is_in_the_next_line(tmp_path: Path) -> None:
    ledger = tmp_path / "prompts.jsonl"
    prompts = made(ledger=ledger)
    issued = prompts.issue(4)
    finish(prompts, *issued)
    prompts.trained(1, [0, 2])
    prompts.drop(1, "filtered")
    ledger.mkdir()
    with pytest.raises(CheckpointError):
        prompts.state_dict()
    ledger.rmdir()
    line = prompts.state_dict()["line"]
    found = PromptHistory.read(ledger).fates(line)
    assert (found.trained, found.dropped, found.problems) == ({0: 1, 2: 1}, {1: "filtered"}, [])


@pytest.mark.parametrize("on_stale", ["requeue", "drop"])
def test_a_rollout_is_as_old_as_its_own_weights(on_stale: Any) -> None:
    prompts = made(rollouts=3, min_rollouts=1, max_staleness=1, on_stale=on_stale)
    one, two = prompts.issue(2)
    assert prompts.done(0, one.ticket, 0, version=0)
    assert prompts.done(1, two.ticket, 0, version=0)
    prompts.trained(1, [(1, 0)])
    assert prompts.advance(1) == []
    assert prompts.done(0, one.ticket, 1, version=1)
    assert prompts.done(1, two.ticket, 1, version=1)
    # Rollouts 1 are new enough, whatever rollouts 0 of their prompts were made by.
    assert prompts.advance(2) == [(0, 0)]
    prompts.trained(2, [(0, 1), (1, 1)])
    wanted = [(0, (0,)), (2, (0, 1, 2))] if on_stale == "requeue" else [(2, (0, 1, 2)), (3, (0, 1, 2))]
    assert [(prompt.ordinal, prompt.rollouts) for prompt in prompts.issue(2)] == wanted
    if on_stale == "requeue":  # made again: as old as the weights that made it now
        assert prompts.done(0, one.ticket, 0, version=2)
        assert prompts.advance(3) == []


def test_weights_that_advance_has_not_named() -> None:
    prompts = made(max_staleness=4)
    (prompt,) = prompts.issue(1)
    with pytest.raises(UsageError, match="no weights of this version yet"):
        prompts.done(0, prompt.ticket, version=1)
    prompts.advance(1)
    assert prompts.done(0, prompt.ticket, version=1)


def test_after_a_resume_no_prompt_waits_for_a_rollout_that_was_refused() -> None:
    prompts = made(max_staleness=4)
    prompts.issue(1)
    again = resumed(prompts, max_staleness=4)
    (prompt,) = again.issue(1)
    assert not again.done(0, prompt.ticket, version=1)
    assert again.counts == {"of later weights": 1}
    assert bare(*again.issue(1)) == bare(prompt)
    assert again.done(0, prompt.ticket, version=0)


def test_the_error_says_how_many_are_missing() -> None:
    prompts = made(rollouts=3)
    (prompt,) = prompts.issue(1)
    for rollout in (0, 1):
        assert prompts.done(0, prompt.ticket, rollout)
    prompts.drop(0, "failed", rollout=0)
    with pytest.raises(StateError) as whole:
        prompts.trained(1, [0])
    assert "rollouts (1,) of 3, and (0,) trained or dropped before" in str(whole.value)
    assert "at least 2 that came back" in str(whole.value)
    with pytest.raises(StateError, match="rollout 2 of prompt 0 has not come back"):
        prompts.trained(1, [(0, 2)])


def test_a_ledger_of_which_the_beginning_is_gone(tmp_path: Path) -> None:
    ledger = tmp_path / "prompts.jsonl"
    prompts = made(ledger=ledger)
    finish(prompts, *prompts.issue(2))
    prompts.trained(1, [0])
    prompts.state_dict()
    ledger.unlink()
    state = prompts.state_dict()
    again = made(ledger=ledger)
    with pytest.raises(StateError, match="the ledger of prompts has a gap"):
        again.load_state_dict(state)
    assert again.next_ordinal == 0
    made().load_state_dict(state)


def test_a_ledger_that_is_a_directory_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a file"):
        made(ledger=tmp_path)


@pytest.mark.parametrize("ledger", ["s3://bucket/run/prompts.jsonl", Path("gs://bucket/prompts.jsonl")])
def test_a_ledger_in_a_store_is_refused_at_once(ledger: Any) -> None:
    """Or it would be written to a directory named "s3:", and be gone with the machine."""
    with pytest.raises(UsageError, match=r"cannot be a URL(.|\n)*bucket(.|\n)*copy it with each checkpoint"):
        made(ledger=ledger)


@pytest.mark.parametrize(("name", "meant"), [("max_epoch", "max_epochs"), ("rolouts", "rollouts")])
def test_unknown_options_are_refused_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match="unknown argument of Prompts") as caught:
        made(**{name: 1})
    assert (caught.value.cause, caught.value.action) == (f"did you mean '{meant}'?", f"write {meant}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drop_last", True),
        ("accumulation", 2),
        ("collate_fn", list),
        ("batch_size", 4),
        ("dp_rank", 0),
    ],
)
def test_options_of_batches_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"makes no batches(.|\\n)*found: *{name}="):
        made(**{name: value})
    if name in ("drop_last", "accumulation", "collate_fn"):
        with pytest.raises(UsageError, match=f"makes no batches(.|\\n)*found: *{name}="):
            Prompts(DataLoader(Texts("data", 20), 4, **{name: value}))
