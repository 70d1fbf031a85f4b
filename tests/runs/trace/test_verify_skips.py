"""A run that leaves samples out and begins a stage: what ranks write down is still what planning gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.lock.lock import write_step_file
from megaresume.checkpoint.records.names import step_path
from megaresume.checkpoint.records.rank_log import RankLog, noted
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.save.commit import begin_save, commit_save, write_data_config
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
from megaresume.program import main
from megaresume.stream.batches import BatchSchedule
from tests.cluster.training.conftest import write_corpus


def test_left_out_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("web", "code")):
        write_corpus(tmp_path / name, documents=200, seed=seed)
    config = {
        "seq_length": 64,
        "packing": "best_fit",
        "sources": {"web": "web", "code": "code"},
        "skip": {"samples": ["10:14", "30:31"], "documents": {"web": [3, 5, 8]}},
        "stages": [{"from_samples": 24, "weights": {"web": 1, "code": 5}, "packing": "split"}],
    }
    data, root = tmp_path / "data.yaml", tmp_path / "save"
    data.write_text(yaml.safe_dump(config, sort_keys=False))
    stream = open_stream(data)
    topology = Topology(dp=1, world_size=1, global_batch_size=8, micro_batch_size=4)
    record_start(root, iteration=0, state=stream.state_at(0), choice=None, topology=topology)
    for step in (3, 6):
        state = stream.state_at(8 * step, batches=[(0, 8)])
        pending = begin_save(root, tag=f"global_step{step}", iteration=step, state=state, topology=topology)
        (root / f"global_step{step}").mkdir()
        (root / f"global_step{step}" / "weights").write_bytes(b"w")
        commit_save(pending)
    write_data_config(root, stream.origin)
    log = RankLog(tmp_path / "samples", rank=0, launch=1)
    log.start(step=0, samples=0, dp_rank=0, dp=1, micro_batch_size=4, pad_id=0, digest="0" * 16)
    for number, batch in enumerate(StreamLoader(stream, BatchSchedule.constant(8), micro_batch_size=4, stop=48), 1):
        log.add_noted(noted(batch))
        if number % 2 == 0:
            log.end_step(number // 2)
    for more in ([], ["--from", "3", "--to", "6"]):
        capsys.readouterr()
        words = ["verify", str(root), "--log-samples", str(tmp_path / "samples"), "--content", "--json", *more]
        assert main(words) == 0, capsys.readouterr()
        found = json.loads(capsys.readouterr().out)["log"]
        assert found["steps"] == found["contents"] == (3 if more else 6)
    assert main(["report", str(root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["left_out"]["samples"] == 5 and facts["left_out"]["documents"] == ["web:3,5,8"]
    assert facts["left_out"]["asked"] and 0.9 < facts["fill"] <= 1
    # A step that no rank has a line of any more, between two that have.
    (file,) = (tmp_path / "samples").iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert main(["verify", str(root), "--log-samples", str(tmp_path / "samples")]) == 1
    assert "MISSING    step 2: no line of any rank" in capsys.readouterr().out
    assert main(["verify", str(root), "--log-samples", str(tmp_path / "samples"), "--from", "3"]) == 0


def test_a_start_that_goes_back_to_leave_samples_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/changing-data.md says: to step 8, back to step 2 with a range to skip, to step 8 again; and once more."""
    write_corpus(tmp_path / "web", documents=200, seed=1)
    data, root = tmp_path / "data.yaml", tmp_path / "save"
    topology = Topology(dp=1, world_size=1, global_batch_size=8, micro_batch_size=4)

    def train(first: int, last: int, *skip: str) -> None:
        config = {"seq_length": 64, "packing": "best_fit", "sources": {"web": "web"}, "skip": {"samples": [*skip]}}
        data.write_text(yaml.safe_dump(config, sort_keys=False))
        stream, choice = open_stream(data), choose(root, tag=f"global_step{first}") if first else None
        if choice is not None:
            stream.restore(choice.record.stream)  # type: ignore[union-attr]
        record_start(root, iteration=first, state=stream.state_at(8 * first), choice=choice, topology=topology)
        for step in range(first + 2, last + 1, 2):
            state = stream.state_at(8 * step, batches=[(0, 8)])
            pending = begin_save(root, tag=f"global_step{step}", iteration=step, state=state, topology=topology)
            (root / f"global_step{step}").mkdir(exist_ok=True)
            (root / f"global_step{step}" / "weights").write_bytes(b"w")
            commit_save(pending)
        write_data_config(root, stream.origin)

    def verified() -> list[str]:
        capsys.readouterr()
        assert main(["verify", str(root), "--json"]) == 0, capsys.readouterr()
        report = json.loads(capsys.readouterr().out)
        assert report["holds"]
        return [branch.partition(":")[0] for branch in report["given_up"]]

    train(0, 8)
    assert verified() == []
    train(2, 8, "20:24")
    assert verified() == ["branch 1, steps 3 to 8"]
    train(8, 10, "20:24")
    train(4, 6, "20:24", "40:41")
    assert verified() == ["branch 1, steps 3 to 8", "branch 2, steps 5 to 10"]
    # What is not of the run is found all the same.
    record = read_step_file(step_path(root, 6, "global_step6"))
    write_step_file(step_path(root, 6, "global_step6"), replace(record, state=record.stream.replace(digest="0" * 16)))
    assert main(["verify", str(root)]) == 1
