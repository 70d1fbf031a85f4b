"""What changed in Megatron's own datasets under guard, and what stock Megatron would do with the new flags.

Stock Megatron derives the order of its own datasets anew at every start, from their sizes. ``GPTDataset``
(megatron/core/datasets/gpt_dataset.py, the same from 0.8 on) shuffles all epochs of a corpus jointly, except that the
last one is separate if less than 80 % of it is needed. Both follow from the requested number of samples and determine
how often the random generator is used: with another number of epochs, or on the other side of 80 %, every sample
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from megaresume.hosts.megatron.guard.compare import compare, grown_too_far
from megaresume.hosts.megatron.guard.pinned import extendable
from megaresume.hosts.megatron.guard.record import BuilderRecord, ComponentRecord, Corpus, OrderRecord, Request
from megaresume.runs.answer import told
from megaresume.runs.plan.start import Finding, Findings, Flags
from megaresume.stream.errors import UsageError

#: The threshold in ``_build_document_index``: below this share of an epoch, the last one is shuffled separately.
_THRESHOLD = 0.80


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """How a corpus is shuffled."""

    epochs: int
    #: whether the last epoch is shuffled separately.
    last_apart: bool

    def __str__(self) -> str:
        if self.epochs == 1:
            return "1 epoch"
        return f"{self.epochs} epochs, the last one " + ("shuffled apart" if self.last_apart else "among the others")


def epochs_of(tokens: int, samples: int | None, *, seq_length: int, extra: int) -> Epochs:
    """How stock Megatron shuffles a corpus.

    Args:
        tokens: in one epoch.
        samples: requested; None: one epoch.
        seq_length: tokens per sample.
        extra: 1 if a sample needs the token after it (``add_extra_token_to_sequence``).
    """
    epochs = 1 if samples is None else max(ceil((samples * seq_length + extra) / tokens), 1)
    if epochs == 1 or samples is None:
        return Epochs(epochs=1, last_apart=False)
    from_last = samples - ((epochs - 1) * tokens - extra) // seq_length
    return Epochs(epochs=epochs, last_apart=from_last < int(_THRESHOLD * ((tokens - extra) // seq_length)))


#: samples requested from a corpus, by the set's samples and its weight: for one corpus; a blend from core 0.11 on; up
#: to 0.10.
_SIZES: tuple[Callable[[int, float], int], ...] = (
    lambda size, weight: size,
    lambda size, weight: ceil(ceil(size * weight) * (1 + 0.005)),
    lambda size, weight: ceil(size * weight * 1.005),
)


def requested_of(recorded: int, old: int, new: int, weight: float, *, alone: bool) -> int | None:
    """The number of samples that stock Megatron would request from a corpus.

    Args:
        recorded: the number that it requested when the whole set had ``old`` samples.
        new: samples of the whole set now.
        weight: normalised.
        alone: whether it is a single corpus without a weight.

    Returns:
        None if no known rule gives the recorded number (``--mid-level-dataset-surplus``).
    """
    for rule in _SIZES[:1] if alone else _SIZES[1:]:
        if rule(old, weight) == recorded:
            return rule(new, weight)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One corpus of the training set, as stock Megatron would build it."""

    path: str | None
    #: the epochs when the order was recorded, and with the new flags; None if unknown.
    before: Epochs | None
    now: Epochs | None

    @property
    def is_reshuffled(self) -> bool:
        """Whether its samples would come in another order."""
        return self.before != self.now


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarded:
    """What happens to Megatron's own datasets."""

    #: requested training samples, when recorded and now; None: one epoch.
    recorded_samples: int | None
    samples: int | None
    #: the corpora of the training set; None if stock Megatron's order is unknown, as it is not GPTDataset's.
    components: tuple[Component, ...] | None

    @told
    def stock_reshuffles(self) -> bool | None:
        """Whether stock Megatron would silently train in another order; None if unknown."""
        if self.components is None:
            return None
        if any(c.is_reshuffled for c in self.components if c.before is not None and c.now is not None):
            return True
        return None if any(c.before is None or c.now is None for c in self.components) else False


