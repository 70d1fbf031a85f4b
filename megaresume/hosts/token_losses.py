"""The loss of each label, without a call by the user, for ``metrics="losses"``.

    `LogitLosses`   under Hugging Face's Trainer and DeepSpeed's engine, from the logits of the model
        loss, outputs.logits       cross entropy of each label, without a gradient, one row at a time
    `TokenLosses`   common with Megatron's, whose model returns the loss of each token itself
        compares their sum with ``loss`` at the first micro-batch: is this what is trained, and are labels shifted?

The training is not affected: nothing here has a gradient, and the loss is the trainer's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megaresume.batches.items import IGNORED
from megaresume.stream.errors import UsageError

log = logging.getLogger(__name__)

#: allowed relative distance between the trainer's loss and the mean of ours: it may be rounded to bfloat16.
NEAR = 0.02

#: gets float[m, L] losses, at the positions of their labels, and bool or float[m, L]: which are trained.
Take = Callable[[Tensor, Tensor], object]


class TokenLosses:
    """The losses of every ``every``-th micro-batch, until it turns out that they are not what is trained.

    Args:
        every: take the losses of every ``every``-th micro-batch.
        take: gets them.
        instead: what the user can call if they are not available automatically.
    """

    def __init__(self, every: int, take: Take, *, instead: str) -> None:
        self._every, self._take, self._instead = every, take, instead
        self._seen = 0
        self._is_over = False

    def wants(self) -> bool:
        """Whether the losses of the next micro-batch are to be taken."""
        self._seen += 1
        return not self._is_over and (self._seen - 1) % self._every == 0

    def take(self, losses: Tensor, counts: Tensor) -> None:
        """Pass them on; if they are not those of the samples, stop."""
        try:
            self._take(losses, counts)
        except UsageError as error:
            self.stop(error.line)

    def stop(self, why: str) -> None:
        """Take no more losses, and log why."""
        if not self._is_over:
            self._is_over = True
            log.warning(
                "megaresume: metrics: losses: %s: there are no losses by source; %s (docs/metrics.md)",
                why,
                self._instead,
            )


def distance(loss: float, total: float, *numbers: float) -> float:
    """The relative distance between a loss and a total divided by one of some numbers, ignoring zeros. Infinity if none
    is left, or something is NaN.
    """
    means = [total / number for number in numbers if number]
    far = [abs(loss - mean) / max(abs(mean), 1e-6) for mean in means]
    return min((one for one in far if one == one), default=math.inf)


class LogitLosses(TokenLosses):
    """Computes losses if the model's loss is the cross entropy of its labels. See `TokenLosses`."""

    #: whether a label is compared with the logits before it; None: unknown so far.
    _is_shifted: bool | None = None

    def look(self, inputs: Mapping[str, Any], loss: Any, outputs: Any, *, items: Any = None, ours: Any = None) -> None:
        """Take the losses of a micro-batch.

        Args:
            inputs: of the model: ``labels``, integers[m, L], with -100 for untrained ones; or ``shift_labels``, which
                transformers prefers, and does not shift.
            loss: the trainer's.
            outputs: of the model.
            items: by which the trainer divides the sum; None: the number of labels.
            ours: bool[], on the device: whether it is the expected micro-batch; None: it is.
        """
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
        labels = inputs.get("labels") if (whole := inputs.get("shift_labels")) is None else whole
        if not (isinstance(labels, Tensor) and isinstance(logits, Tensor) and isinstance(loss, Tensor)):
            self.stop("the model gives no logits and loss, or is given no labels")
            return
        if logits.dim() != labels.dim() + 1 or labels.dim() != 2 or logits.shape[:2] != labels.shape:
            self.stop(f"logits {list(logits.shape)} are not one row for each of the labels {list(labels.shape)}")
            return
        is_shifted = self._is_shifted
        if is_shifted is None:
            is_shifted = self._find(labels, logits, loss, items, (False,) if whole is not None else (True, False))
        if is_shifted is None:
            self.stop("the loss of the model is not the cross entropy of its labels")
            return
        losses, counts = token_losses(logits, labels, is_shifted=is_shifted)
        self.take(losses, counts if ours is None else counts.to(losses.device) & ours)

    def _find(self, labels: Tensor, logits: Tensor, loss: Tensor, items: Any, ways: Sequence[bool]) -> bool | None:
        """Whether labels are shifted, found out by the model's loss; None if it is another loss. Waits for the device.

        Untrained weights have nearly the same losses both ways. Then the nearer one is used, and the next micro-batch
        checks again.
        """
        found, parts = float(loss.detach()), [] if items is None else [float(items)]
        far: list[tuple[float, bool]] = []
        for is_shifted in ways:
            losses, counts = token_losses(logits, labels, is_shifted=is_shifted)
            total = float(losses.sum(dtype=torch.float64))
            far.append((distance(found, total, max(int(counts.sum()), 1), *parts), is_shifted))
        far.sort()
        nearest, is_shifted = far[0]
        if nearest > NEAR:
            return None
        if all(other > NEAR or other > 10 * nearest + 1e-5 for other, _ in far[1:]):
            self._is_shifted = is_shifted
        return is_shifted


def token_losses(logits: Tensor, labels: Tensor, *, is_shifted: bool) -> tuple[Tensor, Tensor]:
    """The cross entropy of each label, at its own position, and which labels are trained: float32[m, L], bool[m, L].

    Args:
        logits: float[m, L, V].
        labels: integers[m, L].
        is_shifted: whether a label is compared with the logits of the position before it.
    """
    with torch.no_grad():
        counts = labels != IGNORED
        losses = torch.zeros(labels.shape, dtype=torch.float32, device=logits.device)
        first = int(is_shifted)
        if is_shifted:
            counts = counts.clone()
            counts[:, 0] = False
        for row in range(len(labels)):  # a float32 copy of all logits at once would be large
            losses[row, first:] = torch.nn.functional.cross_entropy(
                logits[row, : logits.shape[1] - first].float(),
                labels[row, first:].to(logits.device),
                ignore_index=IGNORED,
                reduction="none",
            )
        return losses, counts
