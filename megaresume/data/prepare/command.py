"""``megaresume prepare``: text, rows, conversations or a directory to a Megatron corpus; tar shards to an index."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megaresume.command_line import at_least, given_of, names_of
from megaresume.data.prepare.command_shards import add_shard_arguments, run_shards, wants_shards
from megaresume.encoding.text.conversations import STYLES
from megaresume.stream.errors import UsageError

if TYPE_CHECKING:
    from megaresume.data.prepare.chat import ChatOptions
    from megaresume.data.prepare.corpus import PrepareSummary


DESCRIPTION = """\
Builds OUTPUT.bin and OUTPUT.idx, which Megatron opens, and OUTPUT.megaresume.json, which remembers the tokenizer.
With --index-only OUTPUT.places stands instead of the .bin: the inputs stay what is read.
Of tar shards it builds OUTPUT.shards.idx: where each record lies, and how many tokens it takes.
If it is killed, the same command continues where it stopped. The result does not depend on --workers or --part.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="a text file (.txt .md .rst), JSON lines or an array of rows (.jsonl .ndjson .json), CSV (.csv .tsv), "
        "any of them with .gz .bz2 .xz or .zst; Parquet or Arrow (.parquet, .arrow); all also as a pattern "
        "('data/*.jsonl') or at a URL ('s3://bucket/*.jsonl'); a directory of files, or one that Hugging Face's "
        "save_to_disk wrote; - for standard input; or "
        "tar shards ('shards/pairs-{000000..000127}.tar', local or on an object store), a directory or "
        "metadataset.yaml of Energon",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="output prefix, without .bin, .idx or .shards.idx"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json, or a directory with one (default: bytes)"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="end every document with the end-of-document token (default: yes; with --chat: no)",
    )
    parser.add_argument(
        "--eod-token", metavar="TEXT", help="that token, if it has an unusual name (default: <|endoftext|>, </s>, ...)"
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--json-key",
        metavar="KEY",
        help="key of the text in rows (default: text), or of the messages with --chat; meta.text: a key in a key",
    )
    text.add_argument(
        "--text-unit",
        choices=("file", "line", "paragraph"),
        default="file",
        help="what counts as a document in a text file (default: the file)",
    )
    text.add_argument(
        "--glob", default="**/*", metavar="PATTERN", help="files of a directory (default: all, at any depth)"
    )
    text.add_argument(
        "--format", choices=("text", "jsonl", "json", "csv"), help="format of all files, whatever their names"
    )
    text.add_argument(
        "--invalid-utf8",
        choices=("error", "replace", "skip"),
        default="error",
        help="for text that is not UTF-8: stop, insert U+FFFD, or leave the document out (default: stop)",
    )
    parser.add_argument(
        "--bad-lines",
        choices=("error", "skip"),
        default="error",
        help="for rows that are not an object with a text or a conversation: stop, or leave them out and count them "
        "(default: stop; the same command with skip continues from there)",
    )
    text.add_argument(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="type of the tokens in the .bin (default: uint16 for vocabularies below 65500, otherwise int32)",
    )
    parser.add_argument(
        "--workers", type=int, default=_cores(), metavar="N", help="processes (default: one per core, here %(default)s)"
    )
    text.add_argument(
        "--block-bytes",
        type=at_least(1),
        metavar="N",
        help="text per unit of work; a kill loses at most one per worker (default: 4 to 64 MiB, by input size)",
    )
    text.add_argument(
        "--part",
        metavar="K/N",
        help="make part K of N of the work, from 1, on one of several machines; the same command without --part, after "
        "all of them, merges",
    )
    text.add_argument(
        "--index-only",
        action="store_true",
        help="write no .bin but OUTPUT.places: lengths and places alone; the inputs stay, and tokens are made of them "
        "while they are trained on",
    )
    parser.add_argument("--repeat-inputs", action="store_true", help="read an input as often as it is named")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing corpus")
    parser.add_argument("--restart", action="store_true", help="discard what a killed run left, and start over")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    # The flags for each kind of input, so that those for another kind are refused.
    only = {"text_only": names_of(text), "chat_only": add_chat_arguments(parser)}
    parser.set_defaults(parser=parser, **only, shards_only=add_shard_arguments(parser))


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the corpus is complete.

    Raises:
        MegaresumeError: see `megaresume.data.prepare.corpus.prepare`.
    """
    from megaresume.data.documents import TextOptions
    from megaresume.data.inputs import expand_shards
    from megaresume.data.prepare.corpus import PrepareOptions, prepare
    from megaresume.data.shard_files import ShardFiles

    if wants_shards(args):
        return run_shards(args)
    options = PrepareOptions(
        tokenizer=args.tokenizer,
        eod_token=args.eod_token,
        append_eod=args.append_eod,
        dtype=args.dtype,
        glob=args.glob,
        format=args.format,
        text_unit=args.text_unit,
        chat=chat_options(args),
        text=TextOptions(json_key=args.json_key, invalid=args.invalid_utf8, bad_lines=args.bad_lines),
        workers=args.workers,
        block_bytes=args.block_bytes,
        overwrite=args.overwrite,
        restart=args.restart,
        part=None if args.part is None else _part(args.part),
        index_only=args.index_only,
        repeat_inputs=args.repeat_inputs,
        store=ShardFiles(),
    )
    inputs = [path for named in args.inputs for path in (expand_shards([named]) if _is_pattern(named) else [named])]
    piped = _piped(args) if "-" in args.inputs else None
    inputs = [str(piped) if path == "-" else path for path in inputs]
    summary = prepare(inputs, args.output, options)
    if piped is not None:
        piped.unlink()
    if args.json:
        json.dump(asdict(summary), sys.stdout, indent=1)
        print()
    else:
        _show(summary, args)
    return 0


def _show(summary: PrepareSummary, args: argparse.Namespace) -> None:
    """Print the summary as text."""
    rate = summary.text_bytes / max(summary.seconds, 1e-9) / 1e6
    counts = (
        (summary.empty, "empty"),
        (summary.skipped, "not UTF-8"),
        (summary.bad_lines, "bad lines"),
        (summary.too_long, "too long"),
    )
    left_out = [f"{n} {what}" for n, what in counts if n]
    left_out_note = f"; documents left out: {', '.join(left_out)}" if left_out else ""
    resumed_note = (
        f", {summary.resumed_blocks} of {summary.blocks} blocks from an earlier run" if summary.resumed_blocks else ""
    )
    made = f"{summary.prefix}.{'places' if args.index_only else 'bin'} and .idx"
    if summary.part is not None:
        made = f"part {args.part} of {summary.prefix}, which the same command without --part merges"
    print(f"{made}: {summary.documents} documents, {summary.tokens} tokens ({summary.dtype})")
    if summary.trained is not None:
        shortened = f"; {summary.shortened} conversations were too long and are shorter" if summary.shortened else ""
        share = 100 * summary.trained / max(summary.tokens, 1)
        print(f"{summary.prefix}.spans: {summary.trained} tokens are trained, {share:.1f} %{shortened}")
    print(f"  tokenizer {summary.tokenizer}, vocabulary {summary.vocab_size}, end of document {summary.eod}")
    print(f"  {summary.files} files, {summary.text_bytes / 1e6:.1f} MB of text{left_out_note}")
    if summary.to_unpack:
        print(f"  {summary.to_unpack} compressed: a machine that reads one unpacks it into MEGARESUME_CACHE, whole")
    for why in summary.first_left_out:
        print(f"  left out: {why}")
    for path in summary.linked_twice:
        print(f"  left out: {path} is a link to what is already read")
    print(f"  {summary.seconds:.1f} s, {rate:.1f} MB/s{resumed_note}")


def _piped(args: argparse.Namespace) -> Path:
    """Save standard input as a file beside the output, where a killed run finds it again.

    Raises:
        UsageError: several machines or epochs would have to read it; or its format is not given.
    """
    import filecmp
    import shutil

    from megaresume.stream.errors import UsageError

    flag = "--part" if args.part is not None else "--index-only" if args.index_only else "a second -"
    if args.part is not None or args.index_only or args.inputs.count("-") > 1:
        raise UsageError(
            f"standard input cannot be read with {flag}",
            found="the input -",
            expected="input that can be read again",
            action="write it into a file first: ... > rows.jsonl",
        )
    format = args.format or ("jsonl" if args.chat or args.json_key is not None else None)
    if format is None:
        raise UsageError(
            "the format of standard input is not given",
            found="the input - without --format",
            expected="text, jsonl, json (an array of rows) or csv",
            action="for example --format jsonl",
        )
    path = Path(f"{args.output}.stdin.{'txt' if format == 'text' else format}")
    new = path.with_name(f".{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(new, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
    if path.exists() and filecmp.cmp(new, path, shallow=False):
        new.unlink()  # the same command again: continue with the first one's file
    else:
        new.replace(path)
    return path


def _is_pattern(named: str) -> bool:
    """Whether it may match several files: a URL, or a path with wildcards or braces that is not a file."""
    from megaresume.data.remote import is_url

    return is_url(named) or (any(letter in named for letter in "*?[{") and not os.path.exists(named))


def _part(text: str) -> tuple[int, int]:
    from megaresume.stream.errors import UsageError

    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal()):
        raise UsageError("bad --part", found=text, expected="K/N, such as 3/16", action="correct --part")
    return int(number), int(of)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_chat_arguments(parser: argparse.ArgumentParser) -> list[str]:
    """Add the flags that only apply to conversations; returns their names in the namespace."""
    chat = parser.add_argument_group("conversations", "rows to tokens by the tokenizer's chat template, and .spans")
    chat.add_argument(
        "--chat", action="store_true", help="each row is a conversation; only what --train says is trained"
    )
    chat.add_argument(
        "--chat-rows",
        choices=("messages", "sharegpt", "alpaca", "prompt-completion", "preference"),
        help="shape of the rows (default: by the keys of the first one)",
    )
    chat.add_argument(
        "--chat-template",
        metavar="FILE",
        help=f"a jinja2 template instead of the tokenizer's own, or one of {', '.join(STYLES)}",
    )
    chat.add_argument("--chat-date", metavar="YYYY-MM-DD", help="what a template that writes today's date takes for it")
    chat.add_argument(
        "--train", default="assistant", metavar="ROLE[,ROLE]", help="whose messages are trained (default: assistant)"
    )
    chat.add_argument(
        "--train-turns",
        choices=("all", "last"),
        default="all",
        help="all of these messages, or only those after the user's last one (default: all)",
    )
    chat.add_argument(
        "--train-parts",
        default="text,thinking,tool-calls",
        metavar="PART[,PART]",
        help="of the assistant's messages (default: text,thinking,tool-calls)",
    )
    chat.add_argument("--any-role-order", action="store_true", help="take roles in any order that the template takes")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="tokens of a conversation (default: any number)")
    chat.add_argument(
        "--too-long",
        choices=("error", "turn", "cut", "skip"),
        help="conversations longer than --max-tokens: stop, end them after an answer that fits, cut them, or leave "
        "them out (default: stop)",
    )
    return names_of(chat)


def chat_options(args: argparse.Namespace) -> ChatOptions | None:
    """The conversation options in the flags; None if rows are not conversations.

    Raises:
        UsageError: a conversation flag without --chat, or a bad value.
    """
    from megaresume.data.prepare.chat import ChatOptions
    from megaresume.encoding.text.chat_template import PARTS
    from megaresume.encoding.text.turns import Selection

    if not args.chat:
        if given := given_of(args, args.chat_only):
            raise UsageError(
                f"{given[0]} goes with --chat",
                found=f"{given[0]} without --chat",
                expected="--chat, if each row is a conversation",
                action="add --chat, or leave it out",
            )
        return None
    roles, parts = (tuple(filter(None, words.split(","))) for words in (args.train, args.train_parts))
    if not roles or not parts or not set(parts) <= set(PARTS):
        raise UsageError(
            "bad --train or --train-parts",
            found=f"--train {args.train} --train-parts {args.train_parts}",
            expected=f"roles such as assistant,tool; and some of {','.join(PARTS)}",
            action="correct it",
        )
    return ChatOptions(
        template=args.chat_template,
        date=args.chat_date,
        shape=args.chat_rows,
        selection=Selection(roles=roles, turns=args.train_turns, parts=tuple(part for part in PARTS if part in parts)),
        any_order=args.any_role_order,
        max_tokens=args.max_tokens,
        too_long=args.too_long or "error",
    )
