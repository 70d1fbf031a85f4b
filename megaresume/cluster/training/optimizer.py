"""torch's AdamW, the learning rate, and the DeepSpeed config.

The learning rate is a pure function of trained samples: nothing to save, nothing to restore. The shapes are
Megatron-LM's (megatron.core.optimizer_param_scheduler), which counts in samples as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megaresume.cluster.training.arguments import Arguments, DecayStyle
from megaresume.stream.batches import BatchSchedule


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
        decay = args.train_samples if args.train_samples is not None else (args.train_iters or 0) * final
        warmup = args.lr_warmup_iters * final
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
        done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        left = 1 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1)
        return self.lowest + left * (self.highest - self.lowest)


#: of matrices.
WEIGHT_DECAY = 0.01
#: DeepSpeed's own default, in elements: 2 GB a rank in float32, whatever the size of the model.
_BUCKET = 500_000_000


def deepspeed_config(args: Arguments, *, global_batch_size: int, num_parameters: int) -> dict[str, Any]:
    """Build the config for ``deepspeed.initialize``.

    Args:
        args: the flags.
        global_batch_size: samples of the first step.
        num_parameters: of this rank's model; no buffer needs to be larger.
    """
    bucket = min(_BUCKET, max(num_parameters, 1))
    config: dict[str, Any] = {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": args.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }
    if args.bf16:
        config["bf16"] = {"enabled": True}
    return config


def build_optimizer(args: Arguments, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; matrices are decayed, vectors (biases, norms) are not, as in Megatron."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    betas = (0.9, args.adam_beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=args.lr, betas=betas, fused=device.type == "cuda")
