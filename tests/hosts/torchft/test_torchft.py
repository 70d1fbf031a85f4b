"""`megaresume.attach` of torchft's Manager: real replicas under a real lighthouse, killed and joined by others.

What was trained is read from the weights: `replica.py`. `harness.py` starts, kills and judges, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from tests.release import release

ROOT = Path(__file__).parents[3]


def harness(python: str, *words: str) -> list[dict[str, Any]]:
    """What the harness found; its last line sums it up."""
    command = [python, "-W", "ignore", "-m", "tests.hosts.torchft.harness", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return found


@release("torchft, which no extra installs; twenty kills", "`tests/hosts/torchft/test_parts.py`")
def test_killed_and_joined_at_random_moments(python: str, tmp_path: Path) -> None:
    """Order, global batch and weights are those of a run that nobody disturbed; `verify` proves it."""
    *runs, total = harness(python, "--kills", "20", "--each", "10", "--seed", "11", "--directory", str(tmp_path))
    assert total["wrong"] == 0 and total["joins"] >= 10 and total["noise"] < 1e-5
    for run in runs:
        entries = read_ledger(ledger_path(Path(run["directory"]) / "checkpoints")).entries
        members = [entry for entry in entries if entry.kind == "membership"]
        assert members and all(entry.samples % entry.iteration == 0 for entry in members)
        assert all(entry.details["replicas"] == entry.topology.dp for entry in members)


@release(
    "torchft: three processes",
    "`tests/hosts/torchft/test_parts.py::test_a_step_counts_if_the_replicas_make_it_up`",
)
def test_a_process_group_that_is_not_that_of_the_quorum(python: str, tmp_path: Path) -> None:
    """A step of which torchft would add up one part alone, and commit it, is not committed."""
    (found,) = harness(python, "--stale-group", "--directory", str(tmp_path / "run"))
    assert found["wrong"] == [] and found["replicas"] == {"1": found["replicas"]["1"], "2": 12 - found["replicas"]["1"]}


@release("torchft: three replicas", "`tests/hosts/torchft/test_parts.py::test_the_ranks_make_up_the_step_in_order`")
def test_replicas_have_as_much_to_do(python: str, tmp_path: Path) -> None:
    """``balance``, for the replicas of each step: the same samples in the same steps, dealt evenly by their lengths."""
    words = ["--balanced", "--kills", "8", "--each", "8", "--size", "3", "--seed", "4", "--directory", str(tmp_path)]
    run, total = harness(python, *words)
    assert total["wrong"] == 0 and run["uneven"] < 0.5 * run["uneven_in_order"]


@release("torchft, which no extra installs; thirty kills", "`tests/hosts/torchft/test_lanes.py`")
def test_lanes_are_lost_and_dealt_again(python: str, tmp_path: Path) -> None:
    """LocalSGD and DiLoCo: every sample is once in what was committed, at every outer step."""
    words = ["--outer", "--kills", "30", "--each", "15", "--steps", "25", "--seed", "21", "--directory", str(tmp_path)]
    *_, total = harness(python, *words)
    assert total["wrong"] == 0 and total["joins"] >= 10


@release("torchft: six processes", "`tests/hosts/torchft/test_parts.py::test_all_of_a_step_is_dealt_whoever_is_there`")
def test_replicas_of_two_processes(python: str, tmp_path: Path) -> None:
    """As with FSDP in each replica; one of them is killed, and joins again."""
    (found,) = harness(python, "--groups", "--directory", str(tmp_path / "run"))
    assert found["wrong"] == [] and found["replicas"]["1"] and found["replicas"]["2"]


@release("torchft: two processes", "`tests/hosts/torchft/test_parts.py::test_a_step_counts_if_one_replica_says_so`")
def test_a_log_that_says_something_else_is_no_proof(python: str, tmp_path: Path) -> None:
    """`verify` compares what each replica wrote down with the plan, and misses a replica that wrote nothing."""
    run, _ = harness(python, "--kills", "0", "--each", "0", "--runs", "1", "--size", "2", "--directory", str(tmp_path))
    log = Path(run["directory"]) / "log"
    words = [python, "-m", "megaresume", "verify", str(log.with_name("checkpoints")), "--log-samples", str(log)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "40 steps: " in done.stdout and "MISSING" not in done.stdout, done.stdout
    one, *_ = sorted(log.iterdir())
    one.unlink()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "no line of data-parallel rank" in done.stdout, done.stdout
