"""Errors say what was found, what was expected, why, and what to do, also when they come from another process."""

from __future__ import annotations

import pickle

import pytest

from megaresume.stream import errors
from megaresume.stream.errors import MegaresumeError, StateError


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith(("Error", "Exhausted"))])
def test_through_a_worker_process(name: str) -> None:
    error = getattr(errors, name)("it broke", found=3, expected="4", cause="rain", action="wait")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and isinstance(again, MegaresumeError)
    assert str(again) == str(error)
    assert str(error).splitlines() == [
        "it broke",
        "  found:        3",
        "  expected:     4",
        "  likely cause: rain",
        "  next action:  wait",
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert str(StateError("it broke", found=0)) == "it broke\n  found:        0"
