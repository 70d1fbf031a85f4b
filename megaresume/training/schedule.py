"""The learning rate as a pure function of trained samples: nothing to save, nothing to restore.

The shapes are Megatron-LM's (megatron.core.optimizer_param_scheduler), which counts in samples as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaresume.stream.batches import BatchSchedule
from megaresume.training.arguments import Arguments, DecayStyle

__all__ = ["LearningRate"]


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
