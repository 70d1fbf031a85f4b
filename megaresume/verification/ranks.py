"""What every rank trained, step by step, as it wrote it down itself: the log of ranks, written and read.

    <DIR>/rank_00003.jsonl
      {"event": "start", "launch": 17636…, "step": 10, "samples": 80, "dp_rank": 3, "dp": 4, "micro_batch_size": 2, ...}
      {"event": "step", "step": 11, "samples": [[86, 88], [94, 96]], "order": "9f…", "content": "17…"}

Every process that is handed data writes a file of its own: no rank waits for another one, no collective is added to a
step. A line is one append, of some 150 bytes, once the last micro-batch of its step was handed out; SIGKILL loses
nothing that was appended, and a line that a dying machine cut short is closed off by the next start and passed over.
Lines are sealed: what was damaged later is known as such.

A run that went back to a checkpoint has lines of what it lost; what the next launch does again counts.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.checkpoint.clock import utc
from megaresume.checkpoint.sealed import NewerFormatError, SealError, seal, unseal
from megaresume.stream.errors import SetupError, UsageError

__all__ = ["RankLog", "RankRecords", "RankStep", "hash_rows", "hash_samples", "images_of", "read_rank_logs"]

FORMAT = "megaresume.ranks"
VERSION = 1
_NAME = re.compile(r"rank_\d+(_chunk_\d+)?\.jsonl")
Int64Array = npt.NDArray[np.int64]


def hash_rows(tokens: npt.NDArray[Any], images: Iterable[tuple[int, npt.NDArray[Any]]] = ()) -> npt.NDArray[np.uint64]:
    """What each sample holds.

    Args:
        tokens: integers[m, S], padding included.
        images: (row of the sample, float32 pixels) of every image, in the order of their tokens.

    Returns:
        uint64[m]: xxh3_64 of each row, as int64 little-endian, and of its pixels behind that.
    """
    hashers = [xxhash.xxh3_64(row.data) for row in np.ascontiguousarray(tokens, dtype="<i8")]
    for row, pixels in images:
        hashers[row].update(np.ascontiguousarray(pixels, dtype="<f4").data)
    return np.array([hasher.intdigest() for hasher in hashers], np.uint64)


def hash_samples(values: npt.NDArray[np.uint64]) -> str:
    """One hash of many: xxh3_64 over uint64[n] in this order; 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values, dtype="<u8").tobytes())


def images_of(batch: Mapping[str, Any]) -> list[tuple[int, npt.NDArray[Any]]]:
    """(row, pixels) of the images of a `megaresume.loading.batch.Batch`; none where its blend has no images."""
    if "pixel_values" not in batch:
        return []
    parts = batch["pixel_values"].split(batch["num_tiles"].tolist())
    return [(row, pixels.numpy()) for row, pixels in zip(batch["image_positions"][:, 0].tolist(), parts, strict=True)]


