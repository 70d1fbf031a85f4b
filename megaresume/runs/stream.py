"""``megaresume stream DATA.yaml --samples A:B``: shows these samples of the stream."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.batches.open import open_stream
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.command_line import number_range
from megaresume.data.layout import bin_path, idx_path, prefix_of
from megaresume.data.spans import has_spans
from megaresume.runs.answer import Answer, optional
from megaresume.runs.trace.trace import ShardRecords, record_words
from megaresume.stream.errors import UsageError, parse_json
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan
from megaresume.stream.progress import progress
from megaresume.stream.skips import absolute
from megaresume.stream.source import count_trained
from megaresume.stream.state import FORMAT, StreamState
from megaresume.stream.stream import Stream

#: Most samples shown at once, as their plan is in memory.
MOST_SAMPLES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "data", nargs="+", metavar="DATA", help="a data.yaml, or the arguments of Megatron's --data-path"
    )
    parser.add_argument(
        "--samples", metavar="A:B", help="samples A to B-1 (default: the first 8, or the 8 that follow --state)"
    )
    parser.add_argument("--seq-length", type=int, help="tokens per sample, if the data config does not set it")
    parser.add_argument("--seed", type=int, help="if the data config does not set it")
    parser.add_argument("--split", help="shares of train, valid and test, as in Megatron: 969,30,1")
    parser.add_argument("--part", choices=["train", "valid", "test"], default="train", help="part of the split")
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="continue from the data state in this file: SAVE/megaresume/step_0000010.json, or a state's JSON",
    )
    parser.add_argument("--summary", action="store_true", help="totals only, not every sample")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Show the samples."""
    samples = None if args.samples is None else number_range("--samples", args.samples, 0)
    data = args.data[0] if len(args.data) == 1 and args.data[0].endswith((".yaml", ".yml")) else args.data
    _check_paths(data, args.state)
    seed = 1234 if args.seed is None else args.seed
    stream = open_stream(data, seq_length=args.seq_length, seed=seed, split=args.split, part=args.part)
    if args.state is not None:
        stream.restore(_state(Path(args.state)))
    first, stop = samples or (stream.start, stream.start + 8)
    _check_size(first, stop)
    return _look(stream, stream.plan(first, stop), summary=args.summary).give(_text, as_json=args.json)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """The share of a source in some samples."""

    segments: int
    tokens: int
    #: the source's share of all tokens, and of all weights.
    share: float
    weight: float
    #: labels that are trained; None if the source does not say.
    trained: int | None = optional()


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSample:
    """One sample, with its segments as ``megaresume trace`` shows them."""

    sample: int
    #: the sample's number if no samples were left out; None: the same.
    absolute: int | None = optional()
    tokens: int
    #: the hash of the sample, and the digest of all up to it: 16 hex digits.
    hash: str
    digest: str
    segments: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSamples(Answer):
    """Samples ``first`` to ``stop - 1`` of a stream."""

    first: int
    stop: int
    seq_length: int
    packing: str
    tokens: int
    #: share of positions with a token.
    fill: float
    sources: dict[str, SourceShare]
    #: the samples; None: only the totals were requested.
    samples: list[StreamSample] | None = optional()


def _check_paths(data: str | list[str], state: str | None) -> None:
    """Refuse a missing path on the command line as bad usage; paths inside a data config are checked elsewhere."""
    missing = [] if state is None or Path(state).is_file() else [(state, "a file with a data state")]
    for word in data if isinstance(data, list) else ():
        prefix = prefix_of(word)
        if not re.fullmatch(r"[0-9.eE+-]+", word) and not (idx_path(prefix).is_file() or bin_path(prefix).is_file()):
            missing.append((word, "a data.yaml, or the common part of a .bin and an .idx"))
    for path, expected in missing:
        raise UsageError(f"{path} does not exist", found="no such file", expected=expected, action="check the path")


def _state(path: Path) -> StreamState:
    """Read a state: from a record beside a checkpoint, or from the output of `StreamState.to_json`."""
    try:
        data = parse_json(path.read_bytes())
    except (OSError, ValueError):
        data = None  # the reader of records reports what is wrong
    if isinstance(data, dict) and data.get("format") == FORMAT:
        return StreamState.from_json(data)
    return read_step_file(path).stream


