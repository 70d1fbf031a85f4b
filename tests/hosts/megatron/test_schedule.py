"""The batch sizes that we plan, against Megatron's own calculator, step by step."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from megaresume.hosts.megatron.arguments import schedule_from_args
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import UsageError
from tests.hosts.megatron.conftest import ramp_calculator

pytest.importorskip("megatron.core.num_microbatches_calculator")


def compare(schedule: BatchSchedule, calculator: Any, num_steps: int) -> list[int]:
    """Sizes of the first steps, equal to what Megatron trains."""
    sample, sizes = 0, []
    for step in range(num_steps):
        calculator.update(sample, True)
        trained = calculator.get() * calculator.micro_batch_size * 2  # two data-parallel ranks
        assert schedule.size_at(sample) == trained, f"step {step} at sample {sample}"
        sizes.append(trained)
        sample += trained
    return sizes


@pytest.mark.parametrize(
    ("rampup", "final", "micro"),
    [
        ((8, 8, 480), 32, 4),
        ((4, 4, 1000), 64, 2),
        ((2, 2, 7), 20, 1),
        ((16, 16, 100), 48, 8),
        ((8, 4, 999), 128, 2),
        ((2, 2, 100000), 1000, 1),
    ],
)
def test_rampup(rampup: tuple[int, int, int], final: int, micro: int) -> None:
    args = Namespace(rampup_batch_size=[str(n) for n in rampup], global_batch_size=final)
    theirs = ramp_calculator(final, micro, 2, False, 1, *rampup)
    sizes = compare(schedule_from_args(args), theirs, 3000)
    assert sizes[0] == rampup[0]
    assert sizes[-1] == final


def test_rampup_after_steps_of_another_size() -> None:
    """A size changes where the samples trained say so, and these depend on the sizes before: here 12, to sample 36."""
    args = Namespace(rampup_batch_size=[8, 8, 132], global_batch_size=24)
    differs = []
    for start in range(0, 240, 12):
        theirs = ramp_calculator(24, 4, 2, False, 1, 8, 8, 132)
        schedule = schedule_from_args(args, start=start).resumed([(0, 12)], start)
        sample = start
        for _ in range(40):
            theirs.update(sample, False)
            trained = theirs.get_current_global_batch_size()
            assert schedule.step_of(sample) == (sample, sample + trained)
            differs.append(schedule_from_args(args).resumed([(0, 12)], start).size_at(sample) != trained)
            sample += trained
    assert any(differs)


@pytest.mark.parametrize("micro", [3, 5, 7])
def test_rampup_with_decreased_sizes(micro: int) -> None:
    args = Namespace(
        rampup_batch_size=[16, 16, 2000],
        global_batch_size=128,
        decrease_batch_size_if_needed=True,
        micro_batch_size=micro,
        data_parallel_size=2,
    )
    theirs = ramp_calculator(128, micro, 2, True, 1, 16, 16, 2000)
    assert any(size % 16 for size in compare(schedule_from_args(args), theirs, 300))


def test_constant() -> None:
    assert schedule_from_args(Namespace(global_batch_size=24)) == BatchSchedule.constant(24)
    decreased = Namespace(
        global_batch_size=24, decrease_batch_size_if_needed=True, micro_batch_size=5, data_parallel_size=2
    )
    assert schedule_from_args(decreased) == BatchSchedule.constant(20)
    # since 0.19: two ranks with the same weights, each of which shares them with another
    decreased.gtp_weight_remat_size, decreased.micro_batch_size = 2, 4
    assert schedule_from_args(decreased) == BatchSchedule.constant(16)
    # from 0.18 on the flag is parsed, and ignored
    ignored = Namespace(global_batch_size=24, rampup_batch_size=[8, 8, 100], step_batch_size_schedule=None)
    assert schedule_from_args(ignored) == BatchSchedule.constant(24)


STEPS = [("0:8 1K:16 10K:32", 32), ("0:4,96:8,97:12,1M:16", 1), ("10.5K:64 0:2", 100)]


@pytest.mark.parametrize(("text", "seq_length"), STEPS)
def test_steps(text: str, seq_length: int, newer_calculators: Callable[[], Any]) -> None:
    args = Namespace(step_batch_size_schedule=text, seq_length=seq_length, global_batch_size=None)
    theirs = newer_calculators().StepBatchsizeNumMicroBatchesCalculator(1, 2, False, 1, text, seq_length)
    sizes = compare(schedule_from_args(args), theirs, 2000)
    assert len(set(sizes)) > 1


@pytest.fixture
def newer_calculators(core_wheel: Callable[[str], Any]) -> Callable[[], Any]:
    """The calculators of 0.18, which stand in a file of their own that any Python can run."""

    def load() -> Any:
        path = core_wheel("0.18.0") / "megatron/core/num_microbatches_calculator.py"
        spec = importlib.util.spec_from_file_location("calculators_0_18", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("text", ["", "8", "9:8", "0:8 0:16", "0:0", "0:x"])
def test_bad_steps(text: str) -> None:
    with pytest.raises(UsageError):
        schedule_from_args(Namespace(step_batch_size_schedule=text or " ", seq_length=8))


@pytest.mark.parametrize("rampup", [(8, 8), (8, 7, 100), (0, 8, 100), (32, 8, 100)])
def test_bad_rampup(rampup: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="rampup"):
        schedule_from_args(Namespace(rampup_batch_size=rampup, global_batch_size=32))
