"""A run on local storage, copied to shared storage: killed, its node lost, and resumed exactly."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.checkpoint.copies.session_copies import Staged
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.save.retention import KEEP_ALL
from megaresume.stream.errors import SetupError, UsageError
from tests.corpora import simple_corpus

PROGRAM = Path(__file__).with_name("staged.py")


def _run(where: Path, local: str, shared: str, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(PROGRAM),
        str(where / "data.yaml"),
        str(where / local),
        str(where / shared),
        str(steps),
    ]
    return subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=120)


def _samples(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    rows = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("SAMPLES")]
    return {row[0]: row[1] for row in rows}


@pytest.fixture
def where(tmp_path: Path) -> Path:
    simple_corpus(tmp_path / "web", [5 + k % 9 for k in range(200)])
    (tmp_path / "data.yaml").write_text(json.dumps({"sources": {"web": {"path": str(tmp_path / "web")}}}))
    return tmp_path


@pytest.mark.process
def test_killed_and_its_node_lost(where: Path) -> None:
    """The twin is never stopped. The run is killed behind a save, goes on locally, loses its node, and goes on from the
    copies: every step gets the twin's samples, and the old ones go in both places.
    """
    for name in ("shared", "twins"):
        (where / name).mkdir()
    twin = _samples(_run(where, "twin", "twins", 10))
    assert len(twin) == 10
    killed = _run(where, "local", "shared", 5, "KILL")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    second = _run(where, "local", "shared", 8)
    assert second.returncode == 0, second.stderr
    assert "resumed" in second.stdout and sorted(_samples(second)) == ["5", "6", "7", "8"]
    for root in (where / "local", where / "shared"):
        assert sorted(path.name for path in root.glob("global_step*")) == ["global_step6", "global_step8"]
        found = choose(root, checksums=True)
        assert found is not None and found.tag == "global_step8" and not found.notes
    shutil.rmtree(where / "local")
    third = _run(where, "local", "shared", 10)
    assert third.returncode == 0, third.stderr
    assert {**_samples(killed), **_samples(second), **_samples(third)} == twin
    ledger = read_ledger(where / "shared/megaresume/ledger.jsonl").entries
    assert [(e.kind, e.iteration) for e in ledger if e.kind == "start"] == [("start", 0), ("start", 4), ("start", 8)]
    assert [e.iteration for e in ledger if e.kind == "checkpoint"] == [2, 4, 6, 8, 10] and len(
        {e.run for e in ledger}
    ) == 1
    shown = subprocess.run(
        [sys.executable, "-m", "megaresume", "inspect", str(where / "local")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"copies in {where / 'shared'}" in shown and "1 complete, the newest global_step10" in shown


def test_a_place_that_cannot_be_copied_to(tmp_path: Path) -> None:
    """A storage that is not mounted is no fresh start; and a directory is not copied into itself."""
    with pytest.raises(SetupError, match="does not exist") as caught:
        Staged(str(tmp_path / "local"), tmp_path / "missing", KEEP_ALL)
    assert f"mkdir -p {tmp_path / 'missing'}" in str(caught.value)
    with pytest.raises(UsageError, match="to where they are"):
        Staged(str(tmp_path / "local"), tmp_path, KEEP_ALL)
