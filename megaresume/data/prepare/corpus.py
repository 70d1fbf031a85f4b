"""Builds a Megatron corpus from text, JSON lines or a directory: parallel, resumable, the same bytes every time.

    files -> BlockReader -> blocks -> workers: decode, tokenize -> parts -> merge -> .bin, .idx, sidecar

One process reads and splits the input, workers do the rest. Finished parts stay in ``PREFIX.prepare/`` until the corpus
is complete. Before that, several machines can each make the parts of their stretch of the input.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.data.documents import EncoderSpec, TextOptions, TextUnit, library_versions, unit_of
from megaresume.data.inputs import COMPRESSIONS, Format, InputFile, find_inputs
from megaresume.data.layout import DTYPES, bin_path, idx_path, prefix_of
from megaresume.data.prepare.blocks import block_bytes, check_part, cut
from megaresume.data.prepare.chat import ChatOptions, with_conversations
from megaresume.data.prepare.encode import SHOWN, Encoder, Part, PartFiles, make_parts, merge_parts
from megaresume.data.prepare.work import check_workers, disk_error
from megaresume.data.record_index import places_path
from megaresume.data.shard_files import ShardFiles
from megaresume.data.sidecar import sidecar_path
from megaresume.data.spans import spans_path
from megaresume.data.streams import of_content
from megaresume.encoding.text.tokenizers import Tokenizer, read_tokenizer_file, tokenizer_from_content
from megaresume.stream.errors import CorpusError, UsageError, require
from megaresume.stream.progress import progress

#: The integer types of tokens in Megatron.
DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES.values() if dtype.kind in "iu")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Everything that determines the content of the corpus, and how it is made."""

    #: file or directory; None: bytes.
    tokenizer: str | Path | None = None
    eod_token: str | None = None
    #: whether documents end with the tokenizer's end-of-document token; None: texts do, conversations do not, as their
    #: template determines how they end.
    append_eod: bool | None = None
    #: "auto": uint16 for vocabularies below 65500, otherwise int32, as Megatron does.
    dtype: str = "auto"
    #: the pattern for files in directories.
    glob: str = "**/*"
    #: the format of all files; None: by their names.
    format: Format | None = None
    #: what a document is in a text file.
    text_unit: TextUnit = "file"
    #: where the text of a row is; for conversations, see ``chat``.
    text: TextOptions = field(default_factory=TextOptions)
    #: rows are conversations; None: texts.
    chat: ChatOptions | None = None
    #: processes; the result does not depend on it.
    workers: int = 1
    #: decompressed bytes per unit of work; the result does not depend on it.
    block_bytes: int | None = None
    #: replace an existing corpus.
    overwrite: bool = False
    #: discard what a killed run left.
    restart: bool = False
    #: (K, N): only make the parts of stretch K of N, from 1; a later run without it merges them.
    part: tuple[int, int] | None = None
    #: no .bin, only lengths and places; tokens are made when they are read.
    index_only: bool = False
    #: read a file twice if it is given twice, instead of refusing it.
    repeat_inputs: bool = False
    #: reads inputs that are URLs.
    store: ShardFiles | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareSummary:
    """The result of preparing a corpus."""

    prefix: str
    files: int
    documents: int
    tokens: int
    #: documents without tokens, left out.
    empty: int
    #: documents that are not valid UTF-8, left out (``invalid: skip``).
    skipped: int
    #: lines that are not a JSON object with a text or a conversation, left out (``bad_lines: skip``).
    bad_lines: int
    #: conversations longer than ``max_tokens``: left out, and shortened.
    too_long: int
    shortened: int
    #: the first few of both: where they are, and what is wrong with them.
    first_left_out: list[str]
    #: tokens that are trained, if the corpus has a .spans.
    trained: int | None
    #: directories skipped because they link to one that is read already.
    linked_twice: list[str]
    #: UTF-8 bytes of the documents.
    text_bytes: int
    #: size of the .bin; None if there is none, or not yet.
    bin_bytes: int | None
    #: size of the .places; None if there is none, or not yet.
    places_bytes: int | None
    #: compressed files of an index without .bin, which every machine that reads them must unpack.
    to_unpack: int
    #: (K, N), if only that part was made.
    part: tuple[int, int] | None
    dtype: str
    tokenizer: str
    vocab_size: int
    eod: int | None
    #: wall clock time of this run.
    seconds: float
    #: units of work, and how many of them an earlier run had finished.
    blocks: int
    resumed_blocks: int


#: The numbers to sum over all parts.
_SUMS = ("documents", "tokens", "empty", "skipped", "bad_lines", "too_long", "shortened", "text_bytes")


