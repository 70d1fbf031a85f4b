"""The output of a run: lines for people on standard output, JSON lines for programs in a file.

They contain the seconds that a rank spends on its data, and hashes of what the model gets of a sample: tokens, labels,
masks, positions, and its images to the last bit. A JSON line is one write to a file opened for appending: a kill loses
at most the line of the current step, and lines of earlier attempts are never touched. The last line of a step counts.

    {"event": "start", "attempt": 2, "step": 10, "samples": 80, "digest": "...", "data_seconds": 0.2, "topology": {...},
     "time": ...}
    {"event": "step", "attempt": 2, "step": 11, "samples": [80, 88], "order": "...", "content": "...", "digest": "...",
     "ranks": [["...", "..."], ["...", "..."]],
     "loss": 5.25, "loss_hex": "0x1.5p+2", "lr": 0.001, "grad_norm": 1.5, "tokens": 500, "data_seconds": 0.01,
     "tokens_per_second": 9000, ...}
    {"event": "validation", "attempt": 2, "step": 11, "set": "valid", "loss": 5.25, "loss_hex": "0x1.5p+2",
     "tokens": 4000, "digest": "..."}
"""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megaresume.batches.batch import Batch
from megaresume.checkpoint.records.rank_log import hash_rows, hash_samples, images_of
from megaresume.checkpoint.system import Topology, utc
from megaresume.cluster.training.launch import announce
from megaresume.stream.errors import UsageError


class Stopwatch:
    """Runs within its ``with`` statements, and within methods that it watches."""

    def __init__(self) -> None:
        #: the seconds so far.
        self.seconds = 0.0
        self._began = 0.0

    def watch(self, thing: Any, method: str) -> None:
        """Count every call of a method of this object."""
        call = getattr(thing, method)

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self:
                return call(*args, **kwargs)

        setattr(thing, method, timed)

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began


def content_hashes(batch: Batch) -> list[int]:
    """An unsigned 64-bit hash of each sample of a micro-batch, the same for any layout of micro-batches and ranks.

    Images are included with their pixels, grid, column and number of tokens; not their row, which depends on the
    layout.
    """
    arrays = [batch[name].numpy() for name in ("tokens", "labels", "loss_mask", "position_ids")]
    hashers = [xxhash.xxh3_64() for _ in range(len(arrays[0]))]
    for row, hasher in enumerate(hashers):
        for array in arrays:
            hasher.update(array[row].data)
    if "pixel_values" in batch:
        pixels = torch.split(batch["pixel_values"], batch["num_tiles"].tolist())
        for place, grid, image in zip(batch["image_positions"], batch["image_grid_thw"], pixels, strict=True):
            hasher = hashers[int(place[0])]
            hasher.update(repr((place[1:].tolist(), grid.tolist(), tuple(image.shape))).encode())
            hasher.update(image.contiguous().numpy().data)
    return [hasher.intdigest() for hasher in hashers]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step."""

    #: number of the step, from 1.
    step: int
    #: [first, last) samples that the ranks trained on, according to their batches.
    samples: tuple[int, int]
    #: hash of the identities of these samples; hash of their tokens, labels, masks, positions and images; 16 hex
    #: digits. None without a log.
    order: str | None
    content: str | None
    #: for each data-parallel rank: hash of its samples; hash of their tokens and pixels, as in
    #: `megaresume.checkpoint.records.rank_log`.
    ranks: tuple[tuple[str, str], ...] | None
    #: rolling digest of the stream after the step, 16 hex digits.
    digest: str
    #: mean over the trained tokens of the global batch.
    loss: float
    lr: float
    grad_norm: float | None
    #: trained tokens.
    tokens: int
    global_batch_size: int
    #: seconds; and how many of them rank 0 waited for its samples.
    seconds: float
    data_seconds: float
    #: positions (tokens and padding) per second.
    tokens_per_second: float

    def line(self, total_steps: str) -> str:
        """The step as a line in Megatron's format."""
        norm = "" if self.grad_norm is None else f" grad norm: {self.grad_norm:.3f} |"
        return (
            f" iteration {self.step:8d}/{total_steps:>8} | consumed samples: {self.samples[1]:12d} | "
            f"elapsed time per iteration (ms): {self.seconds * 1000:.1f} | tokens/s: {self.tokens_per_second:.0f} | "
            f"learning rate: {self.lr:.6E} | global batch size: {self.global_batch_size:5d} | "
            f"lm loss: {self.loss:.6E} |{norm} sample digest: {self.digest} |"
        )


