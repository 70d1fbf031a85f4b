"""What stock Megatron would do with its own datasets: it derives their order anew at every start, from their sizes.

``GPTDataset`` (megatron/core/datasets/gpt_dataset.py, the same from 0.8 on) shuffles all epochs of a corpus jointly,
the last one apart where less than 80 % of it is needed. Both depend on the samples asked for, and both decide how
often the generator is drawn from: another number of epochs, or the other side of 80 %, and every sample is another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

__all__ = ["Epochs", "epochs_of", "requested_of"]

#: of an epoch, in `_build_document_index`.
_THRESHOLD = 0.80


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """How a corpus is shuffled."""

    epochs: int
    #: the last epoch by itself.
    last_apart: bool

    def __str__(self) -> str:
        if self.epochs == 1:
            return "1 epoch"
        return f"{self.epochs} epochs, the last one " + ("shuffled apart" if self.last_apart else "among the others")


def epochs_of(tokens: int, samples: int | None, *, seq_length: int, extra: int) -> Epochs:
    """How stock Megatron shuffles a corpus.

    Args:
        tokens: in one epoch.
        samples: asked for; None: one epoch.
        seq_length: tokens a sample.
        extra: 1 where a sample needs the token behind it (``add_extra_token_to_sequence``).
    """
    epochs = 1 if samples is None else max(ceil((samples * seq_length + extra) / tokens), 1)
    if epochs == 1 or samples is None:
        return Epochs(epochs=1, last_apart=False)
    from_last = samples - ((epochs - 1) * tokens - extra) // seq_length
    return Epochs(epochs=epochs, last_apart=from_last < int(_THRESHOLD * ((tokens - extra) // seq_length)))


#: samples of a corpus with this share of a blend of so many: alone, from 0.11 on, up to 0.10.
_SIZES: tuple[Callable[[int, float], int], ...] = (
    lambda size, weight: size,
    lambda size, weight: ceil(ceil(size * weight) * (1 + 0.005)),
    lambda size, weight: ceil(size * weight * 1.005),
)


def requested_of(recorded: int, old: int, new: int, weight: float, *, alone: bool) -> int | None:
    """Samples that stock Megatron would ask a corpus for.

    Args:
        recorded: what it asked for when the whole set had ``old`` samples.
        new: samples of the whole set now.
        weight: normalised.
        alone: a single corpus without a weight.

    Returns:
        None: the recorded number comes from no rule that is known (``--mid-level-dataset-surplus``).
    """
    for rule in _SIZES[:1] if alone else _SIZES[1:]:
        if rule(old, weight) == recorded:
            return rule(new, weight)
    return None
