"""`megaresume demo --sft`: what its own code says of masks; its program; and, slow, all of it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megaresume.cluster.demo.sft import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    SFT,
    SPECIAL,
    Given,
    _marked,
    compare_masks,
    conversations,
    read_given,
    what_is_trained,
    write_given,
    write_tokenizer,
)
from megaresume.cluster.records import read_records
from megaresume.program import main
from tests.cli.conftest import megaresume_process
from tests.release import release

CHAT = [IM_START, *b"user\nHi", IM_END, ord("\n"), IM_START, *b"assistant\nYo", IM_END, ord("\n")]
TEXT = [*b"A text", END_OF_TEXT]
#: in the words of the next tokens: "Yo" and what ends it.
CHAT_TRAINED = [0] * (CHAT.index(ord("Y")) - 1) + [1, 1, 1, 0, 0]


def given(sample: int = 0) -> Given:
    """A conversation, a text, one that goes on elsewhere, and padding."""
    parts = [CHAT, TEXT, [*b"half"], [0, 0, 0]]
    tokens = np.array([token for part in parts for token in part])
    trained = np.array([*CHAT_TRAINED, *[1] * 6, 0, *[1] * 4, 0, 0, 0], bool)
    positions = np.concatenate([np.arange(len(part)) for part in parts])
    return Given(sample, tokens, positions, np.roll(tokens, -1), trained)


def test_tokens_say_what_is_trained() -> None:
    right = given()
    assert len(CHAT) == len(CHAT_TRAINED) and list(what_is_trained([right])) == []
    for place in range(len(right.tokens)):
        trained = right.trained.copy()
        trained[place] ^= True
        wrong = list(what_is_trained([replace(right, trained=trained)]))
        assert [one.place for one in wrong] == [place]


@pytest.mark.parametrize("name", ["tokens", "positions", "labels", "trained"])
def test_a_place_that_differs_from_the_twin_is_found(name: str) -> None:
    changed = getattr(given(), name).copy()
    changed[5] = not changed[5] if name == "trained" else 99
    assert list(compare_masks([given()], [given()])) == []
    wrong = list(compare_masks([given()], [given(), replace(given(), **{name: changed})]))
    assert [(one.sample, one.place) for one in wrong] == [(0, 5)] and name in str(wrong[0])


def test_samples_that_only_one_of_them_has_are_found() -> None:
    wrong = list(compare_masks([given(0), given(1)], [given(1), given(2)]))
    assert [one.sample for one in wrong] == [2, 0]


def test_what_is_written_is_read_also_after_a_kill(tmp_path: Path) -> None:
    one = given(7)
    names = {"tokens": one.tokens, "position_ids": one.positions, "labels": one.labels}
    batch = {name: torch.from_numpy(array)[None] for name, array in names.items()}
    batch |= {"loss_mask": torch.from_numpy(one.trained)[None].float(), "samples": torch.tensor([7])}
    write_given(tmp_path / "run.jsonl", 0, batch)
    path = tmp_path / "run.jsonl.rank0"
    path.write_bytes(path.read_bytes() + b'\n{"sample": 8, "tok')
    write_given(tmp_path / "run.jsonl", 0, batch)
    found = read_given(tmp_path, "run")
    assert [sample.sample for sample in found] == [7, 7]
    assert list(compare_masks([one], found)) == [] and list(what_is_trained(found)) == []


def test_its_tokenizer_has_bytes_and_special_tokens(tmp_path: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(write_tokenizer(tmp_path) / "tokenizer.json"))
    text = "".join(map(chr, range(300))) + "🦊"
    assert tokenizer.encode(text + "".join(SPECIAL)).ids == [*text.encode(), END_OF_TEXT, IM_START, IM_END]


def test_the_report_marks_what_is_trained() -> None:
    page = _marked(given().tokens, given().trained)
    assert "assistant\n<mark>Yo&lt;|im_end|&gt;</mark>\n" in page and "A<mark> text&lt;|endoftext|&gt;</mark>" in page


def test_conversations_are_questions_and_answers() -> None:
    some = list(itertools.islice(conversations(), 9))
    assert all([turn["role"] for turn in one] == ["user", "assistant"] * (len(one) // 2) for one in some)
    assert len({len(one) for one in some}) > 1


@pytest.mark.process
def test_the_program_trains_what_its_code_expects(tmp_path: Path) -> None:
    from megaresume.cluster.processes import LocalJob

    data = SFT.prepare(tmp_path, lambda text: None)
    log = tmp_path / "run.jsonl"
    flags = [*SFT.flags(tmp_path, 2), "--megaresume-data", str(data), "--micro-batch-size", "8"]
    flags += ["--megaresume-log-samples", str(log), "--save", str(tmp_path / "run")]
    output = tmp_path / "run.txt"
    env = {"DS_ACCELERATOR": "cpu"}
    with LocalJob(SFT.program, flags, num_processes=1, output=output, launcher="env", env=env) as job:
        assert job.wait(1200) == 0, job.text()[-4000:]
    found = read_given(tmp_path, "run")
    assert [one.sample for one in found] == list(range(32))
    assert list(what_is_trained(found)) == []
    steps = read_records(log).steps
    assert sum(int(one.trained.sum()) for one in found) == sum(record["tokens"] for record in steps.values())


@release(
    "a minute of training",
    "`::test_the_program_trains_what_its_code_expects`, "
    "`tests/cluster/demo/test_demo.py::test_it_proves_a_run_that_was_killed_twice`",
)
@pytest.mark.process
def test_all_of_it_short(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = megaresume_process("demo", "--sft", "--steps", "24", "--out", out, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["holds"] and result["steps"] == 24 and result["masks_different"] == 0
    assert result["masks_compared"] >= 24 * 16 * 256 > result["masks_trained"] > 0
    records = read_records(out / "run.jsonl")
    assert [(s["topology"]["dp"], s["topology"]["num_workers"]) for s in records.starts] == [(2, 0), (1, 2), (2, 1)]
    assert "<mark>" in (out / "report.html").read_text()
    # A mask that is not its twin's fails the demo.
    path = next(out.glob("run.jsonl.rank0"))
    lines = path.read_text().splitlines()
    record = json.loads(lines[-1])
    lines[-1] = json.dumps(record | {"loss_mask": "01000000" + record["loss_mask"][8:]})
    assert json.loads(lines[-1]) != record
    path.write_text("\n".join(lines))
    assert not SFT.extra(out).holds


def test_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--sft", "--steps", "3"]) == 2
    assert "too few steps" in capsys.readouterr().err
