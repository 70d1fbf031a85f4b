"""The lock of a checkpoint root: real processes that take it at once, are killed, stopped, and come back."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaresume.checkpoint.lock import lock
from megaresume.checkpoint.lock.claim import OUTSIDE, claim, gone, newest, place, read_alive, read_owner, this_process
from megaresume.checkpoint.lock.lock import holder_of, release, take, write_latest
from megaresume.checkpoint.records.pointers import read_pointers
from megaresume.checkpoint.records.sealed import seal
from megaresume.stream.errors import CheckpointError
from tests.checkpoint.conftest import save_checkpoint

pytestmark = pytest.mark.process

#: takes the lock, says so, and does what it is told line by line.
PROGRAM = """
import dataclasses, os, sys, time
from pathlib import Path
from megaresume.checkpoint.lock import claim
from megaresume.checkpoint.lock import lock
from megaresume.checkpoint.lock.lock import write_latest
from megaresume.stream.errors import CheckpointError
root = Path(sys.argv[1])
lock.RENEW_SECONDS, lock.PATIENCE_SECONDS = float(sys.argv[2]), float(sys.argv[3])
other_boot = os.environ.get("BOOT")
if other_boot:
    real = lock.this_process
    lock.this_process = lambda **options: dataclasses.replace(real(**options), boot=other_boot, host=other_boot)
if "AT" in os.environ:
    time.sleep(max(float(os.environ["AT"]) - time.time(), 0))
try:
    lock.take(root)
except CheckpointError as error:
    print("REFUSED", str(error).replace(chr(10), " | "), flush=True)
    sys.exit(1)
print("TAKEN", flush=True)
for line in sys.stdin:
    try:
        exec(line)
        print("DONE\\n", end="", flush=True)
    except CheckpointError as error:
        print("FAILED " + str(error).replace(chr(10), " | ") + "\\n", end="", flush=True)
"""


class Job:
    """A process of the program."""

    def __init__(self, root: Path, *, renew: float = 0.1, patience: float = 20.0, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root), str(renew), str(patience)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | env,
            cwd=Path(__file__).parents[2],
        )
        self.lines: list[str] = []

    def says(self, *words: str) -> str:
        """Read on to a line that begins with one of these."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(words):
                return line.rstrip()
        pytest.fail(f"it ended, and said {self.lines}")

    def does(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.says("DONE", "FAILED")

    def end(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(200)


@contextmanager
def job(root: Path, **options: object) -> Iterator[Job]:
    started = Job(root, **options)  # type: ignore[arg-type]
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGCONT)
            started.process.kill()
        started.process.wait(200)


@pytest.fixture(autouse=True)
def _nothing_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    yield
    release(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("pid", "12"), ("started", 1.5), ("job", 7), ("uid", None), ("run", [])])
