"""Conversations and text that fills, through worker processes: killed, and resumed on other ranks.

Every token has a value of its own. What was trained is read from what the ranks wrote down, and from the raw files.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.batches.open import open_stream
from megaresume.data.spans import spans_path
from megaresume.program import main
from tests.hosts.torch.program import run
from tests.hosts.torch.record import items, launch_forked, lines, trained
from tests.release import release
from tests.stream import test_filled as filled

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, a worker each, four samples a step, killed after step 5, of which 3 were saved; then one rank."""
    root = tmp_path_factory.mktemp("filled")
    filled._sources(root / "corpora", 120)
    each = "max_epochs: 2, weight: 1"
    (root / "data.yaml").write_text(
        f"seed: 18\nseq_length: {filled.SEQ}\npacking: {{mode: best_fit, open_bins: 4}}\nsources:\n"
        f"  text: {{path: corpora/text, packing: split, {each}}}\n  chat: {{path: corpora/chat, {each}}}\n"
    )
    options: dict[str, Any] = {"data": str(root / "data.yaml"), "save_every": 3, "parallel": "ddp"}
    status, text = launch_forked(
        PROGRAM, root / "run", 2, batch=1, accumulation=2, steps=12, num_workers=1, kill=("step", 5), **options
    )
    assert status == -9, text[-3000:]
    run(root / "run", attempt=2, batch=2, accumulation=4, steps=30, num_workers=2, **options)
    return root / "run"


def rows_of(directory: Path) -> dict[int, dict[str, np.ndarray]]:
    """By sample: its tokens and its loss mask, as they were trained last."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for line in sorted(lines(directory), key=lambda line: line["attempt"]):
        if (line["attempt"], line["step"] > 3) != (1, True):  # that was lost
            for k, sample in enumerate(line["items"]):
                found[sample] = {name: np.array(line[name][k]) for name in ("tokens", "loss_mask")}
    return found


@release(
    "two launches",
    "`tests/stream/test_filled.py::test_every_token_once_an_epoch_on_any_ranks_while_both_corpora_grow`, "
    "`tests/runs/trace/test_verify_megatron.py::test_balanced_ranks_of_a_filled_blend`",
)
def test_nothing_is_lost_repeated_or_cut_and_the_masks_are_those_of_the_spans(killed: Path) -> None:
    steps = [sorted(step) for step in trained(killed)]
    assert [len(step) for step in steps] == [4] * 3 + [8] * 27 and items(steps) == list(range(228))
    rows = rows_of(killed)
    tokens = [filled._record(rows[sample]) for sample in range(228)]
    whole = filled._rest(open_stream(killed.parent / "data.yaml"), killed.parent / "corpora")
    assert tokens == [[int(token) for token in sample] for sample in itertools.islice(whole, 228)]
    counts = Counter(items(tokens))
    assert max(counts.values()) == 2 and counts.total() == 228 * filled.SEQ


@release(
    "the same launches",
    "`tests/runs/trace/test_verify_megatron.py::test_balanced_ranks_of_a_filled_blend`, "
    "`tests/cli/test_conversations.py::test_trace_marks_what_is_trained`",
)
def test_the_commands_know_what_was_trained(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(killed)
    assert main(["trace", str(killed), "--samples", "0:228", "--text", "--json"]) == 0
    raw = {name: np.fromfile(killed.parent / "corpora" / f"{name}.bin", "<i4") for name in ("text", "chat")}
    starts = {"text": np.cumsum([0, *filled.TEXT]), "chat": np.cumsum([0, *filled.CHATS])}
    told = 0
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        tokens = np.zeros(filled.SEQ, np.int64)
        for s in row["segments"]:
            first = starts[s["source"]][s["document"]] + s["offset"]
            tokens[s["place"] : s["place"] + s["length"]] = raw[s["source"]][first : first + s["length"]]
            spans = [list(span) for span in filled.SPANS[s["document"]] if span[0] < span[1]]
            assert s.get("trained") == (spans if s["source"] == "chat" else None)
        assert tokens.tolist() == rows[row["sample"]]["tokens"].tolist()
        told += 1
    assert told == 228
    assert main(["verify", str(killed), "--content"]) == 0
    assert "proved" in capsys.readouterr().out
    spans = spans_path(killed.parent / "corpora" / "chat")
    good = spans.read_bytes()
    try:
        filled.write_spans(killed.parent / "corpora" / "chat", filled.CHATS, [[(0, n)] for n in filled.CHATS])
        assert main(["verify", str(killed)]) == 1
    finally:
        spans.write_bytes(good)
