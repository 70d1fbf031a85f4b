"""What a load accepts: weights, their state, and the state beside them, all of one step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megaresume.checkpoint.host import Restored, check_same
from megaresume.checkpoint.load.choose import choose
from megaresume.stream.errors import StateError


@pytest.mark.parametrize("more", [{"iteration": 1}, {"samples": 8}], ids=["another-step", "other-samples"])
def test_weights_of_another_step(root: Path, more: dict[str, int]) -> None:
    choice = choose(root)
    assert choice is not None and choice.record is not None
    record = choice.record
    right = Restored(envelope=record.envelope, iteration=record.iteration, samples=record.state.samples)
    check_same(record.envelope, right, record, choice)
    wrong = dataclasses.replace(right, **{name: getattr(right, name) + n for name, n in more.items()})
    with pytest.raises(StateError, match="the weights and the data state are from different steps"):
        check_same(record.envelope, wrong, record, choice)


def test_another_state_beside_them(root: Path) -> None:
    choice, older = choose(root), choose(root, tag="global_step20")
    assert choice is not None and choice.record is not None and older is not None
    record = choice.record
    read = Restored(envelope=record.envelope, iteration=record.iteration, samples=record.state.samples)
    with pytest.raises(StateError, match="is not the one beside it"):
        check_same(record.envelope, read, older.record, choice)
