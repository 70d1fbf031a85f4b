"""Bytes of a block to texts: one for each document."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megaresume.corpora.prepare.blocks import Piece
from megaresume.stream.errors import CorpusError

__all__ = ["BadLines", "InvalidText", "LeftOut", "TextOptions", "texts_of"]

#: what to do with bytes that are not UTF-8 (and with half surrogates in JSON).
InvalidText = Literal["error", "replace", "skip"]
#: what to do with lines that are no JSON object with a text.
BadLines = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How documents are taken out of files."""

    #: key of the text in a JSON line.
    json_key: str = "text"
    invalid: InvalidText = "error"
    bad_lines: BadLines = "error"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """In the place of a document that is left out, as the options say."""

    #: which of them.
    option: Literal["invalid", "bad_lines"]
    #: file and line, and what is wrong there.
    why: str


class _BadLine(CorpusError):
    """A line that is no JSON object with a text."""


def texts_of(piece: Piece, options: TextOptions) -> Iterator[str | LeftOut]:
    """The text of each document, in order, or why it is left out.

    Raises:
        CorpusError: naming file and line: not UTF-8, not JSON, no such key, not a text.
    """
    data = piece.data
    # Only at the start of a file is it a mark; elsewhere U+FEFF is a character.
    if piece.line == 0 and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    if piece.unit == "file":
        yield _decode(data, piece, 1, options)
        return
    if piece.unit == "paragraph":
        yield from _paragraphs(data, piece, options)
        return
    for number, line in enumerate(data.split(b"\n"), piece.line + 1):
        if not line.strip():
            continue
        if piece.unit == "line":
            yield _decode(line.removesuffix(b"\r"), piece, number, options)
            continue
        try:
            yield _json_text(line, piece, number, options)
        except _BadLine as error:
            if options.bad_lines == "error":
                raise
            yield LeftOut("bad_lines", error.headline)


#: for an action.
_LEAVE_OUT = "leave such lines out and count them: --bad-lines skip"


def _paragraphs(data: bytes, piece: Piece, options: TextOptions) -> Iterator[str | LeftOut]:
    lines: list[bytes] = []
    first = piece.line + 1
    for number, line in enumerate([*data.split(b"\n"), b""], piece.line + 1):
        if line.strip():
            first = first if lines else number
            lines.append(line.removesuffix(b"\r"))
        elif lines:
            yield _decode(b"\n".join(lines), piece, first, options)
            lines = []


def _json_text(line: bytes, piece: Piece, number: int, options: TextOptions) -> str | LeftOut:
    decoded = _decode(line, piece, number, options)
    if isinstance(decoded, LeftOut):
        return decoded
    where = f"{piece.name}:{number}"
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        whole = decoded.lstrip()[:1] in "[{" and number == 1
        raise _BadLine(
            f"{where} is not JSON",
            found=f"{error}: {_excerpt(decoded)}",
            expected="one JSON object on each line",
            cause="one JSON value over several lines, not JSON lines" if whole else "a line that was cut or damaged",
            action=f"correct the line, or {_LEAVE_OUT}; for one JSON array: jq -c '.[]' FILE > FILE.jsonl",
        ) from error
    if not isinstance(record, dict):
        raise _BadLine(
            f"{where} is not a JSON object",
            found=_excerpt(decoded),
            expected=f'an object such as {{"{options.json_key}": "..."}}',
            action=f"correct the line, or {_LEAVE_OUT}",
        )
    if options.json_key not in record:
        raise _BadLine(
            f"{where} has no key '{options.json_key}'",
            found=f"keys {', '.join(map(repr, list(record)[:10]))}" if record else "an empty object",
            expected=f"the text under '{options.json_key}'",
            action=f"name the key: --json-key KEY; or {_LEAVE_OUT}",
        )
    text = record[options.json_key]
    if not isinstance(text, str):
        raise _BadLine(
            f"{where}: '{options.json_key}' is not a text",
            found=f"{type(text).__name__}: {_excerpt(json.dumps(text))}",
            expected="a JSON string",
            action=f"name another key: --json-key KEY, correct the line, or {_LEAVE_OUT}",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if options.invalid == "skip":
            return LeftOut("invalid", f"{where} is not UTF-8")
        if options.invalid == "error":
            raise _not_utf8(where, "half of a surrogate pair, written as \\ud8.. in JSON", error) from error
        # "replace" would put "?" on the way out; what a decoder puts is U+FFFD.
        text = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


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
