"""One block to one part: what a worker process does.

Parts are finished blocks of a text corpus in the `WorkDirectory`, by names that `Stretch.name` gives. A part is a
line of JSON, then int32[documents] lengths; of conversations int32[documents] spans of each, and int32[spans, 2], as in
`megaresume.corpora.spans`; then the tokens. It holds the position in the input where the next block starts, so that
finished blocks need not be read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaresume.corpora.prepare.conversations.encode import ConversationEncoder
from megaresume.corpora.prepare.conversations.rows import BadRow, Conversation
from megaresume.corpora.prepare.documents import (
    Block,
    LeftOut,
    Position,
    TextOptions,
    bad_conversation,
    documents_of,
    left_out,
)
from megaresume.corpora.prepare.tokenizers import HuggingFaceTokenizer, Tokenizer, tokenizer_from_content
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
    #: conversations that were too long: left out, and made shorter.
    too_long: int
    shortened: int
    #: spans of trained tokens, and these tokens; None: every token is trained.
    spans: int | None
    trained: int | None
    #: of the documents, UTF-8 bytes; of conversations, as the template writes them.
    text_bytes: int
    #: read for it from disk (about).
    raw_bytes: int
    #: where the next block starts.
    end: Position
    #: bytes of a token.
    token_bytes: int
    #: xxh3_64 of the arrays, 16 hex digits.
    hash: str


@dataclass(frozen=True, slots=True)
class SpansOfPart:
    """Which tokens of the documents of a part are trained."""

    #: int32[documents], spans of each.
    counts: npt.NDArray[np.int32]
    #: int32[spans, 2], counted in their document.
    spans: npt.NDArray[np.int32]

    @classmethod
    def of(cls, spans: Sequence[Sequence[tuple[int, int]]]) -> SpansOfPart:
        """From those of each document."""
        flat = [span for document in spans for span in document]
        return cls(np.array([len(document) for document in spans], "<i4"), np.array(flat, "<i4").reshape(-1, 2))

    def sizes(self) -> dict[str, int]:
        """Fields of `Part`."""
        return {"spans": len(self.spans), "trained": int((self.spans[:, 1] - self.spans[:, 0]).sum(dtype=np.int64))}


class PartFiles(WorkDirectory):
    """The parts of one corpus."""

    def write_part(
        self,
        name: str,
        lengths: npt.NDArray[np.int32],
        tokens: npt.NDArray[Any],
        spans: SpansOfPart | None,
        *,
        end: Position,
        **counts: Any,
    ) -> Part:
        """Write a part: all of it or nothing.

        Args:
            name: of the block.
            lengths: tokens of each document, int32[documents].
            tokens: of all documents, in the type of the corpus.
            spans: of conversations, which tokens are trained.
            end: where the next block starts.
            counts: the other fields of `Part`.

        Raises:
            OSError: it cannot be written.
        """
        sizes = {"documents": len(lengths), "tokens": len(tokens), "token_bytes": tokens.dtype.itemsize, **counts}
        sizes |= {"spans": None, "trained": None} if spans is None else spans.sizes()
        arrays = (lengths, tokens) if spans is None else (lengths, spans.counts, spans.spans, tokens)
        found = self.write(name, {**sizes, "end": asdict(end)}, arrays)
        return Part(**sizes, end=end, hash=found)

    def find_part(self, name: str) -> Part | None:
        """A part if it is finished; a damaged one is removed."""
        head = self.find(name, _body_bytes)
        return None if head is None else _part(head)

    def read_part(self, name: str) -> tuple[npt.NDArray[np.int32], SpansOfPart | None, bytes]:
        """Lengths, spans and tokens of a finished part.

        Raises:
            CorpusError: it is damaged; it is removed, so that a rerun makes it again.
        """
        head, body = self.read(name)
        documents, spans = head["documents"], head["spans"]
        lengths = np.frombuffer(body, "<i4", documents)
        if spans is None:
            return lengths, None, body[4 * documents :]
        counts = np.frombuffer(body, "<i4", documents, 4 * documents)
        pairs = np.frombuffer(body, "<i4", 2 * spans, 8 * documents).reshape(-1, 2)
        return lengths, SpansOfPart(counts, pairs), body[8 * documents + 8 * spans :]


def _part(head: Mapping[str, Any]) -> Part:
    return Part(**{**head, "end": Position(**head["end"])})


def _body_bytes(head: Mapping[str, Any]) -> int:
    part = _part(head)
    spans = 0 if part.spans is None else 4 * part.documents + 8 * part.spans
    return 4 * part.documents + spans + part.token_bytes * part.tokens


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


class _Made(NamedTuple):
    """A document."""

    #: its tokens, and the end of document.
    arrays: tuple[npt.NDArray[Any], ...]
    text_bytes: int
    #: None: every token is trained.
    spans: list[tuple[int, int]] | None = None
    shortened: bool = False


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
        self._conversations: ConversationEncoder | None = None
        if spec.text.conversations is not None:
            assert isinstance(self._tokenizer, HuggingFaceTokenizer), "a chat template needs special tokens"
            self._conversations = ConversationEncoder(spec.text.conversations, self._tokenizer, self._eod)

    def encode(self, name: str, block: Block) -> Part:
        """Write the part of a block.

        Raises:
            CorpusError: the input is damaged, or a document has too many tokens.
            SetupError: the part cannot be written.
        """
        arrays: list[npt.NDArray[Any]] = []
        lengths: list[int] = []
        spans: list[list[tuple[int, int]]] = []
        counts = dict.fromkeys(("empty", "text_bytes", "too_long", "shortened"), 0)
        omitted: list[LeftOut] = []
        for documents in self._batches(block):
            for made in self._encode(documents):
                if isinstance(made, LeftOut):
                    omitted.append(made)
                elif isinstance(made, str):
                    counts[made] += 1
                else:
                    arrays += made.arrays
                    lengths.append(sum(map(len, made.arrays)))
                    counts["text_bytes"] += made.text_bytes
                    counts["shortened"] += made.shortened
                    if made.spans is not None:
                        spans.append(made.spans)
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
                name,
                np.array(lengths, "<i4"),
                tokens_of_all,
                None if self._conversations is None else SpansOfPart.of(spans),
                skipped=sum(entry.option == "invalid" for entry in omitted),
                bad_lines=sum(entry.option == "bad_lines" for entry in omitted),
                first_left_out=[entry.why for entry in omitted[:SHOWN]],
                raw_bytes=block.raw_bytes,
                end=block.end,
                **counts,
            )
        except OSError as error:
            raise disk_error(self._files.directory, error) from error

    def _encode(self, documents: Sequence[str | Conversation | LeftOut]) -> Iterator[_Made | LeftOut | str]:
        """Each document; why it is left out; or the count that it goes to."""
        kept = [document for document in documents if not isinstance(document, LeftOut)]
        made = iter(self._texts(kept) if self._conversations is None else self._chats(kept, self._conversations))
        for document in documents:
            yield document if isinstance(document, LeftOut) else next(made)

    def _texts(self, texts: Sequence[Any]) -> Iterator[_Made | str]:
        for text, tokens in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            size = len(text) if text.isascii() else len(text.encode())
            yield _Made((tokens, self._eod), size) if len(tokens) else "empty"

    def _chats(self, chats: Sequence[Any], encoder: ConversationEncoder) -> Iterator[_Made | LeftOut | str]:
        for chat, found in zip(chats, encoder.encode_batch(chats), strict=True):
            if isinstance(found, BadRow):
                yield left_out(bad_conversation(chat.where, found), self._spec.text)
            elif found is None:
                yield "too_long"
            else:
                yield _Made((found.tokens,), found.text_bytes, found.spans, found.shortened)

    def _batches(self, block: Block) -> Iterator[list[str | Conversation | LeftOut]]:
        batch: list[str | Conversation | LeftOut] = []
        for piece in block.pieces:
            for document in documents_of(piece, self._spec.text):
                batch.append(document)
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


def encode_in_worker(name: str, block: Block) -> Part:
    """`Encoder.encode` in a process that `start_worker` initialised."""
    global _encoder
    if _encoder is None:
        if _spec is None:
            raise RuntimeError("start_worker was not called in this process")
        _encoder = Encoder(_spec)
    return _encoder.encode(name, block)
