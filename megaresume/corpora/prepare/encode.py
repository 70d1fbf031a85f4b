"""One block to one part: what a worker process does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.corpora.prepare.blocks import Block
from megaresume.corpora.prepare.documents import LeftOut, TextOptions, texts_of
from megaresume.corpora.prepare.parts import SHOWN, Part, PartFiles
from megaresume.corpora.prepare.tokenizers import Tokenizer, tokenizer_from_content
from megaresume.stream.errors import CorpusError, SetupError

__all__ = ["Encoder", "EncoderSpec", "encode_in_worker", "start_worker"]

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
