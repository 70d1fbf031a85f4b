"""The session of docs/reliability.md: a run that is killed in its save, and recovers. It is printed, or written there.

The jobs are real ones; ``train.py`` stands for `tests.reliability.job`, whose saves are at steps 2, 4 and 6.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.reliability.harness import Harness
from tests.reliability.job import Fault, Task

_START = "$ torchrun --nproc-per-node 2 train.py\n"


def session() -> str:
    """Make it; the text, with its commands."""
    with tempfile.TemporaryDirectory(prefix="megaresume-session-") as work:
        harness = Harness(Path(work), seed=1)
        directory, output = Path(work, "checkpoints"), Path(work, "output")

        def task(saves: tuple[int, ...], stop: int, fault: Fault | None = None) -> Task:
            return Task(zero=2, data=harness.data(), directory=directory, saves=saves, stop=stop, fault=fault)

        def inspect() -> str:
            command = [sys.executable, "-m", "megaresume", "inspect", "checkpoints/"]
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
            shown = re.search(r"^pointers.*?(?=^ledger)", done.stdout, re.DOTALL | re.MULTILINE)
            assert shown is not None, done.stdout + done.stderr
            return f"$ megaresume inspect checkpoints/\n...\n{shown[0].rstrip()}\n"

        def start(task: Task) -> str:
            output.unlink(missing_ok=True)
            harness.run(task, output=output)
            lines = [line for line in output.read_text().splitlines() if line.startswith("megaresume: ")]
            return "".join(f"{line}\n" for line in lines)

        harness.run(task((2, 4), 4))
        # In the middle of its third write of the optimizer's state.
        start(task((6,), 6, Fault(rank=1, at=3, mode="half")))
        killed = f"{_START}...                  SIGKILL in the save of step 6, in the middle of a write of rank 1\n"
        after = inspect()
        again = _START + start(task((6,), 8)) + "...\n"
        text = "\n".join([killed, after, again, inspect()]).replace(work, "/data")
        return re.sub(r"\S+'s process \d+ on \S+ \(.*?\)", "alice's process 4242 on node1 (train.py)", text)


def masked(text: str) -> str:
    """Without what differs from one time to the next."""
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+Z)?", "<time>", text)
    # A kill may come before the checkpoint of the step before is forced to the disk.
    text = text.replace("complete, not durable", "complete")
    return re.sub(r"[0-9.]+ KB|digest +[0-9a-f]{16}|[0-9a-f]{16}", "<number>", text)
