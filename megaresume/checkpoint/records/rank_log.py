"""The log of ranks: what every rank trained in each step, as recorded by itself. `read_rank_steps` reads it.

    <DIR>/rank_00003.jsonl
      {"event": "start", "launch": 17636…, "step": 10, "samples": 80, "dp_rank": 3, "dp": 4, "micro_batch_size": 2, ...}
      {"event": "step", "step": 11, "samples": [[86, 88], [94, 96]], "order": "9f…", "content": "17…",
       "masks": true, "seen": true}

With replicas that leave and join during the run, ``launch`` identifies those that train together: the first of them
determines it, and it grows whenever the members change. Their steps are dealt out evenly (``"dealt": "evenly"``), and
have a line ``vote`` before it is decided whether they count; a step counts if one of them has written its line
``step``.

``content`` covers tokens and pixels and, with ``masks``, which labels are trained.

Every process that gets data writes its own file: no rank waits for another, and no collective is added to a step.
``seen``: the model's own forward was given these samples (`megaresume.hosts.deepspeed.engine_data`); otherwise they
were only handed out. A line is one append of about 150 bytes, after its step (under Megatron: once the last micro-batch
of the step was handed out); SIGKILL loses nothing that was appended, and a line truncated by a dying machine is closed
off by the next start and skipped. Lines are sealed, so that later damage is detected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.checkpoint.records.sealed import seal
from megaresume.checkpoint.replay import Replay
from megaresume.checkpoint.system import utc
from megaresume.files import is_torn
from megaresume.stream.arrays import Int64Array
from megaresume.stream.batches import Balance
from megaresume.stream.errors import SetupError

FORMAT = "megaresume.ranks"
VERSION = 1


def hash_rows(
    tokens: npt.NDArray[Any],
    images: Iterable[tuple[int, npt.NDArray[Any]]] = (),
    loss_mask: npt.NDArray[Any] | None = None,
) -> npt.NDArray[np.uint64]:
    """A hash of the content of each sample.

    Args:
        tokens: integers[m, S], including padding.
        images: (row of the sample, float32 pixels) of every image, in the order of their tokens.
        loss_mask: float32[m, S], which labels are trained; None to leave it out.

    Returns:
        uint64[m]: xxh3_64 of each row as little-endian int64, followed by its pixels and its mask.
    """
    hashers = [xxhash.xxh3_64(row.data) for row in np.ascontiguousarray(tokens, dtype="<i8")]
    for row, pixels in images:
        hashers[row].update(np.ascontiguousarray(pixels, dtype="<f4").data)
    if loss_mask is not None:
        for hasher, counts in zip(hashers, np.ascontiguousarray(loss_mask > 0), strict=True):
            hasher.update(counts.data)
    return np.array([hasher.intdigest() for hasher in hashers], np.uint64)


def hash_samples(values: npt.NDArray[np.uint64]) -> str:
    """One hash of many: xxh3_64 over uint64[n] in this order; 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values, dtype="<u8").tobytes())


def images_of(batch: Mapping[str, Any]) -> list[tuple[int, npt.NDArray[Any]]]:
    """(row, pixels) of the images in a `megaresume.batches.batch.Batch`; empty if its blend has no images."""
    if "pixel_values" not in batch:
        return []
    parts = batch["pixel_values"].split(batch["num_tiles"].tolist())
    return [(row, pixels.numpy()) for row, pixels in zip(batch["image_positions"][:, 0].tolist(), parts, strict=True)]


@dataclass(frozen=True, slots=True)
class Noted:
    """A micro-batch of m samples, as it is logged."""

    #: int64[m]: sample numbers in the stream.
    samples: Int64Array
    #: uint64[m] each: identities, and contents (`hash_rows`).
    hashes: npt.NDArray[np.uint64]
    contents: npt.NDArray[np.uint64]
    #: whether the latter include which labels are trained.
    masks: bool = False


def noted(batch: Mapping[str, Any]) -> Noted:
    """The log entry for a `megaresume.batches.batch.Batch`, taken before anything changes it."""
    loss_mask = batch.get("loss_mask")
    return Noted(
        np.array(batch["samples"].numpy(), np.int64),
        np.array(batch["hashes"].numpy(), np.int64).view(np.uint64),
        hash_rows(batch["tokens"].numpy(), images_of(batch), None if loss_mask is None else loss_mask.numpy()),
        masks=loss_mask is not None,
    )


