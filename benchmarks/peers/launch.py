"""Starts the ranks of a run, kills them with SIGKILL, and says how the run ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.scenario import EPOCHS, Layout

ROOT = Path(__file__).parents[2]
#: seconds until a run counts as one that hangs.
PATIENCE = 420.0
#: seconds that other ranks are given to say their own error, after one has ended with one.
GRACE = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the ranks of one life do. It is a file, which each of them reads."""

    tool: str
    layout: Layout
    #: of the run: its checkpoints and records.
    directory: Path
    #: of the dataset, if the tool reads files.
    data: Path
    life: int
    #: of the whole run.
    epochs: int = EPOCHS
    #: the step after which rank 0 kills itself; None: train to the end.
    kill_after: int | None = None

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What `write` wrote."""
        raw = json.loads(path.read_text())
        raw["layout"] = Layout(**raw["layout"])
        return cls(**{**raw, "directory": Path(raw["directory"]), "data": Path(raw["data"])})


def prepare(python: str, plan: Plan) -> None:
    """Write the dataset of a tool that reads files.

    Raises:
        RuntimeError: the tool could not write it.
    """
    done = subprocess.run(
        [python, "-m", "benchmarks.peers.worker", "--prepare", str(_written(plan))],
        cwd=ROOT,
        env=_environment(0, 1, _free_port()),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{plan.tool}: the dataset could not be written\n{done.stderr[-3000:]}")


def run(python: str, plan: Plan) -> str | None:
    """One life of a run, until it ends or is killed.

    Returns:
        None if it ended, or was killed, as planned; otherwise the words with which it failed, or "hangs".
    """
    path, port = _written(plan), _free_port()
    errors = [plan.directory / f"life-{plan.life}.rank-{rank}.err" for rank in range(plan.layout.ranks)]
    ranks = []
    for rank, error in enumerate(errors):
        with open(error, "w") as file:
            command = [python, "-m", "benchmarks.peers.worker", str(path)]
            environment = _environment(rank, plan.layout.ranks, port)
            # A session of its own, so that its worker processes can be killed with it.
            ranks.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
            )
    try:
        return _wait(ranks, plan, errors)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], plan: Plan, errors: list[Path]) -> str | None:
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE:
        codes = [process.poll() for process in ranks]
        if plan.kill_after is not None and codes[0] == -signal.SIGKILL:
            return None  # the other ranks go the same way
        if any(code not in (None, 0) for code in codes):
            time.sleep(GRACE)
            return _words(errors)
        if all(code == 0 for code in codes):
            return None if plan.kill_after is None else "ended before it was to be killed"
        time.sleep(0.05)
    return "hangs"


def _words(errors: list[Path]) -> str:
    """The last exception of the first rank that shows one."""
    for path in errors:
        text = re.sub(r"^\[rank\d+\]: ?", "", path.read_text(), flags=re.MULTILINE)
        found = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception)\b:? ?.*", text, re.MULTILINE)
        if found and found[-1].strip() == "AssertionError":  # without words: what was asserted
            return f"AssertionError: {re.findall(r'^ +(assert .*)', text, re.MULTILINE)[-1]}"
        if found:
            return str(found[-1]).strip()
    return errors[0].read_text()[-300:].strip() or "ended without a word"


def _written(plan: Plan) -> Path:
    plan.directory.mkdir(parents=True, exist_ok=True)
    path = plan.directory / f"life-{plan.life}.json"
    plan.write(path)
    return path


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets, and one thread for each library."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def copy(source: Path, target: Path) -> None:
    """A run that was killed, to be resumed in several ways."""
    shutil.copytree(source, target)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """For datasets and runs."""
    return tempfile.TemporaryDirectory(prefix="megaresume-peers-")
