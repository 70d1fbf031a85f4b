"""Machines that share no disk: their parts in a store, killed at any time; see nodes.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.checkpoint import nodes
from megaresume.checkpoint.copies.stager import Stager
from megaresume.checkpoint.copies.store_place import NodePlace, join_parts
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.manifest import FileEntry, Manifest, read_manifest
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.program import main
from megaresume.stream.errors import CheckpointError
from tests.checkpoint.conftest import MODEL, make_state, save_checkpoint, write_model
from tests.release import release

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[3]


def test_a_part_is_never_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files are all there, and those of the other node are not."""
    state = make_state(80)
    pending = begin_save(tmp_path, tag="global_step10", iteration=10, state=state)
    write_model(pending.tag_dir, state)
    commit = commit_save(pending, part=(0, 2))
    assert commit.manifest.part == (0, 2)
    manifest = read_manifest(tmp_path / "megaresume/step_0000010.manifest.json")
    assert manifest == commit.manifest and b'"version": 2' in manifest.to_bytes()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints") as refused:
        choose(tmp_path)
    assert "global_step10 is part: these are the files of node 0 alone, of 2" in str(refused.value.found)
    assert "start with stage_to=the run's URL" in str(refused.value.action)
    pytest.importorskip("fsspec")
    stager = Stager(tmp_path, NodePlace(f"memory://{tmp_path.name}/run", print))
    stager.start()
    stager.close(0.0)
    with pytest.raises(CheckpointError) as refused:
        choose(tmp_path)
    assert f"start with stage_to='memory://{tmp_path.name}/run'" in str(refused.value.action)
    main(["inspect", str(tmp_path)])
    assert "these are the files of node 0 alone, of 2" in capsys.readouterr().out


def test_a_node_that_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks look for each other's files; one whose disk is read-only cannot make its own."""
    monkeypatch.setattr(nodes, "world_size", lambda: 2)
    monkeypatch.setattr(nodes, "gather", lambda mine: [mine, mine])
    monkeypatch.setattr(nodes, "leftover_name", lambda name: f"no such directory/{name}")
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}"):
        nodes.find_nodes(tmp_path)


def _part(node: int, checksum: str) -> Manifest:
    files = (FileEntry(path=MODEL, size=4, checksum=checksum), FileEntry(path=f"of_{node}", size=1, checksum="c"))
    return Manifest(iteration=10, tag="global_step10", save_id="s", digest="d", files=files, part=(node, 2))


def test_a_file_of_two_nodes() -> None:
    """Of the same content it is one; otherwise nobody knows which of them is in the store."""
    whole = join_parts([_part(0, "a"), _part(1, "a")])
    assert [entry.path for entry in whole.files] == [MODEL, "of_0", "of_1"] and whole.part is None
    with pytest.raises(CheckpointError, match="nodes have written different files with one name") as refused:
        join_parts([_part(0, "a"), _part(1, "b")])
    assert refused.value.found == f"{MODEL}: 4 bytes on node 0, 4 bytes on node 1, not the same"


def test_a_whole_checkpoint_on_the_disk_of_another_node(tmp_path: Path) -> None:
    """It was rank 0's before machines changed places: the node, which brings parts, leaves it alone."""
    pytest.importorskip("fsspec")
    save_checkpoint(tmp_path, 10, checksums=True)
    place = NodePlace(f"memory://{tmp_path.name}/run", print)
    place.hold(tmp_path, lambda: None)
    stager = Stager(tmp_path, place)
    stager.start()
    assert stager.close(10.0) == () and place.store.sizes() == {}


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of nodes to its end."""
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=dict(os.environ))


def _tries(*words: str) -> str:
    done = _python("-m", "tests.checkpoint.store.nodes", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_on_any_node_at_any_time() -> None:
    said = _tries("--count", "3", "--seed", "2")
    assert "tries, 0 lost" in said and "\n0 checkpoints opened" not in said


DISK_LOST = """
from tests.checkpoint.store.nodes import REFUSED, Cluster
cluster = Cluster(94)
try:
    # Its files never reach the store: what is saved is in parts on the disks.
    assert cluster.start(2, 100, fault=(0, "files", 1), until=4)
    assert cluster.judge() == []
    cluster.disks[0], cluster.disks[2] = cluster.disks[2], cluster.disks[0]
    url, cluster.url = cluster.url, cluster.url + "-empty"  # as if its ledger had not, either
    print(cluster.start(2, 6) == [REFUSED] * 2, cluster.said())
    cluster.disks[0], cluster.disks[2] = cluster.disks[2], cluster.disks[0]
    cluster.url = url
    assert cluster.start(2, 6) == [0, 0], cluster.said()
    cluster.judge_start(4, 2)
finally:
    cluster.close()
