"""What the ranks of a job do together, as far as one process can tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.checkpoint import ranks
from megaresume.cluster.processes import free_port
from tests.reliability.shim import compiler

ROOT = Path(__file__).parents[2]


def test_of_long_texts_what_differs_is_shown() -> None:
    before = ", ".join(f"'source_{k}': {{'seed': {k}}}" for k in range(100))
    one, other = (f"{before}, 'source_{last}': {{}}, {before}" for last in (7, 8))
    shown = ranks._around_difference(one, other)
    assert all("'source_99'" in text and len(text) < 140 for text in shown)
    assert "'source_7': {}" in shown[0] and "'source_8': {}" in shown[1]
    assert ranks._around_difference("1e5", "2e5") == ("1e5", "2e5")
    assert ranks._around_difference(one, one + "!")[1].endswith("! ...")


#: ends right after collectives of ours, as a program does that leaves its process group to Python.
PROGRAM = """
import os
import torch
import torch.distributed as dist
from megaresume.checkpoint import ranks
dist.init_process_group("gloo")
number, size = dist.get_rank(), dist.get_world_size()
assert ranks.gather({"rank": number, "text": "x" * number}) == [{"rank": n, "text": "x" * n} for n in range(size)]
assert ranks.broadcast(["from", number], source=1) == ["from", 1]
os.environ["LATE"] = "1"
assert ranks.on_rank_0(lambda: (number, None)) == (0, None)
"""


#: ends right after collectives of its own, under our launcher; with the status that it is given.
SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
os.environ["LATE"] = "1"
dist.all_gather_object([None, None], {"text": "x"})
print("END")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def late_threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes gloo's threads late whenever they ask for Python."""
    library = tmp_path_factory.mktemp("late") / "late.so"
    source = Path(__file__).with_name("late_threads.c")
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def ended(library: Path, *words: object) -> list[tuple[str, str, int]]:
    """(output, the last of the errors, exit status) of two ranks of a program."""
    env = os.environ | {"LD_PRELOAD": str(library), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": "2", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, words)]
    jobs = [subprocess.Popen(command, env=env | {"RANK": str(rank)}, **pipes) for rank in range(2)]  # type: ignore[call-overload]
    texts = [job.communicate() for job in jobs]
    return [(out, err[-2000:], job.returncode) for (out, err), job in zip(texts, jobs, strict=True)]


@pytest.mark.process
def test_a_process_ends_well_whose_threads_of_gloo_are_late(tmp_path: Path, late_threads: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert ended(late_threads, tmp_path / "program.py") == [("", "", 0)] * 2


@pytest.mark.process
@pytest.mark.parametrize("status", [0, 7])
def test_a_script_under_our_launcher_ends_with_its_own_status(tmp_path: Path, late_threads: Path, status: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = ended(late_threads, "-m", "megaresume.run", tmp_path / "script.py", status)
    assert found == [("END\n", "", status)] * 2
