"""Megatron-DeepSpeed: a stand-in for its package, with a real DeepSpeed engine, through the launcher.

The real one is in tests/upstream.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.records.ledger import LedgerEntry, read_ledger
from megaresume.checkpoint.records.names import ledger_path
from tests.release import release

pytest.importorskip("deepspeed")
pytest.importorskip("megatron.core")

SCRIPT = Path(__file__).parent / "mini_deepspeed" / "pretrain.py"
SIZE, EVERY = 8, 4


@dataclass(frozen=True)
class Run:
    """What came of one."""

    status: int
    output: str
    #: samples trained before a step -> hashes, in the order of the stream.
    steps: dict[int, list[str]]


Train = Callable[..., Run]


@pytest.fixture
def train(launch: Callable[..., tuple[int, str]], data_yaml: Path, tmp_path: Path) -> Train:
    """``train(save, *flags, dp=2, until=12, mode="stream", env={})``: from what is in ``save``, if anything."""
    count = 0
    config = tmp_path / "data.yaml"
    config.write_text(
        f"seed: 7\nseq_length: 32\npacking: {{mode: split}}\nsources:\n  web: {{path: {data_yaml.parent / 'web'}}}\n"
    )

    def run(
        save: str | Path,
        *flags: object,
        dp: int = 2,
        until: int = 8,
        mode: str = "stream",
        env: dict[str, str] | None = None,
    ) -> Run:
        nonlocal count
        count += 1
        log, root = tmp_path / f"log{count}", tmp_path / save
        sizes = ["--seq-length", 32, "--micro-batch-size", 2, "--global-batch-size", SIZE, "--save-interval", EVERY]
        words = [SCRIPT, *sizes, "--train-iters", until, "--save", root, "--load", root, "--log", log]
        words += ["--seed", 7, "--megaresume-mode", mode, *(["--megaresume-data", config] if mode == "stream" else [])]
        status, output = launch("megaresume.run", *words, *flags, num_processes=dp, env=env)
        return Run(status, output, read_steps(log, dp))

    return run


def read_steps(log: Path, dp: int) -> dict[int, list[str]]:
    """Global batches from the logs of all ranks."""
    ranks: list[dict[int, list[list[str]]]] = []
    for rank in range(dp):
        path, micro = Path(f"{log}.{rank}"), {}
        for line in path.read_text().splitlines() if path.exists() else []:
            sample, rows = json.loads(line)
            micro.setdefault(sample, []).append(rows)
        ranks.append(micro)
    steps: dict[int, list[str]] = {}
    for sample, rounds in ranks[0].items():
        others = [rank.get(sample, []) for rank in ranks]
        steps[sample] = [row for k in range(len(rounds)) for one in others if k < len(one) for row in one[k]]
    return steps


def text(save: Path, name: str) -> str:
    return (save / name).read_text().strip()


def ledger(save: Path) -> tuple[LedgerEntry, ...]:
    return read_ledger(ledger_path(save)).entries


def test_an_engine_that_counts_other_micro_batches_saves_nothing(train: Train, tmp_path: Path) -> None:
    run = train("save", until=EVERY, env={"MINI_ENGINE_MICRO_BATCH": "4"})
    assert run.status not in (0, -9) and "Traceback" not in run.output
    assert "train_micro_batch_size_per_gpu 4 in the DeepSpeed config, --micro-batch-size 2" in run.output
    assert not list((tmp_path / "save").glob("global_step*"))


def test_a_resume_on_another_number_of_ranks_trains_the_same_samples(train: Train, tmp_path: Path) -> None:
    whole = train("whole", "--megaresume-keep-last", 2, until=12)
    assert whole.status == 0, whole.output[-3000:]
    kept = {path.name for path in (tmp_path / "whole").glob("global_step*")}
    assert kept == {f"global_step{step}" for step in (12 - EVERY, 12)}
    assert sorted(whole.steps) == list(range(0, 12 * SIZE, SIZE))
    assert train("cut", until=4).steps == {s: whole.steps[s] for s in range(0, 4 * SIZE, SIZE)}
    save = tmp_path / "cut"
    assert text(save, "latest") == "global_step4" and text(save, "latest_checkpointed_iteration.txt") == "4"
    assert json.loads(text(save, "megaresume/step_0000004.json"))["tag"] == "global_step4"

    alone = train("cut", dp=1, until=8)
    assert alone.status == 0, alone.output[-3000:]
    assert alone.steps == {s: whole.steps[s] for s in range(4 * SIZE, 8 * SIZE, SIZE)}
    assert f"resumed at sample {4 * SIZE}" in alone.output and "repeated 0 skipped 0" in alone.output
    again = train("cut", dp=2, until=12)
    assert again.steps == {s: whole.steps[s] for s in range(8 * SIZE, 12 * SIZE, SIZE)}
    ends = [(entry.iteration, entry.samples) for entry in ledger(save) if entry.kind == "finished"]
    assert ends == [(4, 4 * SIZE), (8, 8 * SIZE), (12, 12 * SIZE)]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=release("`[1]`: another ZeRO stage", "the same, `[3]`")), 3])
def test_a_kill_before_the_pointers_move_loses_no_step_and_repeats_none(
    train: Train, tmp_path: Path, stage: int
) -> None:
    killed = train("x", "--zero-stage", stage, env={"DIE": "latest"})
    assert killed.status != 0
    save = tmp_path / "x"
    assert not (save / "latest").exists() or text(save, "latest") == "global_step4"
    resumed = train("x", "--zero-stage", stage, until=10)
    assert resumed.status == 0, resumed.output[-3000:]
    # Nothing of the checkpoint is missing but its pointers.
    assert sorted(resumed.steps) == [8 * SIZE, 9 * SIZE]
    assert text(save, "latest") == "global_step8"


def test_what_is_refused(train: Train, tmp_path: Path) -> None:
    assert train("x", "--zero-stage", 1).status == 0
    other = train("x", "--zero-stage", 1, dp=1, until=12)
    assert other.status != 0 and "a different number of data-parallel ranks" in other.output and not other.steps
    converted = train("x", "--zero-stage", 1, "--megaresume-elastic", dp=1, until=10)
    assert converted.status == 0, converted.output[-3000:]
    assert sorted(converted.steps) == [8 * SIZE, 9 * SIZE] and "converted in" in converted.output
    assert "dp 2->1" in converted.output and "repeated 0 skipped 0" in converted.output

    # Without records, and without the pointer: stock begins at iteration 0, with a warning.
    save = tmp_path / "x"
    (save / "megaresume").rename(tmp_path / "records")
    (save / "latest").unlink()
    lost = train("x", "--zero-stage", 1, until=12)
    assert lost.status != 0 and "nothing says which of them to load" in lost.output and not lost.steps


def test_a_tag_that_is_asked_for_and_weights_alone(train: Train, tmp_path: Path) -> None:
    whole = train("x")
    assert whole.status == 0, whole.output[-3000:]
    tagged = train("x", "--load-tag", "global_step4")
    assert tagged.steps == {s: whole.steps[s] for s in range(4 * SIZE, 8 * SIZE, SIZE)}, tagged.output[-3000:]
    weights = train("x", "--finetune", "--save", tmp_path / "anew", until=2)
    assert weights.steps == {s: whole.steps[s] for s in range(0, 2 * SIZE, SIZE)}, weights.output[-3000:]


def test_pointers_that_disagree_do_not_take_back_what_was_trained(train: Train, tmp_path: Path) -> None:
    whole = train("x", until=12)
    save = tmp_path / "x"
    (save / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = train("x", until=13)
    assert sorted(resumed.steps) == [12 * SIZE], resumed.output[-3000:]
    assert "the pointers disagree" in resumed.output
    assert whole.status == 0


def test_the_users_own_data_is_left_alone(train: Train, tmp_path: Path) -> None:
    plain, guarded = train("off", mode="off"), train("guard", "--megaresume-keep-last", 1, mode="guard")
    assert plain.status == guarded.status == 0, guarded.output[-3000:]
    assert guarded.steps == plain.steps
    assert text(tmp_path / "guard", "latest") == "global_step8"
    assert [path.name for path in (tmp_path / "guard").glob("global_step*")] == ["global_step8"]
    assert not (tmp_path / "off" / "megaresume").exists()
    resumed = train("guard", mode="guard", dp=1, until=9)
    assert sorted(resumed.steps) == [8 * SIZE], resumed.output[-3000:]
    mixed: Any = train("guard", mode="stream", dp=1, until=9)
    assert mixed.status != 0 and "--megaresume-mode guard" in mixed.output


def test_files_that_only_the_load_finds_unreadable(train: Train, tmp_path: Path) -> None:
    sizes_alone = "--no-megaresume-checksums"
    whole = train("x", sizes_alone)
    assert whole.status == 0, whole.output[-3000:]
    path = tmp_path / "x" / "global_step8" / "mp_rank_00_model_states.pt"
    path.write_bytes(b"none" + bytes(path.stat().st_size - 4))
    resumed = train("x", sizes_alone)
    assert resumed.status == 0 and "passed over global_step8" in resumed.output, resumed.output[-3000:]
    assert resumed.steps == {sample: whole.steps[sample] for sample in range(4 * SIZE, 8 * SIZE, SIZE)}


def test_copies_of_an_engine_and_its_disk_is_lost(train: Train, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    whole = train("whole", until=12)
    cut = train("cut", "--megaresume-stage-to", tmp_path / "copies", until=8)
    assert cut.status == 0, cut.output[-3000:]
    shutil.rmtree(tmp_path / "cut")
    after = train("cut", "--megaresume-stage-to", tmp_path / "copies", until=12)
    assert after.status == 0, after.output[-3000:]
    assert min(after.steps) == 8 * SIZE and {**cut.steps, **after.steps} == whole.steps
    assert sorted(path.name for path in (tmp_path / "copies").glob("global_step*")) == [
        "global_step12",
        "global_step4",
        "global_step8",
    ]
