"""The loss of each label under Hugging Face's Trainer, from the logits of its model: ``metrics="losses"``.

    compute_loss(model, inputs)    asked for its outputs too
      loss, outputs.logits         cross entropy of each label, without a gradient, a row at a time
      their sum against ``loss``   at the first micro-batch: is this what the model trains on, and are labels shifted?

What is trained is left as it is: nothing of this has a gradient, and the loss is the one that the Trainer had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megaresume.batches.items import IGNORED

log = logging.getLogger(__name__)

#: how far, relatively, the loss of the model may be from the mean of ours: it may be rounded to bfloat16.
NEAR = 0.02


class TokenLosses:
    """Computes them, if the model's loss is the cross entropy of its labels.

    Args:
        every: of every so many micro-batches.
        take: is given float[m, L] losses, at the places of their labels, and bool[m, L]: which count.
    """

    def __init__(self, every: int, take: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        self._every, self._take = every, take
        self._seen = 0
        #: whether a label is compared with the logits before it; None: not known yet.
        self._is_shifted: bool | None = None
        self._is_over = False

    def wants(self) -> bool:
        """Whether it is the turn of the micro-batch that comes."""
        self._seen += 1
        return not self._is_over and (self._seen - 1) % self._every == 0

    def look(self, labels: Any, loss: Any, outputs: Any, items: Any) -> None:
        """Take the losses of a micro-batch.

        Args:
            labels: integers[m, L]; -100 does not count.
            loss: of the Trainer.
            outputs: of the model.
            items: by which the Trainer divides the sum; None: by the number of labels.
        """
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
        if not isinstance(labels, torch.Tensor) or not isinstance(logits, torch.Tensor):
            self._stop("the model gives no logits, or the batch has no labels")
        elif logits.dim() != labels.dim() + 1 or labels.dim() != 2 or logits.shape[:2] != labels.shape:
            self._stop(f"logits {list(logits.shape)} are not one row for each of the labels {list(labels.shape)}")
        elif self._is_shifted is None and not self._find(labels, logits, loss, items):
            self._stop("the loss of the model is not the cross entropy of its labels")
        else:
            self._take(*token_losses(logits, labels, is_shifted=bool(self._is_shifted)))

    def _find(self, labels: torch.Tensor, logits: torch.Tensor, loss: Any, items: Any) -> bool:
        """Compare with the loss of the model; waits for the device, once."""
        found = float(loss.detach())
        for is_shifted in (True, False):
            losses, counts = token_losses(logits, labels, is_shifted=is_shifted)
            total = float(losses.sum(dtype=torch.float64))
            means = [total / max(int(counts.sum()), 1)]
            if items is not None and float(items):
                means.append(total / float(items))
            if any(abs(found - mean) <= NEAR * max(abs(mean), 1e-6) for mean in means):
                self._is_shifted = is_shifted
                return True
        return False

    def _stop(self, why: str) -> None:
        self._is_over = True
        log.warning(
            "megaresume: metrics: losses: %s: there are no losses by source; call loader.meter.losses in compute_loss "
            "(docs/metrics.md)",
            why,
        )


def token_losses(logits: torch.Tensor, labels: torch.Tensor, *, is_shifted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross entropy of each label, at its own place, and which labels count: float32[m, L], bool[m, L].

    Args:
        logits: float[m, L, V].
        labels: integers[m, L].
        is_shifted: whether a label is compared with the logits of the place before it.
    """
    with torch.no_grad():
        counts = labels != IGNORED
        losses = torch.zeros(labels.shape, dtype=torch.float32, device=logits.device)
        first = int(is_shifted)
        if is_shifted:
            counts = counts.clone()
            counts[:, 0] = False
        for row in range(len(labels)):  # a float32 copy of all logits at a time would be large
            losses[row, first:] = torch.nn.functional.cross_entropy(
                logits[row, : logits.shape[1] - first].float(),
                labels[row, first:].to(logits.device),
                ignore_index=IGNORED,
                reduction="none",
            )
        return losses, counts
