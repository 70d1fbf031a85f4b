"""Our own small models are such as the training program takes, whatever the launch script asks for."""

from __future__ import annotations

from typing import Literal

import pytest

from megaresume.cluster.smoke.plan import model_flags
from megaresume.cluster.training.launch import parse_arguments


@pytest.mark.parametrize("model", ["gpt", "vlm"])
@pytest.mark.parametrize("stage", range(4))
def test_every_zero_stage(model: Literal["gpt", "vlm"], stage: int) -> None:
    flags = ["--megaresume-data", "data.yaml", "--train-iters", "8", "--micro-batch-size", "1"]
    args = parse_arguments([*flags, *model_flags(model, 8), "--zero-stage", str(stage)])
    assert args.zero_stage == stage and args.untie_embeddings_and_output_weights
