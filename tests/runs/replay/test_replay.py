"""``megaresume replay``: steps of real runs again, bit for bit, by their own programs; and nothing of a run changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaresume.checkpoint.metrics.record import meter_dir
from megaresume.checkpoint.metrics.segments import read_sums
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.runs.layout import laid_out
from megaresume.stream.errors import UsageError
from tests.checkpoint.metrics.runs import config_of, write_sources
from tests.cli.conftest import megaresume
from tests.release import release

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("programs.py")
STEPS = 24
#: what a run that is alive writes all the time.
LIVE = ("meter", "alive")


def command(trainer: str, directory: Path, *more: object) -> list[str]:
    return [sys.executable, str(PROGRAM), trainer, str(directory / "run"), str(STEPS), *map(str, more)]


def started(trainer: str, directory: Path, *more: object) -> subprocess.Popen[str]:
    """A run, over packed text or items."""
    directory.mkdir(exist_ok=True)
    write_sources(directory)
    (directory / "data.yaml").write_text(yaml.safe_dump(config_of(directory)))
    words = command(trainer, directory, *more)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def trained(trainer: str, directory: Path, *more: object) -> Path:
    """The checkpoints of a run that has come to its end."""
    run = started(trainer, directory, *more)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said[-6000:]
    return directory / "run"


def replay(run: Path, *flags: object, launch: list[str], status: int = 0) -> dict[str, Any]:
    """What ``megaresume replay --json`` says."""
    done = megaresume("replay", run, *flags, "--json", "--", *launch)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def everything(root: Path, *, without: Sequence[str] = ()) -> dict[str, tuple[Any, ...]]:
    """Every path in a directory: what it holds, and when and which file it is."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in [root, *root.rglob("*")]:
        if any(name in path.parts for name in without):
            continue
        about = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = content, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_mode
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a loop."""
    return trained("loop", tmp_path_factory.mktemp("loop"))


def launch(run: Path) -> list[str]:
    return command("loop", run.parent)


def check(run: Path, answer: dict[str, Any]) -> None:
    """Twenty steps are the same, bit for bit."""
    assert answer["tag"] and answer["holds"] and answer["first_difference"] is None
    assert [step["step"] for step in answer["steps"]] == [*range(4, STEPS)]
    for step in answer["steps"]:
        assert step["same_samples"] is True and step["bitwise"] is True
        assert step["loss"] == step["recorded_loss"] > 0
    recorded = {e.iteration: e.digest for e in read_ledger(ledger_path(run)).entries if e.kind == "checkpoint"}
    for step in answer["steps"]:
        assert step["digest"] == recorded.get(step["step"], step["digest"])
    assert len({step["loss"] for step in answer["steps"]}) == STEPS - 4


def test_a_loop(run: Path) -> None:
    before = everything(run)
    check(run, replay(run, "--steps", f"4:{STEPS}", launch=launch(run)))
    assert everything(run) == before


FURTHER = release(
    "`[lightning]`, `[accelerate]`, `[deepspeed]`: further trainers, each a run and its replay",
    "the same, `[trainer]`, and `::test_a_loop`",
)


@pytest.mark.parametrize(
    "trainer", ["trainer", *(pytest.param(one, marks=FURTHER) for one in ("lightning", "accelerate", "deepspeed"))]
)
def test_a_trainer(trainer: str, tmp_path: Path) -> None:
    run = trained(trainer, tmp_path)
    before = everything(run)
    if trainer == "trainer":
        items = ["--step", "4", "--skip-documents", "data:3", "--", *command(trainer, tmp_path)]
        assert "--skip-documents is for packed text" in megaresume("replay", run, *items).stderr
    answer = replay(run, "--steps", f"4:{STEPS}", launch=command(trainer, tmp_path))
    check(run, answer)
    assert (answer["compared"]["norms"] == STEPS - 4) == (trainer != "lightning")
    assert everything(run) == before


def test_a_run_that_trains_meanwhile(run: Path, tmp_path: Path) -> None:
    """Its lock is not asked for, and it goes on as if nothing had been."""
    (tmp_path / "wait").write_text("13")
    alive = started("loop", tmp_path)
    try:
        while not (tmp_path / "waits").exists():
            assert alive.poll() is None
            time.sleep(0.05)
        mine = tmp_path / "run"
        while 12 not in [e.iteration for e in read_ledger(ledger_path(mine)).entries if e.kind == "durable"]:
            time.sleep(0.05)  # its own thread makes that checkpoint durable
        before = everything(mine, without=LIVE)
        answer = replay(mine, "--steps", "7:11", launch=launch(mine))
        assert answer["tag"] == "global_step6" and answer["holds"]
        assert [step["bitwise"] for step in answer["steps"]] == [True] * 4
        assert everything(mine, without=LIVE) == before
        (tmp_path / "wait").unlink()
        said, _ = alive.communicate(timeout=600)
        assert alive.returncode == 0, said[-6000:]
    finally:
        alive.kill()
    ends = [[e.digest for e in read_ledger(ledger_path(one)).entries if e.kind == "finished"] for one in (run, mine)]
    assert ends[0] == ends[1] and len(ends[0]) == 1


def test_a_bad_device_is_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "8")
    answer = replay(run, "--steps", "7:11", launch=launch(run), status=1)
    assert answer["first_difference"] == 8
    assert [(step["same_samples"], step["bitwise"]) for step in answer["steps"]] == [(True, True)] + [(True, False)] * 3
    assert 0 < answer["steps"][1]["loss_difference"] < 1e-5
    again = megaresume("replay", run, "--steps", "7:11", "--out", answer["out"], "--tolerance", "1e-3")
    assert again.returncode == 0 and "within 0.001" in again.stdout, again.stdout + again.stderr
    assert "samples are compared by their numbers: not what they held" in again.stdout
    assert "4 steps: samples, losses within" in again.stdout and "data" not in again.stdout


@release("three processes that train", "`::test_a_bad_device_is_found`")
def test_a_kill_in_the_middle(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(run)
    monkeypatch.setenv("DIE", "9")
    answer = replay(run, "--steps", "7:14", launch=launch(run), status=1)
    assert answer["program_status"] == -9 and not answer["holds"]
    monkeypatch.delenv("DIE")
    again = replay(run, "--steps", "7:14", launch=launch(run))
    assert again["holds"] and again["out"] != answer["out"]
    assert everything(run) == before


@release("launched by torchrun with two ranks", "`::test_a_loop`, `::test_launchers`")
def test_other_ranks(run: Path) -> None:
    """The same data, and sums in another order."""
    one = ["-m", "torch.distributed.run", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    words = [sys.executable, *one, *launch(run)[1:]]
    answer = replay(run, "--steps", "7:9", "--on", "1x2", "--tolerance", "1e-2", launch=words)
    assert [step["same_samples"] for step in answer["steps"]] == [True, True]
    assert [step["bitwise"] for step in answer["steps"]] == [False, False]  # dropout draws other numbers
    out = Path(answer["out"])
    assert {path.name for path in (out / "megaresume/meter").glob("rank_*")} == {"rank_00000.jsonl", "rank_00001.jsonl"}


def test_without_the_loss_of_a_document(run: Path) -> None:
    rows = [json.loads(line) for line in megaresume("trace", run, "--steps", "8", "--json").stdout.splitlines()]
    name, document = rows[2]["segments"][0]["source"], rows[2]["segments"][0]["document"]
    flag = f"{name}:{document}"
    answer = replay(run, "--step", "8", "--skip-documents", flag, launch=launch(run))
    [step] = answer["steps"]
    assert step["same_samples"] is True and step["bitwise"] is False and answer["skipped"] == [flag]
    again = megaresume("replay", run, "--step", "8", "--out", answer["out"], "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["skipped"] == [flag]
    first = rows[0]["sample"]
    sums, recorded = (read_sums(meter_dir(one), first, first + 8) for one in (Path(answer["out"]), run))
    for row in rows:
        for k, segment in enumerate(row["segments"]):
            is_left_out = (segment["source"], segment["document"]) == (name, document)
            tokens, before = sums[row["sample"]][k, 1], recorded[row["sample"]][k, 1]
            assert tokens == (0 if is_left_out else before)


@release("a run of its own, and two replays", "`::test_a_run_that_trains_meanwhile`, which chooses a checkpoint too")
def test_from_the_start_and_what_retention_has_removed(tmp_path: Path) -> None:
    run = trained("loop", tmp_path, 2)
    before = everything(run)
    done = megaresume("replay", run, "--step", "4", "--", *command("loop", tmp_path, 2))
    assert done.returncode == 1 and "no complete checkpoint before step 4 is left" in done.stderr
    assert "--step 22 or later; or --from-start, which trains all 4 steps" in done.stderr
    answer = replay(run, "--steps", "1:5", "--from-start", launch=command("loop", tmp_path, 2))
    assert answer["tag"] is None and [step["bitwise"] for step in answer["steps"]] == [True] * 4
    first = replay(run, "--step", "2", launch=command("loop", tmp_path, 2))  # before the first checkpoint
    assert first["tag"] is None and first["holds"]
    assert everything(run) == before


def test_a_run_that_was_not_measured(run: Path, tmp_path: Path) -> None:
    """Its data is planned again from its records; of losses it has none."""
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/megaresume/meter")
    shutil.copy(run.with_name("data.yaml"), tmp_path)
    done = megaresume("replay", tmp_path / "run", "--steps", "7:10", "--", *launch(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run recorded neither losses nor gradient norms" in done.stdout
    assert done.stdout.endswith("3 steps: samples identical\n")


def test_what_is_refused(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def said(*words: object, status: int = 2) -> str:
        done = megaresume("replay", run, *words)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr

    before = everything(run), sorted(os.listdir(run.parent))
    assert "the run has not made step 25" in said("--step", "25", "--", *launch(run))
    assert "--out lies in the directory of the run" in said("--step", "5", "--out", run / "x", "--", *launch(run))
    assert "what should be replayed?" in said("--step", "5")
    assert "--on does not know this launcher" in said("--step", "5", "--on", "1x2", "--", *launch(run))
    assert "mpirun does not hand the environment on" in said("--step", "5", "--", "mpirun", "-n", "2", *launch(run))
    assert "the run has no such document" in said("--step", "5", "--skip-documents", "web:300", "--", *launch(run))
    assert "the run has no such document" in said("--step", "5", "--skip-documents", "wep:3", "--", *launch(run))
    rows = [json.loads(line) for line in megaresume("trace", run, "--steps", "4:6", "--json").stdout.splitlines()]
    trained = {(segment["source"], segment["document"]) for row in rows for segment in row["segments"]}
    there, absent = (
        next(iter(trained)),
        next(("web", number) for number in range(300) if ("web", number) not in trained),
    )
    flag = ",".join(f"{name}:{document}" for name, document in (there, absent))
    unseen = said("--step", "5", "--skip-documents", flag, "--", *launch(run))
    assert f"web:{absent[1]} is in none of steps 4 to 5: nothing would be left out" in unseen
    assert "the command cannot be started" in said("--step", "5", "--out", tmp_path / "a", "--", "/no/such/command")
    nothing = said("--step", "5", "--out", tmp_path / "b", "--", sys.executable, "-c", "pass", status=1)
    assert "the command did not replay anything" in nothing
    assert (everything(run), sorted(os.listdir(run.parent))) == before
    forgotten = ["import os, sys; sys.argv[1:] = sys.argv[2:]", "megaresume.hosts.loop.Loop.load = lambda *_: None"]
    forgotten[1:1] = ["import megaresume.hosts.loop", "import runpy", f"sys.path.insert(0, {os.getcwd()!r})"]
    program = "; ".join([*forgotten, f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"])
    out = tmp_path / "c"
    done = megaresume("replay", run, "--step", "5", "--out", out, "--", sys.executable, "-c", program, *launch(run)[1:])
    assert done.returncode == 1 and "the command did not replay anything" in done.stderr
    assert "the program of this replay did not load a checkpoint" in capfd.readouterr().err
    assert everything(run) == before[0]


def test_what_deepspeed_hands_to_other_nodes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    stub = tmp_path / "deepspeed"
    stub.write_text('#!/bin/sh\necho "$MEGARESUME_REPLAY"; cat "$DS_ENV_FILE"\n')
    stub.chmod(0o755)
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "megaresume", "replay", run, "--step", "5", "--out", out, "--", stub, "train.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.fspath(PROGRAM.parents[3])},
        check=False,
    )
    assert done.stdout.split() == [f"{out}/replay.json", "NCCL_DEBUG=INFO", f"MEGARESUME_REPLAY={out}/replay.json"]


def test_launchers() -> None:
    train = ["train.py", "--nnodes", "7"]
    for words, expected in (
        (["torchrun", "--nproc_per_node=8", *train], ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", *train]),
        (
            ["srun", "python", "-m", "torch.distributed.run", "--nnodes", "1", *train],
            ["srun", "python", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "4", *train],
        ),
        (
            ["deepspeed", "--num_gpus", "8", "--hostfile", "h", *train],
            ["deepspeed", "--num_nodes", "2", "--num_gpus", "4", "--hostfile", "h", *train],
        ),
        (
            ["accelerate", "launch", "--num_processes=2", *train],
            ["accelerate", "launch", "--num_machines", "2", "--num_processes", "8", *train],
        ),
    ):
        assert laid_out(words, "2x4") == expected
    for wrong in ("4", "0x2", "2x"):
        with pytest.raises(UsageError, match="bad --on"):
            laid_out(["torchrun"], wrong)
