"""AdamW: NVIDIA apex's fused one if it is installed, otherwise DeepSpeed's or torch's; and the DeepSpeed config.

The learning rate is a pure function of trained samples: nothing to save, nothing to restore. The shapes are
Megatron-LM's (megatron.core.optimizer_param_scheduler), which counts in samples as well.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaresume.cluster.training.arguments import Arguments, DecayStyle
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Warm-up and decay; all positions in samples."""

    style: DecayStyle
    highest: float
    lowest: float
    warmup_samples: int
    decay_samples: int

    @classmethod
    def from_arguments(cls, args: Arguments, schedule: BatchSchedule) -> LearningRate:
        """Flags that count steps are turned into samples with the final batch size, as Megatron does."""
        final = schedule.segments[-1][1]
        run = args.train_samples if args.train_samples is not None else (args.train_iters or 0) * final
        decay = args.lr_decay_samples or (args.lr_decay_iters or 0) * final or run
        warmup = args.lr_warmup_samples or args.lr_warmup_iters * final
        if args.lr_warmup_fraction is not None:
            warmup = int(args.lr_warmup_fraction * decay)
        return cls(
            style=args.lr_decay_style,
            highest=args.lr,
            lowest=args.min_lr,
            warmup_samples=warmup,
            decay_samples=max(decay, warmup + 1),
        )

    def at(self, samples: int) -> float:
        """The rate of the step that begins when ``samples`` samples are trained; 0 at the first step of a warm-up."""
        if self.warmup_samples and samples <= self.warmup_samples:
            return self.highest * samples / self.warmup_samples
        if self.style == "constant":
            return self.highest
        if samples > self.decay_samples:
            return self.lowest
        if self.style == "inverse-square-root":
            return max(self.lowest, self.highest * math.sqrt(max(self.warmup_samples, 1) / max(samples, 1)))
        done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        left = 1 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1)
        return self.lowest + left * (self.highest - self.lowest)


#: DeepSpeed's own default, in elements: 2 GB a rank in float32, whatever the size of the model.
_BUCKET = 500_000_000


def deepspeed_config(args: Arguments, *, global_batch_size: int, num_parameters: int) -> dict[str, Any]:
    """Build the config for ``deepspeed.initialize``.

    Args:
        args: the flags; ``deepspeed_config`` names a file to start from.
        global_batch_size: samples of the first step.
        num_parameters: of this rank's model; no buffer needs to be larger.

    Raises:
        UsageError: the file cannot be read, or says something else than a flag.
    """
    ours: dict[str, Any] = {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": args.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }
    if args.bf16:
        ours["bf16"] = {"enabled": True}
    if args.fp16:
        ours["fp16"] = {"enabled": True}
    if args.universal_checkpoint:
        ours["checkpoint"] = {"load_universal": True}
    config = ours if args.deepspeed_config is None else _merge(_read(args.deepspeed_config), ours, where="")
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        config["zero_optimization"].setdefault(bucket, min(_BUCKET, max(num_parameters, 1)))
    return config


def _read(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read --deepspeed-config {path}", found=str(error), expected="JSON") from error
    if not isinstance(config, dict):
        raise UsageError(f"--deepspeed-config {path} is not a DeepSpeed config", found=type(config).__name__)
    # The optimizer and its schedule are the program's; batch sizes are flags.
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise UsageError(
                f"the DeepSpeed config has its own {key}",
                found=f"{key} in {path}",
                expected="--lr, --lr-decay-style, --weight-decay and so on",
                action=f"remove {key} from the file",
            )
    return config


def _merge(base: dict[str, Any], ours: dict[str, Any], *, where: str) -> dict[str, Any]:
    merged = dict(base)
    for key, value in ours.items():
        name = f"{where}.{key}" if where else key
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value, where=name)
        elif key in merged and merged[key] not in (value, "auto"):
            raise UsageError(
                "the DeepSpeed config and the flags disagree",
                found=f"{name} is {merged[key]!r} in the file, {value!r} by the flags",
                expected="the same, or 'auto' in the file",
                action=f"remove {name} from the file, or change the flag",
            )
        else:
            merged[key] = value
    return merged


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
