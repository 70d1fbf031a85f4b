"""What DeepSpeed leaves out when it loads a universal checkpoint, put back; and what cannot be, refused beforehand.

A universal load restores what the optimizer holds. It passes over the module's own state dict, and with it

- persistent buffers (running means, for example) and frozen parameters, which keep what the new process made of them;
- under ZeRO 3, the settings of every parameter group but the first: all groups get the first one's weight decay;
- under ZeRO 3, a count of steps for each part of the optimizer: all share one tensor, which torch's optimizers then
  count up once for each part in every step.

Read against DeepSpeed 0.19: engine.py ``_load_checkpoint``, zero/stage3.py
``load_hp_checkpoint_state_from_checkpoint_dir_stage3``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megaresume.integrations import deepspeed_engine as facts
from megaresume.stream.errors import CheckpointError

__all__ = ["check_restorable", "restore_rest"]


def check_restorable(engine: Any) -> None:
    """Raise a CheckpointError where a universal load would silently leave something at its initial value."""
    buffers, frozen = _outside_the_optimizer(engine.module)
    if facts.is_pipeline(engine) and (buffers or frozen):
        what = "buffers and frozen parameters of a pipeline"
    elif facts.zero_stage(engine) == 3 and frozen:
        what = "frozen parameters under ZeRO 3"
    else:
        return
    raise CheckpointError(
        f"{what} are not in a universal checkpoint",
        found=f"{', '.join((*buffers, *frozen)[:5])}",
        expected="only parameters that are trained",
        action="start on the number of ranks that saved it",
    )


def restore_rest(engine: Any, tag_dir: Path) -> None:
    """Put back what DeepSpeed's universal load passed over. On every rank; reads files only where there is something.

    Args:
        engine: which has loaded it.
        tag_dir: of the universal checkpoint.
    """
    names = [name for kind in _outside_the_optimizer(engine.module) for name in kind]
    if names and not facts.is_pipeline(engine):
        saved = torch.load(facts.model_file(engine, tag_dir), map_location="cpu", weights_only=False)["module"]
        now = dict(engine.module.named_buffers()) | dict(engine.module.named_parameters())
        with torch.no_grad():
            for name in names:
                if name in saved:  # save_checkpoint(exclude_frozen_parameters=True)
                    now[name].copy_(saved[name])
    if facts.zero_stage(engine) != 3:
        return
    for part in engine.optimizer.optimizer.state.values():
        if torch.is_tensor(part.get("step")):
            part["step"] = part["step"].clone()
    if len(engine.optimizer.param_groups) > 1:
        path = tag_dir / "zero" / "optimizer_state.pt"
        state = torch.load(path, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]
        for group, before in zip(engine.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})


def _outside_the_optimizer(module: Any) -> tuple[list[str], list[str]]:
    """Names of persistent buffers, and of frozen parameters."""
    persistent = set(module.state_dict())
    buffers = [name for name, _ in module.named_buffers() if name in persistent]
    return buffers, [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
