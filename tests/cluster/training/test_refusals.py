"""What the program refuses, and that it says so once, with a status, and without hanging."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megaresume.batches.open import open_stream
from megaresume.checkpoint.save.commit import begin_save
from megaresume.checkpoint.starts import record_start
from megaresume.cluster.training.launch import check_layout, parse_arguments
from megaresume.stream.errors import UsageError

NEEDED = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --lr 1e-3"
GOOD = f"{NEEDED} --train-iters 4 --megaresume-data data.yaml"


def test_dashes_and_underscores_are_the_same() -> None:
    args = parse_arguments(
        f"{GOOD} --global_batch_size=8 --ckpt_step 4 --load some_dir --rampup_batch_size 2 2 8".split()
    )
    assert (args.global_batch_size, args.ckpt_step, args.load) == (8, 4, "some_dir")
    assert args.rampup_batch_size == (2, 2, 8)


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        (f"{NEEDED} --train-iters 4", 1, ["the data is missing", "--megaresume-data"]),
        (f"{NEEDED} --megaresume-data d.yaml", 1, ["length of the run"]),
        (f"{GOOD} --train-samples 8", 1, ["length of the run"]),
        (f"{GOOD} --zero-stage 3", 1, ["--untie-embeddings-and-output-weights or --zero-stage 2"]),
        (f"{GOOD} --save-interval 2", 1, ["--save DIRECTORY"]),
        (f"{GOOD} --ckpt-step 2", 1, ["--ckpt-step needs --load"]),
        (f"{GOOD} --no-such-flag", 1, ["--no-such-flag"]),
        (f"{GOOD} --global-batch-size 10", 2, ["--global-batch-size 8 or 12 or --micro-batch-size 1"]),
        (f"{GOOD} --global-batch-size 8 --rampup-batch-size 2 2 8", 2, ["global batch size 2"]),
        (f"{GOOD} --global-batch-size 8 --rampup-batch-size 4 3 8", 1, ["--rampup-batch-size"]),
        (f"{GOOD} --tensor-model-parallel-size 2", 3, ["3 ranks", "start 2 ranks"]),
        (f"{GOOD} --tensor-model-parallel-size 3", 3, ["attention heads"]),
        (f"{GOOD} --hidden-size 30", 1, ["--hidden-size 28 or 32"]),
        (f"{GOOD} --micro-batch-size 0", 1, ["at least one sample"]),
    ],
)
def test_bad_flags(flags: str, world_size: int, words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        check_layout(parse_arguments(flags.split()), world_size)
    for word in words:
        assert word in str(refused.value)


def test_bad_batch_ends_both_ranks_with_status_2(runs: Any) -> None:
    done = runs("bad", "--train-iters 2 --micro-batch-size 3 --global-batch-size 8")
    assert done.status == 2
    assert done.text.count("the global batch does not divide over the ranks") == 1
    assert "--micro-batch-size 2" in done.text or "--micro-batch-size 4" in done.text


SHORT = "--train-iters 2 --global-batch-size 4 --micro-batch-size 2"


def files(directory: Path) -> dict[Path, bytes]:
    """All but the name of whoever holds the directory, who may well come and go."""
    found = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path: path.read_bytes() for path in found if not path.parent.name.startswith("owner_")}


def test_checkpoints_are_never_overwritten_or_passed_over(runs: Any, data_yaml: Path) -> None:
    """One run's directory, and all the ways to misuse it."""
    first = runs("first", f"{SHORT} --save {{dir}}/first --save-interval 1", num_processes=1)
    assert first.status == 0, first.text[-4000:]
    directory = runs.directory / "first"
    before = files(directory)

    over = runs("over", f"{SHORT} --save {{dir}}/first", num_processes=1)
    assert over.status == 2
    assert "this start did not load a checkpoint of this directory" in over.text and "--load was forgotten" in over.text
    assert files(directory) == before

    # Weights without a data state.
    shutil.copytree(directory, runs.directory / "bare")
    shutil.rmtree(runs.directory / "bare" / "megaresume")
    bare = runs("bare", f"{SHORT} --load {{dir}}/bare", num_processes=2)
    assert bare.status == 1
    assert bare.text.count("the checkpoint has no data state") == 1
    assert not bare.records.steps if bare.log.exists() else True


def test_a_token_beyond_the_vocabulary(runs: Any) -> None:
    done = runs("tokens", f"{SHORT} --vocab-size 100", num_processes=1)
    assert done.status == 1
    assert "a token that the vocabulary does not have" in done.text and "--vocab-size" in done.text


def test_a_first_save_that_was_killed_is_no_obstacle(runs: Any, data_yaml: Path) -> None:
    """Nothing was ever committed, so nothing can be lost: the run begins again, in the same directory."""
    directory = runs.directory / "unsaved"
    stream = open_stream(data_yaml, split="9,1,0")
    record_start(directory, iteration=0, state=stream.state_at(0))
    begin_save(directory, tag="global_step1", iteration=1, state=stream.state_at(4, batches=((0, 4),)))
    (directory / "global_step1").mkdir()
    (directory / "global_step1" / "mp_rank_00_model_states.pt").write_bytes(b"half")
    flags = f"{SHORT} --save {{dir}}/unsaved --load {{dir}}/unsaved --save-interval 1"
    done = runs("unsaved", flags, num_processes=1)
    assert done.status == 0, done.text[-4000:]
    assert done.records.steps[1]["samples"] == [0, 4]
    assert (directory / "latest").read_text() == "global_step2"
