"""Our flags in Megatron's parser."""

from __future__ import annotations

import argparse
from argparse import Namespace

import pytest

from megaresume.checkpoint.save.retries import Retries
from megaresume.hosts.megatron.arguments import Settings, add_arguments, around_add_data_args
from megaresume.stream.batches import Balance
from megaresume.stream.errors import UsageError


def parse(*words: str) -> Settings:
    def add_data_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--data-path")
        return parser

    parser = argparse.ArgumentParser(allow_abbrev=False)
    # An extra_args_provider of ours on top of the hook: the flags are added once.
    add_arguments(around_add_data_args(add_data_args)(parser))
    args = parser.parse_args(list(words))
    assert args.data_path is None  # Megatron's own are there too
    return Settings.from_args(args, argv=[])


def test_modes() -> None:
    assert parse() == Settings(mode="guard")
    assert parse("--megaresume-data", "d.yaml") == Settings(mode="stream", data="d.yaml")
    assert parse("--megaresume_data=d.yaml") == Settings(mode="stream", data="d.yaml")
    assert parse("--megaresume-mode", "stream") == Settings(mode="stream")
    assert parse("--megaresume_mode", "off", "--megaresume-data", "d.yaml").mode == "off"
    assert parse("--megaresume-accept", "weights", "split").accept == ("weights", "split")


def test_balanced_ranks() -> None:
    data = ["--megaresume-data", "d.yaml"]
    assert parse(*data).balance is None
    assert parse(*data, "--megaresume_balance", "step").balance == Balance(objective="step")
    cost = ["--megaresume-balance-token-cost", "12288"]
    assert parse(*data, *cost).balance is None
    balance = parse(*data, "--megaresume-balance=micro-step", *cost).balance
    assert balance == Balance(objective="micro-step", token_cost=12288)
    for words in ([], ["--megaresume-mode", "guard"], [*data, "--megaresume-mode", "off"]):
        with pytest.raises(UsageError, match="ranks are balanced in stream mode only"):
            parse(*words, "--megaresume-balance", "step")
    with pytest.raises(UsageError, match=r"bad value of --megaresume-balance\n  found: +--megaresume-balance steps"):
        Settings.from_args(Namespace(megaresume_data="d.yaml", megaresume_balance="steps"), argv=[])
    with pytest.raises(UsageError, match="bad cost of a token"):
        parse(*data, "--megaresume-balance", "step", "--megaresume-balance-token-cost", "-1")


def test_in_process_restart() -> None:
    """Megatron calls pretrain() again in the same process then."""
    with pytest.raises(UsageError, match="--inprocess-restart cannot be used"):
        Settings.from_args(Namespace(inprocess_restart=True, megaresume_data="d.yaml"), argv=[])
    off = Namespace(inprocess_restart=True, megaresume_mode="off")
    assert Settings.from_args(off, argv=[]).mode == "off"
    assert Settings.from_args(Namespace(inprocess_restart=False), argv=[]).mode == "guard"


def test_contradiction() -> None:
    with pytest.raises(UsageError, match="contradict"):
        parse("--megaresume-mode", "guard", "--megaresume-data", "d.yaml")
    with pytest.raises(SystemExit):
        parse("--megaresume-mode", "strem")


def test_yaml_runs() -> None:
    """No parser defaults; values from the YAML file, or else from the command line, which Megatron drops."""
    settings = Settings.from_args(Namespace(), argv=["--yaml-cfg", "x", "--lr", "1"])
    assert settings == Settings(mode="guard")
    assert Settings.from_args(Namespace(megaresume_data="d.yaml"), argv=[]).mode == "stream"
    argv = ["--yaml-cfg", "x.yaml", "--megaresume-data", "d.yaml"]
    assert Settings.from_args(Namespace(), argv=argv) == Settings(mode="stream", data="d.yaml")
    assert Settings.from_args(Namespace(megaresume_accept="weights"), argv=[]).accept == ("weights",)
    with pytest.raises(UsageError, match="unknown mode"):
        Settings.from_args(Namespace(megaresume_mode="streams"), argv=[])
    assert Settings.from_args(Namespace(megaresume_data="d.yaml"), argv=[]).checkpoints.checksums
    assert not Settings.from_args(Namespace(megaresume_checksums=False), argv=[]).checkpoints.checksums
    saves = Namespace(megaresume_save_retries=1, megaresume_on_save_failure="continue")
    assert Settings.from_args(saves, argv=[]).checkpoints.retries == Retries(tries=1, on_failure="continue")
    with pytest.raises(UsageError, match="bad value of --megaresume-on-save-failure"):
        Settings.from_args(Namespace(megaresume_on_save_failure="stop"), argv=[])
