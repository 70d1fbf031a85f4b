"""The demo of images: what it tells of the answers; and, slow, all of it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from megaresume.cluster.demo.vlm import ENCODER, VLM, Pictures, write_pictures
from megaresume.cluster.records import read_records
from megaresume.data.prepare.shards import prepare_shards
from megaresume.encoding.images.encoder import ImageTextEncoder
from tests.cli.conftest import megaresume_process
from tests.release import release


def answer(document: int, expected: str, predicted: str) -> dict[str, object]:
    return {
        "source": "held_out",
        "document": document,
        "expected": [*expected.encode(), 256],
        "predicted": [*predicted.encode(), 256],
    }


def test_it_tells_the_share_of_digits_and_shows_pictures(tmp_path: Path) -> None:
    few = Pictures(name="held_out", records=6, shards=1, held_out=True)
    prepare_shards(write_pictures(tmp_path, few), tmp_path / "held_out", ImageTextEncoder.from_options(ENCODER))
    sources = {"held_out": {"kind": "webdataset", "index": "held_out.shards.idx"}}
    (tmp_path / "held_out.yaml").write_text(yaml.safe_dump({"seed": 1, "seq_length": 256, "sources": sources}))
    answers = [answer(0, "3 1\n", "3 1\n"), answer(4, "7\n", "1\n")]
    # 32 is the space, always right; 256 the end of document. Neither is a digit.
    before = {"32": [10, 10], "51": [0, 10], "55": [1, 10]}
    after = {"32": [10, 10], "51": [9, 10], "55": [8, 10], "256": [6, 6]}
    lines = [
        json.dumps({"event": "held_out", "step": step, "by_token": counts, "answers": answers}) + "\n"
        for step, counts in ((0, before), (40, after))
    ]
    for name in ("run", "twin"):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    extra = VLM.extra(tmp_path)
    assert extra.result == {"accuracy_before": 0.05, "accuracy": 0.85, "digits": 20}
    page = "".join(extra.parts)
    assert "85.0 % of 20 handwritten digits" in page and page.count("<svg") == 1
    assert page.count("data:image/png;base64,") >= 2
    assert "<code>3 1</code> <small>right</small>" in page and "<code>1</code> <small>expected 7</small>" in page


@release(
    "a minute of training",
    "`tests/cluster/demo/test_demo.py::test_it_proves_a_run_that_was_killed_twice`, "
    "`tests/cluster/training/test_vlm.py::test_killed_and_resumed_on_another_topology`",
)
def test_all_of_it_short(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = megaresume_process("demo", "--vlm", "--steps", "30", "--out", out, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["holds"] and result["steps"] == 30 and result["digits"] > 300
    assert result["different_samples"] == result["different_content"] == result["missing"] == []
    records = read_records(out / "run.jsonl")
    layouts = [(s["topology"]["dp"], s["topology"]["num_workers"]) for s in records.starts]
    assert layouts == [(2, 1), (1, 2), (2, 0)]
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 4 and page.count("data:image/png;base64,") >= 12
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
