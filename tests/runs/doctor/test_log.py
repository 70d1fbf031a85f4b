"""The table of symptoms: every entry against its samples; logs as they come: huge, compressed, with progress bars."""

from __future__ import annotations

import gzip
import random
import time
from pathlib import Path

import pytest

from megaresume.runs.logs import Symptom, first_failure, log_checks, scan, symptoms
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
