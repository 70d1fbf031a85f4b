"""A run on conversations: what `stream`, `trace --text` and `verify` say of which tokens are trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from megaresume.batches.assemble import Assembler, make_batch
from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.checkpoint.records.rank_log import RankLog, noted
from megaresume.checkpoint.save.commit import begin_save, commit_save, write_data_config
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
from megaresume.data.prepare.chat import ChatOptions
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.split import IndexedSource
from megaresume.encoding.text.turns import Selection
from megaresume.runs.trace.ranks import _hash
from megaresume.stream.batches import BatchSchedule
from tests.cli.conftest import SavedRun, megaresume
from tests.encoding.text.families import FAMILIES
from tests.encoding.text.kit import write_tokenizer


@pytest.fixture
def chat(tmp_path: Path) -> SavedRun:
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    write_tokenizer(tmp_path / "model", FAMILIES["chatml"])
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"How are {i}?"},
                {"role": "assistant", "content": f"Hello {i} 🦊"},
            ]
            * n
        }
        for i, n in enumerate([1, 2, 3] * 20)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_again(tmp_path)
    prepare([tmp_path / "chats.jsonl"], corpora / "web", options(tmp_path, "messages"))
    sources = {"chat": {"path": "corpora/chat", "weight": 0.8}, "web": {"path": "corpora/web", "weight": 0.2}}
    data = tmp_path / "data.yaml"
    data.write_text(yaml.safe_dump({"seed": 3, "seq_length": 96, "packing": "best_fit", "sources": sources}))
    stream, save = open_stream(data), tmp_path / "ckpt"
    topology = Topology(dp=1, world_size=1, global_batch_size=4)
    record_start(save, iteration=0, state=stream.state_at(0), choice=None, topology=topology)
    state = stream.state_at(8, batches=[(0, 4)])
    pending = begin_save(save, tag="global_step2", iteration=2, state=state, topology=topology)
    (save / "global_step2").mkdir()
    (save / "global_step2" / "model.pt").write_bytes(b"weights")
    commit_save(pending, expected_files=["model.pt"])
    write_data_config(save, stream.origin)
    return SavedRun(data=data, save=save, corpora=corpora)


def options(root: Path, text: str | None = None, **selection: object) -> PrepareOptions:
    if text is not None:  # any text will do
        return PrepareOptions(tokenizer=root / "model", format="text", text_unit="line")
    chat = ChatOptions(selection=Selection(**selection))  # type: ignore[arg-type]
    return PrepareOptions(tokenizer=root / "model", chat=chat, overwrite=True)


def prepare_again(root: Path, **selection: object) -> None:
    prepare([root / "chats.jsonl"], root / "corpora" / "chat", options(root, **selection))


def test_stream_counts_what_is_trained(chat: SavedRun) -> None:
    stream = open_stream(chat.data)
    plan = stream.plan(0, 8)
    batch = make_batch(plan, Assembler(stream.sources, seq_length=96))
    mask, column = batch["loss_mask"].numpy(), 0
    trained = 0.0
    for row, segments in enumerate(plan):
        column = 0
        for s in segments:
            trained += mask[row, column : column + s.length].sum() if s.source == 0 else 0
            column += s.length
    found = json.loads(megaresume("stream", chat.data, "--samples", "0:8", "--json", "--summary").stdout)["sources"]
    assert found["chat"]["trained"] == trained > 50 and "trained" not in found["web"]
    assert f"{int(trained):,} trained" in megaresume("stream", chat.data, "--samples", "0:8").stdout


def test_trace_marks_what_is_trained(chat: SavedRun) -> None:
    tokenizer = chat.corpora.parent / "model"
    words = ("trace", chat.save, "--samples", "0:8", "--text", "--tokenizer", tokenizer)
    done = megaresume(*words)
    assert done.returncode == 0, done.stderr
    answers = re.findall("⟦(.*?)⟧", done.stdout, flags=re.DOTALL)
    assert len(answers) > 8 and all(re.fullmatch(r"Hello \d+ 🦊<\|im_end\|>", text) for text in answers)
    assert "⟦" not in re.sub("⟦.*?⟧", "", done.stdout, flags=re.DOTALL)
    ids = megaresume("trace", chat.save, "--samples", "0:8", "--text").stdout
    assert ids.count("⟦") == ids.count("⟧") == len(answers)
    counted = 0
    for line in megaresume(*words, "--json").stdout.splitlines():
        for segment in json.loads(line)["segments"]:
            assert "⟦" not in segment["text"] and ("trained" in segment) == (segment["source"] == "chat")
            for first, stop in segment.get("trained", ()):
                assert segment["offset"] <= first < stop <= segment["offset"] + segment["length"]
                counted += 1
    assert counted == len(answers)


def test_verify_by_content_sees_the_spans(chat: SavedRun) -> None:
    before = megaresume("verify", chat.save, "--content")
    assert before.returncode == 0 and "proved" in before.stdout, before.stderr
    digests = json.loads(megaresume("verify", chat.save, "--content", "--json").stdout)["content"]
    spans = chat.corpora / "chat.spans"
    good = spans.read_bytes()
    prepare_again(chat.corpora.parent, turns="last")
    assert spans.read_bytes() != good
    done = megaresume("verify", chat.save)
    assert done.returncode == 1 and "others of them are trained" in done.stdout + done.stderr
    source = IndexedSource(chat.corpora / "chat")
    other = _hash(source, "chat", 1, 0, source.length(1))
    prepare_again(chat.corpora.parent)
    assert spans.read_bytes() == good
    source = IndexedSource(chat.corpora / "chat")
    assert _hash(source, "chat", 1, 0, source.length(1)) != other
    again = json.loads(megaresume("verify", chat.save, "--content", "--json").stdout)["content"]
    assert again == digests


def test_plan_and_resume_refuse_lost_spans(chat: SavedRun) -> None:
    (chat.corpora / "chat.spans").unlink()
    done = megaresume("plan", chat.save, "--data", chat.data, "--dp", "1", "--global-batch-size", "4")
    assert done.returncode != 0 and "chat.spans is missing" in done.stdout + done.stderr


def test_a_mask_that_was_lost_on_the_way_is_found(chat: SavedRun, tmp_path: Path) -> None:
    """What a rank was handed is held against the spans: not only that it had the right tokens."""
    stream = open_stream(chat.data)
    for name, lost in (("kept", False), ("lost", True)):
        log = RankLog(tmp_path / name, rank=0, launch=1)
        log.start(step=0, samples=0, dp_rank=0, dp=1, micro_batch_size=4, pad_id=0, digest="0" * 16)
        loader = StreamLoader(stream, BatchSchedule.constant(4), micro_batch_size=4, stop=8, prefetch=0)
        for step, batch in enumerate(loader, start=1):
            if lost and step == 2:
                batch["loss_mask"] = torch.ones_like(batch["loss_mask"])
            log.add_noted(noted(batch))
            log.end_step(step)
        log.close()
        words = ("verify", chat.save, "--log-samples", tmp_path / name, "--content")
        done = megaresume(*words)
        assert done.returncode == int(lost), done.stdout + done.stderr
        assert "the content of 2" in done.stdout if not lost else "step 2, rank 0" in done.stdout
        assert megaresume(*words[:-1]).returncode == 0, "the order is what it was"
