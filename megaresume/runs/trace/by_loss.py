"""The documents of a run with the highest loss: ``megaresume trace RUN --steps A:B --by-loss``.

The run's processes recorded a sum for each segment (`megaresume.checkpoint.metrics`); the number of its sample tells
which document that is. If a sample was trained again after a kill, the later losses count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaresume.checkpoint.metrics.record import meter_dir
from megaresume.checkpoint.metrics.segments import Documents, SegmentLosses, read_sums
from megaresume.render import text_table
from megaresume.runs.answer import Answer, optional
from megaresume.runs.trace.documents import Decoder
from megaresume.runs.trace.trace import Trace, TracePiece
from megaresume.stream.errors import CheckpointError, listed
from megaresume.stream.kernel import DOCUMENT, SEGMENT_WIDTH, SOURCE
from megaresume.stream.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedDocument:
    """A document, and its loss in these steps."""

    source: str
    document: int
    #: mean over the tokens that are trained.
    loss: float
    tokens: int
    #: the samples in which it was trained.
    samples: Sequence[int]
    steps: Sequence[int]
    #: the contents of its segments in them, if requested: ``text`` or ``token_ids``.
    segments: Sequence[Mapping[str, Any]] | None = optional()


@dataclass(frozen=True, kw_only=True, slots=True)
class ByLoss(Answer):
    """The documents in some samples, ranked by loss."""

    #: [first, stop) samples; and how many of them have recorded losses.
    first: int
    stop: int
    found: int
    #: source -> mean loss, tokens.
    sources: Mapping[str, Mapping[str, float]]
    documents: Sequence[RankedDocument]


def rank_by_loss(trace: Trace, first: int, stop: int, most: int, *, progress: Progress) -> ByLoss:
    """Rank the documents in samples ``first .. stop``.

    Args:
        trace: of the run.
        first, stop: samples.
        most: number of documents to return.
        progress: see `Trace.pieces`.

    Raises:
        CheckpointError: no loss of these samples was recorded.
    """
    known = read_sums(meter_dir(trace.run.root), first, stop)
    documents = Documents(trace.names)
    places: dict[tuple[int, int], dict[int, int]] = {}
    found = 0
    for piece in trace.pieces(first, stop, progress=progress):
        steps, samples = piece.column("step").tolist(), piece.column("sample").tolist()
        for k, (step, sample) in enumerate(zip(steps, samples, strict=True)):
            sums = known.get(sample)
            begin, end = piece.starts[k : k + 2].tolist()
            if sums is None or len(sums) != end - begin:
                continue
            found += 1
            table = np.zeros((end - begin, SEGMENT_WIDTH), np.int64)
            table[:, SOURCE] = piece.column("source")[begin:end]
            table[:, DOCUMENT] = piece.column("document")[begin:end]
            numbers, counts = np.array([sample]), np.array([len(sums)])
            documents.add(table, SegmentLosses(numbers, counts, sums[:, 0], sums[:, 1].astype(np.int64)))
            for source, document in table[:, [SOURCE, DOCUMENT]].tolist():
                places.setdefault((source, document), {})[sample] = step
    if not found:
        raise CheckpointError(
            "there are no losses of these samples",
            found=f"nothing of samples {first} to {stop - 1} in {meter_dir(trace.run.root)}",
            expected="sums of losses, as meter.losses(batch, token_loss) writes them down",
            cause="the program was not given metrics=, or does not call meter.losses",
            action="docs/metrics.md shows the call",
        )
    ranked = []
    for one in documents.worst(most):
        where = places[trace.names.index(one.source), one.document]
        ranked.append(
            RankedDocument(
                source=one.source,
                document=one.document,
                loss=one.loss,
                tokens=one.tokens,
                samples=list(where),
                steps=sorted(set(where.values())),
            )
        )
    sources = {
        name: {"loss": total / tokens, "tokens": tokens}
        for name, (total, tokens) in documents.by_source().items()
        if tokens
    }
    return ByLoss(first=first, stop=stop, found=found, sources=sources, documents=ranked)


def with_texts(found: ByLoss, trace: Trace, decoder: Decoder) -> ByLoss:
    """Add the text of the documents."""
    wanted = {sample for document in found.documents for sample in document.samples}
    texts: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for piece in trace.pieces(min(wanted), max(wanted) + 1) if wanted else ():
        for part in _of_samples(piece, wanted):
            for row in decoder.rows(part):
                for segment in row["segments"]:
                    texts.setdefault((segment["source"], segment["document"]), []).append(segment)
    documents = [
        dataclasses.replace(one, segments=texts.get((one.source, one.document), [])) for one in found.documents
    ]
    return dataclasses.replace(found, documents=documents)


def _of_samples(piece: TracePiece, wanted: set[int]) -> Iterator[TracePiece]:
    for k, sample in enumerate(piece.column("sample").tolist()):
        if sample in wanted:
            begin, end = piece.starts[k : k + 2].tolist()
            yield dataclasses.replace(
                piece,
                samples=piece.samples[k : k + 1],
                hashes=piece.hashes[k : k + 1],
                segments=piece.segments[begin:end],
                starts=np.array([0, end - begin]),
            )


def losses_as_text(found: ByLoss) -> str:
    """The ranking as text."""
    head = f"samples {found.first:,} to {found.stop - 1:,}, losses of {found.found:,} of them"
    sources = [["source", "loss", "tokens"]]
    sources += [[name, f"{of['loss']:.4f}", f"{of['tokens']:,}"] for name, of in found.sources.items()]
    parts = [head, text_table(sources)]
    table = [["document", "loss", "tokens", "steps"]]
    for one in found.documents:
        steps = listed([f"{step:,}" for step in one.steps], 4)
        table.append([f"{one.source}:{one.document}", f"{one.loss:.4f}", f"{one.tokens:,}", steps])
    parts.append(text_table(table))
    for one in found.documents:
        for segment in one.segments or ():
            stop = segment["offset"] + segment["length"]
            text = segment.get("text", " ".join(map(str, segment.get("token_ids", []))))
            lines = "\n".join(f"  | {line}" for line in text.splitlines())
            parts.append(f"{one.source}:{one.document}[{segment['offset']}:{stop}]  loss {one.loss:.4f}\n{lines}")
    return "\n\n".join(parts)
