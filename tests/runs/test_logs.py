"""The table of symptoms: every entry against its samples; logs as they come: huge, compressed, with progress bars.

Then which rank failed first, in logs as torchrun, deepspeed and srun write them.
"""

from __future__ import annotations

import gzip
import random
import time
from pathlib import Path

import pytest

from megaresume.runs.logs import Symptom, find_first_error, first_failure, log_checks, scan, symptoms
from megaresume.stream.errors import UsageError

#: what users report, as they paste it; each must be known.
REPORTED = [
    "WARNING: could not find the metadata file /x/latest_checkpointed_iteration.txt",
    "    will not load any checkpoints and will start from random",
    "Unable to find latest file at /x/latest, if trying to load latest checkpoint please ensure this file exists or "
    "pass an explicit checkpoint tag when loading a checkpoint.",
    "Invalid for universal checkpoint: /x/latest_universal does not exist",
    "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 32 but the current world size is 128. "
    "Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported.",
    "Expected 8 of '*_optim_states.pt' under /x but found 7",
    "The following zero checkpoints paths are missing: ['/x/a.pt']",
    "[Errno 2] No such file or directory: '/x/iter_0006000/mp_rank_00/model_optim_rng.pt'",
    "ERROR: Invalid metadata file /x/latest_checkpointed_iteration.txt. Exiting",
    "AssertionError: error parsing metadata file /x/latest_checkpointed_iteration.txt",
    "AssertionError: no samples left to consume: 335360, 257280",
    "AssertionError: no samples left to consume: 23397312, 23397312",
    "OptimizerParamScheduler: class input value 10 and checkpointvalue 5 for total number of iterations do not match",
    "OptimizerParamScheduler: class input value 10 and checkpointvalue 5 for weight decay iterations do not match",
    "loading dataset state failed. Skipping.",
    "dataset state /x/train_dataloader_dprank000.pt does not exist",
    "DataLoader state is empty for dp rank 16, expected key dp_rank_16.",
    "There is a worker with no samples in any of the blended datasets. This can happen if you have a lot of workers",
    "DataLoader workers are already running",
    "StopIteration",
    "FileNotFoundError: [Errno 2] No such file or directory: '/x/index-cache/abc_doc_idx.npy'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/x/abc-GPTDataset-train-shuffle_index.npy'",
    "> WARNING: could not find index map files, building the indices on rank 0 ...",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=BROADCAST, Timeout(ms)=1800000) ran for "
    "1800072 milliseconds before timing out.",
    "Trying to create tensor with negative dimension -686245457367107674",
    "Skipping the first batches:  76%|███ | 93017/122500 [6:35:47<2:26:12",
    "total number of epochs: 165",
    "ValueError: Packing is not supported for vision-language models. Please set packing=False",
    "ValueError: Image features and image tokens do not match",
    "*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
    "Received SIGTERM: 15",
    "Bypassing SIGTERM: 15",
    "(DependencyNeverSatisfied)",
    "ModuleNotFoundError: No module named 'fused_layer_norm_cuda'",
    "ModuleNotFoundError: No module named 'amp_C'",
]
#: what healthy logs say.
HEALTHY = [
    " iteration      100/     500 | consumed samples:         3200 | lm loss: 5.250000E+00 | number of skipped "
    "iterations:   0 |",
    "  successfully saved checkpoint from iteration     100 to /x",
    "  successfully loaded checkpoint from /x at iteration 100",
    "total number of epochs: 1",
    "saving checkpoint at iteration 10 to /x in torch_dist format: model_optim_rng.pt zero_optim_states.pt",
    "using fused_layer_norm_cuda from apex, amp_C loaded",
    "raises StopIteration at the end of an epoch",
]


@pytest.mark.parametrize("symptom", symptoms(), ids=lambda symptom: symptom.name)
def test_every_entry(symptom: Symptom, tmp_path: Path) -> None:
    """Its samples show it, and nothing else."""
    for sample in symptom.samples:
        log = tmp_path / "log"
        log.write_text(f"before\n{sample}\nafter\n")
        assert [(hit.symptom.name, hit.line, hit.count) for hit in scan(log)] == [(symptom.name, 2, 1)], sample
    assert len(symptom.means) > 20 and symptom.do
    assert symptom.level in ("error", "warning", "note")


