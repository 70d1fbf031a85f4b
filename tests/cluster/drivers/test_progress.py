"""What counts as progress of an attempt: its own lines in the ledger, and what is kept of attempts between them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megaresume.checkpoint.records.ledger import ATTEMPT, LedgerEntry, append_ledger, with_attempt
from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.starts import NOTHING_TO_TRAIN
from megaresume.checkpoint.system import Topology
from megaresume.cluster.drivers.attempts import (
    Attempts,
    Ledgers,
    checkpoint_roots,
    read_attempts,
    without_pins,
    write_attempts,
)
from megaresume.cluster.drivers.decide import AttemptProgress
from megaresume.stream.errors import SetupError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ATTEMPT, "7.0")
    return tmp_path / "checkpoints"


def write(root: Path, kind: str, step: int, **details: object) -> None:
    entry = LedgerEntry(
        kind=kind,  # type: ignore[arg-type]
        iteration=step,
        tag=None,
        samples=8 * step,
        digest="0" * 16,
        run="a" * 16,
        time="2025-01-01T00:00:00.000Z",
        topology=Topology(),
        details=with_attempt(details),
    )
    append_ledger(ledger_path(root), entry)


def test_only_what_is_new_and_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "checkpoint", 10)
    write(root, "finished", 10)
    ledgers = Ledgers([root], "7.1")
    assert ledgers.progress() == AttemptProgress()
    write(root, "checkpoint", 20)  # of attempt 7.0, which this one took for dead
    assert ledgers.progress() == AttemptProgress()
    monkeypatch.setenv(ATTEMPT, "7.1")
    write(root, "start", 10)
    write(root, "checkpoint", 15)
    assert ledgers.progress() == AttemptProgress(saved=15)
    write(root, "finished", 20)
    assert ledgers.progress() == AttemptProgress(saved=15, finished=20)


def test_flags_that_pin_the_start_are_for_the_first_attempt() -> None:
    words = ["train.py", "--ckpt-step", "20", "--save", "run", "--ckpt_step=30", "--lr", "1"]
    left = (("train.py", "--save", "run", "--lr", "1"), ["--ckpt-step", "20", "--ckpt_step=30"])
    assert without_pins(words) == left
    assert without_pins(left[0]) == (left[0], [])


def test_without_a_name_new_lines_are_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = Ledgers([root], "7.1")
    monkeypatch.delenv(ATTEMPT)  # as behind ssh, which passes few variables on
    write(root, "checkpoint", 15)
    assert ledgers.progress() == AttemptProgress(saved=15)


def test_a_node_that_does_not_know_the_name_counts_all(root: Path) -> None:
    write(root, "finished", 5)
    ledgers = Ledgers([root], None)
    write(root, "checkpoint", 15)
    assert ledgers.progress() == AttemptProgress(saved=15)


def test_nothing_to_train_is_an_end_if_it_ended_well(root: Path) -> None:
    ledgers = Ledgers([root], "7.0")
    write(root, "start", 20, **{NOTHING_TO_TRAIN: True})
    assert ledgers.progress() == ledgers.progress(status=1) == AttemptProgress()
    assert ledgers.progress(status=0) == AttemptProgress(finished=20)


@pytest.mark.parametrize(
    ("words", "roots"),
    [
        ("train.py --save a --load b", ["/x/a"]),
        ("--save a --save=/y/b", ["/y/b"]),
        ("--save /y --megaresume_stage_to z", ["/y", "/x/z"]),
        ("train.py --save-interval 5 --save", []),
    ],
)
def test_where_a_command_saves_to(words: str, roots: list[str]) -> None:
    assert [str(root) for root in checkpoint_roots(words.split(), Path("/x"))] == roots


def test_attempts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "attempts.json"
    assert read_attempts(path) == Attempts()
    kept = Attempts(fruitless=2, excluded={"n2": "rank 3 failed first"}, replaced={"n1": "has no /data"})
    write_attempts(path, kept)
    assert read_attempts(path) == kept


def test_a_disk_that_takes_no_more_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attempts.json"

    def full(*words: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(SetupError, match="cannot be written, so an endless loop") as error:
        write_attempts(path, Attempts(fruitless=1))
    assert "quota" in str(error.value)


@pytest.mark.parametrize("text", ["", "{}", "3\n"])
def test_a_damaged_count_does_not_begin_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "attempts.json"
    path.write_text(text)
    with pytest.raises(SetupError, match="cannot be read, so an endless loop"):
        read_attempts(path)
