"""Asked to stop, told what to keep, started again and again: what our flags add to Megatron's own."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.starts import NOTHING_TO_TRAIN
from megaresume.cluster.drivers.attempts import Ledgers
from megaresume.cluster.drivers.decide import AttemptProgress
from megaresume.hosts.megatron import host
from megaresume.hosts.megatron.arguments import Settings
from megaresume.hosts.megatron.project import Project
from megaresume.stream.errors import UsageError
from tests.release import release

pytest.importorskip("megatron.core")


def iterations(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("iter_*"))


def test_one_run_through_all_of_it(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    save, trigger = tmp_path / "save", tmp_path / "stop"
    flags = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 9]
    flags += ["--micro-batch-size", 2, "--global-batch-size", 8, "--save", save, "--load", save, "--save-interval", 2]
    flags += ["--megaresume-checksums"]

    # Rank 1 alone gets a signal that Megatron does not listen to: all ranks save and exit after step 5.
    keep = ["--megaresume-keep-last", 2, "--exit-signal-handler"]
    first = mini(*flags, *keep, env={"MINI_KILL": "step:5", "MINI_KILL_RANK": "1", "MINI_SIGNAL": "SIGUSR2"})
    assert first.status == 0, first.output[-3000:]
    assert max(first.steps()) == 5
    assert first.output.count("megaresume: SIGUSR2 received: all ranks save and exit") == 1
    assert iterations(save) == ["iter_0000004", "iter_0000005"]

    # A flipped bit, which sizes do not show.
    victim = next(path for path in sorted((save / "iter_0000005").rglob("*.distcp")) if path.stat().st_size > 100)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    asked = mini(*flags, "--ckpt-step", 5)
    assert asked.status == 1 and asked.steps() == {}, asked.output[-3000:]
    assert "iter_0000005 is damaged" in asked.output and "--ckpt-step 4" in asked.output

    # The newest complete one is taken. The file stops it without --exit-signal-handler, and is used up.
    trigger.touch()
    second = mini(*flags, "--megaresume-stop-file", trigger)
    assert second.status == 0, second.output[-3000:]
    assert second.output.count("megaresume: passed over iter_0000005") == 1 and "checksum is" in second.output
    assert "step 4 from iter_0000004" in second.output
    assert list(second.steps()) == [5] and second.steps()[5] == first.steps()[5]
    assert f"megaresume: {trigger} is there: all ranks save and exit" in second.output and not trigger.exists()

    # Two starts that die before they save; the third is refused before it trains.
    limit = ["--megaresume-max-starts", 1]
    killed = mini(*flags, *limit, env={"MINI_KILL": "step:6"})
    assert killed.status == -9
    refused = mini(*flags, *limit)
    assert refused.status == 1 and refused.steps() == {}, refused.output[-3000:]
    assert "no progress: 1 start from iteration 5" in refused.output and "every 2 steps" in refused.output

    # A run that is over may be launched any number of times: these starts do not count.
    over = mini(*flags, *limit, "--train-iters", 5)
    assert over.status == 0 and over.steps() == {}, over.output[-3000:]
    entries = read_ledger(ledger_path(save)).entries
    starts = [entry for entry in entries if entry.kind == "start"]
    assert [NOTHING_TO_TRAIN in entry.details for entry in starts] == [False] * 4 + [True]
    # After the stops nothing said so.
    assert [entry.iteration for entry in entries if entry.kind == "finished"] == [5]


@release(
    "seven runs",
    "`::test_one_run_through_all_of_it`",
)
def test_a_run_says_that_it_is_over_and_only_then(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    """By what the launch scripts read of its ledger: after a stop, an error, its end, an evaluation, its end again."""
    save = tmp_path / "save"
    flags = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--async-save"]
    flags += ["--micro-batch-size", 2, "--global-batch-size", 8, "--save", save, "--load", save, "--save-interval", 3]
    flags += ["--split", "80,10,10"]

    def run(*more: object, env: dict[str, str] | None = None, status: int = 0) -> tuple[list[int], AttemptProgress]:
        before = Ledgers([save], None)
        done = mini(*flags, *more, env=env)
        assert done.status == status, done.output[-3000:]
        return sorted(done.steps()), before.progress(status=done.status)

    stopped = run("--train-iters", 7, "--exit-signal-handler", env={"MINI_KILL": "step:2", "MINI_SIGNAL": "SIGTERM"})
    assert stopped == ([1, 2], AttemptProgress(saved=2))
    assert run("--train-iters", 7, "--exit-interval", 4) == ([3, 4], AttemptProgress(saved=4))
    # The last step is saved, and the validation after it fails.
    fails = ["--eval-interval", 6, "--eval-iters", 1, "--mini-fail-in-evaluation"]
    assert run("--train-iters", 6, *fails, status=1) == ([5, 6], AttemptProgress(saved=6))

    assert run("--train-iters", 7) == ([7], AttemptProgress(saved=7, finished=7))
    entries = [entry for entry in read_ledger(ledger_path(save)).entries if entry.kind != "durable"]
    assert (entries[-1].kind, entries[-1].iteration, entries[-1].samples) == ("finished", 7, 56)
    assert entries[-1].digest == entries[-2].digest

    # An evaluation is over when it ends, and says nothing of the run.
    assert run("--train-iters", 9, "--skip-train") == ([], AttemptProgress(finished=7))
    entries = read_ledger(ledger_path(save)).entries
    assert [entry.kind for entry in entries].count("finished") == 1 and NOTHING_TO_TRAIN in entries[-1].details
    assert run("--train-iters", 9) == ([8, 9], AttemptProgress(saved=9, finished=9))
    assert run("--train-iters", 9) == ([], AttemptProgress(finished=9))
    assert read_ledger(ledger_path(save)).entries[-1].kind == "finished"


def test_a_megatron_that_never_asks() -> None:
    args = Namespace(megaresume_stop_file="stop", exit_signal_handler=False)
    project = Project(kind="bigscience", root=Path(), version="1", modules={})
    with pytest.raises(UsageError, match="cannot be asked to stop"):
        host.switch_on(args, Settings.from_args(args), project)
    host.switch_on(args, Settings.from_args(Namespace(), []), project)
    assert args.exit_signal_handler is False


def test_retention_of_megatron_joins_ours() -> None:
    args = Namespace(megaresume_keep_last=3, save_retain_interval=100, megaresume_data="d.yaml")
    kept = Settings.from_args(args).checkpoints.retention
    assert (kept.keep_last, kept.keep_every) == (3, 100)
    alone = Settings.from_args(Namespace(save_retain_interval=100, megaresume_data="d.yaml")).checkpoints.retention
    assert not alone  # Megatron's own does it
