"""`megaresume convert` on the checkpoints of real ZeRO runs: kills, two at once, no room, directories of others."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.manifest import read_manifest
from megaresume.hosts.deepspeed import conversion as conversions
from megaresume.hosts.deepspeed.load_rules import read_universal, remove_converted, write_seal
from megaresume.program import main
from megaresume.runs.directory import Run

TAG = "global_step4"


@pytest.fixture
def root(kept: Path, tmp_path: Path) -> Path:
    """A checkpoint of two ranks with ZeRO 1."""
    return Path(shutil.copytree(kept / "zero1", tmp_path / "save"))


def start(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megaresume", "convert", str(root), "--tag", TAG]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def hidden(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name.startswith(".")]


def is_whole(root: Path) -> bool:
    choice = choose(root)
    assert choice is not None and choice.record is not None
    return read_universal(root / TAG, choice.record.save_id) is not None


def command_lines() -> Iterator[bytes]:
    """Of all processes of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            yield path.read_bytes()


def test_a_kill_leaves_nothing_that_counts_and_the_next_one_converts(root: Path) -> None:
    process = start(root)
    deadline = time.monotonic() + 120
    while not any(path.name == "tmp" for where in hidden(root) for path in where.rglob("tmp")):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = hidden(root)
    assert not is_whole(root) and choose(root).tag == TAG
    assert [entry.candidate.tag for entry in Run(root).newest()] == [TAG]
    # Its worker ends as well: nobody writes there any more.
    while any(str(left).encode() in line for line in command_lines()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # Two at once, one of which finds it done.
    both = [start(root), start(root)]
    outputs = [finished(process) for process in both]
    assert sum(f"converting {TAG} into" in text for text in outputs) == 1
    assert is_whole(root) and hidden(root) == []
    assert all("start the run as usual" in text for text in outputs)


def test_no_room(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    needed = conversions.room_needed(root / TAG)
    assert needed > 2 * sum(path.stat().st_size for path in (root / TAG).glob("*optim_states.pt"))
    full = shutil._ntuple_diskusage(10**9, 10**9 - needed + 1, needed - 1)  # type: ignore[attr-defined]
    monkeypatch.setattr(conversions.shutil, "disk_usage", lambda path: full)
    assert main(["convert", str(root)]) == 1
    assert "there is no room to convert global_step4" in capsys.readouterr().err
    assert hidden(root) == [] and not is_whole(root)


def test_what_deepspeed_cannot_convert_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[:4] = b"none"  # no zip file any more, and the same size
    path.write_bytes(data)
    assert main(["convert", str(root)]) == 1
    assert "checksum is" in capsys.readouterr().err
    record = next((root / "megaresume").glob("*.manifest.json"))
    manifest = read_manifest(record)
    files = tuple(dataclasses.replace(entry, checksum=None) for entry in manifest.files)
    record.write_bytes(dataclasses.replace(manifest, files=files).to_bytes())  # saved without checksums
    assert main(["convert", str(root)]) == 1
    error = capsys.readouterr().err
    assert (
        "DeepSpeed could not convert global_step4" in error
        and "exit status 1" in error
        and "Error" in error
        and "--checksums" in error
    )
    assert hidden(root) == [] and not is_whole(root)


def test_other_directories_are_never_replaced(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = root / f"{TAG}_universal"
    target.mkdir()
    (target / "mine").write_text("mine")
    assert main(["convert", str(root)]) == 1
    assert "in the way" in capsys.readouterr().err
    write_seal(target, save_id="of another save", made_by="job")
    assert main(["convert", str(root)]) == 1
    assert "saved again" in capsys.readouterr().err
    assert (target / "mine").read_text() == "mine"


def test_a_damaged_conversion_is_not_taken(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choice = choose(root)
    assert choice is not None and choice.record is not None
    target = root / f"{TAG}_universal"
    target.mkdir()
    (target / "zero").write_text("state")
    write_seal(target, save_id=choice.record.save_id, made_by="command")
    assert main(["convert", str(root)]) == 0
    (target / "zero").write_text("stat")
    assert main(["convert", str(root)]) == 1
    assert "zero: has 4 bytes, had 5 when it was saved" in capsys.readouterr().err
    (target / "zero").write_text("stale")
    assert main(["convert", str(root)]) == 1
    assert "zero: checksum is" in capsys.readouterr().err


def test_only_what_jobs_made_is_removed(root: Path) -> None:
    for name, maker in (("a", "job"), ("b", "command")):
        directory = root / f"{name}_universal"
        directory.mkdir()
        (directory / "zero").write_text(name)
        write_seal(directory, save_id="1", made_by=maker)  # type: ignore[arg-type]
    (root / "c_universal").mkdir()
    remove_converted(root)
    deadline = time.monotonic() + 120
    while hidden(root):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(path.name for path in root.glob("*_universal")) == ["b_universal", "c_universal"]


def test_without_zero_there_is_nothing_to_convert(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "megaresume" / "step_0000004.json"
    from megaresume.checkpoint.records.sealed import seal, unseal

    fields = unseal(path.read_bytes())
    del fields["checksum"]
    fields["topology"]["zero_stage"] = 0
    path.write_bytes(seal(fields, depth=1))
    assert main(["convert", str(root)]) == 2
    assert "needs no conversion" in capsys.readouterr().err


def test_bad_usage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(root), "--workers", "-3"])
    assert "argument --workers: must be at least 1" in capsys.readouterr().err
    assert main(["convert", f"{root}-typed-wrongly"]) == 2
    assert "no such directory" in capsys.readouterr().err