class RankLog:
    """The file of one process.

    Args:
        directory: of the run's logs; created if need be.
        rank: number of the process in the job.
        launch: the same number on every rank, greater at every start of the run: `time.time_ns` on rank 0.
        chunk: of a virtual pipeline, if there is more than one in a process.

    Raises:
        SetupError: it cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int, launch: int, chunk: int = 0) -> None:
        name = f"rank_{rank:05d}" + (f"_chunk_{chunk}" if chunk else "") + ".jsonl"
        self._path = Path(directory) / name
        self._rank, self._launch = rank, launch
        self._samples: list[Int64Array] = []
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._contents: list[npt.NDArray[np.uint64]] = []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")  # closes off a line that a dying machine cut short
        except OSError as error:
            raise SetupError(
                f"cannot write the log of samples {self._path}",
                found=error.strerror or str(error),
                expected="a directory that every rank can write to",
                action="correct --megaresume-log-samples (log_samples), or leave it out",
            ) from error

    def start(
        self, *, step: int, samples: int, dp_rank: int, dp: int, micro_batch_size: int, pad_id: int, digest: str
    ) -> None:
        """Note where this process goes on, and what it will be handed.

        Args:
            step: optimizer steps done.
            samples: trained.
            dp_rank, dp: place among the data-parallel ranks.
            micro_batch_size: samples.
            pad_id: token at places without a document.
            digest: of the samples trained.
        """
        self._samples, self._hashes, self._contents = [], [], []
        layout = {"dp_rank": dp_rank, "dp": dp, "micro_batch_size": micro_batch_size, "pad_id": pad_id}
        at = {"step": step, "samples": samples, "digest": digest}
        self._write({"event": "start", "format": FORMAT, "version": VERSION, "rank": self._rank} | at | layout)

    def add(
        self,
        samples: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        images: Iterable[tuple[int, npt.NDArray[Any]]] = (),
    ) -> None:
        """Note a micro-batch that is handed out.

        Args:
            samples: int64[m], numbers in the stream.
            hashes: int64[m], the bits of the samples' identities.
            tokens: int64[m, S].
            images: see `hash_rows`.
        """
        self._samples.append(np.array(samples, np.int64))
        self._hashes.append(np.array(hashes, np.int64).view(np.uint64))
        self._contents.append(hash_rows(tokens, images))

    def add_batch(self, batch: Mapping[str, Any]) -> None:
        """Note a `megaresume.loading.batch.Batch`."""
        self.add(batch["samples"].numpy(), batch["hashes"].numpy(), batch["tokens"].numpy(), images_of(batch))

    @property
    def noted(self) -> int:
        """Samples noted since the last line."""
        return sum(map(len, self._samples))

    def end_step(self, step: int) -> None:
        """Write the line of a step: all micro-batches since the last one."""
        if not self._samples:
            return
        samples = np.concatenate(self._samples)
        fields = {
            "event": "step",
            "step": step,
            "samples": _ranges(samples),
            "order": hash_samples(np.concatenate(self._hashes)),
            "content": hash_samples(np.concatenate(self._contents)),
        }
        self._samples, self._hashes, self._contents = [], [], []
        self._write(fields)

    def close(self) -> None:
        """Nothing is written any more."""
        os.close(self._file)

    def _write(self, fields: dict[str, Any]) -> None:
        os.write(self._file, seal(fields | {"launch": self._launch, "time": utc(time.time())}))


def _ranges(samples: Int64Array) -> list[list[int]]:
    """Consecutive numbers as [first, stop)."""
    cuts = np.flatnonzero(np.diff(samples) != 1) + 1
    return [[int(part[0]), int(part[-1]) + 1] for part in np.split(samples, cuts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """What one process wrote down about one step."""

    step: int
    #: of the process in the job; None: the line is of all ranks together.
    rank: int | None
    #: data-parallel rank and size, and samples of a micro-batch; None where the line does not say.
    dp_rank: int | None
    dp: int | None
    micro_batch_size: int | None
    #: [first, stop) samples, in the order in which they were handed out.
    samples: tuple[tuple[int, int], ...]
    #: hash over the samples' identities; over their tokens (None: not recorded). 16 hex digits.
    order: str
    content: str | None
    #: token at places without a document.
    pad_id: int = 0

    @property
    def who(self) -> str:
        """In words."""
        if self.rank is None:
            return "all ranks" if self.dp_rank is None else f"data-parallel rank {self.dp_rank}"
        return f"rank {self.rank}" + ("" if self.rank == self.dp_rank else f" (data-parallel rank {self.dp_rank})")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecords:
    """The log of a run, over all of its launches."""

    #: by step: its lines on the path to the present.
    steps: dict[int, tuple[RankStep, ...]]
    #: (lines of a step that was lost, sample at which the launch went on that lost them).
    lost: tuple[tuple[RankStep, int], ...]
    #: lines that cannot be used, in words; damaged ones first.
    problems: tuple[str, ...] = ()
    #: of them, those that were changed after they were written.
    damaged: int = 0
    #: the last step of each launch: where a kill came, not every rank has its line.
    last_steps: frozenset[int] = frozenset()


def read_rank_logs(path: str | Path) -> RankRecords:
    """Read a directory of ranks' files, or the one file of the reference pretraining program.

    Raises:
        UsageError: there is no such thing, or it holds no step.
        NewerFormatError: it was written by a newer megaresume.
    """
    path = Path(path)
    files = sorted(p for p in path.iterdir() if _NAME.fullmatch(p.name)) if path.is_dir() else [path]
    problems: list[tuple[bool, str]] = []
    launches: dict[tuple[int, int], _Launch] = {}
    try:
        for file in files:
            read = _read_file if path.is_dir() else _read_gathered
            read(file, launches, problems)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}",
            found=error.strerror or str(error),
            expected="what --megaresume-log-samples (log_samples) named",
            action="check the path",
        ) from error
    steps: dict[int, list[RankStep]] = {}
    lost: list[tuple[RankStep, int]] = []
    last_steps: set[int] = set()
    for key in sorted(launches):
        launch = launches[key]
        for step in sorted(s for s in steps if s > launch.step):
            lost += [(line, launch.samples) for line in steps.pop(step)]
        last_steps = {step for step in last_steps if step <= launch.step}
        for line in launch.lines:
            steps.setdefault(line.step, []).append(line)
        last_steps.add(max((line.step for line in launch.lines), default=launch.step))
    if not steps:
        raise UsageError(
            f"{path} holds no steps",
            found=f"{len(files)} files" if path.is_dir() else "no line of a step",
            expected="rank_00000.jsonl and the like, or a file of JSON lines with a step each",
            cause="the run ended before its first step, or this is another directory",
            action="give what --megaresume-log-samples (log_samples) named",
        )
    return RankRecords(
        steps={step: tuple(lines) for step, lines in sorted(steps.items())},
        lost=tuple(lost),
        problems=tuple(text for _, text in sorted(problems, key=lambda p: not p[0])),
        damaged=sum(damaged for damaged, _ in problems),
        last_steps=frozenset(last_steps),
    )


@dataclass
class _Launch:
    """A start, of all ranks together."""

    step: int
    samples: int
    lines: list[RankStep]


def _read_file(path: Path, launches: dict[tuple[int, int], _Launch], problems: list[tuple[bool, str]]) -> None:
    start: dict[str, Any] | None = None
    again = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            fields = unseal(line)
        except SealError as error:
            problems.append((not error.cut, f"{path.name} line {number} {error}"))
            continue
        if fields["event"] == "start":
            _check_version(path, fields)
            # A process that loads another checkpoint, without being started anew, begins once more.
            again = again + 1 if start is not None and start["launch"] == fields["launch"] else 0
            start = fields
            key = fields["launch"], again
            launches.setdefault(key, _Launch(int(fields["step"]), int(fields["samples"]), []))
        elif start is not None:
            launches[start["launch"], again].lines.append(
                RankStep(
                    step=int(fields["step"]),
                    rank=int(start["rank"]),
                    dp_rank=int(start["dp_rank"]),
                    dp=int(start["dp"]),
                    micro_batch_size=int(start["micro_batch_size"]),
                    samples=tuple((int(a), int(b)) for a, b in fields["samples"]),
                    order=str(fields["order"]),
                    content=str(fields["content"]),
                    pad_id=int(start["pad_id"]),
                )
            )


def _check_version(path: Path, fields: dict[str, Any]) -> None:
    if fields.get("version", 0) > VERSION:
        raise NewerFormatError(
            "the log of samples was written by a newer megaresume",
            found=f"{path}: version {fields['version']}",
            expected=f"version {VERSION} or older",
            action="upgrade megaresume on this machine to the version that wrote it",
        )


def _read_gathered(path: Path, launches: dict[tuple[int, int], _Launch], problems: list[tuple[bool, str]]) -> None:
    """Rank 0 of the reference program writes for all: a line a step, the hashes of the ranks within."""
    number = 0
    lines = path.read_bytes().split(b"\n")
    for at, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            event, step = record["event"], int(record["step"])
        except (ValueError, KeyError, TypeError):
            problems.append((at < len(lines), f"{path.name} line {at} is no record"))
            continue
        if event == "start":
            number += 1
            launches[number, 0] = _Launch(step, int(record["samples"]), [])
        elif event == "step":
            launch = launches.setdefault((number, 0), _Launch(step - 1, 0, []))
            launch.lines += _gathered(record)


def _gathered(record: dict[str, Any]) -> Iterable[RankStep]:
    from megaresume.stream.batches import micro_batches

    first, stop = record["samples"]
    step, dp, micro = int(record["step"]), int(record.get("dp", 1)), int(record.get("micro_batch_size") or 1)
    if record["order"] is not None:
        everything = ((int(first), int(stop)),)
        yield RankStep(
            step=step,
            rank=None,
            dp_rank=None,
            dp=None,
            micro_batch_size=None,
            samples=everything,
            order=str(record["order"]),
            content=None,
        )
    ranks: Sequence[Any] = record.get("ranks") or ()
    for rank, (order, content) in enumerate(ranks):
        mine = micro_batches(first, stop - first, micro_batch_size=micro, dp_rank=rank, dp_size=dp)
        samples = _ranges(np.concatenate([np.arange(r.start, r.stop) for r in mine]))
        yield RankStep(
            step=step,
            rank=None,
            dp_rank=rank,
            dp=dp,
            micro_batch_size=micro,
            samples=tuple((a, b) for a, b in samples),
            order=str(order),
            content=str(content),
        )
