"""The learning rate against Megatron-LM's own scheduler, at every step."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megaresume.cluster.training.launch import parse_arguments
from megaresume.cluster.training.model import LearningRate
from megaresume.stream.batches import BatchSchedule

BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --megaresume-data d.yaml --lr 0.01"


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_as_megatron(style: str, warmup: int) -> None:
    flags = f"{BASE} --train-iters 20 --global-batch-size 8 --min-lr 0.001 --lr-decay-style {style}"
    args = parse_arguments(f"{flags} --lr-warmup-iters {warmup}".split())
    rate = LearningRate.from_arguments(args, BatchSchedule.constant(8))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    theirs = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=warmup * 8,
        lr_decay_steps=20 * 8,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=20 * 8,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
    for step in range(20):
        assert rate.at(step * 8) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        theirs.step(8)


def test_samples_and_iterations_mean_the_same() -> None:
    schedule = BatchSchedule.constant(8)
    by_steps = parse_arguments(f"{BASE} --train-iters 20 --lr-warmup-iters 2".split())
    by_samples = parse_arguments(f"{BASE} --train-samples 160 --lr-warmup-iters 2".split())
    by_fraction = parse_arguments(f"{BASE} --train-samples 160 --lr-warmup-fraction 0.1".split())
    rates = [LearningRate.from_arguments(args, schedule) for args in (by_steps, by_samples, by_fraction)]
    assert rates[0] == rates[1] == rates[2]
