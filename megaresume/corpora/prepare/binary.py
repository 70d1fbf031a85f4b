"""Telling by its content that a file is no text: an archive, a table or an image would be encoded as if it were."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from megaresume.stream.errors import UsageError

__all__ = ["HEAD_BYTES", "check_text"]

#: bytes of a file that are looked at: enough for every mark below, and for a NUL in most files that have any.
HEAD_BYTES = 8192

#: (where, bytes there, what it is)
_MARKS = (
    (257, b"ustar", "a tar archive"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"BZh", "bzip2"),
    (0, b"\xfd7zXZ\x00", "xz"),
    (0, b"\x28\xb5\x2f\xfd", "zstd"),
    (0, b"PAR1", "a Parquet table"),
    (0, b"ARROW1", "an Arrow table"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (8, b"WEBP", "a WebP image"),
    (0, b"II*\x00", "a TIFF image"),
    (0, b"MM\x00*", "a TIFF image"),
    (0, b"BM", "a BMP image"),
    (0, b"%PDF-", "a PDF"),
    (0, b"\x89HDF", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x7fELF", "a program"),
    (0, b"MMIDIDX\x00", "the index of a Megatron corpus"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
)
_COMPRESSED = {"gzip": ".gz", "bzip2": ".bz2", "xz": ".xz", "zstd": ".zst"}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: what no text has, besides white space, form feeds and escapes of terminals.
_CONTROL = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")


def check_text(path: Path, head: bytes) -> None:
    """Raise a UsageError if a file begins as no text does. Text in another encoding than UTF-8 is no matter here.

    Args:
        path: of the file.
        head: its first bytes, decompressed; up to `HEAD_BYTES` of them count.
    """
    head = head[:HEAD_BYTES]
    if _is_text(head):
        return  # whatever it begins with: PAR1 is a gene, too
    kind = next((kind for at, mark, kind in _MARKS if head.startswith(mark, at)), None)
    if kind is None and b"\0" not in head:
        return  # another encoding, or characters that went astray: --invalid-utf8 decides
    raise UsageError(
        f"{path} is no text",
        found=kind or f"a NUL byte at {head.index(0)}",
        expected="text in UTF-8, or JSON lines",
        cause="text in UTF-16" if head.startswith(_UTF16) else None if kind else "a binary file among the inputs",
        action=_action(path, kind, head),
    )


def _is_text(head: bytes) -> bool:
    if _CONTROL.search(head):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _action(path: Path, kind: str | None, head: bytes) -> str:
    if kind == "a tar archive":
        return f"name the shards themselves, with a processor: megaresume prepare {path.parent}/*.tar --processor KIND"
    if kind == "a Parquet table":
        return f"give it the suffix that says so: {path.name}.parquet"
    if kind in _COMPRESSED:
        return f"give it the suffix that says so: {path.name}{_COMPRESSED[kind]}"
    if head.startswith(_UTF16):
        return f"iconv -f UTF-16 -t UTF-8 {path}"
    return "leave it out: name the files that are text, or --glob '**/*.txt'"
