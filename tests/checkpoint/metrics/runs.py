"""Runs of program.py, and what they trained, counted from what they wrote down and from the raw files alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.cluster.processes import free_port
from tests.corpora import write_corpus

PROGRAM = Path(__file__).with_name("program.py")
#: source -> documents, tokens of the longest. The tokens of source k are 1000 k + 1 to 1000 k + 999.
SOURCES = {"web": (300, 80), "code": (120, 200)}


def write_sources(directory: Path, seed: int = 0) -> dict[str, list[np.ndarray]]:
    """Corpora of random documents; 1 begins each, 2 ends it."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[np.ndarray]] = {}
    for k, (name, (num, longest)) in enumerate(SOURCES.items()):
        documents = [1000 * k + rng.integers(3, 1000, int(rng.integers(2, longest))) for _ in range(num)]
        for document in documents:
            document[0], document[-1] = 1000 * k + 1, 1000 * k + 2
        write_corpus(directory / name, [[document] for document in documents])
        found[name] = documents
    return found


def config_of(directory: Path, web: int = 3, code: int = 1, **more: Any) -> dict[str, Any]:
    """A data config of `write_sources`."""
    sources = {
        name: {"path": str(directory / name), "weight": weight} for name, weight in (("web", web), ("code", code))
    }
    for name, options in more.pop("options", {}).items():
        sources[name] |= options
    return {"seed": 1, "seq_length": 64, "packing": "split", "sources": sources} | more


Counts = dict[str, dict[str, int]]


def nothing(sources: list[str]) -> Counts:
    """Zeros."""
    return {name: dict.fromkeys(sources, 0) for name in ("tokens", "trained", "documents", "cut")}


def count(rows: list[list[int]], masks: list[list[int]], bounds: list[list[int]], found: Counts) -> None:
    """Add a micro-batch, from its tokens alone."""
    names = list(found["tokens"])
    for tokens, mask, edges in zip(rows, masks, bounds, strict=True):
        for first, stop in pairwise(edges):
            part = [token for token in tokens[first:stop] if token]
            if not part:
                continue
            name = names[part[0] // 1000]
            assert {token // 1000 for token in part} == {part[0] // 1000}
            found["tokens"][name] += len(part)
            found["trained"][name] += sum(mask[first:stop])
            found["documents"][name] += part[0] % 1000 == 1
            found["cut"][name] += part[0] % 1000 == 1 and part[-1] % 1000 != 2


@dataclass
class Chain:
    """A run in several processes, one after the other."""

    directory: Path
    data: dict[str, Any]
    #: of each process, when it was started, and when it was gone.
    lives: list[tuple[float, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def save_dir(self) -> Path:
        """Of its checkpoints."""
        return self.directory / "run"

    def run(self, ranks: int = 1, *, status: int = 0, queue: float = 0.0, **job: Any) -> None:
        """Start a process, or one for each rank, after ``queue`` seconds, and wait for its end."""
        time.sleep(queue)
        port = str(free_port())
        born = time.time()
        asked = {"directory": str(self.directory), "data": self.data, "attempt": len(self.lives) + 1}
        started = []
        for rank in range(ranks):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            started.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), json.dumps(asked | job)],
                    env=os.environ | of_rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [one.communicate(timeout=600)[0] for one in started]
        self.lives.append((born, time.time()))
        self.said.append("\n".join(said))
        for one in started:
            assert (one.returncode != 0) == (status != 0), self.said[-1]

    def micro_batches(
        self, *, only: int | None = None
    ) -> Iterator[tuple[int, list[list[int]], list[list[int]], list[list[int]]]]:
        """(step, tokens, masks, bounds) of what lies on the path to the present; or of all of one process."""
        attempts = [sorted(self.directory.glob(f"trained.{k}.*")) for k in range(1, len(self.lives) + 1)]
        lines = [[json.loads(line) for path in paths for line in path.read_text().splitlines()] for paths in attempts]
        for k, mine in enumerate(lines) if only is None else [(only - 1, lines[only - 1])]:
            later = [line[0] for other in lines[k + 1 :] for line in other] if only is None else []
            for line in mine:
                if not later or line[0] < min(later):
                    yield line

    def counts(self, until: int) -> Counts:
        """What the steps up to this one have trained, by source."""
        found = nothing(list(SOURCES))
        for step, *batch in self.micro_batches():
            if step <= until:
                count(*batch, found)
        return found

    def truth(self) -> dict[str, float]:
        """Seconds by cause, as the processes of rank 0 and the test itself saw it.

        ``first`` is the wait of each process for its first micro-batch, in which start-up ends and data begins.
        """
        ended: float | None = None
        spent = dict.fromkeys(("startup", "first", "data", "saving", "lost", "waiting", "steps"), 0.0)
        kept = [self._kept(k) for k in range(len(self.lives))]
        for k, (_, gone) in enumerate(self.lives):
            noted = [json.loads(line) for line in (self.directory / f"truth.{k + 1}.0").read_text().splitlines()]
            for what, begin, end in noted:
                spent["lost" if what != "startup" and begin >= kept[k] - 1e-3 else what] += end - begin
            spent["waiting"] += 0.0 if ended is None else noted[0][1] - ended
            ended = noted[-1][2]
            assert gone >= ended
        return spent

    def _kept(self, k: int) -> float:
        """When process k had ended the last save that counts: what comes after it is lost, if another one follows."""
        if k + 1 == len(self.lives):
            return float("inf")
        noted = [json.loads(line) for line in (self.directory / f"truth.{k + 1}.0").read_text().splitlines()]
        return max(end for what, _, end in noted if what in ("saving", "startup"))
