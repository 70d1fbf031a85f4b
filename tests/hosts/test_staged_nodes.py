"""Two machines without a shared disk, their checkpoints in an S3 server: killed and replaced, under DeepSpeed's ZeRO;
with files that do not fit together, in a loop with Accelerate."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.cluster.processes import free_port
from tests.checkpoint.store.recorder import Bucket
from tests.checkpoint.store.server import Server, serving
from tests.corpora import simple_corpus
from tests.release import release

PROGRAM = Path(__file__).with_name("staged_nodes.py")
#: see `_run`.
DISK = object()
NOTING = Path(__file__).with_name("noting_nodes.py")

pytestmark = pytest.mark.process


server = pytest.fixture(scope="module")(serving)


def _run(server: Server, program: Path, *words: object, disks: list[Path]) -> list[tuple[int, str]]:
    """(status, output) of each rank. ``DISK`` among the words stands for its own."""
    port = str(free_port())
    runs = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), port, *(str(disk if word is DISK else word) for word in words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | server.environment,
        )
        for rank, disk in enumerate(disks)
    ]
    said = [run.communicate(timeout=1500)[0] for run in runs]
    return [(run.returncode, words) for run, words in zip(runs, said, strict=True)]


def _seen(ranks: list[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """By rank and step: samples and loss."""
    rows = [
        (rank, *line.split(" ", 2)[1:])
        for rank, (_, words) in enumerate(ranks)
        for line in words.splitlines()
        if line.startswith("SAMPLES")
    ]
    return {(rank, step): row for rank, step, row in rows}


@release(
    "five launches of two ranks under DeepSpeed",
    "`tests/checkpoint/store/test_nodes.py::test_killed_on_any_node_at_any_time`, in plain torch",
)
def test_two_nodes_under_zero(server: Server, tmp_path: Path) -> None:
    """The twin is never stopped. The run is killed, loses one machine, and then both; the files of both count."""
    simple_corpus(tmp_path / "web", [5 + k % 9 for k in range(200)])
    (tmp_path / "data.yaml").write_text(json.dumps({"sources": {"web": {"path": str(tmp_path / "web")}}}))
    twins, disks = ([tmp_path / f"{name}_{node}" for node in (0, 1)] for name in ("twin", "disk"))
    data = tmp_path / "data.yaml"
    twin = _run(server, PROGRAM, data, DISK, "s3://runs/nodes-twin", 10, disks=twins)
    assert [status for status, _ in twin] == [0, 0], twin
    expected = _seen(twin)
    assert len(expected) == 20
    killed = _run(server, PROGRAM, data, DISK, "s3://runs/nodes", 5, "KILL", disks=disks)
    assert {status for status, _ in killed} == {-signal.SIGKILL}, killed
    seen = _seen(killed)
    for steps, lost in ((8, [disks[1]]), (9, disks), (10, [])):
        after = _run(server, PROGRAM, data, DISK, "s3://runs/nodes", steps, disks=disks)
        assert [status for status, _ in after] == [0, 0], after
        assert "2 nodes save to disks of their own" in after[0][1] and "resumed at sample" in after[0][1]
        seen |= _seen(after)
        if steps == 9:  # brought to an empty disk, and only what this rank reads
            brought = ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]
            assert sorted(os.listdir(disks[1] / "global_step8")) == brought
        for disk in lost:
            shutil.rmtree(disk)
    assert seen == expected
    bucket = Bucket(server.client(), "nodes")
    head = bucket.heads()[-1]
    for saved in head["saves"]:
        names = {name for name in sorted(bucket.keys()) if name.startswith(f"{saved['tag']}/{saved['save_id']}/")}
        assert {name.rpartition("/")[2] for name in names} == {
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        }
    assert head["latest"] == "global_step10"


def test_files_with_one_name_that_differ_between_nodes(server: Server, tmp_path: Path) -> None:
    """The run ends at the save, before that checkpoint counts anywhere; those before it count. The same file from both
    nodes is one file.
    """
    disks = [tmp_path / f"disk_{node}" for node in (0, 1)]
    twin = _run(server, NOTING, DISK, "s3://runs/notes-twin", 6, disks=[tmp_path / "twin_0", tmp_path / "twin_1"])
    assert [status for status, _ in twin] == [0, 0], twin
    refused = _run(server, NOTING, DISK, "s3://runs/notes", 6, 4, disks=disks)
    assert [status for status, _ in refused] == [1, 1], refused
    assert "different files with one name, and checkpoint-4 cannot be put together" in refused[0][1]
    assert "notes.txt: 6 bytes on node 0, 6 bytes on node 1, not the same" in refused[0][1]
    bucket = Bucket(server.client(), "notes")
    assert [saved["tag"] for saved in bucket.heads()[-1]["saves"]] == ["checkpoint-2"]
    (save,) = (saved["save_id"] for saved in bucket.heads()[-1]["saves"])
    assert bucket.get(f"checkpoint-2/{save}/notes.txt") == b"node 0"
    after = _run(server, NOTING, DISK, "s3://runs/notes", 6, disks=disks)
    assert [status for status, _ in after] == [0, 0], after
    assert "step 2 from checkpoint-2" in after[0][1]
    assert _seen(refused) | _seen(after) == _seen(twin) and len(_seen(twin)) == 12
