"""Preference pairs: prepared as transformers writes both halves, packed as one, told apart in batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.batches.batch import FIELDS
from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data.documents import TextOptions
from megaresume.data.prepare.chat import ChatOptions
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.spans import SpanFile, SpansWriter, spans_of
from megaresume.data.split import IndexedSource
from megaresume.program import main
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import CorpusError, UsageError
from tests.encoding.text.families import FAMILIES, GENERATION
from tests.encoding.text.kit import reference_tokenizer, write_tokenizer

SEQ_LENGTH = 256
WITH_PAIRS = (*FIELDS, "pairs")


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def row(i: int) -> dict[str, Any]:
    prompt = said("Hi", "Hello!", f"How are you, {i}?") if i % 2 else said(f"How are you, {i}?")
    good, bad = "the fox " * (1 + i % 5) + ".", "lazy dog " * (1 + i % 3)
    if i % 3 == 0:
        return {"chosen": said_on(prompt, good), "rejected": said_on(prompt, bad)}
    if i % 3 == 1:
        return {"prompt": prompt, "chosen": good, "rejected": [{"role": "assistant", "content": bad}]}
    return {"prompt": prompt, "chosen": said_on(prompt, good), "rejected": said_on(prompt, bad)}  # told twice


def said_on(prompt: list[dict[str, str]], answer: str) -> list[dict[str, str]]:
    return [*prompt, {"role": "assistant", "content": answer}]


ROWS = [row(i) for i in range(40)]


def halves(i: int) -> list[list[dict[str, str]]]:
    """Both conversations of a row, by code of its own."""
    pair = ROWS[i]
    whole = []
    for name in ("chosen", "rejected"):
        answer = pair[name] if isinstance(pair[name], str) else pair[name][-1]["content"]
        prompt = pair["prompt"] if "prompt" in pair else pair[name][:-1]
        whole.append(said_on(prompt, answer))
    return whole


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), FAMILIES["chatml"], template=GENERATION["chatml"])


@pytest.fixture(scope="module")
def expected(tokenizer: Path) -> list[tuple[list[int], list[int], int]]:
    """Of each row its tokens, what is trained, and where the rejected half begins: as transformers has it."""
    theirs, found = reference_tokenizer(tokenizer), []
    for i in range(len(ROWS)):
        tokens, mask, at = [], [], 0
        for half in halves(i):
            whole = theirs.apply_chat_template(half, return_assistant_tokens_mask=True, return_dict=True)
            prompt = theirs.apply_chat_template(half[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
            at = at or len(whole["input_ids"])
            tokens += whole["input_ids"]
            mask += [0] * len(prompt) + whole["assistant_masks"][len(prompt) :]
        found.append((tokens, mask, at))
    return found


def made(tmp_path: Path, tokenizer: Path, rows: list[Any], **more: Any) -> Any:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = more.pop("chat", ChatOptions())
    return prepare([path], tmp_path / "out", PrepareOptions(tokenizer=tokenizer, chat=chat, **more))


def test_a_pair_is_both_conversations_and_the_place_between_them(tmp_path, tokenizer, expected):
    summary = made(tmp_path, tokenizer, ROWS)
    source = IndexedSource(tmp_path / "out")
    source.fingerprint()  # reads and checks every span
    spans = spans_of(source, np.arange(len(source)))
    for i, (tokens, mask, at) in enumerate(expected):
        assert source.get(i).tolist() == tokens
        assert spans.mask(i, 0, len(tokens)).astype(int).tolist() == mask
        mine = spans.spans[spans.starts[i] : spans.starts[i + 1]]
        assert [int(a) for a, b in mine if a == b] == [at]
    assert summary.trained == sum(sum(mask) for _, mask, _ in expected)


@pytest.fixture
def stream(tmp_path, tokenizer):
    made(tmp_path, tokenizer, ROWS)

    def opened(packing: Any = "best_fit") -> Any:
        sources = {"prefs": {"path": str(tmp_path / "out")}}
        return open_stream({"seed": 1, "seq_length": SEQ_LENGTH, "packing": packing, "sources": sources})

    return opened


def test_batches_tell_the_halves_apart(stream, expected):
    loader = StreamLoader(stream(), BatchSchedule.constant(4), micro_batch_size=4, fields=WITH_PAIRS, prefetch=0)
    by_tokens = {tuple(tokens): (mask, at) for tokens, mask, at in expected}
    seen = 0
    for _, batch in zip(range(4), loader, strict=False):
        for pair in batch["pairs"].tolist():
            line, chosen, rejected, stop = pair
            tokens = batch["tokens"][line, chosen:stop].tolist()
            mask, at = by_tokens[tuple(tokens)]
            assert rejected - chosen == at
            # The loss of a token is at the place before it; none leads from one half into the other.
            assert batch["loss_mask"][line, chosen:stop].int().tolist() == [*mask[1:], 0] and mask[at] == 0
            assert batch["labels"][line, rejected - 1] == 0
            assert batch["position_ids"][line, chosen:stop].tolist() == [*range(at), *range(stop - rejected)]
            bounds = batch["cu_seqlens"][line].tolist()
            assert {chosen, rejected} <= {*bounds} and bounds == sorted({*bounds}) and bounds[-1] == SEQ_LENGTH
            seen += 1
        assert batch["pairs"].tolist() == sorted(batch["pairs"].tolist())
        # Segments besides padding are halves of pairs.
        assert sum(len(bounds) - 1 for bounds in batch["cu_seqlens"]) <= 2 * len(batch["pairs"]) + 4
    assert seen > 20


def test_a_loop_that_does_not_ask_is_refused(stream):
    loader = StreamLoader(stream(), BatchSchedule.constant(4), micro_batch_size=4, prefetch=0)
    with pytest.raises(UsageError, match="would train both of each") as found:
        next(iter(loader))
    assert "'prefs'" in found.value.found and "pairs" in str(found.value)


def test_pairs_after_conversations_are_refused_too(tmp_path, tokenizer):
    made(tmp_path, tokenizer, [{"messages": said("Hi", "Hello!")}] * 2)
    source = IndexedSource(tmp_path / "out")
    spans = spans_of(source, np.arange(2))
    with open(tmp_path / "out.spans", "w+b") as file:
        writer = SpansWriter(file, documents=2, spans=len(spans.spans) + 1)
        writer.add(np.array([1, 2]), np.array([*spans.spans.tolist(), [source.length(1) - 1] * 2], np.int32))
        writer.finish(source.length(0) + source.length(1))
    (tmp_path / "out.megaresume.json").unlink()  # made by another program: nobody knows which .spans is its own
    stream = open_stream(
        {"seed": 1, "seq_length": SEQ_LENGTH, "packing": "best_fit", "sources": {"c": str(tmp_path / "out")}}
    )
    loader = StreamLoader(stream, BatchSchedule.constant(1), micro_batch_size=1, prefetch=0)
    with pytest.raises(UsageError, match="would train both of each"):
        for _, _ in zip(range(8), loader, strict=False):
            pass


@pytest.mark.parametrize("packing", ["split", {"mode": "best_fit", "align": 16}])
def test_pairs_are_never_cut_nor_aligned(stream, packing):
    loader = StreamLoader(stream(packing), BatchSchedule.constant(4), micro_batch_size=4, fields=WITH_PAIRS, prefetch=0)
    expected = (CorpusError, "does not stay in one sample") if packing == "split" else (UsageError, "cannot be aligned")
    with pytest.raises(expected[0], match=expected[1]):
        for _, _ in zip(range(8), loader, strict=False):
            pass


BAD = [
    ({"chosen": "a", "rejected": "b"}, "has no 'prompt'"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has no preference"),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "has no 'rejected'"),
    ({"prompt": "a", "chosen": "b", "rejected": []}, "has no list of messages"),
    ({"chosen": said("a", "b"), "rejected": said("a")}, "has no role that is trained"),
    ({"chosen": said("a", "b"), "rejected": [*said("a", "c"), *said("d")[:1], *said("e")]}, "has roles out of order"),
    ({"messages": said("a", "b")}, "has no 'chosen'"),
]


@pytest.mark.parametrize(("bad", "what"), BAD)
def test_bad_pairs_are_named_or_left_out_and_counted(tmp_path, tokenizer, bad, what):
    rows = [*ROWS[:3], bad, *ROWS[3:6]]
    with pytest.raises(CorpusError, match=rf"in\.jsonl:4 {what}"):
        made(tmp_path, tokenizer, rows)
    summary = made(tmp_path, tokenizer, rows, restart=True, text=TextOptions(bad_lines="skip"))
    assert (summary.documents, summary.bad_lines) == (6, 1)


def test_pairs_that_are_too_long_are_left_out_whole(tmp_path, tokenizer, expected):
    limit = sorted(len(tokens) for tokens, _, _ in expected)[20]
    for how in ("turn", "cut"):
        with pytest.raises(UsageError, match="is not for preference pairs"):
            made(tmp_path, tokenizer, ROWS, chat=ChatOptions(max_tokens=limit, too_long=how))
    summary = made(tmp_path, tokenizer, ROWS, chat=ChatOptions(max_tokens=limit, too_long="skip"))
    kept = [tokens for tokens, _, _ in expected if len(tokens) <= limit]
    assert summary.too_long == len(ROWS) - len(kept) > 0
    source = IndexedSource(tmp_path / "out")
    assert [source.get(i).tolist() for i in range(len(source))] == kept


@pytest.mark.parametrize(
    ("spans", "good"),
    [
        ([(2, 4), (4, 4), (4, 6)], True),
        ([(4, 4)], True),
        ([(0, 0), (4, 6)], False),
        ([(2, 4), (8, 8)], False),
        ([(2, 5), (4, 4)], False),
        ([(3, 3), (5, 5)], False),
        ([(2, 4), (4, 6)], False),
    ],
)
def test_a_file_of_spans_has_one_place_between_halves(tmp_path, spans, good):
    path = tmp_path / "x.spans"
    with open(path, "w+b") as file:
        writer = SpansWriter(file, documents=1, spans=len(spans))
        writer.add(np.array([len(spans)], np.int32), np.array(spans, np.int32))
        writer.finish(8)
    file_of = SpanFile(path, path.read_bytes(), documents=1, tokens=8)
    if good:
        file_of.check(lambda ids: np.full(len(ids), 8, np.int64))
        return
    with pytest.raises(CorpusError, match="is damaged"):
        file_of.check(lambda ids: np.full(len(ids), 8, np.int64))


def test_the_command(tmp_path, tokenizer, capsys):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({**row, "messages": said("x", "y")}) + "\n" for row in ROWS))
    words = ["prepare", tmp_path / "in.jsonl", "--output", tmp_path / "c", "--tokenizer", tokenizer, "--chat"]
    assert main([*map(str, words), "--chat-rows", "preference", "--workers", "1"]) == 0
    assert "40 documents" in capsys.readouterr().out
