"""An independent count of what a run of prompts has trained: from its weights and the lines of its ledger, as JSON.

Imports nothing of megaresume.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def numbers(text: str) -> list[int]:
    """``0:3 7`` as [0, 1, 2, 7]."""
    found: list[int] = []
    for word in text.split():
        first, colon, stop = word.partition(":")
        found += range(int(first), int(stop)) if colon else [int(first)]
    return found


def fates(ledger: Path, line: str | None) -> tuple[dict[int, tuple[str, Any]], int, int]:
    """Of every ordinal up to a line ("trained", step) or ("dropped", reason); the next ordinal; how many are in flight.

    An ordinal that is there twice is an AssertionError.
    """
    lines = {}
    for text in ledger.read_text().splitlines():
        try:
            one = json.loads(text)
        except ValueError:
            continue  # torn by a kill
        lines[one["id"]] = one
    assert line is not None
    last, found = lines[line], dict[int, tuple[str, Any]]()
    at: str | None = line
    while at is not None:
        one = lines[at]
        for what, value, text in [("trained", int(step), text) for step, text in one["trained"].items()] + [
            ("dropped", reason, text) for reason, text in one["dropped"].items()
        ]:
            for ordinal in numbers(text):
                assert ordinal not in found, (ordinal, found[ordinal], what, value)
                assert ordinal < last["next"]
                found[ordinal] = what, value
        at = one["parent"]
    return found, last["next"], last["open"]


def count(state: dict[str, Any], weights: list[list[Any]], said: dict[int, str], ledger: Path) -> dict[str, int]:
    """Lost, twice and mismatched, of a checkpoint.

    Args:
        state: of the prompts.
        weights: what they have seen: [step, ordinal, rollout, text].
        said: of every ordinal, what its prompt says.
        ledger: the file.
    """
    settled, stop, in_flight = fates(ledger, state["line"])
    seen = Counter((ordinal, rollout) for _, ordinal, rollout, _ in weights)
    last: dict[int, int] = {}
    for step, ordinal, _, _ in weights:
        last[ordinal] = max(step, last.get(ordinal, 0))
    trained = {ordinal: step for ordinal, (what, step) in settled.items() if what == "trained"}
    # In parts: trained already, and not settled.
    parts = {ordinal for ordinal in last if ordinal not in settled}
    assert set(trained) | parts == set(last)
    assert {ordinal: step for ordinal, step in last.items() if ordinal in trained} == trained
    assert state["next"] == stop
    return {
        "prompts": stop,
        "lost": stop - len(settled) - in_flight,
        "twice": sum(times - 1 for times in seen.values()),
        "mismatched": sum(said[ordinal] != text for _, ordinal, _, text in weights),
    }
