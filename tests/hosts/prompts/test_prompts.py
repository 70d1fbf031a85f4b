"""`megaresume.Prompts`: the order, groups, staleness, what a state is, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import megaresume
from megaresume import MegaresumeError, Prompts
from megaresume.checkpoint.records.prompt_ledger import PromptHistory
from megaresume.stream.errors import CorpusError, StateError, UsageError
from tests.hosts.prompts.simulated import Texts


def made(items: int = 20, **options: Any) -> Prompts:
    """Over one dataset."""
    return Prompts(Texts("data", items), **options)


def resumed(prompts: Prompts, items: int = 20, **options: Any) -> Prompts:
    """From the state of others, through text."""
    found = made(items, **options)
    found.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    return found


def bare(*issued: Any) -> list[Any]:
    """Without the start and the attempt that issued them."""
    return [prompt._replace(ticket=prompt.ticket[:16]) for prompt in issued]


def finish(prompts: Prompts, *issued: Any) -> None:
    """All their rollouts come back."""
    for prompt in issued:
        for rollout in prompt.rollouts:
            assert prompts.done(prompt.ordinal, prompt.ticket, rollout)


def test_the_order_is_that_of_the_loader() -> None:
    batches = megaresume.DataLoader(Texts("data", 20), 5, seed=3)
    wanted = [text for _ in range(3) for batch in batches for text in batch]
    prompts = made(seed=3)
    issued = [prompt for n in (1, 7, 30, 22) for prompt in prompts.issue(n)]
    assert [prompt.content for prompt in issued] == wanted
    assert [prompt.ordinal for prompt in issued] == list(range(60))
    assert [prompt.epoch for prompt in issued] == [0] * 20 + [1] * 20 + [2] * 20
    assert [f"data {prompt.item}" for prompt in issued] == wanted
    over = Prompts(megaresume.DataLoader(Texts("data", 20), 4, seed=3, max_epochs=3))
    assert [prompt.content for prompt in over.issue(100)] == wanted
    assert over.issue(1) == []


def test_a_blend_with_stages_is_that_of_the_loader() -> None:
    def data() -> dict[str, Any]:
        return {"web": (Texts("web", 50), 3), "code": (Texts("code", 30), 1)}

    stages = [{"from_samples": 40, "weights": {"web": 1, "code": 1}}]
    batches = megaresume.DataLoader(data(), 8, stages=stages)
    wanted = [text for batch in batches for text in batch]
    issued = Prompts(data(), stages=stages).issue(len(wanted))
    assert [prompt.content for prompt in issued] == wanted
    assert [f"{prompt.dataset} {prompt.item}" for prompt in issued] == wanted


def test_what_was_in_flight_comes_first_and_in_order() -> None:
    prompts = made()
    issued = prompts.issue(10)
    finish(prompts, *issued[4:8])
    prompts.trained(1, [5, 4, 7])
    prompts.drop(0, "filtered")
    again = resumed(prompts)
    assert (again.frontier, again.next_ordinal, again.in_flight) == (1, 10, [1, 2, 3, 6, 8, 9])
    assert again.num_settled == 4
    assert bare(*again.issue(4)) == bare(*(issued[k] for k in (1, 2, 3, 6)))
    assert bare(*again.issue(4)[:2]) == bare(issued[8], issued[9])
    assert again.next_ordinal == 12


def test_a_rollout_that_was_kept_is_matched_by_ordinal_and_ticket() -> None:
    prompts = made()
    issued = prompts.issue(4)
    finish(prompts, *issued)
    prompts.trained(1, [0])
    again = resumed(prompts)
    assert again.done(2, issued[2].ticket)
    with pytest.raises(StateError, match="of another prompt"):
        again.done(3, issued[2].ticket)
    assert not again.done(0, issued[0].ticket)
    assert [prompt.ordinal for prompt in again.issue(3)] == [1, 3, 4]
    again.trained(2, [2])
    assert again.counts == {"late": 1, "trained": 1}


def test_groups_come_back_and_are_trained_in_parts() -> None:
    prompts = made(rollouts=4)
    (prompt,) = prompts.issue(1)
    assert prompt.rollouts == (0, 1, 2, 3)
    for rollout in (0, 2, 3):
        assert prompts.done(0, prompt.ticket, rollout)
    prompts.trained(1, [(0, 2)])
    again = resumed(prompts, rollouts=4)
    assert again.done(0, prompt.ticket, 3)
    assert not again.done(0, prompt.ticket, 2)
    (rest,) = again.issue(1)
    assert (rest.ordinal, rest.rollouts) == (0, (0, 1))
    finish(again, rest)
    again.trained(3, [0])
    assert again.in_flight == []
    with pytest.raises(StateError, match="of another size"):
        resumed(prompts, rollouts=8)
    assert resumed(made(rollouts=4), rollouts=8).issue(1)[0].rollouts == tuple(range(8))


def test_a_group_that_is_large_enough() -> None:
    prompts = made(rollouts=4, min_rollouts=2)
    first, second = prompts.issue(2)
    assert prompts.done(0, first.ticket, 1)
    with pytest.raises(StateError, match="has not come back"):
        prompts.trained(1, [0])
    assert prompts.done(0, first.ticket, 3)
    prompts.trained(1, [0])
    assert not prompts.done(0, first.ticket, 0)
    for rollout in range(3):
        prompts.drop(1, "failed", rollout=rollout)
    assert prompts.done(1, second.ticket, 3)
    prompts.trained(2, [1])
    assert prompts.counts == {"trained": 2, "late": 1, "dropped: failed": 3}


def test_requeued() -> None:
    prompts = made(rollouts=2)
    issued = prompts.issue(4)
    finish(prompts, *issued[:2])
    prompts.drop(3, "cancelled", requeue=True)
    prompts.drop(1, "filtered", requeue=True)
    prompts.drop(2, "failed", requeue=True, rollout=1)
    with pytest.raises(StateError, match="has not come back"):
        prompts.trained(1, [1])
    found = prompts.issue(4)
    assert [(prompt.ordinal, prompt.rollouts) for prompt in found] == [
        (1, (0, 1)),
        (2, (1,)),
        (3, (0, 1)),
        (4, (0, 1)),
    ]


@pytest.mark.parametrize("on_stale", ["requeue", "drop"])
def test_rollouts_of_weights_that_are_too_old(on_stale: Any) -> None:
    prompts = made(max_staleness=1, on_stale=on_stale)
    issued = prompts.issue(4)
    assert prompts.done(0, issued[0].ticket, version=0)
    assert prompts.advance(1) == []
    assert prompts.done(1, issued[1].ticket, version=1)
    assert prompts.advance(2) == [(0, 0)]
    assert not prompts.done(2, issued[2].ticket, version=0)
    assert prompts.done(3, issued[3].ticket, version=1)
    prompts.trained(1, [3, 1])
    word = {"requeue": "requeued: stale", "drop": "dropped: stale"}[on_stale]
    assert prompts.counts == {word: 2, "trained": 2}
    assert [prompt.ordinal for prompt in prompts.issue(3)] == ([0, 2, 4] if on_stale == "requeue" else [4, 5, 6])
    with pytest.raises(UsageError, match="version"):
        prompts.done(prompts.in_flight[-1], ticket_of(prompts.in_flight[-1]))


def ticket_of(ordinal: int) -> str:
    """Of the prompts of `made`."""
    return made().issue(ordinal + 1)[-1].ticket


def test_rollouts_of_weights_that_a_resume_went_back_before() -> None:
    prompts = made(max_staleness=8)
    (prompt,) = prompts.issue(1)
    state = prompts.state_dict()
    prompts.advance(1)
    again = made(max_staleness=8)
    again.load_state_dict(state)
    assert not again.done(0, prompt.ticket, version=1)
    assert again.counts == {"of later weights": 1}


@pytest.mark.parametrize("append", ["now", "next_epoch"])
def test_prompts_that_are_added_come_after_those_in_flight(append: Any) -> None:
    prompts = made(append=append)
    issued = prompts.issue(12)
    finish(prompts, *issued[3:])
    prompts.trained(1, [3, 4, 9])
    more = resumed(prompts, 25, append=append)
    for _ in range(3):  # a state of the old order and the new one
        more = resumed(more, 25, append=append)
    found = more.issue(9 + 8 + 5)
    assert bare(*found[:9]) == bare(*(issued[k] for k in (0, 1, 2, 5, 6, 7, 8, 10, 11)))
    # The rest of the epoch: 8 of the old ones, with all that are new if they come now.
    rest = {p.item for p in found[9:] if p.epoch == 0}
    old = set(range(20)) - {p.item for p in issued}
    assert rest == (old | set(range(20, 25)) if append == "now" else old)
    finish(more, *found[:9])
    more.trained(2, [prompt.ordinal for prompt in found[:9]])
    assert len(more.state_dict()["streams"]) == 1
    assert len(resumed(prompts, 25, append=append).state_dict()["streams"]) == 2


def test_other_weights_begin_after_what_is_in_flight() -> None:
    def over(web: int, code: int, **more: Any) -> Prompts:
        return Prompts({"web": (Texts("web", 40), web), "code": (Texts("code", 40), code)}, **more)

    prompts = over(1, 1)
    issued = prompts.issue(8)
    changed = over(1, 0, on_change="stage")
    changed.load_state_dict(prompts.state_dict())
    found = changed.issue(20)
    assert bare(*found[:8]) == bare(*issued)
    assert {prompt.dataset for prompt in found[8:]} == {"web"}
    with pytest.raises(StateError, match="is not the one that the state was made with"):
        over(1, 0).load_state_dict(prompts.state_dict())


def test_a_state_of_ten_thousand_exceptions_is_small() -> None:
    prompts = made(10**8)
    issued = prompts.issue(120_000)
    assert len(json.dumps(prompts.state_dict())) < 4 << 10  # 120,000 in flight, in one run
    chosen = sorted(random.Random(1).sample(issued, 10_000))
    finish(prompts, *chosen)
    prompts.trained(1, [prompt.ordinal for prompt in chosen])
    state = prompts.state_dict()
    assert len(json.dumps(state)) < 64 << 10
    again = made(10**8)
    again.load_state_dict(state)
    assert again.in_flight == prompts.in_flight
    assert len(again.in_flight) == 110_000
    left = sorted(set(issued) - set(chosen))
    assert bare(*again.issue(3)) == bare(*left[:3])


def test_a_state_of_ten_thousand_groups_in_part_is_small() -> None:
    prompts, draw = made(10**8, rollouts=8), random.Random(1)
    issued = prompts.issue(20_000)
    for step, prompt in enumerate(draw.sample(issued, 10_000)):
        rollouts = draw.sample(range(8), draw.randrange(1, 8))
        finish(prompts, prompt._replace(rollouts=tuple(rollouts)))
        prompts.trained(step // 50, [(prompt.ordinal, rollout) for rollout in rollouts])
    state = prompts.state_dict()
    assert len(json.dumps(state)) < 64 << 10
    again = made(10**8, rollouts=8)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.state_dict() == state
    wanted = [prompt.rollouts for prompt in again.issue(20_000)]
    for prompt in issued:
        prompts.drop(prompt.ordinal, "failed", requeue=True)
    assert [prompt.rollouts for prompt in prompts.issue(20_000)] == wanted


def test_prompts_that_are_requeued_are_not_planned_again_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = made(10**6)
    issued = prompts.issue(50_000)
    plan, calls = megaresume.DataLoader.places, []
    monkeypatch.setattr(megaresume.DataLoader, "places", lambda *given: calls.append(1) or plan(*given))
    for ordinal in range(0, 50_000, 500):
        prompts.drop(ordinal, "failed", requeue=True)
        again, new = prompts.issue(2)
        assert (bare(again), new.ordinal) == (bare(issued[ordinal]), 50_000 + ordinal // 500)
    assert len(calls) <= 1


def test_a_prompt_that_cannot_be_read_is_issued_later() -> None:
    class Broken(Texts):
        broken = False

        def __getitem__(self, i: int) -> str:
            if self.broken:
                raise OSError("the disk is gone")
            return super().__getitem__(i)

    texts = Broken("data", 20)
    prompts = Prompts(texts)
    issued = prompts.issue(3)
    prompts.drop(1, "failed", requeue=True)
    texts.broken = True
    with pytest.raises(OSError, match="the disk is gone"):
        prompts.issue(2)
    texts.broken = False
    assert [prompt.ordinal for prompt in prompts.issue(2)] == [1, 3]
    assert len(issued) == 3


MISUSES: dict[str, Any] = {
    "trained before it came back": lambda p: p.trained(1, [1]),
    "trained and never issued": lambda p: p.trained(1, [99]),
    "trained twice": lambda p: (p.trained(1, [0]), p.trained(2, [0])),
    "named twice in a step": lambda p: p.trained(1, [0, 0]),
    "a rollout named twice": lambda p: p.trained(1, [(0, 0), (0, 0)]),
    "a step before the last one": lambda p: (p.trained(5, [0]), p.trained(4, [2])),
    "trained and dropped": lambda p: (p.drop(0, "filtered"), p.trained(1, [0])),
    "dropped twice": lambda p: (p.drop(0, "filtered"), p.drop(0, "filtered")),
    "dropped and trained": lambda p: (p.trained(1, [0]), p.drop(0, "filtered")),
    "dropped for no reason": lambda p: p.drop(0, ""),
    "dropped and never issued": lambda p: p.drop(99, "filtered"),
    "done and never issued": lambda p: p.done(99, "0" * 16),
    "done of another prompt": lambda p: p.done(1, p.issue(1)[0].ticket),
    "done of a rollout that is not there": lambda p: p.done(1, ticket_of(1), 7),
    "weights that get older": lambda p: (p.advance(3), p.advance(2)),
    "no rollouts": lambda p: made(rollouts=0),
    "a smaller group than none": lambda p: made(rollouts=4, min_rollouts=5),
    "another word for stale": lambda p: made(on_stale="keep"),
    "packed": lambda p: made(seq_length=128),
    "not a number": lambda p: p.issue("3"),
    "an ordinal that is text": lambda p: p.done("1", "0" * 16),
    "trained and no list": lambda p: p.trained(1, 0),
    "trained and text": lambda p: p.trained(1, ["0"]),
    "trained and three numbers": lambda p: p.trained(1, [(0, 0, 0)]),
    "options of batches": lambda p: made(batch_size=4),
    "options twice": lambda p: Prompts(megaresume.DataLoader(Texts("data", 9), 1), seed=3),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_and_changes_nothing(name: str) -> None:
    prompts = made()
    issued = prompts.issue(3)
    finish(prompts, issued[0], issued[2])
    with pytest.raises(MegaresumeError):
        MISUSES[name](prompts)
    finish(prompts, issued[1])
    prompts.trained(9, [k for k in (0, 1, 2) if k in prompts.in_flight])
    assert [k for k in prompts.in_flight if k < 3] == []


def test_a_step_with_one_wrong_prompt_trains_none() -> None:
    prompts = made()
    issued = prompts.issue(3)
    finish(prompts, *issued[:2])
    before = prompts.state_dict()
    with pytest.raises(StateError, match="prompt 2 has not come back"):
        prompts.trained(1, [0, 1, 2])
    assert prompts.state_dict() == before


def test_states_that_are_refused() -> None:
    state = made(rollouts=2).state_dict()
    for name, wrong in {
        "damaged": state | {"next": 7},
        "of a stream": state["streams"][0],
        "nothing": None,
        "newer": state | {"version": 9},
    }.items():
        prompts = made(rollouts=2)
        before = prompts.issue(2)
        with pytest.raises(StateError):
            prompts.load_state_dict(wrong)  # type: ignore[arg-type]
        assert [prompt.ordinal for prompt in prompts.issue(1)] == [2], name
        assert len(before) == 2
    used = made()
    used.issue(3)
    with pytest.raises(StateError, match="dataset 'data' is not the one"):
        Prompts(Texts("other", 20)).load_state_dict(used.state_dict())
    with pytest.raises(StateError, match="dataset 'data' is not the one"):
        made(19).load_state_dict(used.state_dict())
    with pytest.raises(StateError, match="seed"):
        made(seed=1).load_state_dict(used.state_dict())


def test_a_loader_that_somebody_else_reads() -> None:
    loader = megaresume.DataLoader(Texts("data", 20), 2)
    prompts = Prompts(loader)
    next(iter(loader))
    with pytest.raises(StateError, match="something else read from the loader"):
        prompts.state_dict()
    with pytest.raises(UsageError, match="read from already"):
        Prompts(loader)


def test_a_dataset_that_is_removed_while_its_prompts_are_in_flight() -> None:
    both = {"web": (Texts("web", 9), 1), "code": (Texts("code", 9), 1)}
    prompts = Prompts(both)
    prompts.issue(4)
    one = Prompts({"web": both["web"]}, on_change="stage")
    with pytest.raises(CorpusError, match="weight 0 is enough"):
        one.load_state_dict(prompts.state_dict())


def test_a_ledger_that_does_not_know_the_state(tmp_path: Path) -> None:
    prompts = made(ledger=tmp_path / "one.jsonl")
    state = prompts.state_dict()
    other = made(ledger=tmp_path / "other.jsonl")
    with pytest.raises(StateError, match="does not know this state"):
        other.load_state_dict(state)
    resumed(prompts, ledger=tmp_path / "one.jsonl")


def test_a_ledger_that_begins_in_the_middle_of_a_run(tmp_path: Path) -> None:
    prompts = made()
    finish(prompts, *prompts.issue(5))
    prompts.trained(1, [0, 1, 3])
    prompts.drop(4, "filtered")
    path = tmp_path / "prompts.jsonl"
    later = resumed(prompts, ledger=path)
    assert not path.exists()
    finish(later, *later.issue(2))
    later.trained(2, [2, 5])
    state = later.state_dict()
    fates = PromptHistory.read(path).fates(state["line"])
    assert fates.problems == [] and (fates.before, fates.next) == (4, 6)
    before = "settled before the ledger began"
    assert [fates.of(k) for k in range(7)] == [
        before,
        before,
        "trained at step 2",
        before,
        before,
        *["trained at step 2", "not issued"],
    ]
    assert list(fates.in_flight()) == []
    resumed(later, ledger=path)
    with pytest.raises(StateError, match="does not know this state"):
        resumed(later, ledger=tmp_path / "other.jsonl")


def test_how_old_the_rollouts_were_that_were_trained(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts = made(rollouts=2, max_staleness=2, ledger=path)
    first, second, third = prompts.issue(3)
    assert all(prompts.done(0, first.ticket, k, version=0) for k in range(2))
    assert prompts.done(1, second.ticket, 0, version=0)
    prompts.advance(2)
    assert prompts.done(1, second.ticket, 1, version=1) and prompts.done(2, third.ticket, 0, version=2)
    prompts.trained(1, [0, 1, (2, 0)])
    line = prompts.state_dict()["line"]
    assert PromptHistory.read(path).lines[line].staleness == {0: 1, 1: 1, 2: 3}
    following = prompts.state_dict()["line"]
    assert PromptHistory.read(path).lines[following].staleness == {}


def test_the_state_of_many_groups_in_parts() -> None:
    draw = random.Random(7)
    prompts = made(20_000, rollouts=64)
    finish(prompts, *prompts.issue(10_000))
    for ordinal in range(10_000):
        gone = draw.sample(range(64), draw.randrange(8))
        prompts.trained(1 + ordinal // 1000, [(ordinal, rollout) for rollout in gone])
    assert len(json.dumps(prompts.state_dict())) < 65_536
    again = resumed(prompts, 20_000, rollouts=64)
    wanted = {ordinal: flight.gone for ordinal, flight in prompts._flights.open.items()}
    assert {ordinal: flight.gone for ordinal, flight in again._flights.open.items()} == wanted
