"""Real runs of the stand-in through the launcher: killed, resumed on other ranks, compared with an uninterrupted one.

Three call shapes of ``pretrain``, two checkpoint formats, saves of every kind. What is compared is the order of the
samples of every step, by the hash of their tokens.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.release import release

pytest.importorskip("megatron.core")

UNTIL_0_17, AT_0_18, FROM_0_19 = "pretrain_until_0_17.py", "pretrain_0_18.py", "pretrain_from_0_19.py"
ITERATIONS = 12


@pytest.fixture(scope="session")
def stream_flags(data_yaml: Path) -> list[object]:
    """Flags of a run on our stream."""
    return ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65]


@pytest.fixture(scope="session")
def guard_flags(data_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Flags of a run on Megatron's own datasets."""
    web, code = data_yaml.with_name("web"), data_yaml.with_name("code")
    cache = tmp_path_factory.mktemp("index-cache")
    data = ["--data-path", 0.6, web, 0.4, code, "--split", "90,5,5", "--data-cache-path", cache]
    return [*data, "--seed", 7, "--seq-length", 32, "--vocab-size", 65]


def sizes(*, iterations: int = ITERATIONS, micro: int = 2, batch: int = 8) -> list[object]:
    return ["--train-iters", iterations, "--micro-batch-size", micro, "--global-batch-size", batch]


def places(directory: Path, *, every: int = 3, form: str = "torch_dist") -> list[object]:
    return ["--save", directory, "--load", directory, "--save-interval", every, "--ckpt-format", form]


@pytest.fixture(scope="session")
def uninterrupted(mini: Any, stream_flags: list[object]) -> dict[int, list[str]]:
    """Steps of a whole run on our stream, on one rank."""
    run = mini(*stream_flags, *sizes(), num_processes=1)
    assert run.status == 0, run.output
    assert sorted(run.steps()) == list(range(1, ITERATIONS + 1))
    return run.steps()


@pytest.fixture(scope="session")
def guard_uninterrupted(mini: Any, guard_flags: list[object]) -> dict[int, list[str]]:
    """Steps of a whole run on Megatron's own datasets without any hook of ours."""
    run = mini(*guard_flags, *sizes(), num_processes=1, hooks=False)
    assert run.status == 0, run.output
    return run.steps()


def assert_steps(run: Any, expected: dict[int, list[str]], first: int, last: int) -> None:
    steps = run.steps()
    assert sorted(steps) == list(range(first, last + 1)), run.output[-3000:]
    for step, samples in steps.items():
        assert samples == expected[step], f"step {step} trained other samples"


def command(*words: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "megaresume", *map(str, words)], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_killed_and_resumed_twice(
    mini: Any, tmp_path: Path, stream_flags: list[object], uninterrupted: dict[int, list[str]]
) -> None:
    """torch, shape up to 0.17: DP 2 killed in step 8, DP 1 up to 9, DP 2 with other micro-batches to the end."""
    where = places(tmp_path / "save", form="torch")
    first = mini(*stream_flags, *sizes(), *where, env={"MINI_KILL": "step:8"})
    assert first.status == -9, first.output
    assert_steps(first, uninterrupted, 1, 7)

    second = mini(*stream_flags, *sizes(), *where, "--exit-interval", 9, num_processes=1)
    assert second.status == 0, second.output
    assert "megaresume: resumed at sample 48 | digest" in second.output
    assert "dp 2->1 workers 0->0 mbs 2->2 gbs 8->8 | repeated 0 skipped 0 | step 6 from iter_0000006" in second.output
    assert_steps(second, uninterrupted, 7, 9)

    third = mini(*stream_flags, *sizes(micro=1), *where, "--num-workers", 1)
    assert third.status == 0, third.output
    assert "resumed at sample 72" in third.output
    assert_steps(third, uninterrupted, 10, 12)

    status, text = command("verify", tmp_path / "save")
    assert status == 0, text
    status, text = command("inspect", tmp_path / "save", "--json")
    assert status == 0, text
    assert json.loads(text)["choice"]["tag"] == "iter_0000012"


