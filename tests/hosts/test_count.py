"""The one count: what each event does in each state, and that what is trained is what was taken, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megaresume.hosts.count import Count, Words
from megaresume.stream.errors import StateError

WHY = ("a cause", "a way out")
WORDS = Words(
    trainer="the trainer",
    clock="step()",
    next="next() asks for more",
    untrained=WHY,
    incomplete=WHY,
    early_save=WHY,
    other_count=WHY,
)
UNTRAINED, NONE, LESS = (
    "was taken and not trained",
    "no micro-batch was taken for it",
    "without all of its micro-batches",
)
MIDDLE, OTHER = "in the middle of a step", "count different steps"


def count_at(taken: int, *, checks_before: bool = False) -> Count[str]:
    """One that has trained a step of two micro-batches of four samples, and has so many of the next out."""
    count: Count[str] = Count(WORDS, checks_before_weights_change=checks_before)
    for number in range(2 + taken):
        if number % 2 == 0:
            count.begin(8)
        count.take(f"batch {number}", 4 * number + 4)
        if number == 1:
            count.stepped()
    return count


Event = Callable[[Count[str]], object]
EVENTS: dict[str, Event] = {
    "take": lambda count: (count.begin(8), count.take("one more", count.end + 4)),
    "use": lambda count: count.use(),
    "use_twice": lambda count: (count.use(), count.use()),
    "check_step": lambda count: count.check_step(),
    "stepped": lambda count: count.stepped(),
    "unseen": lambda count: count.check_step(["batch 3"]),
    "check_idle": lambda count: count.check_idle(),
    "save": lambda count: count.check_save(),
    "save_when_used": lambda count: (count.use(), count.check_save()),
    "same": lambda count: count.compare(1, 8),
    "other_step": lambda count: count.compare(2),
    "other_samples": lambda count: count.compare(1, 12),
    "trained_to": lambda count: count.trained_to(8, ahead={0}),
    "trained_to_with_a_step_ahead": lambda count: count.trained_to(8, ahead={0, 8}),
    "trained_beyond": lambda count: count.trained_to(24, ahead=None),
}


@pytest.mark.parametrize(
    ("event", "idle", "taken", "whole"),
    [
        ("take", None, None, UNTRAINED),
        ("use", NONE, None, None),
        ("use_twice", NONE, NONE, None),
        ("check_step", NONE, LESS, None),
        ("stepped", NONE, LESS, None),
        ("unseen", NONE, LESS, "the model was not trained on batch 3"),
        ("check_idle", None, UNTRAINED, UNTRAINED),
        ("save", None, None, None),
        ("save_when_used", NONE, MIDDLE, MIDDLE),
        ("same", None, None, None),
        ("other_step", OTHER, OTHER, OTHER),
        ("other_samples", OTHER, OTHER, OTHER),
        ("trained_to", None, UNTRAINED, UNTRAINED),
        ("trained_to_with_a_step_ahead", None, UNTRAINED, None),
        ("trained_beyond", LESS, LESS, LESS),
    ],
)
def test_each_event_in_each_state(event: str, idle: str | None, taken: str | None, whole: str | None) -> None:
    for number, words in enumerate((idle, taken, whole)):
        count = count_at(number)
        if words is None:
            EVENTS[event](count)
            assert count.failure is None
            continue
        with pytest.raises(StateError) as raised:
            EVENTS[event](count)
        assert words in str(raised.value), str(raised.value)
        assert (count.step, count.samples) == (1, 8), "what is refused is not counted"
        for later in ("take", "check_step", "stepped", "check_idle"):
            with pytest.raises(StateError) as again:
                EVENTS[later](count)
            assert again.value is raised.value
        count.loaded(1, 8)
        EVENTS["take"](count)


def test_what_a_step_has_trained() -> None:
    count = count_at(2)
    assert list(count.stepped()) == ["batch 2", "batch 3"]
    assert (count.step, count.samples, count.is_idle, count.is_whole) == (2, 16, True, False)
    count.begin(8)
    count.take("the last of the data", 20, is_last=True)
    assert list(count.stepped()) == ["the last of the data"]
    assert (count.step, count.samples) == (3, 20)


def test_the_size_that_counts_is_the_last_one_before_a_micro_batch() -> None:
    count: Count[str] = Count(WORDS)
    count.take("of no size", 4)
    assert count.is_whole, "without begin() the first one is the whole step"
    count = count_at(1)
    count.begin(12)
    count.take("batch 3", 16)
    assert not count.is_whole
    count.begin(4)
    assert not count.is_whole, "not before the next one"
    count.take("batch 4", 20)
    assert count.is_whole and list(count.stepped()) == ["batch 2", "batch 3", "batch 4"]


@pytest.mark.parametrize("checks_before", [True, False])
def test_what_is_refused_before_the_weights_change_leaves_them_to_be_saved(checks_before: bool) -> None:
    count = count_at(1, checks_before=checks_before)
    with pytest.raises(StateError, match="to be made without all"):
        count.check_step()
    if checks_before:
        count.check_save()
    else:
        with pytest.raises(StateError, match="to be made without all"):
            count.check_save()
    count = count_at(1, checks_before=checks_before)
    with pytest.raises(StateError, match="was made without all"):
        count.stepped()
    with pytest.raises(StateError, match="was made without all"):
        count.check_save()


def test_a_failure_that_leaves_the_weights_alone_does_not_mend_one_that_did_not() -> None:
    count = count_at(0)
    count.fail(StateError("the weights are gone"))
    count.fail(StateError("and a batch"), may_save=True)
    with pytest.raises(StateError, match="and a batch"):
        count.check_save()


def test_a_rank_that_reads_nothing_counts_with_the_others() -> None:
    count: Count[str] = Count(WORDS, 3, 24, reads=False)
    count.begin(8)
    count.use()
    count.check_save()
    count.check_step()
    count.stepped()
    assert (count.step, count.samples) == (4, 32)


def test_what_is_returned_is_taken_again() -> None:
    count = count_at(2)
    count.return_all()
    assert count.is_idle and count.end == 8
    for name in ("batch 2", "batch 3"):
        count.take(name, count.end + 4)
    assert list(count.stepped()) == ["batch 2", "batch 3"]


def test_what_is_ahead_of_a_trainer_that_tells_of_no_step_stays_out() -> None:
    count = count_at(2)
    count.trained_to(12, ahead=None)
    assert [taken.batch for taken in count.out] == ["batch 3"] and count.samples == 12
    with pytest.raises(StateError, match="batch 3 taken since"):
        count.trained_to(12)


def test_after_a_step_nothing_of_the_next_is_used() -> None:
    count = count_at(2)
    count.use()
    count.stepped()
    count.check_save()
    count = count_at(1)
    count.use()
    count.return_all()
    count.check_save()


def test_many_are_named_in_part() -> None:
    count: Count[str] = Count(WORDS)
    count.begin(12)
    for number in range(12):
        count.take(f"b{number}", number + 1)
    count.use()
    with pytest.raises(
        StateError, match=r"b0, .*b7, and 4 more taken since step 0, 1 of them in its gradients, and next"
    ):
        count.check_more()


@pytest.mark.parametrize("seed", range(200))
def test_whatever_a_trainer_does_what_is_trained_was_taken_once_and_in_order(seed: int) -> None:
    """Events at random, with sizes of steps at random: the samples of the steps are 0, 1, 2, ... without a gap."""
    draw = random.Random(seed)
    count: Count[range] = Count(WORDS)
    trained: list[int] = []
    saved: tuple[int, int, int] = (0, 0, 0)
    for _ in range(60):
        event = draw.choice(["take"] * 6 + ["stepped"] * 3 + ["use", "save", "return_all", "load"])
        try:
            if event == "take":
                if count.is_idle:
                    count.begin(4 * draw.randint(1, 4))
                count.take(range(count.end, count.end + 4), count.end + 4)
            elif event == "stepped":
                trained += [number for batch in count.stepped() for number in batch]
            elif event == "use":
                count.use()
            elif event == "save":
                count.check_save()
                saved = (count.step, count.samples, len(trained))
            elif event == "return_all":
                count.return_all()
            else:
                count.loaded(*saved[:2])
                del trained[saved[2] :]
        except StateError:
            count.loaded(*saved[:2])
            del trained[saved[2] :]
        assert trained == list(range(count.samples))
