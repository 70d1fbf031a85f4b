"""Asked to stop, told what to keep, started again and again: what our flags add to Megatron's own."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.layout import ledger_path
from megaresume.checkpoint.ledger import read_ledger
from megaresume.checkpoint.start import NOTHING_TO_TRAIN
from megaresume.integrations.megatron import stopping
from megaresume.integrations.megatron.arguments import Settings
from megaresume.integrations.megatron.project import Project
from megaresume.stream.errors import UsageError

pytest.importorskip("megatron.core")


def iterations(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("iter_*"))


def test_one_run_through_all_of_it(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    save, trigger = tmp_path / "save", tmp_path / "stop"
    flags = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 9]
    flags += ["--micro-batch-size", 2, "--global-batch-size", 8, "--save", save, "--load", save, "--save-interval", 2]
    flags += ["--megaresume-verify-checkpoint"]

    # Rank 1 alone gets a signal that Megatron does not listen to: all ranks save and exit behind step 5.
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
    assert second.output.count("WARNING: passed over iter_0000005") == 1 and "checksum is" in second.output
    assert "step 4 from iter_0000004" in second.output
    assert list(second.steps()) == [5] and second.steps()[5] == first.steps()[5]
    assert f"megaresume: {trigger} is there: all ranks save and exit" in second.output and not trigger.exists()

    # Two starts that die before they save; the third is refused before it trains.
    limit = ["--megaresume-max-starts", 1]
    killed = mini(*flags, *limit, env={"MINI_KILL": "step:6"})
    assert killed.status == -9
    refused = mini(*flags, *limit)
    assert refused.status == 1 and refused.steps() == {}, refused.output[-3000:]
    assert "no progress: 1 starts from iteration 5" in refused.output and "(now 2)" in refused.output

    # A run that is over may be launched any number of times: these starts do not count.
    over = mini(*flags, *limit, "--train-iters", 5)
    assert over.status == 0 and over.steps() == {}, over.output[-3000:]
    starts = [entry for entry in read_ledger(ledger_path(save)).entries if entry.kind == "start"]
    assert [NOTHING_TO_TRAIN in entry.details for entry in starts] == [False] * 4 + [True]


def test_a_megatron_that_never_asks() -> None:
    args = Namespace(megaresume_stop_file="stop", exit_signal_handler=False)
    project = Project(kind="bigscience", root=Path(), version="1", modules={})
    with pytest.raises(UsageError, match="cannot be asked to stop"):
        stopping.switch_on(args, Settings.from_args(args), project)
    stopping.switch_on(args, Settings.from_args(Namespace(), []), project)
    assert args.exit_signal_handler is False


def test_retention_of_megatron_joins_ours() -> None:
    args = Namespace(megaresume_keep_last=3, save_retain_interval=100, megaresume_data="d.yaml")
    kept = Settings.from_args(args).retention
    assert (kept.keep_last, kept.keep_every) == (3, 100)
    alone = Settings.from_args(Namespace(save_retain_interval=100, megaresume_data="d.yaml")).retention
    assert not alone  # Megatron's own does it
