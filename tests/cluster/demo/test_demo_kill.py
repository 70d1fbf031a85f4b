"""When the demo may kill: before anything is committed, a fresh start is right, and proves nothing."""

from __future__ import annotations

from pathlib import Path

from megaresume.checkpoint.save.commit import begin_save
from megaresume.checkpoint.system import Topology
from megaresume.cluster.demo.command import committed_since
from tests.checkpoint.conftest import make_state, save_checkpoint


def test_only_a_committed_save_of_this_start_counts(tmp_path: Path) -> None:
    assert not committed_since(tmp_path, 0)
    begin_save(tmp_path, tag="global_step8", iteration=8, state=make_state(64), topology=Topology())
    assert not committed_since(tmp_path, 0)  # killed here, the next start finds nothing
    save_checkpoint(tmp_path, 8)
    assert committed_since(tmp_path, 0) and not committed_since(tmp_path, 8)
