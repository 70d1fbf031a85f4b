"""What is minimised, and what is reported: both the same whatever the data-parallel and the micro-batch size.

Minimised: the sum of the token losses of a global batch, divided by its G * S places. A mean over trained tokens of
each micro-batch (what many programs do) weighs a token by how full the *others* of its micro-batch are, and so
changes with the layout; places are constant, so DeepSpeed's averaging over micro-steps and ranks is exact. With
packed samples nearly all places are trained tokens. Adam does not feel the scale.

Reported: the sum of the token losses of the global batch, divided by its number of trained tokens, summed in float64.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["LossMeter", "loss_to_minimise"]


def loss_to_minimise(token_losses: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Sum of the counted token losses of a micro-batch over its places.

    Args:
        token_losses: float[m, S].
        loss_mask: float32[m, S], 1 where the label counts.

    Returns:
        float32 scalar.
    """
    return (token_losses.float() * loss_mask).sum() / loss_mask.numel()


class LossMeter:
    """Sums of token losses and of trained tokens, over micro-batches and then over data-parallel ranks."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, token_losses: torch.Tensor, loss_mask: torch.Tensor) -> None:
        """Count one micro-batch: float[m, S] each."""
        losses = (token_losses.detach().double() * loss_mask).sum()
        self._sums[0] += losses
        self._sums[1] += loss_mask.sum()

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[float, int]:
        """Add up over the ranks of a group (the data-parallel ranks).

        Returns:
            loss per trained token, and the number of trained tokens.
        """
        dist.all_reduce(self._sums, group=group)
        total, tokens = self._sums.tolist()
        return total / max(tokens, 1.0), int(tokens)