def _check_size(first: int, stop: int) -> None:
    if stop - first > MOST_SAMPLES:
        raise UsageError(
            "too many samples at once",
            found=f"{stop - first} samples",
            expected=f"at most {MOST_SAMPLES}",
            action=f"for example --samples {first}:{first + MOST_SAMPLES}",
        )


def _samples(stream: Stream, plan: Plan) -> list[StreamSample]:
    """Every sample of the plan. Reads image-text records, which takes time with a store."""
    records, samples = ShardRecords(stream.sources), []
    with progress("reading samples", len(plan), "samples") as advance:
        for sample in range(plan.first, plan.stop):
            samples.append(_sample(stream, plan, sample, records))
            advance(1)
    return samples


def _sample(stream: Stream, plan: Plan, sample: int, records: ShardRecords) -> StreamSample:
    names = [s.name for s in stream.config.sources]
    segments = [
        {
            "source": names[s.source],
            "epoch": s.epoch,
            "document": s.document,
            "offset": s.offset,
            "length": s.length,
            **records.place(s.source, s.document),
            **records.describe(s.source, s.document),
        }
        for s in plan.segments(sample)
    ]
    index, number = sample - plan.first, absolute(stream.skips.ranges, sample)
    return StreamSample(
        sample=sample,
        absolute=number if number != sample else None,
        tokens=sum(s["length"] for s in segments),
        hash=f"{int(plan.hashes[index]):016x}",
        digest=f"{int(plan.digests[index]):016x}",
        segments=segments,
    )


def _trained(stream: Stream, plan: Plan) -> dict[int, Any]:
    """Trained labels of each segment, for sources that say which labels are: int64[n] over all segments."""
    found = {}
    for i, source in enumerate(stream.sources):
        if has_spans(source):
            mine = plan.table[:, SOURCE] == i
            segments = plan.table[mine]
            found[i] = np.zeros(len(plan.table), np.int64)
            found[i][mine] = count_trained(source, segments[:, DOCUMENT], segments[:, OFFSET] + 1, segments[:, LENGTH])
    return found


def _look(stream: Stream, plan: Plan, *, summary: bool) -> StreamSamples:
    config = stream.config
    lengths, which = plan.table[:, LENGTH], plan.table[:, SOURCE]
    total = int(lengths.sum())
    weights = sum(s.weight for s in config.sources)
    trained = _trained(stream, plan)
    sources = {
        s.name: SourceShare(
            segments=int(np.count_nonzero(which == i)),
            tokens=int(lengths[which == i].sum()),
            share=round(int(lengths[which == i].sum()) / total, 6) if total else 0.0,
            weight=round(s.weight / weights, 6),
            trained=int(trained[i].sum()) if i in trained else None,
        )
        for i, s in enumerate(config.sources)
    }
    return StreamSamples(
        first=plan.first,
        stop=plan.stop,
        seq_length=config.seq_length,
        packing=config.packed_by,
        tokens=total,
        fill=round(total / (len(plan) * config.seq_length), 6),
        sources=sources,
        samples=None if summary else _samples(stream, plan),
    )


def _text(found: StreamSamples) -> str:
    lines = []
    for sample in found.samples or ():
        parts = [
            f"{s['source']}:{s['document']}"
            + (f"[{s['offset']}:{s['offset'] + s['length']}]" if s["offset"] else f"[:{s['length']}]")
            + (f" epoch {s['epoch']}" if s["epoch"] else "")
            + record_words(s)
            for s in sample.segments
        ]
        fill = f"{100 * sample.tokens / found.seq_length:6.2f} %"
        number = f"  absolute {sample.absolute:>9}" if sample.absolute is not None else ""
        lines.append(f"sample {sample.sample:>9}{number}  {fill}  {sample.hash}  {', '.join(parts)}")
    if lines:
        lines.append("")
    lines.append(
        f"samples {found.first} to {found.stop - 1}: {found.tokens:,} tokens, "
        f"{100 * found.fill:.3f} % of {found.seq_length} a sample ({found.packing})"
    )
    width = max(len(name) for name in found.sources)
    lines.append(f"  {'source':<{width}}  {'segments':>10}  {'tokens':>14}  {'share':>8}  {'weight':>8}")
    for name, s in found.sources.items():
        words = f"  {name:<{width}}  {s.segments:>10,}  {s.tokens:>14,}  {s.share:>8.4f}  {s.weight:>8.4f}"
        lines.append(words + (f"  {s.trained:,} trained" if s.trained is not None else ""))
    return "\n".join(lines)
