"""One thing wrong in otherwise equal records: every kind of it is found, and named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from megaresume.cluster.records import RunComparison, assemble, compare_runs

STEPS, SIZE, SAVED, STOPPED = 8, 4, 4, 6
Events = list[dict[str, Any]]


def step(number: int, *, attempt: int = 1, dp: int = 2) -> dict[str, Any]:
    samples = [(number - 1) * SIZE, number * SIZE]
    return {
        "event": "step",
        "step": number,
        "attempt": attempt,
        "samples": samples,
        "order": f"order {number}",
        "content": f"content {number}",
        "digest": f"digest {number}",
        "ranks": [f"rank 0 of {number}"],
        "loss": 5.0 / number,
        "loss_hex": (5.0 / number).hex(),
        "dp": dp,
        "tp": 1,
        "micro_batch_size": 2,
    }


def start(number: int) -> dict[str, Any]:
    return {"event": "start", "step": number, "samples": number * SIZE, "digest": f"digest {number}" if number else "0"}


def run_of(dp: int = 2) -> Events:
    """Stopped behind step 6, resumed from step 4."""
    first = [start(0), *(step(k) for k in range(1, STOPPED + 1))]
    return [*first, start(SAVED), *(step(k, attempt=2, dp=dp) for k in range(SAVED + 1, STEPS + 1))]


def compare(reference: Events, run: Events, *, dp: int = 2, exact: bool = True) -> RunComparison:
    return compare_runs(
        assemble(copy.deepcopy(reference)),
        assemble(copy.deepcopy(run)),
        steps=STEPS,
        done=STEPS,
        tolerance=1e-3,
        exact=exact,
        nodes=[2, dp],
    )


REFERENCE: Events = [start(0), *(step(k) for k in range(1, STEPS + 1))]


def changed(index: int, **fields: Any) -> Callable[[Events], None]:
    def change(events: Events) -> None:
        events[index] |= fields

    return change


def dropped(events: Events) -> None:
    del events[-2]


def longer(events: Events) -> None:
    events.append(step(STEPS + 1, attempt=2))


#: places in `run_of`: 5 and 6 are the steps that were lost, 7 the second start, 8 to 11 steps 5 to 8.
FAULTS: dict[str, tuple[Callable[[Events], None], str]] = {
    "start at another sample": (changed(7, samples=12), "the start from step 4 resumed at sample 12, and not at 16"),
    "start with another digest": (
        changed(7, digest="x"),
        "the start from step 4 resumed with digest x, and not",
    ),
    "samples": (changed(11, samples=[28, 31]), "step 8: samples: reference 28 to 31, run 28 to 30"),
    "skipped": (changed(10, samples=[25, 28]), "step 7 of the run trained samples 25 to 27 after 20 to 23"),
    "order": (changed(9, order="x"), "step 6: identities of the samples: reference order 6, run x"),
    "content": (changed(9, content="x"), "step 6: what the model got of the samples"),
    "digest": (changed(9, digest="x"), "step 6: digest of all samples so far"),
    "ranks": (changed(9, ranks=["x"]), "step 6: what a rank was handed"),
    "lost step": (changed(6, content="x"), "when it was trained for the first time: what the model got"),
    "missing": (dropped, "step 7 is missing in the records of the run"),
    "beyond the end": (longer, "the run continued to step 9, beyond the end at step 8"),
    "loss by a bit": (changed(9, loss=math.nextafter(5.0 / 6, 1)), "step 6: loss: reference"),
    "no number": (changed(9, loss=math.nan), "step 6: loss: reference"),
}


def test_equal_records_hold() -> None:
    for dp in (2, 1):
        found = compare(REFERENCE, run_of(dp), dp=dp)
        assert found.holds and found.compared == STEPS and found.redone == 2
        assert found.losses.exact == found.losses.exact_equal == (8 if dp == 2 else SAVED)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    change, words = FAULTS[fault]
    run = run_of()
    change(run)
    found = compare(REFERENCE, run)
    assert not found.holds and found.first is not None and words in found.first, found.first


def test_a_reference_with_a_gap() -> None:
    found = compare([event for event in REFERENCE if event["step"] != 3], run_of())
    assert not found.holds and found.first == "step 3 is missing in the records of the reference"


@pytest.mark.parametrize(("loss", "holds"), [(1.0005, True), (1.002, False), (math.nan, False), (math.inf, False)])
def test_losses_behind_another_layout(loss: float, holds: bool) -> None:
    run = run_of(dp=1)
    run[-1]["loss"] *= loss
    found = compare(REFERENCE, run, dp=1)
    assert found.holds is holds and (holds or "step 8: loss" in str(found.first))


def test_losses_on_another_number_of_nodes_need_not_be_equal() -> None:
    run = run_of()
    run[-1]["loss"] *= 1.0001
    assert compare(REFERENCE, run, dp=1).holds  # dp=1: nodes of the second attempt
    assert not compare(REFERENCE, run).holds
    assert compare(REFERENCE, run, exact=False).holds
