"""AdamW: NVIDIA apex's fused one where it is installed, otherwise DeepSpeed's or torch's."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from megaresume.training.arguments import Arguments

__all__ = ["build_optimizer"]


def build_optimizer(args: Arguments, model: torch.nn.Module, device: torch.device) -> tuple[torch.optim.Optimizer, str]:
    """Choose and build the optimizer.

    Returns:
        the optimizer, and in words which one it is and why.
    """
    groups = _parameter_groups(model, args.weight_decay)
    options: dict[str, Any] = {"lr": args.lr, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps}
    if device.type == "cpu":
        return torch.optim.AdamW(groups, **options), "torch's AdamW (the fused ones need a GPU)"
    if importlib.util.find_spec("apex") is not None:
        try:
            from apex.optimizers import FusedAdam  # deferred: not installed everywhere
        except ImportError as error:
            why = f"apex is installed without its CUDA extensions: {error}"
        else:
            return FusedAdam(groups, adam_w_mode=True, **options), "apex's FusedAdam"
    else:
        why = "apex is not installed"
    import deepspeed.ops  # deferred: seconds to import

    # Only where it was compiled at installation: compiling now takes minutes, and a kill in the middle leaves a lock.
    if deepspeed.ops.__installed_ops__.get("fused_adam"):
        from deepspeed.ops.adam import FusedAdam as DeepSpeedAdam

        return DeepSpeedAdam(groups, adam_w_mode=True, **options), f"DeepSpeed's FusedAdam ({why})"
    return (
        torch.optim.AdamW(groups, fused=True, **options),
        f"torch's fused AdamW ({why}; DeepSpeed's is not precompiled)",
    )


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices are decayed, vectors (biases, norms) are not, as in Megatron."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
