"""Runs of the stand-in training package, their logs, and megatron-core of other versions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megaresume.cluster.processes import LocalJob

MINI = Path(__file__).parent / "mini"
SCRIPTS = ("pretrain_until_0_17.py", "pretrain_0_18.py", "pretrain_from_0_19.py")


@dataclass(frozen=True)
class Run:
    """What a run of the stand-in printed and trained."""

    status: int
    output: str
    log: Path

    def rows(self) -> list[dict[str, Any]]:
        """Lines of all ranks."""
        return [json.loads(line) for path in sorted(self.log.glob("*.jsonl")) for line in path.read_text().splitlines()]

    def steps(self) -> dict[int, list[str]]:
        """Hashes of the samples of each step, in the order of the stream; all replicas have read the same."""
        return global_batches(self.rows())


def global_batches(rows: list[dict[str, Any]]) -> dict[int, list[str]]:
    """iteration -> hashes in the order of the stream; fails where replicas have read different samples."""
    replicas: dict[tuple[int, int, int, int], dict[int, list[list[str]]]] = {}
    for row in rows:
        if "iteration" in row:
            key = (row["iteration"], row["pp"], row["cp"], row["chunk"])
            replicas.setdefault(key, {})[row["dp"]] = row["micro"]
    steps: dict[int, list[str]] = {}
    for (iteration, *_), ranks in sorted(replicas.items()):
        micro_steps = zip(*(ranks[dp] for dp in sorted(ranks)), strict=True)
        batch = [sample for micro in micro_steps for rank in micro for sample in rank]
        assert steps.setdefault(iteration, batch) == batch, f"replicas differ in step {iteration}"
    return steps


def ramp_calculator(*numbers: Any) -> Any:
    """Megatron's own calculator of ``--rampup-batch-size``; skips the test if this megatron-core has none."""
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    if not hasattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("megatron-core 0.18 and later ignore --rampup-batch-size")
    return calculators.RampupBatchsizeNumMicroBatchesCalculator(*numbers)


Mini = Callable[..., Run]


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Mini:
    """``mini(*arguments, script=SCRIPTS[0], num_processes=2, hooks=True, env={}) -> Run``.

    With hooks, through ``megaresume.run``, as a user would. A killed run ends in -9.
    """

    def run(
        *arguments: object,
        script: str = SCRIPTS[0],
        num_processes: int = 2,
        hooks: bool = True,
        env: dict[str, str] | None = None,
        timeout: float = 1200,
    ) -> Run:
        directory = tmp_path_factory.mktemp("run")
        path, words = str(MINI / script), [str(a) for a in arguments]
        variables = {"MEGARESUME_CACHE": str(tmp_path_factory.getbasetemp()), "TORCHDYNAMO_DISABLE": "1"}
        with LocalJob(
            "megaresume.run" if hooks else path,
            [*([path] if hooks else []), *words, "--mini-log", str(directory / "log")],
            num_processes=num_processes,
            output=directory / "output.txt",
            launcher="env",
            env=variables | (env or {}),
        ) as job:
            status = job.wait(timeout)
            return Run(status=status, output=job.text(), log=directory / "log")

    return run


@pytest.fixture(scope="session")
def core_wheel() -> Callable[[str], Path]:
    """``core_wheel("0.12.0")``: a folder that holds that megatron-core, without its dependencies. Kept between runs."""
    cache = Path(os.environ.get("MEGARESUME_TEST_CACHE") or Path.home() / ".cache" / "megaresume-tests")

    def get(version: str) -> Path:
        target = cache / f"megatron-core-{version}"
        if not (target / "megatron" / "core").is_dir():
            temporary = target.with_name(f"{target.name}.{os.getpid()}")
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-requires-python"]
            command += ["--only-binary", ":all:", "--target", str(temporary), f"megatron-core=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                shutil.rmtree(temporary, ignore_errors=True)
                pytest.skip(f"megatron-core {version} cannot be installed: {done.stderr.strip()[-300:]}")
            if target.exists():
                shutil.rmtree(temporary)
            else:
                temporary.rename(target)
        return target

    return get