"""


def test_the_disk_of_rank_0_is_lost_before_anything_was_copied() -> None:
    """What the other holds is in parts: it is not begun anew beside it, and the refusal names the disks."""
    done = _python("-c", DISK_LOST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("True "), done.stdout
    assert "the nodes hold checkpoints of which other parts are nowhere" in done.stdout
    assert re.search("global_step4(, global_step2)? on node 1,", done.stdout)


ENDED = """
import functools, json, megaresume
from megaresume.checkpoint import ending
from megaresume.checkpoint.ranks import known_to_all
from megaresume.stream.errors import StateError
from tests.checkpoint.store import nodes

megaresume.attach = functools.partial(megaresume.attach, writer="dcp_async")
# in place of a kill: each rank ends at the step after the save of step 4
nodes.is_told = lambda url, step: ending.end(known_to_all(StateError("something is refused")))
cluster = nodes.Cluster(96)
try:
    assert cluster.start(2, 6, die=4) == [1, 1], cluster.said()
    assert cluster.start(2, 6) == [0, 0], cluster.said()
    print([json.loads((cluster.record / f"rank_{rank}").read_text().splitlines()[0])["start"] for rank in range(2)])
finally:
    cluster.close()
"""


def test_a_save_that_is_being_written_when_all_ranks_end() -> None:
    """It counts: they commit each node's part of it first."""
    done = _python("-c", ENDED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "[4, 4]\n"


CLONED = """
import shutil
from megaresume.checkpoint import system
from tests.checkpoint.store.nodes import Cluster
system.identity_of = lambda directory: ("boot", 1, 1)
cluster = Cluster(95)
try:
    assert cluster.start(3, 4) == [0, 0, 0], cluster.said()
    assert cluster.judge() == [2, 4]
    for disk in cluster.disks:
        shutil.rmtree(disk)
    assert cluster.start(3, 6) == [0, 0, 0], cluster.said()
    cluster.judge_start(4, 3)
    assert cluster.judge() == [4, 6]
finally:
    cluster.close()
"""


def test_machines_that_were_cloned_while_they_ran() -> None:
    """The kernel says the same of all of them, as if they shared a directory."""
    done = _python("-c", CLONED)
    assert done.returncode == 0, done.stdout + done.stderr


@release(
    "150 starts of up to three nodes that are killed, which takes half an hour",
    "`tests/checkpoint/store/test_nodes.py::test_killed_on_any_node_at_any_time`, of some",
)
def test_killed_on_any_node_at_any_time_150_times() -> None:
    assert "tries, 0 lost" in _tries("--count", "150", "--seed", "1")


GOES_BACK = """
from tests.checkpoint.store.nodes import Cluster
cluster = Cluster(93)
disks, full = cluster.disks, (0, "files", 1)
try:
    def start(ranks, steps, **more):
        statuses = cluster.start(ranks, steps, **more)
        assert more or statuses == [0] * ranks, (statuses, cluster.said())
        return cluster.judge()

    assert start(1, 4)[-1] == 4
    assert start(1, 100, fault=full, until=12)[-1] == 4
    disks[0], disks[1] = disks[1], disks[0]
    assert start(3, 100, fault=full, until=8)[-1] == 4
    cluster.judge_start(4, 3)
    disks[0], disks[1] = disks[1], disks[0]
    RANKS
    print("WENT ON", cluster.judge())
finally:
    cluster.close()
"""
#: the third disk is not there: what three have saved is lost.
TWO = """
    assert start(2, 6)[-1] == 6, cluster.said()
    cluster.judge_start(4, 2)
    assert start(1, 10)[-1] == 10, cluster.said()
    cluster.judge_start(6, 1)
"""
#: it is there, and so is what was saved last; rank 0 has another disk than then.
THREE = """
    assert start(3, 10)[-1] == 10, cluster.said()
    cluster.judge_start(8, 3)
"""


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(TWO, id="2"),
        pytest.param(THREE, id="3", marks=release("`[3]`: three nodes", "the same, `[2]`")),
    ],
)
def test_a_disk_that_comes_back_with_a_branch_that_was_given_up(ranks: str) -> None:
    """It is that of rank 0, whole and never copied, and of later steps than the run has gone back to: it stays where
    it is."""
    done = _python("-c", GOES_BACK.replace("    RANKS", ranks))
    assert "WENT ON" in done.stdout, done.stdout + done.stderr


GROWS = """
from tests.checkpoint.store.nodes import Cluster
cluster = Cluster(91)
try:
    cluster.start(1, 5000, until=8)
    cluster.judge()
    records = (cluster.disks[0] / "megaresume").glob("step_*.manifest.json")
    newest = max(int(path.name[5:12]) for path in records)
    assert cluster.start(3, newest // 2 * 2 + 4) == [0, 0, 0], cluster.said()
    cluster.judge_start(newest, 3)
    print("GREW from", newest, "the store had", cluster.best)
finally:
    cluster.close()
"""


def test_more_nodes_than_before_the_copies_were_made() -> None:
    """What one machine has saved and not yet copied is copied first: the three go on from it."""
    done = _python("-c", GROWS)
    assert "GREW from" in done.stdout, done.stdout + done.stderr
