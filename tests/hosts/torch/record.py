"""What loops have written down of their training, read again: by `program.py` and those like it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megaresume.cluster.processes import LocalJob
from megaresume.hosts.driver import copied, items, lines, losses, trained

__all__ = ["copied", "items", "lines", "losses", "trained"]

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}


def launch(
    program: Path,
    directory: Path,
    ranks: int,
    restarts: int = 0,
    *,
    python: str = sys.executable,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """``program DIRECTORY JSON-OPTIONS`` on so many ranks, which start again so often if one is killed."""
    words = [python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    words += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(program), str(directory), json.dumps(options)]
    env = os.environ | ENVIRONMENT
    if restarts:  # the ranks would find the addresses of those before them
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(words, env=env, capture_output=True, text=True)


def ended(program: Path, python: str, directory: Path, ranks: int, **options: Any) -> str:
    """What a run said that came to its end."""
    done = launch(program, directory, ranks, python=python, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def refused(program: Path, python: str, directory: Path, ranks: int = 1, **options: Any) -> str:
    """What a run said that was refused."""
    done = launch(program, directory, ranks, python=python, **options)
    assert done.returncode != 0
    return done.stderr


def launch_forked(program: Path, directory: Path, ranks: int, **options: Any) -> tuple[int, str]:
    """The same without a launcher, by processes that are forked: exit status and output."""
    words, output = [str(directory), json.dumps(options)], directory.with_name(f"{directory.name}.output")
    env = ENVIRONMENT | torchrun_environment(ranks)
    with LocalJob(str(program), words, num_processes=ranks, output=output, launcher="env", env=env) as job:
        return job.wait(), job.text()


def torchrun_environment(ranks: int) -> dict[str, str]:
    """What torchrun tells a process of one node, besides what the launcher ``env`` does: Lightning looks for it."""
    return {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
