"""Every way in which a user's training, or launch script, can be wrong is found, and said."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.smoke.conftest import smoke as command
from tests.release import release

pytestmark = pytest.mark.process

TOY = Path(__file__).parent / "toy.py"
#: RANK: as a launcher sets it, so that the rank is found.
SCRIPT = f'#!/bin/bash\nRANK=${{NODE_RANK}} exec {sys.executable} {TOY} "$@"\n'


def smoke(tmp_path: Path, *words: object, script: str = SCRIPT, **env: str) -> tuple[int, dict[str, Any], str]:
    """The toy under the command."""
    return command(tmp_path, *words, script=script, timeout=120, **env)


def test_a_good_program_holds(tmp_path: Path) -> None:
    kinds = "sigkill,sigterm,node-down"
    sizes = ["--global-batch-size", 8, "--micro-batch-size", "2,4"]
    status, result, text = smoke(tmp_path, "--kill", kinds, "--nodes", "2,1", *sizes)
    assert status == 0 and result["holds"], text
    stops = result["stops"]
    assert [stop["kind"] for stop in stops] == kinds.split(",")
    assert [stop["after"]["nodes"] for stop in stops] == [1, 2, 1]
    assert [stop["after"]["micro_batch_size"] for stop in stops] == [4, 2, 4]
    # In the middle of a step behind a checkpoint: 4 is the interval.
    assert stops[0]["resumed_from"] % 4 == stops[2]["resumed_from"] % 4 == 0
    assert stops[0]["lost"] + stops[2]["lost"] >= 1
    assert stops[1]["lost"] == 0 and stops[1]["resumed_from"] == stops[1]["step"]
    assert all(0 < stop["seconds"] < 60 for stop in stops)
    assert stops[0]["data_seconds"] is None  # no start says it
    compared = result["comparison"]
    assert compared["steps"] == compared["compared"] == 32
    assert compared["trained_again"] == sum(stop["lost"] for stop in stops)
    assert compared["losses"]["compared"] == 32
    assert "EXACT" in text and re.search(r"sigkill +2x1 m2.* 1x1 m4", text)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 1 and "<script" not in page and "node-down" in page


WRONG = {
    "drop": r"step (5|9) of the run trained samples .*: samples were skipped",
    "repeat": r"step (5|9) of the run trained samples .*: samples were repeated",
    "order": r"step (5|9): identities of the samples: reference \w{16}, run \w{16}",
    "content": r"step (5|9): what the model got of the samples: reference \w{16}, run \w{16}",
    "loss": r"step (5|9): loss: reference \S+, run \S+: 5.0e-01 apart, allowed 1e-03",
    "afresh": "attempt 2 began afresh",
    "gap": r"step (6|10) is missing in the records of the run",
    "dies": "CUDA error: an illegal memory access",
}


#: the others are found by the comparison as these are.
QUICK = ("drop", "loss", "dies")


RELEASE = release(
    "five more faults, two launches each",
    "the same, `[drop]`, `[loss]`, `[dies]`; the comparison of all fields in `tests/cluster/smoke/test_compare.py`",
)


@pytest.mark.parametrize(
    "fault", [*QUICK, *(pytest.param(fault, marks=RELEASE) for fault in WRONG if fault not in QUICK)]
)
def test_a_wrong_program_is_found(tmp_path: Path, fault: str) -> None:
    status, result, text = smoke(tmp_path, "--kill", "sigkill", "--steps", 12, FAULT=fault)
    assert status == 1 and not result["holds"]
    assert re.search(WRONG[fault], text), text
    # An attempt that fails, or begins anew, has trained nothing else: it is the test that came to nothing.
    assert ("NOT PROVED: " if fault in ("afresh", "dies") else "NOT EXACT: ") in text
    assert result["first_difference"]


RELEASE_2 = release(
    "`[drop]`: another fault",
    "the same, `[content]`",
)


@pytest.mark.parametrize("fault", [pytest.param("drop", marks=RELEASE_2), "content"])
def test_a_wrong_program_is_found_in_records_of_ranks(tmp_path: Path, fault: str) -> None:
    status, result, _ = smoke(tmp_path, "--kill", "sigkill", "--steps", 12, FAULT=fault, RECORDS="ranks")
    assert status == 1 and result["first_difference"].startswith("step 5")


@pytest.mark.parametrize("nodes", ["2", "2,1"])
def test_hashes_of_ranks_prove_nothing_on_another_layout(tmp_path: Path, nodes: str) -> None:
    words = ["--kill", "sigkill", "--steps", 12, "--nodes", nodes, "--global-batch-size", 8, "--micro-batch-size", 2]
    status, result, text = smoke(tmp_path, *words, RECORDS="ranks")
    assert result["comparison"]["compared"] == 12 and result["verified"] is None
    if nodes == "2":
        assert status == 0 and result["holds"] and result["comparison"]["hashed"] == 12, text
    else:
        # Steps on the second layout: the kill came between two checkpoints, or right after the second.
        changed = 12 - result["stops"][0]["resumed_from"]
        assert changed in (4, 8), text
        assert status == 1 and f"NOT PROVED: order and content of {changed} steps were not compared" in text, text


def test_a_reference_that_was_not_left_alone(tmp_path: Path) -> None:
    first = f'RANK=0 {sys.executable} {TOY} "$@" --train-iters 5\n'
    status, _, text = smoke(tmp_path, "--kill", "sigkill", "--steps", 12, script=first + SCRIPT)
    assert status == 1 and "the reference was not left alone: it started 2 times" in text, text


def test_a_stop_that_did_not_stop(tmp_path: Path) -> None:
    status, result, text = smoke(tmp_path, "--kill", "sigterm", "--steps", 12, FAULT="deaf")
    assert status == 1 and "sigterm came too late: the run was over" in text, text
    assert result["stops"][0]["resumed_from"] is None


def test_a_script_that_starts_it_again(tmp_path: Path) -> None:
    loop = f'#!/bin/bash\nexport RANK=0\nuntil {sys.executable} {TOY} "$@"; do :; done\n'
    status, _, text = smoke(tmp_path, "--kill", "sigkill", "--steps", 12, script=loop)
    assert status == 1 and "attempt 1 started 2 times" in text, text


def test_a_graceful_stop_without_a_save_is_noted(tmp_path: Path) -> None:
    status, result, text = smoke(tmp_path, "--kill", "sigterm", "--steps", 12, FAULT="no-save")
    assert status == 0 and result["stops"][0]["lost"] > 0
    assert "note: sigterm cost" in text


def test_a_script_without_its_arguments(tmp_path: Path) -> None:
    status, _, text = smoke(tmp_path, script='#!/bin/bash\n# "$@" is not used\npython train.py\n')
    assert status == 2 and '"$@"' in text and "Traceback" not in text
    status, result, text = smoke(tmp_path, script=': "$@"\n')
    assert status == 1 and not result["holds"]
    assert "recorded no step" in text and "ignores its arguments" in text and '"$@" after the last flag' in text


def test_other_ranks_than_asked_for(tmp_path: Path) -> None:
    alone = SCRIPT.replace("RANK=", "[ $NODE_RANK = 0 ] || exit 0\nNNODES=1 RANK=")
    status, _, text = smoke(tmp_path, "--nodes", "2,1", script=alone)
    assert status == 1 and "does not run on the ranks that were asked for" in text and "1 ranks" in text
    # Ranks of which only the data-parallel size is known.
    more = SCRIPT.replace("RANK=", "NNODES=2 RANK=")
    more = f'RANK=0 NODE_RANK=1 NNODES=2 {sys.executable} {TOY} "$@" &\n' + more
    words = ["--overwrite", "--nodes", 1, "--global-batch-size", 8, "--micro-batch-size", 2]
    status, _, text = smoke(tmp_path, *words, script=more, RECORDS="ranks")
    assert status == 1 and "does not run on the ranks that were asked for" in text and "2 ranks" in text, text