class Trained:
    """Records what a rank trains in a step, so that runs of any layout can be compared."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, batch: Batch, *, content: bool) -> None:
        """Record a micro-batch: its samples' identities and, if requested, a hash of what the model gets."""
        samples, identities = batch["samples"].tolist(), batch["hashes"].tolist()
        contents, tokens = [0] * len(samples), [0] * len(samples)
        if content:
            contents = content_hashes(batch)
            tokens = hash_rows(batch["tokens"].numpy(), images_of(batch)).tolist()
        rows = zip(samples, identities, map(_signed, contents), map(_signed, tokens), strict=True)
        self._rows += rows

    def collect(
        self, group: dist.ProcessGroup | None, device: torch.device
    ) -> tuple[tuple[int, int], str, str, tuple[tuple[str, str], ...]]:
        """Gather the rows of all data-parallel ranks, and start again.

        Returns:
            (first, last) sample; hash of identities and hash of contents, in stream order; for each rank, hash of
                identities and of tokens, in the order in which it received them.
        """
        rows = torch.tensor(self._rows, dtype=torch.int64, device=device)
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, rows, group=group)
        ranks = tuple(
            (hash_samples(own[:, 1].view(np.uint64)), hash_samples(own[:, 3].view(np.uint64)))
            for own in (part.cpu().numpy() for part in gathered)
        )
        everything = torch.cat(gathered).cpu()
        everything = everything[everything[:, 0].argsort(stable=True)]
        self._rows = []
        order, content = (xxhash.xxh3_64_hexdigest(everything[:, k].numpy().tobytes()) for k in (1, 2))
        return (int(everything[0, 0]), int(everything[-1, 0]) + 1), order, content, ranks


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


class SampleLog:
    """The JSON lines file, written by rank 0 only."""

    def __init__(self, path: str | None, *, attempt: int, topology: Topology, writes: bool) -> None:
        self.enabled = path is not None
        self._common = {"attempt": attempt}
        self._topology = topology
        self._file: int | None = None
        if path is not None and writes:
            try:
                os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            except OSError as error:
                raise UsageError(
                    f"cannot write --megaresume-log-samples {path}",
                    found=str(error),
                    action="name a file in a directory that this user may write to",
                ) from error

    def start(self, *, step: int, samples: int, digest: str, data_seconds: float) -> None:
        """Record where this process begins.

        Args:
            step: optimizer steps done.
            samples: samples trained.
            digest: of these samples.
            data_seconds: from opening the data to restoring the position.
        """
        topology = self._topology.to_dict()
        where = {"step": step, "samples": samples, "digest": digest, "data_seconds": data_seconds}
        self._write({"event": "start", **where, "topology": topology})

    def step(self, record: StepRecord) -> None:
        """Record a step."""
        names = ("dp", "tp", "micro_batch_size", "num_workers")
        layout: dict[str, Any] = {name: getattr(self._topology, name) for name in names}
        if self._topology.balance is not None:
            layout["balance"] = self._topology.balance.to_dict()
        self._write({"event": "step", **asdict(record), "loss_hex": record.loss.hex(), **layout})

    def validation(self, *, step: int, name: str, **fields: Any) -> None:
        """Record and print what `megaresume.cluster.training.loop` measured on a validation set."""
        loss, tokens = fields["loss"], fields["tokens"]
        announce(f" validation loss at iteration {step} on {name} | lm loss value: {loss:.6E} | tokens: {tokens} |")
        self._write({"event": "validation", "step": step, "set": name, **fields})

    def held_out(self, *, step: int, **fields: Any) -> None:
        """Record and print a held-out measurement of `megaresume.cluster.training.loop`."""
        share = fields["right"] / max(fields["tokens"], 1)
        announce(f" held-out accuracy at iteration {step} | {100 * share:.2f} % of {fields['tokens']} tokens |")
        self._write({"event": "held_out", "step": step, **fields})

    def _write(self, fields: dict[str, Any]) -> None:
        if self._file is not None:
            line = json.dumps({**self._common, **fields, "time": utc(time.time())})
            os.write(self._file, line.encode() + b"\n")
