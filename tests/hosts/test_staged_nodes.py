"""Two machines without a shared disk under DeepSpeed's ZeRO, their checkpoints in an S3 server: killed, replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.store.recorder import Bucket
from tests.checkpoint.store.server import Server, serving
from tests.corpora import simple_corpus
from tests.release import release

PROGRAM = Path(__file__).with_name("staged_nodes.py")

pytestmark = pytest.mark.process


server = pytest.fixture(scope="module")(serving)


def _port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def _run(server: Server, where: Path, disks: list[Path], url: str, steps: int, *more: str) -> list[tuple[int, str]]:
    """(status, output) of each rank."""
    port = _port()
    runs = [
        subprocess.Popen(
            [
                sys.executable,
                str(PROGRAM),
                str(rank),
                port,
                str(where / "data.yaml"),
                str(disk),
                url,
                str(steps),
                *more,
            ],
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
    twin = _run(server, tmp_path, twins, "s3://runs/nodes-twin", 10)
    assert [status for status, _ in twin] == [0, 0], twin
    expected = _seen(twin)
    assert len(expected) == 20
    killed = _run(server, tmp_path, disks, "s3://runs/nodes", 5, "KILL")
    assert {status for status, _ in killed} == {-signal.SIGKILL}, killed
    seen = _seen(killed)
    for steps, lost in ((8, [disks[1]]), (9, disks), (10, [])):
        after = _run(server, tmp_path, disks, "s3://runs/nodes", steps)
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
