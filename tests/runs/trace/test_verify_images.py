"""Image-text sources: pixels and records are what contents are hashed of, and shards are told apart in overlaps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream, open_validation
from megaresume.checkpoint.records.rank_log import RankLog, noted
from megaresume.checkpoint.save.commit import begin_save, commit_save, write_data_config
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
from megaresume.data.prepare.shards import prepare_shards
from megaresume.program import main
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import ConfigError
from tests.cluster.training.conftest import write_corpus
from tests.data.kit import encoder, write_shards


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Pictures, flipped at random, beside text."""
    write_shards(tmp_path / "shards", [12, 9])
    prepare_shards([tmp_path / "shards/pairs-{000000..000001}.tar"], tmp_path / "pairs", encoder())
    write_corpus(tmp_path / "web", documents=60, seed=1, mean=30)
    pairs = {"kind": "webdataset", "index": "pairs.shards.idx", "on_fault": "mask", "augment": [{"flip": 0.5}]}
    config = {"seq_length": 96, "packing": "best_fit", "sources": {"web": "web", "pairs": pairs}}
    path = tmp_path / "data.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def save_and_log(data: Path, root: Path) -> None:
    """Four steps of eight samples on two ranks: the state behind them, and what the ranks were handed."""
    stream = open_stream(data)
    topology = Topology(dp=2, world_size=2, global_batch_size=8, micro_batch_size=2)
    record_start(root, iteration=0, state=stream.state_at(0), choice=None, topology=topology)
    state = stream.state_at(32, batches=[(0, 8)])
    pending = begin_save(root, tag="global_step4", iteration=4, state=state, topology=topology)
    (root / "global_step4").mkdir()
    (root / "global_step4" / "weights").write_bytes(b"w")
    commit_save(pending)
    write_data_config(root, stream.origin)
    for rank in range(2):
        log = RankLog(root / "samples", rank=rank, launch=1)
        log.start(step=0, samples=0, dp_rank=rank, dp=2, micro_batch_size=2, pad_id=0, digest="0" * 16)
        options = {"micro_batch_size": 2, "dp_rank": rank, "dp_size": 2, "stop": 32, "prefetch": 0}
        for number, batch in enumerate(StreamLoader(open_stream(data), BatchSchedule.constant(8), **options), start=1):
            assert "pixel_values" in batch
            log.add_noted(noted(batch))
            if number % 2 == 0:
                log.end_step(number // 2)


def test_a_picture_that_changed(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "save"
    save_and_log(data, root)

    def verify(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        main(["verify", str(root), *words, "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    logs = ("--log-samples", str(root / "samples"))
    assert verify(*logs, "--content")["log"]["contents"] == 8
    before = verify("--content")["content"]
    for shard in (tmp_path / "shards").glob("*.tar"):
        content = bytearray(shard.read_bytes())
        at = content.index(b"IDAT") + 8
        content[at] ^= 1  # of the first picture of the shard, whose record is as long as it was
        shard.write_bytes(content)
    assert verify(*logs)["holds"]
    found = verify(*logs, "--content")
    assert not found["holds"] and found["log"]["first_difference"]["field"] == "content"
    assert 1 <= found["log"]["different_steps"] <= 4
    after = verify("--content")["content"]
    assert after["web"] == before["web"] and after["pairs"]["digest"] != before["pairs"]["digest"]
    assert after["pairs"]["documents"] == before["pairs"]["documents"] > 21


def test_pictures_that_are_trained_on_are_not_held_out(data: Path) -> None:
    training = open_stream(data)
    config = yaml.safe_load(data.read_text())
    sets = {"pictures": {"sources": {"pairs": config["sources"]["pairs"]}}}
    data.write_text(yaml.safe_dump(config | {"validation": sets}, sort_keys=False))
    with pytest.raises(ConfigError, match="holds documents that are trained on") as error:
        open_validation(data, training)
    assert "documents 0 to 20 of" in str(error.value.found)