def prepare(inputs: Sequence[str | Path], output: str | Path, options: PrepareOptions) -> PrepareSummary:
    """Build ``OUTPUT.bin`` (or ``OUTPUT.places``), ``OUTPUT.idx`` and ``OUTPUT.megaresume.json``.

    Args:
        inputs: files and directories, in order.
        output: prefix of the corpus.
        options: see `PrepareOptions`.

    Raises:
        UsageError: wrong options, an unknown input, an existing output, leftovers of another run, parts that another
            machine made from other input or with other settings.
        CorpusError: damaged input, or input without a document.
        SetupError: no room, no permission, a missing library, a worker that was killed.
    """
    begin = time.monotonic()
    prefix = prefix_of(output)
    if prefix.name in ("", ".."):
        raise UsageError(
            "--output names no corpus",
            found=repr(str(output)),
            expected="a path without .bin and .idx, such as corpora/web",
            action="give the files a name",
        )
    found = find_inputs(
        inputs, glob=options.glob, format=options.format, store=options.store, repeats=options.repeat_inputs
    )
    # --output may be within an input directory
    files = [file for file in found.files if file.url or not _is_output(file.path, prefix)]
    files = [replace(file, key=options.text.json_key) for file in files]
    if options.format is None:
        files = [of_content(file) for file in files]
    _check_index_only(files, options)
    spec, tokenizer = _spec(options, files)
    parts_files = PartFiles(prefix)
    _check_output(prefix, parts_files, overwrite=options.overwrite)
    size = options.block_bytes or block_bytes(files)
    of = _machines(parts_files, options)
    stretches = cut(files, options.text_unit, of)
    if options.part is not None:
        stretches = [stretches[options.part[0] - 1]]
    plan = _plan(files, spec, tokenizer, options, size) | {"parts": of}
    machine = "" if options.part is None else stretches[0].directory
    check_workers(options.workers)
    # Starting a process takes longer than encoding a small block.
    workers = max(1, min(options.workers, sum(stretch.size for stretch in stretches) // size))
    try:
        with parts_files.locked(plan, restart=options.restart, machine=machine):
            encoder = Encoder(parts_files, spec, options.index_only)
            made, resumed = make_parts(files, options.text_unit, size, stretches, encoder, workers)
            parts = list(made.values())
            if options.part is None:
                _check_not_empty(parts, files)
                raw = _raw(files, spec, options) if options.index_only else None
                with progress("writing the corpus", sum(p.documents for p in parts), "documents") as advance:
                    merge_parts(prefix, parts_files, made, spec.dtype, _identity(tokenizer, spec), advance, raw=raw)
                parts_files.remove()
    except OSError as error:
        raise disk_error(prefix.parent, error) from error
    unmerged = options.part is not None
    return PrepareSummary(
        prefix=str(prefix),
        files=len(files),
        trained=None if options.chat is None else sum(p.trained or 0 for p in parts),
        first_left_out=[why for part in parts for why in part.first_left_out][:SHOWN],
        linked_twice=[str(path) for path in found.linked_twice],
        bin_bytes=None if unmerged or options.index_only else bin_path(prefix).stat().st_size,
        places_bytes=None if unmerged or not options.index_only else places_path(prefix).stat().st_size,
        to_unpack=sum(file.path.suffix in COMPRESSIONS for file in files) if options.index_only else 0,
        part=options.part,
        dtype=spec.dtype,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        seconds=time.monotonic() - begin,
        blocks=len(parts),
        resumed_blocks=resumed,
        **{name: sum(getattr(part, name) for part in parts) for name in _SUMS},
    )


def _check_index_only(files: Sequence[InputFile], options: PrepareOptions) -> None:
    """Refuse files whose rows cannot be read one at a time, and servers that do not support it."""
    for file in files:
        if options.index_only and file.store is not None and file.path.suffix not in COMPRESSIONS:
            file.store.check_ranges(file.name, file.size)
    table = next((file.name for file in files if file.format == "csv"), None)
    if options.index_only and table is not None:
        raise UsageError(
            f"{table} is CSV, whose rows cannot be read one by one",
            found="--index-only",
            expected="JSON lines, an array of JSON, Parquet, Arrow or text",
            action="prepare it without --index-only, or write it as Parquet",
        )


def _spec(options: PrepareOptions, files: Sequence[InputFile]) -> tuple[EncoderSpec, Tokenizer]:
    """Everything that determines the tokens."""
    if options.chat is not None:
        for library in ("tokenizers", "jinja2"):
            require(library, "conversations need it", "pip install 'megaresume[chat]'")
    content, name = read_tokenizer_file(options.tokenizer)
    tokenizer = tokenizer_from_content(content, name, eod_token=options.eod_token)
    dtype, text = _dtype(options.dtype, tokenizer), options.text
    append_eod = options.chat is None if options.append_eod is None else options.append_eod
    if append_eod and tokenizer.eod is None:
        raise UsageError(
            f"tokenizer {name} has no end-of-document token that we know",
            found=f"a vocabulary of {tokenizer.vocab_size} tokens",
            expected="<|endoftext|>, </s> or the like",
            action="name it: --eod-token TEXT, or leave it out: --no-append-eod",
        )
    if options.chat is not None:
        text = with_conversations(text, options.chat, options.tokenizer, files)
    spec = EncoderSpec(
        tokenizer=content,
        tokenizer_name=name,
        eod_token=options.eod_token,
        append_eod=append_eod,
        dtype=dtype,
        text=text,
    )
    return spec, tokenizer


def _machines(parts_files: PartFiles, options: PrepareOptions) -> int:
    """The number of stretches of the input: from ``--part``, or from the plans of machines that ran earlier."""
    if options.part is not None:
        check_part(options.part)
        return options.part[1]
    plans = [] if options.restart else parts_files.plans()
    with suppress(ValueError, KeyError, TypeError):  # an unreadable plan is refused when all are compared
        return max((int(json.loads(plan.read_bytes())["parts"]) for plan in plans), default=1)
    return 1


def _is_output(path: Path, prefix: Path) -> bool:
    directory = PartFiles(prefix).directory
    outputs = (bin_path(prefix), idx_path(prefix), sidecar_path(prefix), spans_path(prefix), places_path(prefix))
    # Names first: resolving the links of every input takes longer than reading it.
    if directory.name in path.parts:
        return directory.resolve() in path.resolve().parents
    return any(path.name == output.name and path.resolve() == output.resolve() for output in outputs)


def _dtype(wanted: str, tokenizer: Tokenizer) -> str:
    if wanted == "auto":
        # same rule as megatron.core.datasets.indexed_dataset.DType.optimal_dtype
        return "uint16" if tokenizer.vocab_size < 65500 else "int32"
    if wanted not in DTYPE_NAMES:
        raise UsageError.unknown(
            "dtype", wanted, ("auto", *DTYPE_NAMES), action="--dtype auto takes one that the vocabulary fits in"
        )
    if tokenizer.vocab_size - 1 > np.iinfo(wanted).max:
        raise UsageError(
            f"the tokens do not fit into {wanted}",
            found=f"a vocabulary of {tokenizer.vocab_size} tokens",
            expected=f"at most {np.iinfo(wanted).max + 1}",
            action="leave out --dtype, or give a wider one",
        )
    return wanted


def _check_output(prefix: Path, parts_files: PartFiles, *, overwrite: bool) -> None:
    if overwrite:
        return
    for path in (idx_path(prefix), bin_path(prefix), places_path(prefix)):
        # A .bin without an .idx beside our parts is ours: we were killed between writing the two.
        if path.exists() and not (path.suffix != ".idx" and parts_files.directory.exists()):
            raise UsageError(
                f"{path} exists",
                found="a corpus, or a part of one",
                expected="an unused --output",
                action="give another --output, or replace it: --overwrite",
            )


def _check_not_empty(parts: Sequence[Part], files: Sequence[InputFile]) -> None:
    if sum(part.documents for part in parts):
        return
    empty, skipped = sum(p.empty for p in parts), sum(p.skipped + p.bad_lines + p.too_long for p in parts)
    first = next((f", the first: {why}" for part in parts for why in part.first_left_out), "")
    raise CorpusError(
        "the input has no document",
        found=f"{len(files)} files with {sum(f.size for f in files)} bytes; {empty} documents empty, "
        f"{skipped} left out{first}",
        expected="at least one document with text",
        cause="the wrong files, or the wrong --json-key or --text-unit",
        action="check the input",
    )


def _plan(
    files: Sequence[InputFile], spec: EncoderSpec, tokenizer: Tokenizer, options: PrepareOptions, size: int
) -> dict[str, Any]:
    chat = None if spec.text.conversations is None else asdict(spec.text.conversations)
    return {
        "too_long": None if chat is None else chat.pop("too_long"),
        "conversations": chat,
        "inputs": [file.to_dict() for file in files],
        "tokenizer": tokenizer.fingerprint(),
        "append_eod": spec.append_eod,
        "dtype": spec.dtype,
        "text_unit": options.text_unit,
        "json_key": spec.text.json_key or "text",
        "invalid": spec.text.invalid,
        "bad_lines": spec.text.bad_lines,
        "block_bytes": size,
        "index_only": options.index_only,
    }


def _raw(files: Sequence[InputFile], spec: EncoderSpec, options: PrepareOptions) -> dict[str, Any]:
    """The header of a .places, without the places."""
    names = [file.url or os.path.abspath(file.path) for file in files]
    # Relative to their common directory: when they are read, it may be elsewhere.
    root = "/".join(os.path.commonprefix([name.split("/")[:-1] for name in names]))  # noqa: RUF071 - of lists
    described = [
        {
            "path": name.removeprefix(f"{root}/"),
            "format": file.format,
            "unit": unit_of(file, options.text_unit),
            "size": file.size,
        }
        for name, file in zip(names, files, strict=True)
    ]
    return {"encoder": spec.to_json(), "made_with": library_versions(), "root": root, "files": described}


def _identity(tokenizer: Tokenizer, spec: EncoderSpec) -> dict[str, Any]:
    return {
        "fingerprint": tokenizer.fingerprint(),
        "vocabulary": tokenizer.vocabulary(),
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": spec.append_eod,
    }
