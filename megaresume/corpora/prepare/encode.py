"""One block to one part: what a worker process does.

Parts are finished blocks of a text corpus in the `WorkDirectory`: ``part-00000000`` and so on. A part is a line of
JSON, then int32[documents] lengths, then the tokens. It holds the position in the input where the next block starts, so
that finished blocks need not be read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.corpora.prepare.documents import Block, LeftOut, Position, TextOptions, texts_of
from megaresume.corpora.prepare.tokenizers import Tokenizer, tokenizer_from_content
from megaresume.corpora.prepare.workdir import WorkDirectory
from megaresume.stream.errors import CorpusError, SetupError

#: documents that are left out of which a part says where they are.
SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One finished block."""

    documents: int
    tokens: int
    #: documents without a token, left out.
    empty: int
    #: documents that are not UTF-8, and lines that are no JSON object with a text: left out.
    skipped: int
    bad_lines: int
    #: where the first few of both are, and what is wrong with them.
    first_left_out: list[str]
    #: of the documents, UTF-8 bytes.
    text_bytes: int
    #: read for it from disk (about).
    raw_bytes: int
    #: where the next block starts.
    end: Position
    #: bytes of a token.
    token_bytes: int
    #: xxh3_64 of lengths and tokens, 16 hex digits.
    hash: str


class PartFiles(WorkDirectory):
    """The parts of one corpus."""

    def write_part(
        self, index: int, lengths: npt.NDArray[np.int32], tokens: npt.NDArray[Any], *, end: Position, **counts: Any
    ) -> Part:
        """Write a part: all of it or nothing.

        Args:
            index: number of the block.
            lengths: tokens of each document, int32[documents].
            tokens: of all documents, in the type of the corpus.
            end: where the next block starts.
            counts: the other fields of `Part`.

        Raises:
            OSError: it cannot be written.
        """
        sizes = {"documents": len(lengths), "tokens": len(tokens), "token_bytes": tokens.dtype.itemsize, **counts}
        found = self.write(_name(index), {**sizes, "end": asdict(end)}, (lengths, tokens))
        return Part(**sizes, end=end, hash=found)

    def find_part(self, index: int) -> Part | None:
        """Part `index` if it is finished; a damaged one is removed."""
        head = self.find(_name(index), _body_bytes)
        return None if head is None else _part(head)

    def read_part(self, index: int) -> tuple[npt.NDArray[np.int32], bytes]:
        """Lengths and tokens of a finished part.

        Raises:
            CorpusError: it is damaged; it is removed, so that a rerun makes it again.
        """
        head, body = self.read(_name(index))
        split = 4 * head["documents"]
        return np.frombuffer(body, "<i4", head["documents"]), body[split:]


def _name(index: int) -> str:
    return f"part-{index:08d}"


def _part(head: Mapping[str, Any]) -> Part:
    return Part(**{**head, "end": Position(**head["end"])})


def _body_bytes(head: Mapping[str, Any]) -> int:
    part = _part(head)
    return 4 * part.documents + part.token_bytes * part.tokens


#: texts tokenized at once.
BATCH = 512
MAX_TOKENS = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec:
    """What a worker needs to build an `Encoder`: the content of the tokenizer, not its path, which may change."""

    prefix: Path
    tokenizer: bytes | None
    tokenizer_name: str
    eod_token: str | None
    append_eod: bool
    #: name of the dtype of the corpus.
    dtype: str
    text: TextOptions


class Encoder:
    """Encodes blocks."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._files = PartFiles(spec.prefix)
        self._tokenizer: Tokenizer = tokenizer_from_content(
            spec.tokenizer, spec.tokenizer_name, eod_token=spec.eod_token
        )
        dtype = np.dtype(spec.dtype)
        self._eod = np.array([self._tokenizer.eod], dtype) if spec.append_eod else np.zeros(0, dtype)

    def encode(self, index: int, block: Block) -> Part:
        """Write part `index`.

        Raises:
            CorpusError: the input is damaged, or a document has too many tokens.
            SetupError: the part cannot be written.
        """
        arrays: list[npt.NDArray[Any]] = []
        lengths: list[int] = []
        empty = text_bytes = 0
        left_out: list[LeftOut] = []
        for texts in self._batches(block):
            valid = [text for text in texts if isinstance(text, str)]
            left_out += [text for text in texts if isinstance(text, LeftOut)]
            for text, tokens in zip(valid, self._tokenizer.encode_batch(valid), strict=True):
                if not len(tokens):
                    empty += 1
                    continue
                text_bytes += len(text) if text.isascii() else len(text.encode())
                arrays += [tokens, self._eod]
                lengths.append(len(tokens) + len(self._eod))
        if lengths and max(lengths) > MAX_TOKENS:
            raise CorpusError(
                f"a document of {block.pieces[0].name} has too many tokens",
                found=f"{max(lengths)} tokens",
                expected=f"at most {MAX_TOKENS}: Megatron's index holds lengths as int32",
                action="cut the document",
            )
        tokens_of_all = np.zeros(0, self._spec.dtype)
        if arrays:
            tokens_of_all = np.concatenate(arrays, dtype=self._spec.dtype, casting="unsafe")
        try:
            return self._files.write_part(
                index,
                np.array(lengths, "<i4"),
                tokens_of_all,
                empty=empty,
                skipped=sum(entry.option == "invalid" for entry in left_out),
                bad_lines=sum(entry.option == "bad_lines" for entry in left_out),
                first_left_out=[entry.why for entry in left_out[:SHOWN]],
                text_bytes=text_bytes,
                raw_bytes=block.raw_bytes,
                end=block.end,
            )
        except OSError as error:
            raise disk_error(self._files.directory, error) from error

    def _batches(self, block: Block) -> Iterator[list[str | LeftOut]]:
        batch: list[str | LeftOut] = []
        for piece in block.pieces:
            for text in texts_of(piece, self._spec.text):
                batch.append(text)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
        yield batch


def disk_error(path: Path, error: OSError) -> SetupError:
    """For what cannot be written."""
    full = error.errno in (28, 122)  # ENOSPC, EDQUOT
    return SetupError(
        f"{path} cannot be written",
        found=error.strerror or str(error),
        expected="room for about twice the size of the corpus, until it is complete"
        if full
        else "a writable directory",
        cause="the disk or the quota is full" if full else None,
        action="free some space and run the same command again: it continues where it stopped"
        if full
        else "check the permissions of the directory, or give another --output",
    )


_encoder: Encoder | None = None
_spec: EncoderSpec | None = None


def start_worker(spec: EncoderSpec) -> None:
    """Initialise a worker process; the tokenizer is built with the first block."""
    global _spec
    _spec = spec


def encode_in_worker(index: int, block: Block) -> Part:
    """`Encoder.encode` in a process that `start_worker` initialised."""
    global _encoder
    if _encoder is None:
        if _spec is None:
            raise RuntimeError("start_worker was not called in this process")
        _encoder = Encoder(_spec)
    return _encoder.encode(index, block)
