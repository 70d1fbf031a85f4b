"""The documents in the bytes of a file: texts, or conversations; where each is, and which are left out.

`DocumentEncoder` turns them into tokens, for `prepare` and for reading a corpus without a .bin.
"""

from __future__ import annotations

import codecs
import importlib.metadata
import io
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.data.inputs import Format, InputFile
from megaresume.data.row_lines import bounds_of
from megaresume.encoding.text.conversation_encoder import ConversationEncoder, ConversationOptions
from megaresume.encoding.text.conversations import (
    MISSING,
    BadRow,
    Conversation,
    check_roles,
    conversation_of,
    under,
)
from megaresume.encoding.text.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    pack_tokenizer,
    tokenizer_from_content,
    unpacked_content,
)
from megaresume.encoding.text.turns import Selection
from megaresume.stream.errors import CorpusError

#: what to do with bytes that are not UTF-8 (and with half surrogates in JSON).
InvalidText = Literal["error", "replace", "skip"]
#: what to do with lines that are not JSON objects with a text.
BadLines = Literal["error", "skip"]
#: what counts as a document in a text file.
TextUnit = Literal["file", "line", "paragraph"]
Unit = Literal["jsonl", "json", "file", "line", "paragraph"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How documents are taken from files."""

    #: key of the text in a row; dots separate nested keys; None: ``text``.
    json_key: str | None = None
    #: rows are conversations; None: texts.
    conversations: ConversationOptions | None = None
    invalid: InvalidText = "error"
    bad_lines: BadLines = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Whole documents of one file, not yet decoded."""

    #: the name of the piece, for errors.
    name: str
    unit: Unit
    #: lines of the file before it.
    line: int
    data: bytes
    #: index of its input file.
    file: int = 0
    #: decompressed bytes of the file before it.
    offset: int = 0
    #: for a table: first row, from 0, and place of each row group, or record batch, that overlaps the piece.
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Replaces a document that the options leave out."""

    #: the option that leaves it out.
    option: Literal["invalid", "bad_lines"]
    #: file and line, and what is wrong there.
    why: str


class BadLine(CorpusError):
    """A line that is not a JSON object with a text, or with a conversation."""


def bad_conversation(where: str, row: BadRow) -> BadLine:
    """The error for a row that is not a conversation."""
    return BadLine(
        f"{where} {row.what}",
        found=row.found,
        expected=row.expected,
        action=f"correct the row, or {_LEAVE_OUT}",
    )


def documents_of(piece: Piece, options: TextOptions) -> Iterator[str | Conversation | LeftOut]:
    """Each document, in order, or why it is left out.

    Raises:
        CorpusError: naming file and line: not UTF-8, not JSON, key missing, not a text, not a conversation.
    """
    for start, stop, number in _bounds(piece):
        data = piece.data[start:stop]
        if piece.unit in ("jsonl", "json"):
            try:
                yield _json_document(data, piece, number, options)
            except BadLine as error:
                yield left_out(error, options)
            continue
        if piece.unit == "line":
            data = data.removesuffix(b"\r")
        elif piece.unit == "paragraph":
            data = b"\n".join(line.removesuffix(b"\r") for line in data.split(b"\n"))
        yield _decode(data, piece, number, options)


def places_of(piece: Piece) -> Iterator[tuple[int, int]]:
    """Where each document of `documents_of` is in its file: ``offset`` and ``nbytes`` of a `RowIndex`."""
    for start, stop, number in _bounds(piece):
        if piece.chunks:
            first, chunk = piece.chunks[bisect_right(piece.chunks, number - 1, key=itemgetter(0)) - 1]
            yield chunk, number - 1 - first
        else:
            yield piece.offset + start, stop - start


def _bounds(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """First byte of each document, the end of the last one, and the first line of each, from 1."""
    if piece.unit == "file":
        has_mark = piece.line == 0 and piece.data.startswith(codecs.BOM_UTF8)
        yield len(codecs.BOM_UTF8) if has_mark else 0, len(piece.data), 1
        return
    begun, end = None, 0
    for start, stop, number in bounds_of(io.BytesIO(piece.data), before=piece.line):
        if piece.unit != "paragraph":
            if stop > start:
                yield start, stop, number
        elif stop > start:
            begun = begun or (start, number)
            end = stop
        elif begun:
            yield begun[0], end, begun[1]
            begun = None
    if begun:
        yield begun[0], end, begun[1]


#: The beginning of an ``action``: how to leave bad lines out.
_LEAVE_OUT = "leave such lines out and count them: --bad-lines skip"


def left_out(error: BadLine, options: TextOptions) -> LeftOut:
    """The replacement for a bad line.

    Raises:
        BadLine: the error itself, if the options do not leave lines out.
    """
    if options.bad_lines == "error":
        raise error
    return LeftOut("bad_lines", error.headline)


def _json_document(line: bytes, piece: Piece, number: int, options: TextOptions) -> str | Conversation | LeftOut:
    decoded = _decode(line, piece, number, options)
    if isinstance(decoded, LeftOut):
        return decoded
    # The first element of an array is on the second line, see `ArrayLines`.
    where = f"{piece.name}:{number}" if piece.unit == "jsonl" else f"{piece.name}, element {number - 1},"
    record = _json_object(decoded, where, number, options)
    chat = options.conversations
    value: Any = record if chat is not None else _text(record, where, options.json_key or "text")
    if "\\u" in decoded:  # JSON can only contain a lone surrogate by an escape
        try:
            value = _valid(value, where, options.invalid)
        except UnicodeError:
            return LeftOut("invalid", f"{where} is not UTF-8")
    if chat is None:
        return str(value)
    try:
        conversation = conversation_of(value, chat.shape, where, key=chat.key)
        if not chat.any_order:
            check_roles(conversation.messages)
            if conversation.rejected is not None:
                check_roles(conversation.rejected.messages)
    except BadRow as error:
        raise bad_conversation(where, error) from error
    return conversation


def _json_object(decoded: str, where: str, number: int, options: TextOptions) -> dict[str, Any]:
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        whole = decoded.lstrip()[:1] in "[{" and number == 1
        raise BadLine(
            f"{where} is not JSON",
            found=f"{error}: {_excerpt(decoded)}",
            expected="one JSON object on each line",
            cause="one JSON value over several lines, not JSON lines" if whole else "a line that was cut or damaged",
            action=f"correct the line, or {_LEAVE_OUT}; for one JSON array: --format json",
        ) from error
    if not isinstance(record, dict):
        raise BadLine(
            f"{where} is not a JSON object",
            found=_excerpt(decoded),
            expected=f'an object such as {{"{options.json_key or "text"}": "..."}}',
            action=f"correct the line, or {_LEAVE_OUT}",
        )
    return record


def _text(record: dict[str, Any], where: str, key: str) -> str:
    text = under(record, key)
    if text is MISSING:
        raise BadLine(
            f"{where} has no key '{key}'",
            found=f"keys {', '.join(map(repr, list(record)[:10]))}" if record else "an empty object",
            expected=f"the text under '{key}'",
            action=f"name the key: --json-key KEY; or {_LEAVE_OUT}",
        )
    if text is None:
        return ""  # left out and counted as such
    if not isinstance(text, str):
        raise BadLine(
            f"{where}: '{key}' is not a text",
            found=f"{type(text).__name__}: {_excerpt(json.dumps(text))}",
            expected="a JSON string",
            action=f"name another key: --json-key KEY, correct the line, or {_LEAVE_OUT}",
        )
    return text


def _valid(value: Any, where: str, invalid: InvalidText) -> Any:
    """JSON without lone surrogates.

    Raises:
        CorpusError: there is one, and no option allows it.
        UnicodeError: there is one, and the document must be left out.
    """
    if isinstance(value, dict):
        return {_valid(key, where, invalid): _valid(item, where, invalid) for key, item in value.items()}
    if isinstance(value, list):
        return [_valid(item, where, invalid) for item in value]
    if not isinstance(value, str):
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        if invalid == "error":
            raise _not_utf8(where, "half of a surrogate pair, written as \\ud8.. in JSON", error) from error
        if invalid == "skip":
            raise
        # "replace" would put "?" on the way out; what a decoder puts is U+FFFD.
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value)
    return value


def _decode(data: bytes, piece: Piece, number: int, options: TextOptions) -> str | LeftOut:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if options.invalid == "replace":
            return data.decode("utf-8", "replace")
        line = number + data.count(b"\n", 0, error.start)
        if options.invalid == "skip":
            return LeftOut("invalid", f"{piece.name}:{line} is not UTF-8")
        byte = data[error.start]
        cause = "UTF-16, or a binary file" if b"\0" in data[:1000] else "another encoding, such as Latin-1"
        raise _not_utf8(f"{piece.name}:{line}", f"byte 0x{byte:02x} ({error.reason})", error, cause) from error


def _not_utf8(where: str, found: str, error: UnicodeError, cause: str | None = None) -> CorpusError:
    return CorpusError(
        f"{where} is not UTF-8",
        found=found,
        expected="UTF-8 text",
        cause=cause,
        action="convert the file (iconv -t UTF-8), or: --invalid-utf8 replace (by U+FFFD) or skip (leave it out)",
    )


def _excerpt(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def unit_of(file: InputFile, text_unit: TextUnit) -> Unit:
    """The unit of a file that is a document."""
    rows: dict[Format, Unit] = {"jsonl": "jsonl", "json": "json", "csv": "jsonl"}
    return rows.get(file.format, text_unit)


#: libraries whose version may change the tokens.
LIBRARIES = ("tokenizers", "jinja2", "pyarrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec:
    """Everything that decides the tokens of a document: the content of the tokenizer, not its path, which may
    change."""

    tokenizer: bytes | None
    tokenizer_name: str
    eod_token: str | None
    append_eod: bool
    #: name of the dtype of the corpus.
    dtype: str
    text: TextOptions

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for `from_json`."""
        tokenizer = pack_tokenizer(self.tokenizer, self.tokenizer_name)
        named = {name: getattr(self, name) for name in ("eod_token", "append_eod", "dtype")}
        return {"tokenizer": tokenizer, **named, "text": asdict(self.text)}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> EncoderSpec:
        """Read what `to_json` wrote."""
        packed, text = said["tokenizer"], dict(said["text"])
        if (chat := text["conversations"]) is not None:
            words = chat["selection"]
            selection = Selection(roles=tuple(words["roles"]), turns=words["turns"], parts=tuple(words["parts"]))
            text["conversations"] = ConversationOptions(**{**chat, "selection": selection})
        return cls(
            tokenizer=unpacked_content(packed["content"]),
            tokenizer_name=packed["name"],
            eod_token=said["eod_token"],
            append_eod=said["append_eod"],
            dtype=said["dtype"],
            text=TextOptions(**text),
        )


def library_versions() -> dict[str, str]:
    """The versions of the installed `LIBRARIES`."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def checksum(tokens: npt.NDArray[Any]) -> int:
    """The lower half of xxh3_64 of a document's tokens, in the corpus's dtype."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).data) & 0xFFFFFFFF


class MadeDocument(NamedTuple):
    """A document as tokens."""

    #: its tokens, and the end of document.
    arrays: tuple[npt.NDArray[Any], ...]
    text_bytes: int
    #: the ranges of tokens that are trained; None if every token is.
    spans: list[tuple[int, int]] | None = None
    shortened: bool = False

    def tokens(self, dtype: str) -> npt.NDArray[Any]:
        """The tokens in the corpus's dtype."""
        return np.concatenate(self.arrays, dtype=dtype, casting="unsafe")


class DocumentEncoder:
    """A stateless function of documents."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec
        self._tokenizer: Tokenizer = tokenizer_from_content(
            spec.tokenizer, spec.tokenizer_name, eod_token=spec.eod_token
        )
        dtype = np.dtype(spec.dtype)
        self._eod = np.array([self._tokenizer.eod], dtype) if spec.append_eod else np.zeros(0, dtype)
        self._conversations: ConversationEncoder | None = None
        if spec.text.conversations is not None:
            assert isinstance(self._tokenizer, HuggingFaceTokenizer), "a chat template needs special tokens"
            self._conversations = ConversationEncoder(spec.text.conversations, self._tokenizer, self._eod)

    def encode(self, documents: Sequence[str | Conversation | LeftOut]) -> Iterator[MadeDocument | LeftOut | str]:
        """Encode each document; or return why it is left out, or what it is counted as.

        Raises:
            CorpusError: a row is not a conversation, or too long, and no option allows it.
        """
        kept = [document for document in documents if not isinstance(document, LeftOut)]
        made = iter(self._texts(kept) if self._conversations is None else self._chats(kept, self._conversations))
        for document in documents:
            yield document if isinstance(document, LeftOut) else next(made)

    def _texts(self, texts: Sequence[Any]) -> Iterator[MadeDocument | str]:
        for text, tokens in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            size = len(text) if text.isascii() else len(text.encode())
            yield MadeDocument((tokens, self._eod), size) if len(tokens) else "empty"

    def _chats(self, chats: Sequence[Any], encoder: ConversationEncoder) -> Iterator[MadeDocument | LeftOut | str]:
        for chat, found in zip(chats, encoder.encode_batch(chats), strict=True):
            if isinstance(found, BadRow):
                yield left_out(bad_conversation(chat.where, found), self.spec.text)
            elif found is None:
                yield "too_long"
            else:
                yield MadeDocument((found.tokens,), found.text_bytes, found.spans, found.shortened)
