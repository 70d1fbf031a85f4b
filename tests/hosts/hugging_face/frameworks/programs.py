"""LLaMA-Factory, ms-swift and Axolotl as their users start them, under the launcher, and what they train read again."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.torch.record import ROOT

HERE = Path(__file__).parent
ITEMS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One of them, in a directory with the model and the data of `tiny`.

    Args:
        bin: of its environment.
        directory: where it runs, and writes.
    """

    bin: Path
    directory: Path

    def start(self, *words: str, run: str, attempt: int = 1, kill: str = "", **env: str) -> tuple[int, str]:
        """Start a command of the environment under the launcher: exit status and output.

        Args:
            words: the command: a program in ``bin``, and its arguments.
            run: what is trained is written down as that of a directory of this name.
            attempt: number of the launch.
            kill: where a rank ends itself, as in recorder/sitecustomize.py.
            env: further variables.
        """
        variables = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(HERE / "recorder"), str(ROOT)]),
            "RECORD": str(self.directory / f"{run}.record"),
            "ATTEMPT": str(attempt),
            "KILL": kill,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.directory / "cache"),
        }
        command = [self.bin / "python", "-m", "megaresume.run", self.bin / words[0], *words[1:]]
        done = subprocess.run(
            command, cwd=self.directory, env=os.environ | variables | env, capture_output=True, text=True, timeout=600
        )
        return done.returncode, done.stdout + done.stderr


def tiny(directory: Path, bin: Path) -> Path:
    """The directory, with a model and conversations in it."""
    words = [bin / "python", HERE / "tiny.py", directory, str(ITEMS)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


def write_config(path: Path, config: dict[str, Any]) -> str:
    """As YAML, of which JSON is a part."""
    path.write_text(json.dumps(config))
    return str(path)