def test_an_owner_with_fields_of_the_wrong_kind(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "owner.json"
    fields = {"format": "megaresume.owner", "version": 1, **dataclasses.asdict(this_process(token="0" * 16))}
    path.write_bytes(seal(fields | {name: value}))
    with pytest.raises(CheckpointError, match="of the wrong kind") as caught:
        read_owner(path)
    assert f"{name} {value!r}" in str(caught.value)


def test_a_live_owner_refuses_the_next_one_by_name(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        first.says("TAKEN")
        with job(tmp_path) as second:
            refusal = second.says("REFUSED")
            assert second.end() == 1
        me = this_process(token="")
        assert f"{tmp_path} is held by {me.user}'s process {first.process.pid} on {me.host} (-c), since 20" in refusal
        assert "it is alive" in refusal and f"kill {first.process.pid} on {me.host} and start again" in refusal
        assert first.does("lock.check_owned(root)") == "DONE"
        shown = holder_of(tmp_path)
        assert shown is not None and shown.status == "held"


def test_a_killed_owner_is_passed_at_once(tmp_path: Path) -> None:
    """Also as a zombie, whose parent has not asked for it yet."""
    with job(tmp_path) as first:
        first.says("TAKEN")
        first.process.kill()
        os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)
        with job(tmp_path, patience=3600.0) as second:
            second.says("TAKEN")
            assert f"process {first.process.pid} on " in second.lines[0]
            assert second.lines[0].endswith("that process is gone; taken over")
            assert [path.name for path in (tmp_path / "megaresume").iterdir()] == ["owner_0000002"]


def test_a_process_that_has_the_number_of_the_owner_is_not_the_owner() -> None:
    """The kernel gives numbers again: the time at which a process began tells two apart."""
    owner = this_process(token="1" * 16)
    assert owner.started is not None
    asks = dataclasses.replace(owner, token="2" * 16, pid=1, started=1)
    assert gone(owner, asks, ask_slurm=False) is None
    before = dataclasses.replace(owner, started=owner.started - 1)
    assert gone(before, asks, ask_slurm=False) == "that process is gone"


def test_an_owner_that_ended_is_no_matter(tmp_path: Path) -> None:
    """Nor does the thread that renews hold the interpreter at its end."""
    with job(tmp_path, renew=3600.0) as first:
        first.says("TAKEN")
        assert first.end() == 0
    shown = holder_of(tmp_path)
    assert shown is not None and shown.status == "released"
    with job(tmp_path, BOOT="another") as second:
        second.says("TAKEN")
        assert second.lines == ["TAKEN"]


@pytest.mark.parametrize("after", ["nobody", "a killed one", "one without a sign of life"])
def test_of_many_that_start_at_once_exactly_one_wins(tmp_path: Path, after: str) -> None:
    if after != "nobody":
        with job(tmp_path, BOOT="elsewhere" if after.startswith("one") else "") as first:
            first.says("TAKEN")
            first.process.kill()
    at = str(time.time() + 1.5)
    jobs = [Job(tmp_path, AT=at, patience=3.0 if after.startswith("one") else 20.0) for _ in range(6)]
    try:
        said = [each.says("TAKEN", "REFUSED") for each in jobs]
        assert sorted(line.split()[0] for line in said) == ["REFUSED"] * 5 + ["TAKEN"]
        winner = next(each for each, line in zip(jobs, said, strict=True) if line == "TAKEN")
        assert all(f"process {winner.process.pid} on" in line for line in said if line != "TAKEN")
        assert winner.does("lock.check_owned(root)") == "DONE"
    finally:
        for each in jobs:
            each.process.kill()
            each.process.wait(200)


def test_a_takeover_between_two_looks_is_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal that follows names the new owner, not the one whose directory was just removed."""
    with job(tmp_path, BOOT="elsewhere") as first:
        first.says("TAKEN")
        first.process.kill()
    me, looks = this_process(token="1" * 16), []

    def look(directory: Path) -> str | None:
        looks.append(directory)
        if len(looks) == 3:
            assert claim(tmp_path, 2, dataclasses.replace(me, token="2" * 16, pid=1, started=1))
        return read_alive(directory)

    monkeypatch.setattr(lock, "read_alive", look)
    assert not lock._is_over(tmp_path, 1, me) and len(looks) == 3


def test_a_node_that_was_thought_dead_commits_nothing(tmp_path: Path) -> None:
    """Stopped in the worst place: between the draft of the pointer and the rename that would make it count."""
    with job(tmp_path, BOOT="node1") as first:
        first.says("TAKEN")
        assert first.does("write_latest(root, 'global_step10')") == "DONE"
        first.does("import signal; rename = os.replace")
        first.does("os.replace = lambda *names: (os.kill(os.getpid(), signal.SIGSTOP), rename(*names))")
        assert first.process.stdin is not None
        first.process.stdin.write("write_latest(root, 'global_step20')\n")
        first.process.stdin.flush()
        os.waitid(os.P_PID, first.process.pid, os.WSTOPPED | os.WNOWAIT)
        with job(tmp_path, BOOT="node2", patience=1.0) as second:
            second.says("TAKEN")
            assert "node1" in second.lines[-2] and "no sign of life for 1 s; taken over" in second.lines[-2]
            assert second.does("write_latest(root, 'global_step15')") == "DONE"
            first.process.send_signal(signal.SIGCONT)
            failed = first.says("DONE", "FAILED")
            assert failed.startswith("FAILED this job has lost its directory of checkpoints")
            assert f"process {second.process.pid} on node2" in failed
            assert (tmp_path / "latest").read_text() == "global_step15"
            first.does("os.replace = rename")
            assert "FAILED" in first.does("lock.check_owned(root)") and "FAILED" in first.does("lock.take(root)")
            warned = [line for line in first.lines if "WARNING" in line] or [first.says("megaresume: WARNING")]
            assert f"{tmp_path} was taken over by" in warned[0]
            assert second.does("lock.check_owned(root)") == "DONE"


def test_a_save_that_began_before_the_root_was_lost_is_not_committed(tmp_path: Path) -> None:
    """Neither state nor manifest of it appear, and the next owner's checkpoint of that step stays as it is."""
    commands = (
        "from megaresume.checkpoint.save.commit import begin_save, commit_save",
        "from tests.checkpoint.conftest import make_state",
        "(root / 'global_step10').mkdir(exist_ok=True)",
        "(root / 'global_step10' / 'model.pt').write_bytes(b'1234')",
        "pending = begin_save(root, tag='global_step10', iteration=10, state=make_state(80))",
    )
    with job(tmp_path, BOOT="node1", SLURM_JOB_ID="7") as first:
        first.says("TAKEN")
        assert [first.does(command) for command in commands] == ["DONE"] * len(commands)
        with job(tmp_path, BOOT="node2", SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1") as second:
            second.says("TAKEN")
            assert second.lines[0].endswith("this is restart 1 of that job; taken over")
            lost = first.does("commit_save(pending)")
            assert lost.startswith("FAILED this job has lost") and "Slurm job 7, restart 1, process" in lost
            assert not [path for path in (tmp_path / "megaresume").glob("step*") if "saving" not in path.name]
            assert read_pointers(tmp_path)[0].status == "absent"
            assert (tmp_path / "megaresume/step_0000010.saving.json").exists()
            assert [second.does(command) for command in commands[:2] + commands[4:]] == ["DONE"] * 3
            assert second.does("commit_save(pending)") == "DONE"
        assert read_pointers(tmp_path)[0].tag == "global_step10"


@pytest.mark.parametrize(
    ("squeue", "line"),
    [
        ("echo COMPLETED", "squeue calls that job COMPLETED"),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", "Slurm does not know that job any more"),
        ("echo RUNNING", "no sign of life for 0.5 s"),
        ("echo PENDING; echo COMPLETING", "no sign of life for 0.5 s"),
        ("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1", "no sign of life for 0.5 s"),
    ],
)
def test_slurm_is_asked_about_another_job(tmp_path: Path, squeue: str, line: str) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tools / "squeue").chmod(0o755)
    with job(tmp_path / "save", BOOT="node1", SLURM_JOB_ID="7") as first:
        first.says("TAKEN")
        first.process.kill()
    with job(tmp_path / "save", patience=0.5, PATH=f"{tools}:{os.environ['PATH']}", SLURM_JOB_ID="8") as second:
        second.says("TAKEN")
        assert "Slurm job 7, process" in second.lines[-2] and line in second.lines[-2]


def test_a_process_that_is_there_is_not_over_because_slurm_says_so(tmp_path: Path) -> None:
    """A shell that has outlived its salloc: what it starts has the number of a job that is over."""
    (tmp_path / "squeue").write_text("#!/bin/sh\necho COMPLETED\n")
    (tmp_path / "squeue").chmod(0o755)
    tools = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with job(tmp_path / "save", SLURM_JOB_ID="7", **tools) as first:
        first.says("TAKEN")
        with job(tmp_path / "save", SLURM_JOB_ID="8", **tools) as second:
            assert "REFUSED" in (said := second.says("REFUSED", "TAKEN")) and "Slurm job 7, process" in said
    torchrun = {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "megaresume"}
    with job(tmp_path / "other", **torchrun, TORCHELASTIC_RESTART_COUNT="0") as first:
        first.says("TAKEN")
        with job(tmp_path / "other", **torchrun, TORCHELASTIC_RESTART_COUNT="1") as second:
            assert "it is alive" in second.says("REFUSED", "TAKEN")


def test_tasks_of_a_job_array_with_one_directory(tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "70"}
    with job(tmp_path, SLURM_JOB_ID="71", SLURM_ARRAY_TASK_ID="1", **array) as first:
        first.says("TAKEN")
        with job(tmp_path, SLURM_JOB_ID="72", SLURM_ARRAY_TASK_ID="2", **array) as second:
            refusal = second.says("REFUSED")
    assert "Slurm job 71, task 70_1 of a job array, process" in refusal
    assert "scancel 71" in refusal and "save to another directory: DIR/$SLURM_ARRAY_TASK_ID" in refusal


def test_torchruns_restart_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another node, where the process cannot be looked for; the launch of a copied script is another one."""

    def owner(**variables: str) -> object:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr("megaresume.checkpoint.lock.claim._namespace", lambda: None)
            return this_process(token="")

    before = owner(SLURM_JOB_ID="7", TORCHELASTIC_RUN_ID="7.0", TORCHELASTIC_RESTART_COUNT="0")
    after = owner(SLURM_JOB_ID="7", TORCHELASTIC_RUN_ID="7.0", TORCHELASTIC_RESTART_COUNT="1")
    assert gone(before, after) == "this is torchrun's restart 1 of it"  # type: ignore[arg-type]
    assert gone(after, before) is None  # type: ignore[arg-type]
    for job_id, run_id in (("8", "7.0"), ("7", "none"), ("7", "7.1")):
        other = owner(SLURM_JOB_ID=job_id, TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_RESTART_COUNT="1")
        assert gone(before, other, ask_slurm=False) is None  # type: ignore[arg-type]


def test_a_process_of_a_machine_that_was_cloned() -> None:
    """It may live there: the clone has the boot of this machine, and this machine does not have its processes."""
    me = dataclasses.replace(this_process(token=""), job=None)
    owner = dataclasses.replace(me, started=(me.started or 0) + 1)
    assert gone(owner, me) == "that process is gone"
    assert gone(dataclasses.replace(owner, host="clone"), me) is None


def test_a_forked_child_neither_holds_nor_releases(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        first.says("TAKEN")
        fork = "pid = os.fork(); pid or (print('HELD', len(lock._held), flush=True), sys.exit()); os.waitpid(pid, 0)"
        assert first.does(fork) == "DONE"
        assert "HELD 0" in first.lines
        count = read_alive(place(tmp_path, 1))
        deadline = time.monotonic() + 200
        while read_alive(place(tmp_path, 1)) == count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert read_alive(place(tmp_path, 1)) not in (count, "released")


def test_a_lock_that_a_user_deleted_is_made_anew(tmp_path: Path) -> None:
    take(tmp_path)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    take(tmp_path)
    write_latest(tmp_path, "global_step10")
    assert newest(tmp_path) == 1
    release(tmp_path)
    with job(tmp_path) as other:
        other.says("TAKEN")


def test_a_name_that_cannot_be_read_is_watched(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        first.says("TAKEN")
        (place(tmp_path, 1) / "owner.json").write_text("{")
        with job(tmp_path) as second:
            assert "held by a process whose name cannot be read; it is alive" in second.says("REFUSED")
        first.process.kill()
    with job(tmp_path, patience=0.5) as third:
        third.says("TAKEN")
        assert "no sign of life" in third.lines[-2]


def test_a_number_that_was_free_again_counts_for_nothing(tmp_path: Path) -> None:
    """Who had looked at the numbers before others came and went."""
    (tmp_path / "megaresume").mkdir()
    assert claim(tmp_path, 7, this_process(token="7" * 16))
    assert not claim(tmp_path, 6, this_process(token="6" * 16))
    assert not claim(tmp_path, 7, this_process(token="8" * 16))
    assert [path.name for path in (tmp_path / "megaresume").iterdir()] == ["owner_0000007"]


def test_it_costs_no_time(tmp_path: Path) -> None:
    """Of the processor's: a loaded machine takes longer."""
    began = time.process_time()
    take(tmp_path)
    first = time.process_time() - began
    began = time.process_time()
    for _ in range(100):
        lock.check_owned(tmp_path)
    each = (time.process_time() - began) / 100
    assert first < 0.5 and each < 0.005, (first, each)
    with pytest.raises(CheckpointError, match="cannot write"):
        take("/proc/nothing")


def test_how_to_end_a_process_that_has_another_number_here() -> None:
    """``kill 1`` of a container would end another process outside."""
    me = dataclasses.replace(this_process(token=""), job=None)
    assert me.how_to_end == f"kill {me.pid} on {me.host}"
    assert dataclasses.replace(me, namespace="pid:[5]").how_to_end == f"kill {me.pid} in its container on {me.host}"
    assert dataclasses.replace(me, boot="another", namespace=OUTSIDE).how_to_end == f"kill {me.pid} on {me.host}"
    assert dataclasses.replace(me, job="17", namespace="pid:[5]").how_to_end == "scancel 17"


def test_inspect_and_doctor_say_who_it_is(tmp_path: Path) -> None:
    def says(*command: str) -> str:
        words = [sys.executable, "-m", "megaresume", *command, str(tmp_path)]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    save_checkpoint(tmp_path, 10)
    with job(tmp_path) as first:
        first.says("TAKEN")
        assert f"\nheld by {holder_of(tmp_path)}\n" in says("inspect")
        assert "'s process" in says("inspect") and f"kill {first.process.pid} on " in says("doctor")
        first.process.kill()
        first.process.wait()
        assert ": that process is gone; the next start takes it over\n" in says("inspect")
        assert '"holder": {"status": "gone"' in says("inspect", "--json")
        assert "left behind by" in says("doctor")
