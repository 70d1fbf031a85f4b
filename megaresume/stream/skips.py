"""Skips as requested: ranges of samples, steps, single documents.

    data.yaml, a flag, attach(skip=)  ->  `SkipConfig`  --left_out.decide-->  `Skips`, in the state

Ranges of samples are in absolute numbers; steps are as training counts them. With skips, a sample has two numbers:

    absolute   0 1 2 3 4 5 6 7 8 9 ...      the number when nothing is skipped
    left out         x x x
    trained    0 1         2 3 4 5 ...      what steps, ledgers and states count

A range is [first, stop). A set of ranges is ascending, and no two touch. Samples are left out just before the next
sample that is trained: after two trained samples the stream is still at absolute number 2, and trained sample 2 is
absolute 5.

Imports neither numpy nor numba, as `megaresume.stream.state`.
"""

from __future__ import annotations

import re
import zlib
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import xxhash

from megaresume.stream.errors import ConfigError, as_count

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def union(*sets: Iterable[Range]) -> Ranges:
    """Unite ranges, joined where they touch."""
    result: list[Range] = []
    for first, stop in sorted(r for ranges in sets for r in ranges):
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        elif first < stop:
            result.append((first, stop))
    return tuple(result)


def minus(ranges: Iterable[Range], other: Iterable[Range]) -> Ranges:
    """The first without the second."""
    result = list(union(ranges))
    for low, high in union(other):
        result = [
            part
            for first, stop in result
            for part in ((first, min(stop, low)), (max(first, high), stop))
            if part[0] < part[1]
        ]
    return tuple(result)


def common(ranges: Iterable[Range], other: Iterable[Range]) -> Ranges:
    """The intersection of two."""
    ranges = union(ranges)
    return minus(ranges, minus(ranges, other))


def length(ranges: Iterable[Range]) -> int:
    """The number of samples in ranges that do not overlap."""
    return sum(stop - first for first, stop in ranges)


def _begin(skipped: Sequence[Range]) -> list[int]:
    """The trained number at which each range is left out."""
    begins, before = [], 0
    for first, stop in skipped:
        begins.append(first - before)
        before += stop - first
    return begins


def left_out(skipped: Sequence[Range], samples: int) -> int:
    """How many samples were left out once ``samples`` were trained; a range that begins right there is not counted."""
    return length(skipped[: bisect_left(_begin(skipped), samples)])


def reached(skipped: Sequence[Range], samples: int) -> int:
    """The absolute number that the stream is at when this many samples were trained."""
    return samples + left_out(skipped, samples)


def absolute(skipped: Sequence[Range], sample: int) -> int:
    """The absolute number of a trained sample."""
    return sample + length(skipped[: bisect_right(_begin(skipped), sample)])


def trained(skipped: Sequence[Range], number: int) -> int:
    """How many samples are trained before an absolute number."""
    return number - sum(min(stop, number) - first for first, stop in skipped if first < number)


def parse_range(text: object, where: str, most: int = (1 << 62) - 1) -> Range:
    """``A:B`` as [A, B).

    Raises:
        ConfigError: something else, backward, or beyond ``most``.
    """
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text) if isinstance(text, str) else None
    first, stop = map(int, match.groups()) if match else (0, 0)
    if not first < stop or stop > most:
        raise ConfigError(
            f"bad range in {where}",
            found=repr(text),
            expected='"A:B" with A < B: from A to B-1, counted from 0 (quoted: YAML reads 1:30 as 90)',
            cause=None if not match else "it is backward or empty" if first >= stop else f"it ends after {most:,}",
            action=f'for example "{stop}:{first}"' if match and stop < first else 'for example "1000:1200"',
        )
    return first, stop


def parse_steps(entry: object, where: str) -> Range:
    """``101-200``, ``(101, 200)`` or ``101`` as (first, last), counted from 1, the last included.

    Raises:
        ConfigError: something else, or backward.
    """
    numbers = [int(n) for n in re.findall(r"\d+", entry)] if isinstance(entry, str) else entry
    well_formed = not isinstance(entry, str) or re.fullmatch(r"\s*\d+(\s*-\s*\d+)?\s*", entry)
    numbers = [numbers] if isinstance(numbers, int) else list(numbers) if isinstance(numbers, Iterable) else []
    if not well_formed or len(numbers) not in (1, 2) or not all(isinstance(n, int) for n in numbers):
        numbers = [1, 0]
    first, last = numbers[0], numbers[-1]
    if not 1 <= first <= last:
        raise ConfigError(
            f"bad range in {where}",
            found=repr(entry),
            expected="FIRST-LAST, steps counted from 1, the last one included",
            cause="it is backward" if first > last >= 1 else None,
            action="for example 101-200",
        )
    return first, last