def test_killed_between_tracker_and_records(
    mini: Any, tmp_path: Path, stream_flags: list[object], uninterrupted: dict[int, list[str]]
) -> None:
    """Asynchronous save, shape of 0.18. The records of 6 are lost; the next start has the state and writes them."""
    where = places(tmp_path / "save")
    env = {"MINI_KILL": "tracker:6", "MINI_KILL_RANK": "0"}
    first = mini(*stream_flags, *sizes(), *where, "--async-save", script=AT_0_18, env=env)
    assert first.status != 0
    records = tmp_path / "save" / "megaresume"
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert not (records / "step_0000006.json").exists()
    assert (records / "step_0000006.saving.json").exists()
    status, text = command("inspect", tmp_path / "save")
    assert status == 0 and "Megatron resumes from iter_0000006" in text, text

    second = mini(*stream_flags, *sizes(), *where, "--async-save", script=AT_0_18, num_processes=1)
    assert second.status == 0, second.output
    assert_steps(second, uninterrupted, 7, 12)
    assert not list(records.glob("*.saving.json"))
    for step in (3, 6, 9, 12):
        assert (records / f"step_{step:07d}.json").exists()
        assert (records / f"step_{step:07d}.manifest.json").exists()
    lines = [json.loads(line) for line in (records / "ledger.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["iteration"]) for line in lines if line["kind"] != "durable"] == [
        ("start", 0),
        ("checkpoint", 3),
        ("checkpoint", 6),
        ("start", 6),
        ("checkpoint", 9),
        ("checkpoint", 12),
        ("finished", 12),
    ]
    status, text = command("verify", tmp_path / "save")
    assert status == 0, text


@release(
    "three launches",
    "`::test_killed_between_tracker_and_records`, and kills in saves of Megatron in "
    "`tests/reliability/test_reliability.py::test_saves_of_megatron`",
)
def test_killed_inside_a_save(
    mini: Any, tmp_path: Path, stream_flags: list[object], uninterrupted: dict[int, list[str]]
) -> None:
    """Shape from 0.19: the files of 6 are there, the tracker names 3: Megatron goes on from 3, and so does the data."""
    where = places(tmp_path / "save")
    first = mini(*stream_flags, *sizes(), *where, script=FROM_0_19, env={"MINI_KILL": "files:6"})
    assert first.status == -9, first.output
    status, text = command("inspect", tmp_path / "save")
    assert status == 0 and "iter_0000006  incomplete" in text, text
    assert "resumes from iter_0000003" in text
    second = mini(*stream_flags, *sizes(iterations=8), *where, script=FROM_0_19, num_processes=1)
    assert second.status == 0, second.output
    assert_steps(second, uninterrupted, 4, 8)


def test_first_save_killed_is_a_fresh_start(
    mini: Any,
    tmp_path: Path,
    stream_flags: list[object],
    guard_flags: list[object],
    uninterrupted: dict[int, list[str]],
) -> None:
    for flags in (stream_flags, guard_flags):
        where = places(tmp_path / str(flags[0]), form="torch")
        first = mini(*flags, *sizes(iterations=4), *where, env={"MINI_KILL": "files:3"}, num_processes=1)
        assert first.status == -9, first.output
        second = mini(*flags, *sizes(iterations=4), *where, num_processes=1)
        assert second.status == 0, second.output
        assert sorted(second.steps()) == [1, 2, 3, 4]


def test_rerun_saves_before_the_counter_moves(
    mini: Any, tmp_path: Path, stream_flags: list[object], uninterrupted: dict[int, list[str]]
) -> None:
    """The batch of step 5 was pulled, and read ahead of by a worker; it was not trained, so that it comes again."""
    where = places(tmp_path / "save", every=100)
    first = mini(*stream_flags, *sizes(), *where, "--mini-rerun-at", 5, "--num-workers", 1, num_processes=1)
    assert first.status == 16, first.output
    second = mini(*stream_flags, *sizes(iterations=7), *where)
    assert second.status == 0, second.output
    assert "resumed at sample 32" in second.output
    assert_steps(second, uninterrupted, 5, 7)


def test_without_state_it_aborts(
    mini: Any, tmp_path: Path, stream_flags: list[object], guard_flags: list[object]
) -> None:
    """A checkpoint of stock Megatron: refused by the stream on every rank, adopted by the guard."""
    where = places(tmp_path / "save", form="torch")
    stock = mini(*guard_flags, *sizes(iterations=3), *where, num_processes=1, hooks=False)
    assert stock.status == 0, stock.output
    run = mini(*stream_flags, *sizes(), *where)
    assert run.status not in (0, -9)
    assert "training continues, but no data state was restored" in run.output
    assert not run.rows()


def test_guard_is_adopted_and_resumed(
    mini: Any, tmp_path: Path, guard_flags: list[object], guard_uninterrupted: dict[int, list[str]]
) -> None:
    where = places(tmp_path / "save", form="torch")
    stock = mini(*guard_flags, *sizes(iterations=12), *where, "--exit-interval", 3, hooks=False)
    assert stock.status == 0, stock.output
    second = mini(*guard_flags, *sizes(), *where, "--exit-interval", 6)
    assert second.status == 0, second.output
    assert "trained without megaresume" in second.output
    assert_steps(second, guard_uninterrupted, 4, 6)
    third = mini(*guard_flags, *sizes(), *where, num_processes=1)
    assert third.status == 0, third.output
    assert "resumed at sample 48" in third.output and "dp 2->1" in third.output
    assert_steps(third, guard_uninterrupted, 7, 12)
    assert list((tmp_path / "save" / "megaresume").glob("step_*.manifest.json"))
    assert not list((tmp_path / "save" / "megaresume").glob("*.saving*"))
    status, text = command("inspect", tmp_path / "save")
    assert status == 0 and "resumes from iter_0000012, at sample 96, under guard" in text, text


def test_modes_do_not_mix(mini: Any, tmp_path: Path, stream_flags: list[object], guard_flags: list[object]) -> None:
    where = places(tmp_path / "save", form="torch")
    first = mini(*stream_flags, *sizes(iterations=3), *where, num_processes=1)
    assert first.status == 0, first.output
    second = mini(*guard_flags, *sizes(), *where, num_processes=1)
    assert second.status not in (0, -9)
    assert "--megaresume-mode stream" in second.output
    # Begun anew, in another directory: nothing is saved over.
    refused = mini(*guard_flags, *sizes(iterations=3), *where, "--finetune", num_processes=1)
    assert refused.status == 1 and "would save over those that are there" in refused.output
    where = ["--save", tmp_path / "anew", "--save-interval", 3, "--ckpt-format", "torch", "--load"]
    anew = mini(*guard_flags, *sizes(iterations=3), *where, tmp_path / "save", "--finetune", num_processes=1)
    assert anew.status == 0, anew.output
    where.append(tmp_path / "anew")
    longer = mini(*guard_flags, *sizes(iterations=6), *where, num_processes=1)
    assert longer.status == 0 and "resumed at sample 24" in longer.output, longer.output
    assert "holds checkpoints" not in longer.output
    assert command("inspect", tmp_path / "save")[0] == 0


def test_non_persistent_and_back(
    mini: Any, tmp_path: Path, stream_flags: list[object], uninterrupted: dict[int, list[str]]
) -> None:
    """Non-persistent saves carry the state too, and leave no records; --ckpt-step and --finetune keep their meaning."""
    extra = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", 2]
    where = [*places(tmp_path / "save", every=6), *extra]
    first = mini(*stream_flags, *sizes(), *where, env={"MINI_KILL": "step:10"})
    assert first.status == -9
    records = tmp_path / "save" / "megaresume"
    assert sorted(path.name for path in records.glob("step_*")) == ["step_0000006.json", "step_0000006.manifest.json"]
    second = mini(*stream_flags, *sizes(iterations=9), *where, num_processes=1)
    assert second.status == 0, second.output
    assert "resumed at sample 64" in second.output
    assert_steps(second, uninterrupted, 9, 9)

    shutil.rmtree(tmp_path / "save" / "non_persistent")
    back = mini(*stream_flags, *sizes(iterations=7), *places(tmp_path / "save"), "--ckpt-step", 6, num_processes=1)
    assert back.status == 0, back.output
    assert_steps(back, uninterrupted, 7, 7)

    tuned = mini(
        *stream_flags,
        *sizes(iterations=2),
        *["--load", tmp_path / "save", "--save", tmp_path / "tuned", "--finetune"],
        num_processes=1,
    )
    assert tuned.status == 0, tuned.output
    assert "resumed" not in tuned.output
    assert_steps(tuned, uninterrupted, 1, 2)


def test_yaml_config(
    mini: Any, tmp_path: Path, stream_flags: list[object], uninterrupted: dict[int, list[str]]
) -> None:
    """Parser defaults and the command line are dropped; our flags are not, wherever they stand."""
    config = tmp_path / "run.yaml"
    log = tmp_path / "log"
    values = {
        "train_iters": 4,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "seed": 7,
        "seq_length": 32,
        "vocab_size": 65,
        "save": str(tmp_path / "save"),
        "load": str(tmp_path / "save"),
        "save_interval": 2,
        "mini_log": str(log),
    }
    config.write_text(json.dumps(values))
    run = mini("--yaml-cfg", config, *stream_flags[:2], num_processes=1, script=AT_0_18)
    assert run.status == 0, run.output
    rows = [json.loads(line) for line in (log / "rank_0.jsonl").read_text().splitlines()]
    assert [[sample for micro in row["micro"] for sample in micro] for row in rows] == [
        uninterrupted[step] for step in (1, 2, 3, 4)
    ]
    assert (tmp_path / "save" / "megaresume" / "step_0000004.json").exists()


def test_trackers(mini: Any, tmp_path: Path, guard_flags: list[object]) -> None:
    """Stock Megatron exits with 0, or begins at iteration 0."""
    where, tracker = places(tmp_path / "save", form="torch"), tmp_path / "save" / "latest_checkpointed_iteration.txt"
    assert mini(*guard_flags, *sizes(iterations=3), *where, num_processes=1).status == 0
    tracker.unlink()
    run = mini(*guard_flags, *sizes(), *where)
    assert run.status not in (0, -9) and not run.rows()
    assert "there are checkpoints, but no tracker" in run.output and "echo 3 >" in run.output, run.output
    tracker.write_text("")
    run = mini(*guard_flags, *sizes(iterations=3), *where)
    assert run.status == 0 and "step 3 from iter_0000003" in run.output, run.output
    assert f"{tracker.name} is empty" in run.output and tracker.read_text() == "3"
    # Without writing to the directory of another run.
    tracker.write_text("1O")
    elsewhere = ["--save", tmp_path / "other", "--load", tmp_path / "save", "--ckpt-format", "torch"]
    run = mini(*guard_flags, *sizes(iterations=3), *elsewhere)
    assert run.status == 0 and "step 3 from iter_0000003" in run.output, run.output
    assert "holds '1O'" in run.output and tracker.read_text() == "1O"


def test_batch_size_left_out(mini: Any, tmp_path: Path, guard_flags: list[object]) -> None:
    where = places(tmp_path / "save", form="torch")
    assert mini(*guard_flags, *sizes(iterations=3), *where, num_processes=1).status == 0
    run = mini(*guard_flags, "--train-iters", 6, "--micro-batch-size", 2, *where)
    assert run.status not in (0, -9)
    assert "--global-batch-size 8 to continue as before, or --global-batch-size 4" in run.output
