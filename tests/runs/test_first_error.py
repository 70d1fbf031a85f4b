"""Which rank failed first, in logs as torchrun, deepspeed and srun write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.runs.logs import find_first_error

TORCHRUN = """Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/torch/distributed/run.py", line 900, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_18:39:{second}
  host      : {node}
  rank      : {rank} (local_rank: 0)
  exitcode  : {status} (pid: 4242)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
USAGE = """megaresume: argument --micro-batch-size: 0 is not positive
  next action: a number
"""


def log(directory: Path, node: str, text: str) -> Path:
    path = directory / f"{node}.log"
    path.write_text(text)
    return path


def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    victim = "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Connection closed by peer\n"
    cause = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "a.py"\n[rank1]: ValueError: no luck\nmore\n'
    logs = [
        log(tmp_path, "n1", victim + TORCHRUN.format(second="01", node="n1", rank=0, status=1)),
        log(tmp_path, "n2", cause + TORCHRUN.format(second="02", node="n2", rank=1, status=-9)),
    ]
    found = find_first_error(logs, "srun: error: n1: task 0: Exited with exit code 1\n")
    assert found is not None
    assert (found.node, found.rank, found.exit, found.headline) == ("n2", 1, 137, "ValueError: no luck")
    assert str(found) == "rank 1 on n2 failed first"
    assert "more" not in found.lines


def test_a_rank_that_was_killed_printed_nothing(tmp_path: Path) -> None:
    logs = [log(tmp_path, "n1", TORCHRUN.format(second="01", node="n1", rank=0, status=-9))]
    found = find_first_error(logs, "")
    assert found is not None and (found.rank, found.exit, found.lines) == (0, 137, ())
    # What follows from it on another node is no cause, however it is spelled.
    text = "[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: a peer is gone\n"
    logs.append(log(tmp_path, "n2", text + TORCHRUN.format(second="02", node="n2", rank=1, status=1)))
    found = find_first_error(logs, "")
    assert found is not None and found.node == "n1"


def test_what_argparse_says(tmp_path: Path) -> None:
    text = (
        "slurmstepd: error: no cgroup\nusage: pretrain_gpt.py [-h]\npretrain_gpt.py: error: unrecognized: --x\nmore\n"
    )
    logs = [log(tmp_path, "n1", text + TORCHRUN.format(second="01", node="n1", rank=0, status=2))]
    found = find_first_error(logs, "")
    assert found is not None and found.lines == ("pretrain_gpt.py: error: unrecognized: --x",)


def test_torchrun_hides_the_status_of_a_mistake(tmp_path: Path) -> None:
    text = "megaresume: rank 0: there is no such flag\n  found: --x\nnext\n"
    logs = [log(tmp_path, "n1", text + TORCHRUN.format(second="01", node="n1", rank=0, status=2))]
    found = find_first_error(logs, "srun: error: n1: task 0: Exited with exit code 1\n")
    assert found is not None and found.exit == 2
    assert found.lines == ("megaresume: rank 0: there is no such flag", "  found: --x")
    assert found.headline == found.lines[0]


@pytest.mark.parametrize(
    "line",
    [
        "/env/bin/python: can't open file '/shared/train.py': [Errno 2] No such file or directory",
        "/env/bin/python: No module named my_training",
        "/env/bin/python: Error while finding module specification for 'a.b' (No module named 'a')",
        "bash: line 1: exec: apptainer: not found",
        "bash: line 1: /env/bin/python: cannot execute: required file not found",
        "/bin/sh: 1: exec: /env/bin/python: Permission denied",
        "slurmstepd: error: execve(): /env/bin/python: No such file or directory",
        "FATAL:   could not open image /shared/image.sif: failed to retrieve path for /shared/image.sif",
    ],
)
def test_what_one_node_alone_does_not_have(tmp_path: Path, line: str) -> None:
    text = f"slurmstepd: error: no cgroup\nstep 1\n{line}\nmore\n"
    logs = [log(tmp_path, "n1", "step 1\n"), log(tmp_path, "n2", text)]
    said = "srun: error: n2: task 1: Exited with exit code 2\n"
    found = find_first_error(logs, said)
    assert found is not None and found.is_lacking
    assert (found.node, found.exit, found.lines) == ("n2", 2, (line,))
    # If another one has not got it either, the node is as good as any.
    found = find_first_error([log(tmp_path, "n1", text), logs[1]], said)
    assert found is not None and found.node == "n2" and not found.is_lacking


def test_a_mistake_of_all_is_no_nodes_lack(tmp_path: Path) -> None:
    said = "srun: error: n2: task 1: Exited with exit code 2\n"
    for text in ("train.py: error: unrecognized: --x\n", "megaresume: rank 0: No such file: web.idx\n"):
        found = find_first_error([log(tmp_path, "n1", ""), log(tmp_path, "n2", text)], said)
        assert found is not None and found.lines and not found.is_lacking


def test_srun_alone(tmp_path: Path) -> None:
    logs = [log(tmp_path, "n1", ""), log(tmp_path, "n2", "Traceback (most recent call last):\n  x\nOSError: gone\n")]
    said = "srun: error: n2: task 3: Exited with exit code 5\nsrun: error: n1: tasks 0-1: Killed\n"
    found = find_first_error(logs, said)
    assert found is not None
    assert (found.node, found.rank, found.exit, found.headline) == ("n2", 3, 5, "OSError: gone")
    several = find_first_error(logs, "srun: error: n[1-2]: tasks 0-1: Exited with exit code 2\n")
    assert several is not None and (several.node, several.rank, several.exit) == ("n1", 0, 2)


def test_deepspeed(tmp_path: Path) -> None:
    text = (
        "megaresume: rank 0: no such data\n[ERROR] [launch.py:325:sigkill_handler] [...] exits with return code = 2\n"
    )
    found = find_first_error([log(tmp_path, "n1", text)], "")
    assert found is not None and (found.node, found.exit, found.headline) == (
        "n1",
        2,
        "megaresume: rank 0: no such data",
    )


def test_no_error_at_all(tmp_path: Path) -> None:
    assert find_first_error([log(tmp_path, "n1", "step 1\n"), tmp_path / "gone.log"], "srun: done\n") is None
