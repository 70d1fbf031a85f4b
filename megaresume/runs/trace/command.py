"""``megaresume trace DIR --steps A:B``: exactly which documents those steps trained on, or will."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.names import split_root
from megaresume.command_line import at_least, number_range
from megaresume.data.source import Source
from megaresume.encoding.text.tokenizers import Tokenizer, load_tokenizer
from megaresume.render import write_bytes
from megaresume.runs import prompts
from megaresume.runs.directory import Run
from megaresume.runs.trace.by_loss import losses_as_text, rank_by_loss, with_texts
from megaresume.runs.trace.documents import Decoder, marked_ids
from megaresume.runs.trace.find import Occurrence, Sought, find, parse_documents
from megaresume.runs.trace.formats import (
    CSV_COLUMNS,
    Format,
    TraceWriter,
    csv_rows,
    heading,
    require_pyarrow,
    write_parquet,
)
from megaresume.runs.trace.images import ImagesWritten, write_images
from megaresume.runs.trace.replan import open_corpora
from megaresume.runs.trace.trace import RECORD_COLUMNS, Trace, TracePiece, image_words, record_words
from megaresume.stream.errors import UsageError, visible
from megaresume.stream.progress import Progress, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="the directory where the run saves its checkpoints")
    what = parser.add_argument_group("what to trace, one of")
    what.add_argument("--steps", metavar="A:B", help="steps A to B-1, counted from 1 as training prints them; or one")
    what.add_argument("--samples", metavar="A:B", help="samples A to B-1 of the stream, counted from 0; or one")
    what.add_argument(
        "--find", metavar="SOURCE:DOC[,...]", help="when documents were or will be seen; see --epochs, --until-step"
    )
    parser.add_argument("--epochs", type=at_least(1), metavar="N", help="with --find: plan ahead through N epochs")
    parser.add_argument("--until-step", type=at_least(1), metavar="N", help="with --find: plan ahead through step N")
    parser.add_argument(
        "--by-loss",
        action="store_true",
        help="their documents, those with the highest loss first, of a run that was given metrics= (--text shows them)",
    )
    parser.add_argument("--most", type=at_least(1), metavar="N", help="with --by-loss: documents to show (default: 20)")
    parser.add_argument(
        "--text",
        action="store_true",
        help="the text of every segment, by the corpus's tokenizer; ⟦⟧ marks what is trained, if not all is",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="its tokenizer.json; byte tokens need none")
    parser.add_argument("--eod-token", metavar="TEXT", help="as given to megaresume prepare")
    parser.add_argument(
        "--records", action="store_true", help="read every image-text record: its key, its images with sizes and tokens"
    )
    parser.add_argument(
        "--images",
        metavar="OUT_DIR",
        type=Path,
        help="write the pictures of every sample there, with a page that shows them",
    )
    parser.add_argument(
        "--augmented", action="store_true", help="with --images: also what augmentation made of each picture, as PNG"
    )
    parser.add_argument("--data", metavar="DATA.yaml", help="where the corpora are now (default: as recorded in DIR)")
    parser.add_argument("--split", help="the run's split, if neither DATA.yaml nor DIR has it: 969,30,1")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON lines, one sample (or found document) per line")
    form.add_argument("--csv", action="store_true", help="CSV, one segment per line")
    form.add_argument(
        "--parquet", metavar="FILE", type=Path, help="a Parquet file, one segment per row (needs pyarrow)"
    )


def run(args: argparse.Namespace) -> int:
    """Trace a run."""
    _check_flags(args)
    if args.find is not None and prompts.has_prompts(args.dir):
        return prompts.prove(args.dir, args.find).give(prompts.text, as_json=args.json)
    run = Run(*split_root(args.dir))
    sources = open_corpora(run.root, run.history.state, data=args.data, split=args.split)
    trace = Trace(run, sources)
    if args.find is not None:
        _find(args, trace)
    else:
        first, stop = _samples(args, trace)
        if args.by_loss:
            _by_loss(args, trace, sources, first, stop)
        elif args.parquet is not None:
            _parquet(args.parquet, trace, first, stop)
        elif args.images is not None:
            _images(args, trace, sources, first, stop)
        else:
            _write(args, trace, sources, first, stop)
    for note in trace.history.notes:
        _note(note)
    return 0


def _note(text: str) -> None:
    print(f"megaresume: note: {visible(text)}", file=sys.stderr)


#: Flags that need others, at least one of each group.
_NEEDED = {
    **dict.fromkeys(("epochs", "until-step"), ("find",)),
    **dict.fromkeys(("text", "csv", "parquet", "records", "images", "by-loss"), ("steps", "samples")),
    "most": ("by-loss",),
    **dict.fromkeys(("tokenizer", "eod-token"), ("text",)),
    "augmented": ("images",),
}


def _check_flags(args: argparse.Namespace) -> None:
    given = {name.replace("_", "-"): value for name, value in vars(args).items() if value not in (None, False)}
    what = [f"--{name}" for name in ("steps", "samples", "find") if name in given]
    if len(what) != 1:
        raise UsageError(
            "say what to trace",
            found=" and ".join(what) or "none of --steps, --samples, --find",
            expected="one of them",
            action="for example --steps 1:3",
        )
    for flag, needed in _NEEDED.items():
        if flag in given and not any(name in given for name in needed):
            names = " or ".join(f"--{name}" for name in needed)
            raise UsageError(
                f"--{flag} goes with {names}",
                found=f"--{flag}, and {what[0]} without {names}",
                action=f"add --{needed[0]}, or leave --{flag} out",
            )
    for flag in ("text", "records"):
        if flag in given and "parquet" in given:
            raise UsageError(
                f"--{flag} goes with text, --json or --csv",
                found=f"--{flag} with --parquet",
                action="leave one of the two out",
            )
    others = [f"--{name}" for name in ("records", "images", "csv", "parquet") if name in given]
    if "by-loss" in given and others:
        raise UsageError(
            f"--by-loss goes without {others[0]}",
            found=f"--by-loss with {', '.join(others)}",
            expected="text, or --json",
            action=f"leave {others[0]} out",
        )
    others = [f"--{name}" for name in ("text", "records", "csv", "parquet") if name in given]
    if "images" in given and others:
        raise UsageError(
            f"--images goes without {others[0]}",
            found=f"--images with {', '.join(others)}",
            expected="one of them: --images writes text and records too, into OUT_DIR/images.jsonl",
            action=f"leave {others[0]} out",
        )


def _samples(args: argparse.Namespace, trace: Trace) -> tuple[int, int]:
    if args.samples is not None:
        return number_range("--samples", args.samples, 0)
    return trace.steps.samples(*number_range("--steps", args.steps, 1))


@contextlib.contextmanager
def _progress(what: str, total: int, *, to_file: bool = False) -> Iterator[Progress]:
    """Show progress on standard error, unless the output goes to the same terminal."""
    if sys.stdout.isatty() and not to_file:
        yield lambda samples: None
        return
    with progress(what, total, "samples") as advance:
        yield advance


def _write(args: argparse.Namespace, trace: Trace, sources: Mapping[str, Source], first: int, stop: int) -> None:
    numbered = bool(trace.replan.skips.ranges)
    form: Format = "json" if args.json else "csv" if args.csv else "text"
    if form == "csv":
        columns = [*CSV_COLUMNS, *(["absolute"] if numbered else []), *_more_columns(args, trace)]
        print(",".join([*columns, *(["text"] if args.text else [])]))
    lines = _decoded(args, trace, sources, form) if args.text or args.records else None
    of_items = trace.is_of_items
    writer = TraceWriter(form, trace.names, numbered=numbered, shards=trace.records.shards, of_items=of_items)
    shown = ""
    with _progress("tracing", trace.work(first, stop)) as update:
        for piece in trace.pieces(first, stop, progress=update):
            if form == "text" and (title := heading(piece)) != shown:
                shown = title
                sys.stdout.write(title + "\n")
            if lines is not None:
                text = "".join(lines(piece))
                if form == "text":
                    sys.stdout.write(text)
                    continue
                data: bytes | memoryview = text.encode("utf-8", "surrogateescape")  # for a program: exact bytes
            else:
                data = writer.write(piece)
            write_bytes(data)


def _more_columns(args: argparse.Namespace, trace: Trace) -> list[str]:
    """Additional CSV columns for records of tar shards."""
    if not trace.records.shards:
        return []
    return [*RECORD_COLUMNS, *(["key", "images", "fault"] if args.records else [])]


def _decoded(
    args: argparse.Namespace, trace: Trace, sources: Mapping[str, Source], form: Format
) -> Callable[[TracePiece], Iterable[str]]:
    """A writer of pieces with the text of their segments, or with their records."""
    decoder = Decoder(sources, _tokenizer(args), _note, marks=form == "text") if args.text else None
    recorded = {(f.sample, f.source, f.document): f for f in trace.history.state.faults.kept}
    more = _more_columns(args, trace)

    def rows(piece: TracePiece) -> Iterator[dict[str, Any]]:
        for row in piece.rows() if decoder is None else decoder.rows(piece):
            for segment in row["segments"] if args.records else ():
                segment.update(trace.records.describe(trace.names.index(segment["source"]), segment["document"]))
                fault = recorded.get((row["sample"], segment["source"], segment["document"]))
                if fault is not None:
                    segment["fault"] = {"policy": fault.policy, "reason": fault.reason}
            yield row

    def cells(segment: dict[str, Any]) -> dict[str, Any]:
        """Turn lists and mappings into text."""
        images, fault = segment.get("images", ()), segment.get("fault")
        words = {"images": image_words(images), "fault": fault and f"{fault['policy']}: {fault['reason']}"}
        return segment | words

    def of_csv(piece: TracePiece) -> Iterator[str]:
        for row in rows(piece):
            row["segments"] = [cells(segment) for segment in row["segments"]]
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerows(csv_rows(row, more))
            yield out.getvalue()

    if form == "json":
        return lambda piece: (json.dumps(row, ensure_ascii=False) + "\n" for row in rows(piece))
    if form == "csv":
        return of_csv
    return lambda piece: (_text_of(row, of_items=trace.is_of_items) for row in rows(piece))


def _text_of(row: Mapping[str, Any], *, of_items: bool) -> str:
    names = ("step", "sample", "rank", "micro_batch")
    words = [f"{name.replace('_', '-')} {'?' if row[name] is None else row[name]}" for name in names]
    if "absolute" in row:
        words[1] += f" (absolute {row['absolute']})"
    tokens = [] if of_items else [f"{row['tokens']} tokens"]
    lines = ["  ".join([*words, *tokens, row["hash"]])]
    for s in row["segments"]:
        epoch = f" epoch {s['epoch']}" if s["epoch"] else ""
        part = "" if of_items else f"[{s['offset']}:{s['offset'] + s['length']}]"
        lines.append(f"  {s['source']}:{s['document']}{part}{epoch}{record_words(s)}")
        if "fault" in s:
            lines.append(f"    {s['fault']['policy']}: {s['fault']['reason']}")
        text = s["text"] if "text" in s else marked_ids(s.get("token_ids", []), s.get("trained", ()), s["offset"])
        lines += [f"    | {line}" for line in text.splitlines()]
    return "\n".join(lines) + "\n"


def _by_loss(args: argparse.Namespace, trace: Trace, sources: Mapping[str, Source], first: int, stop: int) -> None:
    with _progress("tracing", trace.work(first, stop)) as update:
        found = rank_by_loss(trace, first, stop, args.most or 20, progress=update)
    if args.text:
        found = with_texts(found, trace, Decoder(sources, _tokenizer(args), _note))
    found.give(losses_as_text, as_json=args.json)


def _tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    return load_tokenizer(args.tokenizer, eod_token=args.eod_token) if args.tokenizer or args.eod_token else None


def _parquet(path: Path, trace: Trace, first: int, stop: int) -> None:
    require_pyarrow()
    with _progress("tracing", trace.work(first, stop), to_file=True) as update:
        rows = write_parquet(path, trace.pieces(first, stop, progress=update))
    print(f"{rows:,} segments of samples {first} to {stop - 1} in {path}")


def _images(args: argparse.Namespace, trace: Trace, sources: Mapping[str, Source], first: int, stop: int) -> None:
    # First planned, then written: both take time.
    with _progress("writing images", trace.work(first, stop) + stop - first, to_file=True) as update:
        written = write_images(args.images, trace, sources, first, stop, augmented=args.augmented, progress=update)
    written.give(_images_text, as_json=args.json)


def _images_text(written: ImagesWritten) -> str:
    text = f"{written.images:,} images of {written.documents:,} documents"
    text += f" in samples {written.first} to {written.stop - 1}"
    if written.not_shown:
        text += f", {written.not_shown:,} of them not shown to the model"
    if written.faults:
        text += f"; {written.faults:,} documents masked or cut by their policy"
    return f"{text}\n{written.directory / 'index.html'}"


def _find(args: argparse.Namespace, trace: Trace) -> None:
    documents = parse_documents(args.find)
    until = None if args.until_step is None else trace.steps.samples(args.until_step + 1, args.until_step + 2)[0]
    ahead = 0 if until is None else max(until - trace.history.state.samples, 0)
    with _progress("looking for documents", ahead) as update:
        found = find(trace, documents, epochs=args.epochs, until_sample=until, progress=update)
    for document in found:
        document.give(partial(_found_text, of_items=trace.is_of_items), as_json=args.json)


def _found_text(found: Sought, *, of_items: bool) -> str:
    lines = [f"{found.source}:{found.document}" + ("" if of_items else f"  {found.tokens:,} tokens")]
    if not found.tokens:
        lines.append("  an empty document: passed over in every epoch")
    elif not found.occurrences:
        lines.append("  never: all epochs of the source that the data config allows were seen without it")
    for occurrence in found.occurrences:
        lines.append(f"  epoch {occurrence.epoch}  {occurrence.status}{_ahead(occurrence)}")
        for part in occurrence.parts:
            words = {"step": part.step, "sample": part.sample, "rank": part.rank, "micro-batch": part.micro_batch}
            where = "  ".join(f"{name} {'?' if value is None else value}" for name, value in words.items())
            within = "" if of_items else f"  place {part.place}  tokens [{part.offset}:{part.offset + part.length}]"
            lines.append(f"    {where}{within}")
    return "\n".join(lines)


def _ahead(occurrence: Occurrence) -> str:
    if occurrence.pieces_ahead is None:
        return ""
    text = f": {occurrence.pieces_ahead:,} pieces of the source come before it"
    if occurrence.about_sample is not None:
        step = occurrence.about_step
        text += f", about sample {occurrence.about_sample:,}" + ("" if step is None else f", step {step:,}")
    return text + " (--until-step or --epochs plans ahead)"
