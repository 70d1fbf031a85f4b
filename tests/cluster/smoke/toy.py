"""A training program of a user's own, without torch: numbers are its samples. It goes wrong as FAULT says.

It takes the flags that `megaresume smoke` appends, saves a number, and records its steps as the reference program
does; with RECORDS=ranks as Megatron-LM does, with losses printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

FAULT = os.environ.get("FAULT", "")
DP = int(os.environ.get("NNODES", "1"))


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("save", "load", "megaresume-log-samples"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("save-interval", 1), ("train-iters", 1), ("global-batch-size", 8), ("micro-batch-size", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args, _ = parser.parse_known_args()
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    args.save.mkdir(parents=True, exist_ok=True)
    peer = args.save / f"peer-{os.environ['MASTER_PORT']}"
    if os.environ.get("NODE_RANK", "0") != "0":
        peer.write_text(str(os.getpid()))
        done = args.save / f"over-{os.environ['MASTER_PORT']}"
        while not (told or done.exists()):
            time.sleep(0.01)
        return 0
    saved = args.load / "step"
    first = int(saved.read_text()) if saved.exists() and FAULT != "afresh" else 0
    write = rank_records if os.environ.get("RECORDS") == "ranks" else file_of_records
    log = write(args, first)
    while DP > 1 and not (peer.exists() and peer.read_text()):
        time.sleep(0.01)
    for step in range(first + 1, args.train_iters + 1):
        time.sleep(0 if "reference" in args.save.parts else 0.12)
        if FAULT == "no-save" and "reference" not in args.save.parts and first == 0 and step == 2 * args.save_interval:
            while not told:  # however late it comes, it costs the steps after the first checkpoint
                time.sleep(0.01)
            break
        if DP > 1:
            os.kill(int(peer.read_text()), 0)  # a rank that is gone is missed, as in a collective
        again = first > 0
        moved = {"drop": 8, "repeat": -8}.get(FAULT, 0) * again
        if FAULT == "dies" and again and step > first + 2:
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr)
            return 3
        if not (FAULT == "gap" and again and step == first + 2):
            log(step, (step - 1) * args.global_batch_size + moved, again)
        if step % args.save_interval == 0 or (told and FAULT not in ("deaf", "no-save")):
            saved.write_text(str(step))
        if told and FAULT != "deaf":
            break
    else:
        saved.write_text(str(args.train_iters))
    (args.save / f"over-{os.environ['MASTER_PORT']}").touch()
    return 0


def digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def file_of_records(args, first):
    args.megaresume_log_samples.parent.mkdir(parents=True, exist_ok=True)
    file = open(args.megaresume_log_samples, "a", buffering=1)  # noqa: SIM115

    def write(**fields):
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        file.write(json.dumps(fields | {"attempt": 1, "time": stamp}) + "\n")

    layout = {"dp": DP, "tp": 1, "micro_batch_size": args.micro_batch_size, "num_workers": 0}
    samples = first * args.global_batch_size
    write(event="start", step=first, samples=samples, digest=digest(samples), topology=layout | {"world_size": DP})

    def log(step, sample, again):
        end = sample + args.global_batch_size
        content = digest(sample, "content" if FAULT == "content" and again else "")
        loss = 5.0 / step * (1.5 if FAULT == "loss" and again else 1) * (1 + 1e-9 * (DP > 1))
        fields = {"samples": [sample, end], "order": digest(sample), "content": content, "digest": digest(end)}
        if FAULT == "order" and again:
            fields["order"] = digest("other")
        write(event="step", step=step, **fields, loss=loss, loss_hex=loss.hex(), data_seconds=0.25, **layout)

    return log


def rank_records(args, first):
    import numpy as np

    from megaresume.checkpoint.records.rank_log import RankLog

    launch = time.time_ns()
    logs = [RankLog(args.megaresume_log_samples, rank=rank, launch=launch) for rank in range(DP)]
    for rank, log in enumerate(logs):
        at = {"step": first, "samples": first * args.global_batch_size, "digest": "00"}
        log.start(dp_rank=rank, dp=DP, micro_batch_size=args.micro_batch_size, pad_id=0, **at)

    def log(step, sample, again):
        micro = args.micro_batch_size
        for begin in range(sample, sample + args.global_batch_size, DP * micro):
            for rank, one in enumerate(logs):
                numbers = np.arange(begin + rank * micro, begin + (rank + 1) * micro)
                tokens = numbers[:, None] + (1 if FAULT == "content" and again else 0)
                one.add(numbers, numbers, tokens)
        for one in logs:
            one.end_step(step)
        loss = 5.0 / step * (1.5 if FAULT == "loss" and again else 1)
        print(f" iteration {step:8d}/{args.train_iters:8d} | lm loss: {loss:.6E} |", flush=True)

    return log


if __name__ == "__main__":
    sys.exit(main())