def train_size(flags: Flags) -> int | None:
    """The training samples that Megatron requests from its datasets; None if the flags do not say.

    Raises:
        UsageError: steps without a batch size, which the guard does not record.
    """
    if flags.train_samples is not None:
        return flags.train_samples
    if flags.train_iters is None:
        return None
    if flags.global_batch_size is None:
        raise UsageError(
            "the global batch size is not known",
            found=f"--train-iters {flags.train_iters}",
            expected="--global-batch-size as well: a run under guard does not record it",
            action="--global-batch-size B",
        )
    return flags.train_iters * flags.global_batch_size


def compare_with_record(record: OrderRecord, flags: Flags, findings: Findings) -> Guarded | None:
    """Compare the flags with the record; None if it is empty."""
    if not record.builders:
        return None
    size = train_size(flags)
    for ordinal, builder in enumerate(record.builders):
        # Only the first builder builds a training set.
        _compare(builder, size if ordinal == 0 else None, flags, findings)
    builder = record.builders[0]
    wanted = builder.sizes[0] if size is None else size
    guarded = Guarded(recorded_samples=builder.sizes[0], samples=wanted, components=_components(builder, wanted))
    if guarded.recorded_samples is not None and wanted is not None and wanted > guarded.recorded_samples:
        split = builder.splits[0]
        if split is not None and extendable(split):
            findings.note(
                f"the run continues after its {guarded.recorded_samples} recorded samples, up to {wanted}",
                cause="each corpus that runs out continues with further epochs; what is recorded does not move",
            )
    return guarded


def _compare(builder: BuilderRecord, size: int | None, flags: Flags, findings: Findings) -> None:
    now: dict[str, Any] = {"sequence_length": flags.seq_length, "random_seed": flags.seed, "split": flags.split}
    settings = dict(builder.settings) | {name: value for name, value in now.items() if value is not None}
    request = Request(
        cls=type(builder.dataset, (), {}),
        settings=settings,
        blend=builder.blend,
        blend_per_split=builder.blend_per_split,
        sizes=builder.sizes if size is None else (size, *builder.sizes[1:]),
        shares=(None, None, None),
    )
    found = compare(builder, request)
    differences = found.differences + grown_too_far(builder, request.sizes[0])
    findings += [
        Finding(
            kind="refused",
            headline=f"this would change the order of Megatron's datasets: {difference.name}",
            found=difference.found,
            expected=difference.recorded,
            cause="without a guard, samples would silently be repeated and skipped",
            action=f"restore: {difference.restore}. Or, if it is meant: --megaresume-accept {difference.name}",
        )
        for difference in differences
    ]
    for words in found.notes:
        findings.note(words)


def _components(builder: BuilderRecord, wanted: int | None) -> tuple[Component, ...] | None:
    split, size = builder.splits[0], builder.sizes[0]
    if split is None or not split.components or not extendable(split):
        return None
    blend = builder.blend if builder.blend is not None else (builder.blend_per_split or (None,))[0]
    weights: list[float] | None = None
    if blend is not None and blend[1] is not None:
        given = np.array([float.fromhex(weight) for weight in blend[1]])
        weights = (given / given.sum()).tolist()  # as Megatron: Python's own sum rounds differently from 3.12 on
    result = []
    for number, component in enumerate(split.components):
        alone = weights is None and len(split.components) == 1
        weight = 1.0 if weights is None else weights[number]
        result.append(_component(builder, component, size, wanted, weight, alone))
    return tuple(result)


def _component(
    builder: BuilderRecord, component: ComponentRecord, size: int | None, wanted: int | None, weight: float, alone: bool
) -> Component:
    unknown = Component(path=component.path, before=None, now=None)
    corpus = Corpus.at(component.path, None)
    if corpus is None or corpus.documents < component.documents[1]:
        return unknown
    tokens, settings = corpus.tokens(component.documents), builder.settings
    length = settings.get("sequence_length")
    if not tokens or not isinstance(length, int):
        return unknown
    extra = int(bool(settings.get("add_extra_token_to_sequence", True)))
    before = epochs_of(tokens, component.requested, seq_length=length, extra=extra)
    asked: int | None = None  # a blend without weights is one epoch, whatever was requested
    if component.requested is not None and size is not None and wanted is not None:
        asked = requested_of(component.requested, size, wanted, weight, alone=alone)
        if asked is None:
            return replace(unknown, before=before)
    return Component(path=component.path, before=before, now=epochs_of(tokens, asked, seq_length=length, extra=extra))