#: A state writes out at most this many documents of a list, and packs a longer one.
MOST_WRITTEN = 256
#: The most documents in a list: packed, they take 2 to 3 bytes each in every checkpoint.
MOST_DOCUMENTS = 1 << 20
#: The last epoch that a list may name.
MOST_EPOCHS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentList:
    """Documents of a source."""

    source: str
    #: the number of documents.
    count: int
    #: xxh3_64 of their numbers, ascending, int64 little-endian; 16 hex digits.
    digest: str
    #: [first, stop) epochs in which they are left out; None: in all.
    epochs: Range | None = None
    #: ascending; None: a long list that a data config in a state only names. `Skips` in the state have its documents.
    ids: Sequence[int] | None = field(default=None, compare=False)
    #: a file that holds them.
    file: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, source: str, ids: Iterable[int], epochs: Range | None = None, file: str | None = None) -> DocumentList:
        """The list of these documents, in any order."""
        numbers = array("q", sorted(set(ids)))
        digest = xxhash.xxh3_64_hexdigest(numbers.tobytes())
        return cls(source=source, count=len(numbers), digest=digest, epochs=epochs, ids=numbers, file=file)

    def numbers(self) -> Sequence[int]:
        """The numbers of the documents, ascending.

        Raises:
            ConfigError: a long list that is only named.
        """
        if self.ids is None:
            raise _bad_documents(f"skip.documents.{self.source}", f"{self.count} documents, digest {self.digest}")
        return self.ids

    def holds_in(self, epoch: int) -> bool:
        """Whether they are left out in an epoch."""
        return self.epochs is None or self.epochs[0] <= epoch < self.epochs[1]

    def to_plain(self, *, whole: bool = False) -> dict[str, Any]:
        """Plain JSON, without the file. A long list is named, or packed if ``whole``."""
        plain: dict[str, Any] = {"count": self.count, "digest": self.digest}
        if self.epochs is not None:
            plain["epochs"] = f"{self.epochs[0]}:{self.epochs[1]}"
        if self.ids is not None and self.count <= MOST_WRITTEN:
            plain["ids"] = list(self.ids)
        elif whole:
            plain["packed"] = _packed(self)
        return plain

    @classmethod
    def from_plain(cls, source: str, plain: Mapping[str, Any]) -> DocumentList:
        """Read what `to_plain` wrote, the list whole.

        Raises:
            ValueError, KeyError, TypeError, ConfigError: it is malformed.
        """
        if "packed" in plain:
            plain = {name: value for name, value in plain.items() if name != "packed"} | {"ids": _unpacked(plain)}
        elif "ids" not in plain:
            raise ValueError(f"documents of {source!r} without their numbers")
        return _document_list(source, plain, "a state")

    def __str__(self) -> str:
        words = f"{self.count:,} document{'s' * (self.count != 1)} of {self.source}"
        if self.ids is not None and self.count <= 8:
            words = f"{self.source}:{','.join(map(str, self.ids))}"
        return words + ("" if self.epochs is None else f" in epochs {self.epochs[0]} to {self.epochs[1] - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipConfig:
    """The skips requested in one place."""

    #: the ranges of samples to leave out, absolute.
    samples: Ranges = ()
    #: (first, last), counted from 1, the last included, as training prints them.
    steps: Ranges = ()
    documents: tuple[DocumentList, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.samples or self.steps or self.documents)

    @classmethod
    def from_dict(cls, data: object, names: Sequence[str] | None = None, where: str = "skip") -> SkipConfig:
        """Read ``{samples: ["1000:1200"], documents: {web: [17, 99], pairs: {file: ids.npy, epochs: "0:1"}}}``.

        Args:
            data: that.
            names: of the sources; None if not checked.
            where: its name, for errors.

        Raises:
            ConfigError: malformed, backward, an unknown source, an unreadable file.
        """
        if isinstance(data, SkipConfig):
            return data
        if data is None:
            return NO_SKIP
        if _is_list_of(data, str):
            data = {"samples": data}
        if not isinstance(data, Mapping) or set(data) - {"samples", "documents"}:
            raise ConfigError(
                f"bad value of {where}",
                found=repr(data)[:80],
                expected='samples: ["A:B", ...] and documents: {SOURCE: [numbers]}',
                action=f"correct {where}",
            )
        samples = data.get("samples") or []
        if isinstance(samples, str | int) or not isinstance(samples, Sequence):
            samples = [samples]
        ranges = [parse_range(entry, f"{where}.samples") for entry in samples]
        by_source = data.get("documents") or {}
        if not isinstance(by_source, Mapping):
            raise _bad_documents(f"{where}.documents", by_source)
        documents = []
        for name, entry in by_source.items():
            if names is not None and name not in names:
                raise ConfigError.unknown(
                    f"source in {where}.documents", name, names, action=f"correct {where}.documents"
                )
            entries = entry if _is_list_of(entry, Mapping) else [entry]
            documents += [_document_list(str(name), e, f"{where}.documents.{name}") for e in entries]
        return cls(samples=union(ranges), documents=tuple(documents))

    def to_dict(self, *, files: bool = False) -> dict[str, Any]:
        """The normalised form, plain JSON; with the files that hold long lists, or without."""
        plain: dict[str, Any] = {}
        if self.samples:
            plain["samples"] = [f"{first}:{stop}" for first, stop in self.samples]
        documents: dict[str, Any] = {}
        for entry in self.documents:
            file = {"file": entry.file} if files and entry.file is not None else {}
            documents.setdefault(entry.source, []).append(entry.to_plain() | file)
        return plain | ({"documents": documents} if documents else {})

    def renamed(self, identity: Mapping[str, str]) -> SkipConfig:
        """The skips with other names of sources."""
        documents = (replace(d, source=identity.get(d.source, d.source)) for d in self.documents)
        return replace(self, documents=tuple(documents))


NO_SKIP = SkipConfig()


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, kind) for item in value)


