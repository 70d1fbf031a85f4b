"""SIGKILL at every file operation: afterwards the old checkpoint or the new one is chosen, whole, never a mixture."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import rank_file
from megaresume.checkpoint.records.pointers import read_pointers
from megaresume.checkpoint.records.rank_files import write_rank_file
from megaresume.checkpoint.records.sealed import unseal
from megaresume.checkpoint.save.commit import Commit, begin_save, commit_save
from megaresume.checkpoint.save.forcing import not_durable
from megaresume.checkpoint.save.retention import put_back
from megaresume.checkpoint.starts import record_start
from megaresume.stream.state import StreamState
from tests.checkpoint.durability import make_durable
from tests.release import release

pytestmark = pytest.mark.process

MODEL = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"

Save = Callable[..., Commit]
MakeState = Callable[..., StreamState]


def kill_everywhere(scenario: str, base: Path, work: Path) -> list[Path]:
    work.mkdir()
    command = [sys.executable, "-m", "tests.checkpoint.killer", scenario, base, work]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=300)
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
    for manifest in not_durable(root):
        make_durable(root, manifest)
    again = chosen(root)
    assert (again.tag, again.digest) == (choice.tag, choice.digest)
    save(root, iteration)
    for thread in threading.enumerate():
        if thread.name == "megaresume-delete":
            thread.join()
    last = chosen(root)
    assert (last.iteration, last.notes) == (iteration, ())
    assert_whole(last)
    assert last.manifest is not None and last.manifest.durable
    assert not list(root.rglob("*.tmp")) and not list(root.rglob("*.synced"))
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


def save_by_two_ranks(root: Path, state: StreamState) -> None:
    """Step 30, with one more optimizer file than others have here, and a file of each rank."""
    pending = begin_save(root, tag="global_step30", iteration=30, state=state)
    names = [MODEL, OPTIM, OPTIM.replace("rank_0", "rank_1", 1)]
    for name in names:
        (pending.tag_dir / name).write_bytes(state.digest.encode() * 64)
    paths = [rank_file(30, pending.record.tag, "random", rank) for rank in range(2)]
    beside = [write_rank_file(root, path, b"random") for path in paths]
    make_durable(root, commit_save(pending, expected_files=names, beside=beside).manifest)


def assert_all_of(choice: Choice, digest: str, names: set[str]) -> None:
    assert choice.digest == digest
    assert_whole(choice)
    assert {path.name for path in choice.tag_dir.iterdir()} == names
    assert choice.manifest is not None
    assert {entry.path for entry in choice.manifest.files} == names
    assert choice.manifest.verify(choice.tag_dir) == []


@release(
    "a save killed at every operation, and every start after it",
    "`::test_a_new_checkpoint`, "
    "`tests/reliability/test_cuts.py::test_what_is_announced_outlasts_power_cuts`: the same step again",
)
def test_the_same_step_again(root: Path, tmp_path: Path, save: Save, state: MakeState) -> None:
    """A start finds the new save of step 30 or the old one, each with its own files alone: nothing is lost between."""
    save_by_two_ranks(root, state(240))
    old, new = state(240).digest, state(240, salt=1).digest
    files = {old: {MODEL, OPTIM, OPTIM.replace("rank_0", "rank_1", 1)}, new: {MODEL, OPTIM}}
    seen = []
    attempts = kill_everywhere("same_step_other_data", root, tmp_path / "work")
    base = None
    for attempt in attempts:
        before = choose(attempt)  # reads only: it may not be able to take either
        assert before is not None and before.digest in (old, new, state(160).digest)
        if base is None and (attempt / ".step_0000030@global_step30.older" / "global_step30").exists():
            base = shutil.copytree(attempt, tmp_path / "base")
        put_back(attempt)
        assert_every_file_whole(attempt)
        choice = chosen(attempt)
        assert choice.digest is not None
        assert_all_of(choice, choice.digest, files[choice.digest])
        seen.append(choice.digest)
        go_on(attempt, choice, save, 50)
        assert not list(attempt.glob(".*"))
    half = attempts.index(tmp_path / "work" / "1-half")
    for order in (seen[:half], seen[half:]):
        assert order == sorted(order, key=[old, new].index) and set(order) == {old, new}
    assert base is not None
    for attempt in kill_everywhere("start", base, tmp_path / "starts"):
        put_back(attempt)
        assert_all_of(chosen(attempt), old, files[old])


RELEASE = release(
    "`[latest]`, `[ledger]`: every operation after other kills",
    "the same, `[manifest]` and `[tracker]`",
)


@pytest.mark.parametrize(
    "killed_at", ["manifest", "tracker", *(pytest.param(at, marks=RELEASE) for at in ("latest", "ledger"))]
)
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
            "ledger": read_ledger(records / "ledger.jsonl").entries[-1].iteration == 40,
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
