"""What is refused before anything is planned: documents that would be cut or weighed and cannot be, or none left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError
from megaresume.stream.planning.stages import Course
from megaresume.stream.skips import DocumentList
from megaresume.stream.source import LengthSource, chunks, count_trained
from megaresume.stream.state import StreamState

#: Documents looked at, at a time, where the first few mostly answer.
FEW = 1 << 12


def check_whole(config: StreamConfig, sources: Sequence[LengthSource]) -> None:
    """Refuse a config under which, now or in a declared stage, a document would be cut that must not be.

    Args:
        config: with the stages to come.
        sources: one for each of the config's. Those whose documents are never cut, such as those with images, say so by
            ``whole`` (True); they may say by ``longest`` how many tokens the longest has, or else every length is asked
            for; and by ``advice`` what to do about a document that is too long.

    Raises:
        ConfigError: packing ``split`` with such a source, or samples shorter than its longest document.
    """
    for current, where in config.over_time():
        for entry, source in zip(current.sources, sources, strict=True):
            if not entry.weight or not getattr(source, "whole", False):
                continue
            name, length = entry.name, current.seq_length
            if current.packing.traits.cuts or entry.packing == "split":
                which = "packing.mode" if entry.packing is None else f"sources.{name}.packing"
                raise ConfigError(
                    f"packing 'split' would cut documents of source '{name}' that must stay whole{where}",
                    found=f"{which} split, which cuts documents anywhere",
                    expected="knapsack, best_fit or none: whole documents",
                    action="set packing: knapsack" if entry.packing is None else f"remove packing from source '{name}'",
                )
            if (longest := _longest(source)) > length:
                raise ConfigError(
                    f"source '{name}' has documents that are longer than a sample{where}",
                    found=f"up to {longest} tokens, and samples of {length}",
                    expected=f"documents of at most {length} tokens: these are never cut",
                    cause="a long text, large or many images, or a shorter seq_length than they were prepared for",
                    action=getattr(source, "advice", None)
                    or f"raise seq_length to {longest}; or hold the documents to a sample: max_tokens: {length} "
                    "with too_long: truncate (cut the text) or drop (leave the document out); or prepare smaller "
                    "images",
                )


def _longest(source: LengthSource) -> int:
    """What the source says, or else what its lengths say."""
    known = getattr(source, "longest", None)
    return max((int(source.lengths(ids).max()) for ids in chunks(source)), default=0) if known is None else int(known)


def check_trained(config: StreamConfig, sources: Sequence[LengthSource]) -> None:
    """Refuse a blend by trained tokens of sources that could not be weighed, now or in a declared stage.

    Args:
        config: with the stages to come.
        sources: one for each of the config's.

    Raises:
        ConfigError: a source decides what is trained as its documents are read, or trains nothing at all.
    """
    if config.blend.unit != "trained":
        return
    drawn = {entry.name for current, _ in config.over_time() for entry in current.sources if entry.weight}
    for entry, source in zip(config.sources, sources, strict=True):
        if entry.name in drawn and not hasattr(source, "trained_spans"):
            raise ConfigError(
                f"source '{entry.name}' does not say which tokens are trained before they are read",
                found=f"blend.unit trained, and a {type(source).__name__}",
                expected="corpora of .bin and .idx, which have a .spans or are trained entirely",
                action="set blend: {unit: tokens}",
            )
        # An empty one is refused where it is drawn.
        if entry.name in drawn and len(source) and not any(_trains(source, ids) for ids in chunks(source, FEW)):
            raise ConfigError(
                f"nothing of source '{entry.name}' is trained",
                found=f"{len(source):,} documents without a trained token, and blend.unit trained",
                expected="at least one trained token, since its weight is positive",
                cause="the corpus was prepared with --train flags that mark nothing of it",
                action=f"prepare it again, or give '{entry.name}' weight 0",
            )


def _trains(source: LengthSource, ids: npt.NDArray[np.int64]) -> bool:
    return bool(count_trained(source, ids, np.zeros_like(ids), source.lengths(ids)).any())


def check_growing(config: StreamConfig, sources: Sequence[LengthSource]) -> None:
    """Refuse a source that is declared to grow and cannot.

    Raises:
        ConfigError: it is a part of a split.
    """
    for entry, source in zip(config.sources, sources, strict=True):
        if entry.append is not None and getattr(source, "is_part", False):
            raise ConfigError(
                f"source '{entry.label}' cannot grow: it is a part of a split",
                found=f"append: {entry.append}, and split (or --split)",
                expected="one of the two",
                cause="the boundaries of a split move when a corpus grows: what was held out before would be trained",
                action="leave append out and add new documents as a separate source; or hold out documents with a "
                "separate corpus, without split",
            )


def check_remaining(course: Course, sources: Mapping[str, LengthSource], state: StreamState | None) -> None:
    """Refuse lists of documents after which a source would have none, though its weight is positive.

    Epochs in which everything is skipped are passed over, as empty documents are, if others come after them; and a
    source that ends in them (``max_epochs``) ends as it is configured to, if anything of it was left before.

    Args:
        course: the stages and what is left out of them.
        sources: those that are here, by the names of the course.
        state: that the run resumes from; None if it begins.

    Raises:
        ConfigError: naming the source.
    """
    lists: dict[str, list[DocumentList]] = {}
    for skip in course.skips.documents:
        if skip.until is None and skip.documents.source in sources:
            lists.setdefault(skip.documents.source, []).append(skip.documents)
    for name, of_source in lists.items():
        epoch, cursor = 0, None if state is None else state.sources.get(name)
        if cursor is not None and cursor.exhausted:
            continue
        if cursor is not None:
            epoch = cursor.epoch
        drawn, end = _drawn(course, name, state)
        if not drawn:
            continue
        bounds = {epoch, *(b for documents in of_source for b in documents.epochs or () if b > epoch)}
        # From the last bound on every epoch is the same one, forever.
        asked = [max(bounds)] if end is None else sorted(b for b in bounds if b < end)
        if not asked:
            continue  # it has ended
        if not any(_remains(sources[name], [d for d in of_source if d.holds_in(e)]) for e in asked):
            raise ConfigError(
                f"nothing of source '{name}' is left to train on",
                found=f"{len(sources[name]):,} documents; those that have a token are skipped: "
                f"{', '.join(map(str, of_source))}",
                expected="at least one document with a token in the epochs that the run goes through, since its weight "
                "is positive",
                action=f"give '{name}' weight 0, which begins a stage, or take documents off the list",
            )


def _drawn(course: Course, name: str, state: StreamState | None) -> tuple[bool, int | None]:
    """Whether a source is drawn in the current stage or a later one; the epoch with which it ends, if it does."""
    first = 0 if state is None else len(state.stages) - 1
    samples = 0 if state is None else state.samples
    drawn, ends = False, []
    for k in range(first, len(course.stages)):
        following = course.stages[k + 1] if k + 1 < len(course.stages) else None
        if following is not None and following.unit == "samples" and following.at <= samples:
            continue  # another stage begins right here
        entry = next(source for source in course.config(k).sources if source.name == name)
        if entry.weight > 0:
            drawn = True
            ends.append(None if entry.on_exhausted == "repeat" else entry.max_epochs)
    return drawn, None if None in ends else max((end for end in ends if end is not None), default=None)


def _remains(source: LengthSource, lists: Sequence[DocumentList]) -> bool:
    """Whether a document with a token is in none of the lists."""
    skipped = np.unique(np.concatenate([np.array(d.numbers(), np.int64) for d in lists] or [np.zeros(0, np.int64)]))
    for documents in chunks(source, FEW):
        documents = documents[~np.isin(documents, skipped)]
        if len(documents) and (source.lengths(documents) > 0).any():
            return True
    return False
