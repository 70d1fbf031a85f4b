"""Run by two processes, then by one: a pipeline whose number of stages changes. See test_stages.py.

stages_toy.py DATA ROOT STAGES first      train, and save on the way
stages_toy.py DATA ROOT STAGES second     go on from there on another number of stages, each as one process
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import deepspeed
import torch
import toy
from deepspeed.pipe import PipelineModule

import megaresume

STAGES, MODE = int(sys.argv[3]), sys.argv[4]
OPTIONS = megaresume.LoaderOptions(transform=toy.as_pair)
STEPS, SAVE = 4, 2


def engine_of(zero: int) -> Any:
    model = PipelineModule(layers=toy.layers(), num_stages=STAGES, loss_fn=lambda y, label: toy.loss_of(y, *label))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=toy.config(stage=zero))
    return engine


def train(engine: Any, data: Any, save: Path | None = None) -> list[str]:
    losses = []
    while engine.global_steps < STEPS:
        losses.append(engine.train_batch(data_iter=data).item().hex())
        if save is not None and engine.global_steps == SAVE:
            engine.save_checkpoint(str(save))
    return losses


def first(zero: int) -> None:
    engine, root = engine_of(zero), toy.ROOT / f"zero{zero}"
    data = megaresume.attach(engine, toy.DATA, loader_options=OPTIONS)
    toy.result(root.name, {"losses": train(engine, data, root)})


def second(zero: int) -> None:
    engine, root, found = engine_of(zero), toy.ROOT / f"zero{zero}", {}
    for other in (0, 1):  # saved with, while this engine has the stage `zero`
        megaresume.attach(engine, toy.DATA, loader_options=OPTIONS)
        found[f"from {other}"] = toy.error_of(
            lambda other=other: engine.load_checkpoint(str(toy.ROOT / f"zero{other}"))
        )
    if zero:
        data = megaresume.attach(engine, toy.DATA, loader_options=OPTIONS, elastic=True)
        engine.load_checkpoint(str(root))
    else:
        data = megaresume.attach(engine, toy.DATA, loader_options=OPTIONS)
        engine.load_checkpoint(str(root), load_optimizer_states=False)
    found["line"] = data.resume.line()
    found["losses"] = train(engine, data)
    toy.result(root.name, found)


toy.start()
torch.manual_seed(3)
for stage in (0, 1):
    (first if MODE == "first" else second)(stage)
toy.finish()
