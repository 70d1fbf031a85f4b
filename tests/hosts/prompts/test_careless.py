"""`megaresume.Prompts` in careless hands: odd numbers, late calls, a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.stream.errors import StateError
from tests.hosts.prompts.test_prompts import finish, made


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
    assert again.next == 0
    made().load_state_dict(state)
