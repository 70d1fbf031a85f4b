"""For all tests: property tests that give the same answer every time; what a log is to show of tests that passed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.forked import freeze

pytest_plugins = ["tests.tiers", "tests.tokenizer", "tests.warm"]

# Before torch is imported, here and in what is started: threads of many processes at once are in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is compiled here, and importing what compiles takes a third of the time that megatron-core takes to import.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Or each of a thousand processes would compile what it imports of megaresume, and each worker the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Derandomized: a run that fails in CI fails on the next machine too. No deadline: CI machines are slow and shared.
settings.register_profile(
    "megaresume", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("megaresume")


# What is imported for tests stays: the collector need not look through millions of objects, again and again.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """All of it is there."""
    freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """What a module leaves behind would stand in the way of the next one that makes its own."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _what_a_module_leaves_stays() -> Iterator[None]:
    """Imports and caches: trainers collect garbage at each start, and would look through those of a hundred modules."""
    yield
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="write golden files anew instead of comparing with them; see tests/stream/test_golden.py",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what a test gave to ``record_property("log", ...)``: the tables of the runs on a real Slurm."""
    for report in terminalreporter.stats.get("passed", []):
        for text in (text for name, text in report.user_properties if name == "log"):
            terminalreporter.section(report.nodeid)
            terminalreporter.write_line(str(text))
