"""A conversion that is killed at whatever it does on the disk: nothing half-made counts, and the next one converts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import pytest

from megaresume.hosts.deepspeed import conversion
from megaresume.hosts.deepspeed.conversion import Reporter, convert
from megaresume.hosts.deepspeed.load_rules import read_universal

pytestmark = pytest.mark.process

#: events of Python before which the process is killed, in their turn.
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock", "shutil.rmtree"}
SAVE = "1" * 32


@pytest.fixture
def tag_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and in the place of DeepSpeed, which takes seconds, what copies it; by parts, as it would write."""
    tag_dir = tmp_path / "save" / "global_step4"
    tag_dir.mkdir(parents=True)
    for rank in range(2):
        (tag_dir / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(bytes([rank]) * 5000)

    def copy(tag_dir: Path, output: Path, log: Path, *rest: object) -> None:
        log.write_text("converting")
        (output / "tmp").mkdir()
        for path in sorted(tag_dir.iterdir()):
            (output / "tmp" / path.name).write_bytes(path.read_bytes()[:100])
            (output / path.name).write_bytes(path.read_bytes())
        shutil.rmtree(output / "tmp")

    monkeypatch.setattr(conversion, "_run_worker", copy)
    return tag_dir


def converted(tag_dir: Path, kill_at: int) -> bool:
    """Convert in a process that is killed before its so-manieth event; whether it came to its end."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
        return status == 0
    count = 0

    def watch(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        count += event in EVENTS
        if event in EVENTS and count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(watch)
        convert(tag_dir, save_id=SAVE, made_by="job", report=Reporter(say=lambda words: None))
        os._exit(0)
    except BaseException:  # noqa: BLE001  whatever it is, the parent must see that the child failed
        traceback.print_exc()
    finally:
        os._exit(1)


def test_killed_at_every_event(tag_dir: Path) -> None:
    root, kills, whole = tag_dir.parent, 0, 0
    while not converted(tag_dir, kills + 1):
        kills += 1
        # What a start would take is all of it, or nothing.
        made = read_universal(tag_dir, SAVE, checksums=True)
        whole += made is not None
        # One after a kill, without a kill.
        assert converted(tag_dir, 0)
        made = read_universal(tag_dir, SAVE, checksums=True)
        assert made is not None and made.size == 10000
        assert sorted(os.listdir(root)) == ["global_step4", "global_step4_universal", "megaresume"]
        shutil.rmtree(made.path)
    assert kills > 20 and 0 < whole < kills
