"""SIGKILL at every file operation: afterwards the old checkpoint or the new one is chosen, whole, never a mixture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint import Choice, Commit, choose, read_ledger, read_pointers, record_start
from megaresume.checkpoint.sealed import unseal
from megaresume.stream.state import StreamState

pytestmark = pytest.mark.process

MODEL = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"

Save = Callable[..., Commit]
MakeState = Callable[..., StreamState]


def kill_everywhere(scenario: str, base: Path, work: Path) -> list[Path]:
    script = Path(__file__).with_name("killer.py")
    work.mkdir()
    result = subprocess.run(
        [sys.executable, script, scenario, base, work], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return [work / name for name in result.stdout.split()]


def chosen(root: Path) -> Choice:
    choice = choose(root)
    assert choice is not None
    return choice


def assert_whole(choice: Choice) -> None:
    """The weights are those of the state: each model file repeats the digest of the state that it was saved with."""
    assert choice.digest is not None
    for name in (MODEL, OPTIM):
        assert (choice.tag_dir / name).read_bytes() == choice.digest.encode() * 64


def assert_every_file_whole(root: Path) -> None:
    """Other programs read the pointers too, and know nothing of walking back."""
    assert [p.status for p in read_pointers(root)] == ["ok", "ok"]
    for path in (root / "megaresume").glob("step_*.json"):
        unseal(path.read_bytes())


def go_on(root: Path, choice: Choice, save: Save, iteration: int) -> None:
    """The next run starts, saves, and everything is in order again."""
    assert choice.iteration is not None
    assert choice.state is not None
    record_start(root, iteration=choice.iteration, state=choice.state, choice=choice)
    again = chosen(root)
    assert (again.tag, again.digest) == (choice.tag, choice.digest)
    save(root, iteration)
    last = chosen(root)
    assert (last.iteration, last.notes) == (iteration, ())
    assert_whole(last)
    assert not list(root.rglob("*.tmp"))
    entries = read_ledger(root / "megaresume" / "ledger.jsonl").entries
    ids = [e.details["save_id"] for e in entries if e.kind == "checkpoint"]
    assert len(ids) == len(set(ids))


def test_a_new_checkpoint(root: Path, tmp_path: Path, save: Save, state: MakeState) -> None:
    allowed = {(30, state(240).digest), (40, state(320).digest)}
    seen = []
    attempts = kill_everywhere("next_step", root, tmp_path / "work")
    for attempt in attempts:
        assert_every_file_whole(attempt)
        choice = chosen(attempt)
        assert (choice.iteration, choice.digest) in allowed, attempt.name
        assert_whole(choice)
        seen.append(choice.iteration)
        go_on(attempt, choice, save, 50)
    assert len(attempts) > 60
    half = attempts.index(tmp_path / "work" / "1-half")
    for order in (seen[:half], seen[half:]):
        assert order == sorted(order)  # once complete, always complete
        assert {30, 40} == set(order)


def test_the_same_step_again(root: Path, tmp_path: Path, save: Save, state: MakeState) -> None:
    """The new data of step 30, or the untouched old one, or else step 20: never new weights with the old state."""
    allowed = {(30, state(240).digest), (20, state(160).digest), (30, state(240, salt=1).digest)}
    seen = set()
    for attempt in kill_everywhere("same_step_other_data", root, tmp_path / "work"):
        assert_every_file_whole(attempt)
        choice = chosen(attempt)
        assert (choice.iteration, choice.digest) in allowed, attempt.name
        assert_whole(choice)
        seen.add((choice.iteration, choice.digest))
        go_on(attempt, choice, save, 50)
    assert seen == allowed


@pytest.mark.parametrize("killed_at", ["manifest", "latest", "tracker", "ledger"])
def test_a_start_that_finishes_a_killed_commit(
    root: Path, tmp_path: Path, save: Save, state: MakeState, killed_at: str
) -> None:
    """The start after a killed commit is killed as well, everywhere."""
    base = tmp_path / "base"
    for attempt in kill_everywhere("next_step", root, tmp_path / "saves"):
        records = attempt / "megaresume"
        reached = {
            "manifest": (records / "step_0000040.manifest.json").exists(),
            "latest": (attempt / "latest").read_bytes() == b"global_step40",
            "tracker": (attempt / "latest_checkpointed_iteration.txt").read_bytes() == b"40",
            "ledger": len(read_ledger(records / "ledger.jsonl").entries) == 4,
        }
        if reached[killed_at] and (records / "step_0000040.saving.json").exists():
            attempt.rename(base)
            break
    assert base.exists()
    for attempt in kill_everywhere("start", base, tmp_path / "starts"):
        assert_every_file_whole(attempt)
        choice = chosen(attempt)
        assert (choice.iteration, choice.digest) == (40, state(320).digest), attempt.name
        go_on(attempt, choice, save, 50)
