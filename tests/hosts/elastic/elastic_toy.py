"""Run by one process or two: ZeRO engines whose number of ranks changes. See test_elastic.py.

elastic_toy.py DATA ROOT first      two ranks train without a break, save on the way, and are killed
elastic_toy.py DATA ROOT second     another number of ranks goes on from there, saves, and goes on once more
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import deepspeed
import torch
import toy

import megaresume

MODE, STEPS, SAVE, AGAIN = sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6])
#: name -> ZeRO stage, bfloat16.
CASES = {"zero1": (1, False), "zero2": (2, False), "zero3": (3, False), "bf16": (2, True)}


class Model(torch.nn.Module):
    """With what a universal checkpoint leaves out: a buffer, and a frozen parameter that the loss depends on."""

    def __init__(self, frozen: bool, value: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*toy.layers())
        self.register_buffer("calls", torch.zeros(()))
        if frozen:
            self.scale = torch.nn.Parameter(torch.full((toy.WIDTH,), value), requires_grad=False)

    def get_extra_state(self) -> None:
        """As megatron-core's layers: in the state dict, and no tensor."""

    def set_extra_state(self, state: None) -> None:
        pass

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.layers[0](tokens)
        return self.layers[1:](hidden * self.scale if hasattr(self, "scale") else hidden)


def engine_of(case: str) -> Any:
    stage, bf16 = CASES[case]
    torch.manual_seed(3)
    model = Model(frozen=stage < 3, value=1.5 if MODE == "first" else 0.25)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    more: dict[str, Any] = {"bf16": {"enabled": True}} if bf16 else {}
    config = toy.config(
        stage=stage,
        gradient_clipping=0.5,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2 * STEPS}},
        **more,
    )
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    config["zero_allow_untested_optimizer"] = True
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine: Any, data: Any, steps: int) -> dict[str, list[Any]]:
    """By step: mean loss of all ranks, learning rate, weight decay of both groups."""
    found: dict[str, list[Any]] = {"loss": [], "rate": [], "decay": []}
    while engine.global_steps < steps:
        found["loss"].append(toy.step_of(engine, data))
        found["rate"].append(engine.get_lr())
        found["decay"].append([group["weight_decay"] for group in engine.optimizer.param_groups])
    return found


def first(case: str) -> None:
    engine, root = engine_of(case), toy.ROOT / case
    data = megaresume.attach(engine, toy.DATA)
    found = train(engine, data, SAVE)
    calls = engine.module.calls.item()
    engine.save_checkpoint(str(root))
    whole = train(engine, data, STEPS)
    toy.result(case, {name: found[name] + whole[name] for name in found} | {"calls": calls})


def second(case: str) -> None:
    root = toy.ROOT / case
    engine = engine_of(case)
    data = megaresume.attach(engine, toy.DATA)
    refused = toy.error_of(lambda: engine.load_checkpoint(str(root)))
    data = megaresume.attach(engine, toy.DATA, elastic=True)
    path, _ = engine.load_checkpoint(str(root))
    found: dict[str, Any] = {"refused": refused, "path": Path(path).parent.name, "line": data.resume.line()}
    found["calls"] = engine.module.calls.item()
    found["config"] = engine.load_universal_checkpoint()
    found |= train(engine, data, AGAIN)
    engine.save_checkpoint(str(root))
    found["left"] = sorted(p.name for p in root.iterdir() if p.name.endswith("_universal"))
    found["on"] = train(engine, data, STEPS)
    engine = engine_of(case)
    data = megaresume.attach(engine, toy.DATA)
    path, _ = engine.load_checkpoint(str(root))
    found["path_again"] = Path(path).parent.name
    found["again"] = train(engine, data, STEPS)
    toy.result(case, found)


toy.start()
for name in CASES:
    (first if MODE == "first" else second)(name)
if MODE == "first":
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
toy.finish()
