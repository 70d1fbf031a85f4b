"""What a change of the blend means: per source what was seen, what is left of its epoch, and how long that lasts."""

from __future__ import annotations

from dataclasses import dataclass

from megaresume.stream.config import StreamConfig
from megaresume.stream.state import StreamState

__all__ = ["SourceOutlook", "outlook", "outlook_lines"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOutlook:
    """One source at a state, under the weights that hold from there on."""

    name: str
    #: of the blend, 0 to 1.
    share: float
    #: documents and tokens drawn since the start of the run.
    documents: int
    tokens: int
    #: 0-based.
    epoch: int
    #: pieces of that epoch that were not drawn yet (documents, while nothing was), and all of them.
    remaining: int
    size: int
    #: samples until the epoch is over, about; None: the source is not drawn.
    samples_left: int | None


def outlook(state: StreamState, config: StreamConfig) -> list[SourceOutlook]:
    """Every source of a state under a config.

    The samples that an epoch still lasts are an estimate: from the average length of the source's documents, and from
    how full the samples of the run were so far.
    """
    total = sum(source.weight for source in config.sources)
    length = float(config.seq_length)
    if state.samples:
        length *= min(state.tokens / (state.samples * float(_seq_length(state))), 1.0)
    result = []
    for source in config.sources:
        cursor, fingerprint = state.sources.get(source.name), state.fingerprints.get(source.name)
        documents = 0 if fingerprint is None else fingerprint.documents
        remaining = size = documents
        if cursor is not None and cursor.eras:
            remaining, size = cursor.left, cursor.size
        share = source.weight / total
        left: int | None = None
        if fingerprint is not None and documents and share:
            tokens = fingerprint.tokens * remaining / size
            # Of all tokens, or of all documents, the source has its share.
            per_sample = share * length
            if config.blend.unit == "documents":
                average = sum(
                    s.weight / total * state.fingerprints[s.name].tokens / max(state.fingerprints[s.name].documents, 1)
                    for s in config.sources
                    if s.name in state.fingerprints
                )
                per_sample = share * fingerprint.tokens / documents / max(average, 1e-9) * length
            left = round(tokens / max(per_sample, 1e-9))
        result.append(
            SourceOutlook(
                name=source.name,
                share=share,
                documents=0 if cursor is None else cursor.documents,
                tokens=0 if cursor is None else cursor.tokens,
                epoch=0 if cursor is None else cursor.epoch,
                remaining=remaining,
                size=size,
                samples_left=left,
            )
        )
    return result


def _seq_length(state: StreamState) -> int:
    """The average over the stages so far, by samples."""
    ends = [stage.first for stage in state.stages[1:]] + [state.samples]
    weighted = sum((end - s.first) * int(s.config["seq_length"]) for s, end in zip(state.stages, ends, strict=True))
    return max(weighted // max(state.samples, 1), 1)


def outlook_lines(state: StreamState, config: StreamConfig, global_batch_size: int) -> list[str]:
    """The outlook as a table, for logs."""
    rows = outlook(state, config)
    width = max(len(row.name) for row in rows)
    lines = [f"{'source':<{width}}  {'share':>7}  {'seen':>12}  {'epoch':>5}  {'remaining':>12}  epoch lasts until"]
    for row in rows:
        seen = f"{row.documents:>12,}  {row.epoch:>5}  {row.remaining:>12,}"
        until = "not drawn"
        if row.samples_left is not None:
            sample = state.samples + row.samples_left
            until = f"about sample {sample:,}, {row.samples_left // global_batch_size:,} steps from here"
        lines.append(f"{row.name:<{width}}  {row.share:>7.4f}  {seen}  {until}")
    return lines