def _document_list(source: str, entry: object, where: str) -> DocumentList:
    data = {"ids": entry} if isinstance(entry, int | list | tuple) else entry
    if not isinstance(data, Mapping) or set(data) - {"ids", "file", "epochs", "count", "digest"}:
        raise _bad_documents(where, entry)
    epochs = None
    if data.get("epochs") is not None:
        epochs = parse_range(data["epochs"], f"{where}.epochs", most=MOST_EPOCHS)
    file, ids = data.get("file"), data.get("ids")
    if file is not None:
        ids = _read(Path(str(file)), where)
    if ids is None:
        if not isinstance(data.get("count"), int) or not isinstance(data.get("digest"), str):
            raise _bad_documents(where, entry)
        return DocumentList(source=source, count=data["count"], digest=data["digest"], epochs=epochs)
    ids = [ids] if isinstance(ids, int) else ids
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 1 << 62 for i in ids):
        raise _bad_documents(where, entry)
    found = DocumentList.of(source, ids, epochs, None if file is None else str(file))
    if found.count > MOST_DOCUMENTS:
        raise ConfigError(
            f"{file or where} skips more documents than a data state can hold",
            found=f"{found.count:,} documents",
            expected=f"at most {MOST_DOCUMENTS:,} in a list: the list is part of every checkpoint",
            action=f"prepare the corpus of '{source}' without them, before a run begins; or give it weight 0",
        )
    if data.get("digest", found.digest) != found.digest:
        raise ConfigError(
            f"{file or where} holds different documents than when the run saved",
            found=f"{found.count:,} documents, digest {found.digest}",
            expected=f"{data.get('count')} documents, digest {data['digest']}",
            cause="the file was changed",
            action="restore the old list; give a new list a new file name",
        )
    return found


def _bad_documents(where: str, entry: object) -> ConfigError:
    return ConfigError(
        f"bad value of {where}",
        found=repr(entry)[:80],
        expected='document numbers: [17, 99], or {ids: [17, 99], epochs: "0:1"}, or {file: ids.npy}',
        action=f"correct {where}",
    )


def _read(path: Path, where: str) -> list[int]:
    """Numbers in an .npy file, or one a line."""
    try:
        if path.suffix == ".npy":
            import numpy as np

            numbers = np.load(path)
            if numbers.dtype.kind not in "iu":
                raise ValueError(f"an array of {numbers.dtype}")
            return [int(n) for n in numbers.reshape(-1)]
        return [int(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the list of documents in {where} cannot be read",
            found=f"{path}: {error}",
            expected="an .npy file of integers, or a text file with a number on each line",
            action="check the path",
        ) from error


@lru_cache(maxsize=64)
def _packed(documents: DocumentList) -> str:
    """Differences of the numbers, as int64 sorted by significance of their bytes, deflated, in base64."""
    numbers = documents.numbers()
    steps = array("q", (b - a for a, b in pairwise([0, *numbers]))).tobytes()
    return b64encode(zlib.compress(b"".join(steps[k::8] for k in range(8)), 9)).decode()


def _unpacked(entry: Mapping[str, Any]) -> list[int]:
    """Unpack what `_packed` made.

    Raises:
        ValueError: it is malformed.
    """
    count = as_count(entry.get("count"))
    if count > MOST_DOCUMENTS:
        raise ValueError(f"{count} documents in a list")
    try:
        # Limit the size, whatever damaged text decompresses to.
        planes = zlib.decompressobj().decompress(b64decode(entry["packed"], validate=True), 8 * count + 1)
    except zlib.error as error:
        raise ValueError(f"a list of documents: {error}") from error
    if len(planes) != 8 * count:
        raise ValueError(f"{len(planes) / 8} documents in a list of {count}")
    steps = bytearray(len(planes))
    for k in range(8):
        steps[k::8] = planes[k * count : (k + 1) * count]
    return list(accumulate(array("q", bytes(steps))))