def test_names_are_unique() -> None:
    assert len({symptom.name for symptom in symptoms()}) == len(symptoms()) > 30


@pytest.mark.parametrize("line", REPORTED)
def test_what_users_report(line: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"[default0]:{line}\n" if line != "StopIteration" else f"[rank0]: {line}\n")
    assert len(scan(tmp_path / "log")) == 1


def test_healthy_logs(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(HEALTHY))
    assert scan(tmp_path / "log") == []
    (check,) = log_checks(tmp_path / "log")
    assert check.status == "ok"


def test_first_line_and_count(tmp_path: Path) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."  # two texts of one entry
    lines = ["start", "Bypassing SIGTERM: 15", *["x"] * 5, oom, oom, "x", oom, "OSError: No space left on device"]
    text = "\n".join(lines)
    for name, data in (
        ("log", text.encode()),
        ("log.gz", gzip.compress(text.encode())),
        ("dos", text.encode() + b"\r\n"),
    ):
        (tmp_path / name).write_bytes(data)
        hits = [(hit.symptom.name, hit.line, hit.count) for hit in scan(tmp_path / name)]
        assert hits == [
            ("a signal that nobody acted on", 2, 1),
            ("GPU memory is used up", 8, 3),
            ("the disk is full", 12, 1),
        ]
    checks = log_checks(tmp_path / "log")
    assert [check.status for check in checks] == ["warning", "problem", "problem"]
    assert checks[1].found == f"log line 8, 3 times: {oom}"


def test_the_rank_that_failed_first(tmp_path: Path) -> None:
    cause = "Root Cause (first observed failure):\n[0]:\n  time : 2026-11-22_18:39:{}\n  rank : {}\n  exitcode : 1\n"
    texts = {
        "n1": "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Connection reset by peer\n",
        "n2": "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: no luck\n",
    }
    logs = [tmp_path / f"{node}.log" for node in texts]
    for rank, log in enumerate(logs):
        log.write_text(texts[log.stem] + cause.format(f"0{rank}", rank))
    (check,) = first_failure(logs)
    assert check.found == "rank 1 on n2 failed first: ValueError: no luck"
    logs[1].write_text("all is well\n")
    assert first_failure(logs[1:]) == []


def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a block ends, each line is seen once; a bar without newlines is one line."""
    rng = random.Random(3)
    lines = [rng.choice(["x" * rng.randrange(60), "StopIteration", "CUDA out of memory here"]) for _ in range(400)]
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    expected = [(lines.index(text) + 1, lines.count(text)) for text in ("StopIteration", "CUDA out of memory here")]
    for size in (64, 100, 333, 4096):
        monkeypatch.setattr("megaresume.runs.logs._BLOCK", size)
        assert sorted((hit.line, hit.count) for hit in scan(log)) == sorted(expected)
    bar = "".join(f"\rSkipping the first batches: {k}%" for k in range(3)) + "\r\x1b[A\x00done" + "y" * 90_000
    log.write_text("start\n" + bar)
    (hit,) = scan(log)
    assert (hit.line, hit.count, hit.text) == (2, 3, "Skipping the first batches: 0%")


def test_a_large_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = (
        b" iteration 100/ 500 | consumed samples: 3200 | elapsed time per iteration (ms): 512.3 | lm loss: 5.25E+00\n"
    )
    with open(log, "wb") as file:
        for _ in range(16):
            file.write(line * 40_000)
        file.write(b"CUDA out of memory\n")
    seen: list[int] = []
    began = time.process_time()
    (hit,) = scan(log, seen.append)
    rate = log.stat().st_size / (time.process_time() - began)
    assert hit.line == 16 * 40_000 + 1 and sum(seen) == log.stat().st_size and len(seen) > 10
    assert rate > 10e6, f"{rate / 1e6:.0f} MB/s"


def test_no_log(tmp_path: Path) -> None:
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(b"x" * 10_000)[:-12])
    for path in (tmp_path / "nowhere", tmp_path, torn):
        with pytest.raises(UsageError, match="cannot be read"):
            scan(path)


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
