"""What a run leaves out: ranges of samples, steps, single documents.

    data.yaml, a flag, attach(skip=)  ->  `SkipConfig`  --decide-->  `Skips`, in the state

Ranges of samples are written in absolute numbers (`megaresume.stream.ranges`), steps as training counts them when they
are first named: they become samples at that moment, once. What was decided is kept in the state as a log of what was
asked for, and as what is in force. The past is immutable: what was trained already is not left out any more, what was
left out does not come back.

Imports neither numpy nor numba, as `megaresume.stream.state`.
"""

from __future__ import annotations

import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import xxhash

from megaresume.stream.errors import ConfigError
from megaresume.stream.ranges import Range, Ranges, absolute, common, length, minus, parse_range, reached, union
from megaresume.stream.text import as_count

#: Documents of a list that a state writes out; a longer one it packs.
MOST_WRITTEN = 256
#: Documents of a list: packed they take 2 to 3 bytes each, in every checkpoint.
MOST_DOCUMENTS = 1 << 20
#: Epochs in which a list may hold.
MOST_EPOCHS = 1 << 20

Unit = Literal["samples", "steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentList:
    """Documents of a source."""

    source: str
    #: how many.
    count: int
    #: xxh3_64 of their numbers, ascending, int64 little-endian; 16 hex digits.
    digest: str
    #: [first, stop) epochs in which they are left out; None: in all.
    epochs: Range | None = None
    #: ascending; None: a long list as the data config in a state names it. What a state skips has them.
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
        """The documents, ascending.

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

    def __str__(self) -> str:
        words = f"{self.count:,} document{'s' * (self.count != 1)} of {self.source}"
        if self.ids is not None and self.count <= 8:
            words = f"{self.source}:{','.join(map(str, self.ids))}"
        return words + ("" if self.epochs is None else f" in epochs {self.epochs[0]} to {self.epochs[1] - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipConfig:
    """What is asked for in one place."""

    #: absolute.
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
            names: of the sources; None: not checked.
            where: its name, for errors.

        Raises:
            ConfigError: malformed, backward, a source that there is not, a file that cannot be read.
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
                raise ConfigError(
                    f"{where}.documents names a source that there is not",
                    found=str(name),
                    expected=f"one of {', '.join(names)}",
                    action=f"correct {where}.documents",
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
        """With other names of sources."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRecord:
    """One thing that was asked for, when it was seen first."""

    #: samples trained then.
    at: int
    #: ``skip``; ``keep``: a skip that was taken back before it came.
    action: Literal["skip", "keep"]
    unit: Unit
    #: as it was asked for: [first, stop) samples, or (first, last) steps.
    asked: Range
    #: [first, stop) absolute.
    samples: Range
    #: samples of them that were trained already.
    late: int

    def __str__(self) -> str:
        first, stop = self.asked[0], self.asked[1] - (self.unit == "samples")
        words = f"{'skip' if self.action == 'skip' else 'do not skip'} {self.unit} {first:,} to {stop:,}"
        low, high = self.samples[0], self.samples[1] - 1
        num = self.samples[1] - self.samples[0] - self.late
        words += f" ({'' if self.unit == 'samples' else f'samples {low:,} to {high:,}; '}{num:,} samples)"
        late = f"{self.late:,} of them were trained already and stay trained" if num else "all were trained already"
        return words + (f": TOO LATE, {late}" if self.late else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentSkip:
    """Documents that are passed over."""

    documents: DocumentList
    #: samples trained when it was first declared, and when it was taken back: it holds in between.
    at: int
    until: int | None = None

    def holds_at(self, sample: int) -> bool:
        """Whether it holds where so many samples were trained."""
        return self.at <= sample and (self.until is None or sample < self.until)


@dataclass(frozen=True, kw_only=True, slots=True)
class Skips:
    """What is left out of a stream, as its state knows it."""

    #: absolute; in force, or left out.
    ranges: Ranges = ()
    #: in the order in which it was seen.
    log: tuple[SkipRecord, ...] = ()
    #: in the order in which they were declared.
    documents: tuple[DocumentSkip, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ranges or self.log or self.documents)

    @property
    def asked(self) -> Ranges:
        """Samples that were asked for and not taken back, also those that came too late."""
        asked: Ranges = ()
        for record in self.log:
            asked = union(asked, [record.samples]) if record.action == "skip" else minus(asked, [record.samples])
        return asked

    def changes(self) -> tuple[int, ...]:
        """Samples, ascending, at which a list of documents begins or ceases to hold."""
        marks = {d.at for d in self.documents} | {d.until for d in self.documents if d.until is not None}
        return tuple(sorted(marks))

    def to_plain(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "ranges": [list(r) for r in self.ranges],
            "log": [[r.at, r.action, r.unit, *r.asked, *r.samples, r.late] for r in self.log],
            "documents": [
                [d.at, d.until, d.documents.source, d.documents.to_plain(whole=True)] for d in self.documents
            ],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Skips:
        """What `to_plain` gave.

        Raises:
            ValueError, KeyError, TypeError, ConfigError: it is not.
        """
        if not all(isinstance(plain[name], list) for name in ("ranges", "log", "documents")):
            raise ValueError(f"no lists: {plain!r:.100}")
        ranges = tuple((as_count(a), as_count(b)) for a, b in plain["ranges"])
        if ranges != union(ranges):
            raise ValueError(f"ranges {ranges!r:.100}")
        log = []
        for at, action, unit, first, last, low, high, late in plain["log"]:
            if action not in ("skip", "keep") or unit not in ("samples", "steps"):
                raise ValueError(f"a record of a skip: {action!r} {unit!r}")
            asked, samples = (as_count(first), as_count(last)), (as_count(low), as_count(high))
            log.append(
                SkipRecord(at=as_count(at), action=action, unit=unit, asked=asked, samples=samples, late=as_count(late))
            )
        documents = []
        for at, until, source, entry in plain["documents"]:
            if not isinstance(source, str):
                raise ValueError(f"documents of {source!r}")
            if "packed" in entry:
                entry = {name: value for name, value in entry.items() if name != "packed"} | {"ids": _unpacked(entry)}
            elif "ids" not in entry:
                raise ValueError(f"documents of {source!r} without their numbers")
            found = _document_list(source, entry, "a state")
            until = None if until is None else as_count(until)
            documents.append(DocumentSkip(documents=found, at=as_count(at), until=until))
        return cls(ranges=ranges, log=tuple(log), documents=tuple(documents))


NO_SKIPS = Skips()


def decide(
    before: Skips,
    samples: int,
    *,
    then: SkipConfig,
    now: SkipConfig,
    given: Sequence[SkipConfig] = (),
    steps_to_samples: Callable[[Range], Range] | None = None,
    end: int | None = None,
) -> tuple[Skips, tuple[str, ...]]:
    """What is left out from a state on.

    Args:
        before: what the state knows.
        samples: that it has trained.
        then: what the data config of that time asked for, and
        now: that of today. What it asks for no more, and is to come, is taken back.
        given: asked for in other places: flags, ``attach``. They add.
        steps_to_samples: the trained samples of steps (first, last).
        end: trained samples at the end of the run, where it is known.

    Returns:
        what is left out; what changed, in words, to be kept in the state.

    Raises:
        ConfigError: a range that begins beyond the end of the run, or is longer than the run.
    """
    here = reached(before.ranges, samples)
    future: Ranges = ((here, 1 << 62),)
    ranges, log, asked = before.ranges, list(before.log), before.asked
    wanted = union(now.samples, *(g.samples for g in given))

    # What was named as steps is no business of the data config.
    by_steps = union(record.samples for record in before.log if record.unit == "steps")
    gone = common(minus(then.samples, union(wanted, by_steps)), common(future, asked))
    log += [SkipRecord(at=samples, action="keep", unit="samples", asked=r, samples=r, late=0) for r in gone]
    ranges, asked = minus(ranges, gone), minus(asked, gone)

    named = {(record.unit, record.asked) for record in before.log}
    new: list[tuple[Unit, Range, Range]] = [("samples", r, r) for r in minus(wanted, asked)]
    for steps in dict.fromkeys(s for g in given for s in g.steps):
        if ("steps", steps) in named:
            continue
        if steps_to_samples is None:
            raise no_schedule(steps)
        first, stop = steps_to_samples(steps)
        new.append(("steps", steps, (absolute(before.ranges, first), absolute(before.ranges, stop - 1) + 1)))
    for unit, named_as, r in new:
        late = length(minus([(r[0], min(r[1], here))], asked)) if r[0] < here else 0
        log.append(SkipRecord(at=samples, action="skip", unit=unit, asked=named_as, samples=r, late=late))
        ranges, asked = union(ranges, common([r], future)), union(asked, [r])

    for unit, named_as, r in new:
        if end is not None and r[0] >= (last := absolute(minus(ranges, [r]), end)):
            raise _beyond(unit, named_as, end, last)
        if end is not None and r[1] - r[0] > end:
            # A typing error, and planning that far may take hours.
            raise _too_long(unit, named_as, r, end)
    documents, words = _decide_documents(before.documents, samples, then, now, given)
    said = [f"at sample {samples}: {record}" for record in log[len(before.log) :]]
    return Skips(ranges=ranges, log=tuple(log), documents=documents), (*said, *words)


def _decide_documents(
    before: Sequence[DocumentSkip], samples: int, then: SkipConfig, now: SkipConfig, given: Sequence[SkipConfig]
) -> tuple[tuple[DocumentSkip, ...], list[str]]:
    wanted = {d: d for c in (now, *given) for d in c.documents}
    said: list[str] = []
    result = []
    for skip in before:
        if skip.until is None and skip.documents not in wanted and skip.documents in then.documents:
            said.append(f"at sample {samples}: do not skip {skip.documents} any more")
            skip = replace(skip, until=samples)
        result.append(skip)
    for documents in wanted:
        if not any(skip.until is None and skip.documents == documents for skip in before):
            said.append(f"at sample {samples}: skip {documents}")
            documents.numbers()
            result.append(DocumentSkip(documents=documents, at=samples))
    return tuple(result), said


def check_documents(skips: Skips, sizes: Mapping[str, int]) -> None:
    """Every document that is skipped is one of its source.

    Args:
        skips: what is left out.
        sizes: documents of each source that is here.

    Raises:
        ConfigError: one lies beyond the end of its source.
    """
    for skip in skips.documents:
        documents = skip.documents
        num, last = sizes.get(documents.source), documents.numbers()[-1]
        if num is not None and last >= num:
            raise ConfigError(
                f"source '{documents.source}' has no document {last} that could be skipped",
                found=f"skip of {documents}",
                expected=f"documents from 0 to {num - 1}",
                action="correct the numbers; they count the documents of the trained part",
            )


@lru_cache(maxsize=64)
def _packed(documents: DocumentList) -> str:
    """Differences of the numbers, as int64 sorted by significance of their bytes, deflated, in base64."""
    numbers = documents.numbers()
    steps = array("q", (b - a for a, b in pairwise([0, *numbers]))).tobytes()
    return b64encode(zlib.compress(b"".join(steps[k::8] for k in range(8)), 9)).decode()


def _unpacked(entry: Mapping[str, Any]) -> list[int]:
    """What `_packed` made.

    Raises:
        ValueError: it is something else.
    """
    count = as_count(entry.get("count"))
    if count > MOST_DOCUMENTS:
        raise ValueError(f"{count} documents in a list")
    try:
        # Never more than there may be, whatever a damaged text unfolds to.
        planes = zlib.decompressobj().decompress(b64decode(entry["packed"], validate=True), 8 * count + 1)
    except zlib.error as error:
        raise ValueError(f"a list of documents: {error}") from error
    if len(planes) != 8 * count:
        raise ValueError(f"{len(planes) / 8} documents in a list of {count}")
    steps = bytearray(len(planes))
    for k in range(8):
        steps[k::8] = planes[k * count : (k + 1) * count]
    return list(accumulate(array("q", bytes(steps))))


def no_schedule(steps: Range) -> ConfigError:
    return ConfigError(
        "steps cannot be skipped if the batch sizes are not known",
        found=f"steps {steps[0]} to {steps[1]}",
        expected="samples, or a training program that knows which samples a step trains",
        action="skip samples: A:B",
    )


def _too_long(unit: Unit, asked: Range, samples: Range, end: int) -> ConfigError:
    return ConfigError(
        "a skip leaves out more than the run trains",
        found=f"skip of {unit} {asked[0]:,} to {asked[1] - (unit == 'samples'):,}: {samples[1] - samples[0]:,} samples",
        expected=f"at most {end:,} samples, as many as the run trains",
        cause="a typing error: the data after the skipped samples would move up from that far away",
        action="correct the range; to end the run earlier, lower --train-iters or --train-samples",
    )


def _beyond(unit: Unit, asked: Range, end: int, end_absolute: int) -> ConfigError:
    return ConfigError(
        "a skip is beyond the end of the run",
        found=f"skip of {unit} {asked[0]:,} to {asked[1] - (unit == 'samples'):,}",
        expected=f"{unit} of the run, which ends with sample {end - 1:,}"
        + (f" ({end_absolute - 1:,} counted with what is left out)" if end_absolute != end else ""),
        cause="a typing error, or the run was shortened",
        action="correct the range, or train longer",
    )
