"""The wording of every refusal, compared once: elsewhere tests look at the type of an error and at its place."""

from __future__ import annotations

import difflib

from tests.errors.refusals import SNAPSHOT, refusals, snapshot


def test_refusals_say_what_they_said() -> None:
    """If this was meant: ``python -m tests.errors.refusals --write``, and read the difference."""
    before, now = SNAPSHOT.read_text(encoding="utf-8"), snapshot()
    assert now == before, "\n".join(difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=1))


#: place of a refusal without a next action -> why nothing is left to do for who reads it.
NO_ACTION = {
    "checkpoint/file_errors.py, read_on_all_ranks": "an older one is loaded; if there is none, that is the error",
    "checkpoint/store/store.py, Store._download": "its headline says why a checkpoint is passed over for another one",
    "data/shard_source.py, ShardSource._unmeasured": "says why a record is masked, as prepare --invalid mask asked for",
}


def test_all_say_what_to_do_next() -> None:
    """A refusal has a next action. If one more cannot have it, `NO_ACTION` says why."""
    without = {block.rpartition("    in: ")[2] for block in refusals() if "\n    action: " not in block}
    assert without == NO_ACTION.keys()
