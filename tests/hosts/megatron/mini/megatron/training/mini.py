"""What only this stand-in has: the log of what was trained, and kills at chosen places."""

import builtins
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import xxhash

from .global_vars import get_args


def kill_if(where, iteration):
    """``MINI_KILL=where:iteration``; ``MINI_SIGNAL`` names another signal than SIGKILL. ``MINI_FILL`` fills the disk of
    --save there, until so many failures of a save were said: ``where:iteration:failures``, separated by commas."""
    for place in os.environ.get("MINI_FILL", "").split(","):
        if place.rpartition(":")[0] == f"{where}:{iteration}" and os.environ.get("RANK", "0") == "0":
            _fill(Path(get_args().save) / "ballast", failures=int(place.rpartition(":")[2]))
    if os.environ.get("MINI_KILL") != f"{where}:{iteration}":
        return
    if os.environ.get("MINI_KILL_RANK") in (None, os.environ.get("RANK", "0")):
        os.kill(os.getpid(), signal.Signals[os.environ.get("MINI_SIGNAL", "SIGKILL")])


def outlive_if(iteration):
    """``MINI_OUTLIVE=iteration:FILE``: before it writes, every process that writes model files kills its rank, and a
    second later, if it is still there, says so in FILE, which this rank and all of them hold locked."""
    at, _, name = os.environ.get("MINI_OUTLIVE", "").partition(":")
    if at != str(iteration):
        return
    rank, original, file = os.getpid(), builtins.open, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fcntl.flock(file, fcntl.LOCK_EX)

    def late(path, *args, **kwargs):
        if ".distcp" in str(path):
            os.kill(rank, signal.SIGKILL)
            time.sleep(1)
            os.write(file, f"{path}\n".encode())
        return original(path, *args, **kwargs)

    builtins.open = late


def _fill(ballast, failures):
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    sys.stdout = _CleanedAfter(sys.stdout, ballast, failures)


class _CleanedAfter:
    """Standard output; somebody who reads there of a save that failed makes room, after so many failures."""

    def __init__(self, stream, ballast, failures):
        self.stream, self.ballast, self.failures = stream, ballast, failures

    def write(self, text):
        if " was not saved: " in text:
            self.failures -= 1
            if self.failures == 0:
                self.ballast.unlink()
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()


def sample_hashes(batch):
    """Of the tokens of each sample, and of its pixels."""
    hashes = [xxhash.xxh3_64(row.contiguous().to(torch.int64).numpy().tobytes()) for row in batch["tokens"]]
    if "pixel_values" in batch:
        images = batch["pixel_values"].split(batch["num_tiles"].tolist())
        for row, pixels in zip(batch["image_positions"][:, 0].tolist(), images, strict=True):
            hashes[row].update(pixels.contiguous().numpy().tobytes())
    return [sample.hexdigest() for sample in hashes]


def log_step(directory, **fields):
    if directory is None:
        return
    path = Path(directory) / f"rank_{os.environ.get('RANK', '0')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(fields) + "\n")
        file.flush()


def without_cuda():
    """Two calls of torch.cuda that dist_checkpointing makes whatever the tensors lie on; nothing numerical."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: torch.device("cpu")