class RankLog:
    """The file of one process.

    Args:
        directory: for the run's logs; created if necessary. In a replay, a directory outside the run replaces it.
        rank: number of the process in the job.
        launch: the same number on every rank, increasing with every start of the run: `time.time_ns` on rank 0.
        chunk: of a virtual pipeline, if a process has several.

    Raises:
        SetupError: it cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int, launch: int, chunk: int = 0) -> None:
        name = f"rank_{rank:05d}" + (f"_chunk_{chunk}" if chunk else "") + ".jsonl"
        replay = Replay.asked()
        self._path = (Path(directory) if replay is None else Path(replay.out) / "samples") / name
        self._rank, self._launch = rank, launch
        self._batches: list[Noted] = []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            if is_torn(self._file):
                os.write(self._file, b"\n")  # closes off a line truncated by a dying machine
        except OSError as error:
            raise SetupError(
                f"cannot write the log of samples {self._path}",
                found=error.strerror or str(error),
                expected="a directory that every rank can write to",
                action="correct --megaresume-log-samples (log_samples), or leave it out",
            ) from error

    def start(
        self,
        *,
        step: int,
        samples: int,
        dp_rank: int,
        dp: int,
        micro_batch_size: int,
        pad_id: int,
        digest: str,
        balance: Balance | None = None,
        launch: int | None = None,
    ) -> None:
        """Record where this process resumes, and what it will be handed.

        Args:
            step: optimizer steps done.
            samples: samples trained.
            dp_rank, dp: its number among the data-parallel ranks, and how many there are.
            micro_batch_size: in samples.
            pad_id: token at positions without a document.
            digest: of the samples trained.
            balance: how the samples of a step are dealt to the ranks.
            launch: id of those that train together, if replicas leave and join; None: that of this process.
        """
        self._batches = []
        layout: dict[str, Any] = {"dp_rank": dp_rank, "dp": dp, "micro_batch_size": micro_batch_size, "pad_id": pad_id}
        if balance is not None:
            layout |= {"balance": balance.to_dict()}
        if launch is not None:
            self._launch, layout = launch, layout | {"dealt": "evenly"}
        at = {"step": step, "samples": samples, "digest": digest}
        self._write({"event": "start", "format": FORMAT, "version": VERSION, "rank": self._rank} | at | layout)

    def add(
        self,
        samples: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        images: Iterable[tuple[int, npt.NDArray[Any]]] = (),
        loss_mask: npt.NDArray[Any] | None = None,
    ) -> None:
        """Record a micro-batch that is handed out.

        Args:
            samples: int64[m], sample numbers in the stream.
            hashes: int64[m], the bits of the samples' identities.
            tokens: int64[m, S].
            images, loss_mask: see `hash_rows`.
        """
        identities = np.array(hashes, np.int64).view(np.uint64)
        contents = hash_rows(tokens, images, loss_mask)
        self.add_noted(Noted(np.array(samples, np.int64), identities, contents, masks=loss_mask is not None))

    def add_noted(self, batch: Noted) -> None:
        """Add an entry from `noted`."""
        self._batches.append(batch)

    @property
    def noted(self) -> int:
        """Number of samples recorded since the last line."""
        return sum(len(batch.samples) for batch in self._batches)

    def end_step(self, step: int, *, seen: bool = False) -> None:
        """Write the line of a step: all micro-batches since the last line.

        Args:
            step: its number.
            seen: whether the model's own forward was seen to get them, in this order; otherwise they were handed out.
        """
        if not self._batches:
            return
        samples = np.concatenate([batch.samples for batch in self._batches])
        fields = {
            "event": "step",
            "step": step,
            "samples": ranges_of(samples),
            "order": hash_samples(np.concatenate([batch.hashes for batch in self._batches])),
            "content": hash_samples(np.concatenate([batch.contents for batch in self._batches])),
            "masks": all(batch.masks for batch in self._batches),
            "seen": seen,
        }
        self._batches = []
        self._write(fields)

    def note_planned(self, event: Literal["vote", "step"], step: int, samples: Int64Array, hashes: Any) -> None:
        """Write a line of a step, from this process's plan.

        Args:
            event: ``vote``: trained, and not yet decided; ``step``: it counts.
            step: its number.
            samples: int64[m], sample numbers in the stream, m > 0.
            hashes: uint64[m], their identities.
        """
        fields = {"samples": ranges_of(samples), "order": hash_samples(hashes), "masks": False, "seen": False}
        self._write({"event": event, "step": step} | fields)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, fields: dict[str, Any]) -> None:
        os.write(self._file, seal(fields | {"launch": self._launch, "time": utc(time.time())}))


def ranges_of(samples: Int64Array) -> list[list[int]]:
    """Consecutive numbers as [first, stop)."""
    cuts = np.flatnonzero(np.diff(samples) != 1) + 1
    return [[int(part[0]), int(part[-1]) + 1] for part in np.split(samples, cuts)]
