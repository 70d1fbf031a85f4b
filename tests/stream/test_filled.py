"""Text that fills what whole conversations leave free: nothing cut, lost or repeated, and samples that are full.

Every token has a value of its own, so that what the batches hold can be counted and put in place by itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpora import write_corpus
from megaresume.batches.loader import StreamLoader
from megaresume.data.layout import bin_path
from megaresume.data.spans import Spans
from megaresume.data.split import IndexedSource
from megaresume.encoding.text.conversation_encoder import runs_of
from megaresume.program import main
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import OnChange, StreamConfig
from megaresume.stream.errors import ConfigError, StateError, StreamExhausted
from megaresume.stream.kernel import LENGTH, SOURCE
from megaresume.stream.planner import Plan, Planner
from megaresume.stream.skips import SkipConfig
from megaresume.stream.stages import Course
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_exact_resume
from tests.corpora import write_spans
from tests.stream.reference import reference_samples

SEQ = 32
RANDOM = random.Random(18)
TEXT = [RANDOM.choice([2, 9, 20, 31, 32, 50, 130]) for _ in range(120)]
CHATS = [RANDOM.choice([3, 7, 12, 18, 25, 32]) for _ in range(120)]
SPANS = [[(0, n // 3), (n - 1, n)] for n in CHATS]
#: value of the first token of the conversations.
CHAT = 1_000_000


def _sources(directory: Path, num: int) -> list[IndexedSource]:
    """The first documents of both corpora, whose tokens count up from 1 and from `CHAT`."""
    directory.mkdir(exist_ok=True)
    prefixes = []
    for name, lengths, first in (("text", TEXT, 1), ("chat", CHATS, CHAT)):
        prefixes.append(write_corpus(directory / name, np.array(lengths[:num], np.int32), sparse=True))
        np.arange(first, first + sum(lengths[:num]), dtype="<i4").tofile(bin_path(prefixes[-1]))
    write_spans(prefixes[1], CHATS[:num], SPANS[:num])
    return [IndexedSource(prefix) for prefix in prefixes]


def _config(packing: Any = None, text: Any = "split", **more: Any) -> StreamConfig:
    """Text and conversations in equal parts, each for two epochs."""
    each = {"max_epochs": 2, "append": "now"}
    sources = {"text": each | ({"packing": text} if text else {}), "chat": each}
    packing = packing or {"mode": "best_fit", "open_bins": 4, "max_age": 20}
    return StreamConfig.from_dict({"seed": 18, "seq_length": SEQ, "packing": packing, "sources": sources, **more})


def _taught(first: int, token: int) -> bool:
    """Whether a token is trained, by its place in its document."""
    starts = np.cumsum([first, *CHATS])
    document = int(np.searchsorted(starts, token, side="right")) - 1
    return any(a <= token - starts[document] < b for a, b in SPANS[document])


def _record(row: dict[str, Any]) -> list[int]:
    """The tokens of one sample; conversations are whole in it, and its loss mask is that of their labels."""
    tokens, mask = row["tokens"].tolist(), row["loss_mask"].tolist()
    starts = {CHAT + int(n): size for n, size in zip(np.cumsum([0, *CHATS]), CHATS, strict=False)}
    at = 0
    while at < len(tokens) and tokens[at]:
        if tokens[at] < CHAT:
            at += 1
            continue
        size = starts[tokens[at]]  # nothing of a conversation comes but from its first token on
        assert tokens[at : at + size] == list(range(tokens[at], tokens[at] + size))
        wanted = [float(_taught(CHAT, token)) for token in tokens[at + 1 : at + size]]
        assert mask[at : at + size] == [*wanted, 0.0]
        at += size
    assert not any(tokens[at:]) and not any(mask[at:])
    return tokens[:at]


def _train(stream: Stream, steps: int, batch: int, dp: int, micro: int, got: list[list[int]]) -> StreamState:
    """So many steps on so many ranks; then the state, as text."""
    schedule = BatchSchedule.constant(batch)
    rows: dict[int, list[int]] = {}
    for rank in range(dp):
        loader = StreamLoader(stream, schedule, micro_batch_size=micro, dp_rank=rank, dp_size=dp)
        batches = iter(loader)
        for _ in range(steps * batch // dp // micro):
            found = next(batches)
            for k, sample in enumerate(found["samples"].tolist()):
                rows[sample] = _record({key: found[key][k] for key in ("tokens", "loss_mask")})
    assert sorted(rows) == list(range(stream.start, stream.start + steps * batch))
    got += [rows[sample] for sample in sorted(rows)]
    return StreamState.from_json(stream.state_at(stream.start + steps * batch).to_json())


def _rest(stream: Stream, directory: Path) -> Iterator[list[int]]:
    """The samples that are left, from the raw files by the plan."""
    raw = [np.fromfile(directory / f"{name}.bin", "<i4") for name in ("text", "chat")]
    starts = [np.cumsum([0, *lengths]) for lengths in (TEXT, CHATS)]
    sample = stream.start
    while True:
        try:
            table = stream.plan(sample, sample + 1).table.tolist()
        except StreamExhausted:
            return
        yield [t for s, _, d, offset, n in table for t in raw[s][starts[s][d] + offset :][:n].tolist()]
        sample += 1


def test_every_token_once_an_epoch_on_any_ranks_while_both_corpora_grow(tmp_path: Path) -> None:
    got: list[list[int]] = []
    state = _train(Stream(_config(), _sources(tmp_path, 60)), 2, 6, 2, 1, got)
    # Another global batch, micro-batch and layout; twice from the same state, as after a kill.
    for _ in range(2):
        tried = got[:]
        later = _train(Stream(_config(), _sources(tmp_path, 60), state=state), 1, 8, 1, 4, tried)
    assert later.tails and later.bins
    stream = Stream(_config(), _sources(tmp_path, 120), state=later)
    assert "grew from 60 to 120 documents" in stream.accepted[0] + stream.accepted[1]
    last = _train(stream, 3, 6, 3, 2, tried)
    tried += _rest(Stream(_config(), _sources(tmp_path, 120), state=last), tmp_path)
    counts = Counter(token for sample in tried for token in sample)
    assert counts == dict.fromkeys([*range(1, 1 + sum(TEXT)), *range(CHAT, CHAT + sum(CHATS))], 2)
    full = [len(sample) for sample in tried[: len(tried) // 2]]
    assert sum(full) == SEQ * len(full)


@pytest.mark.parametrize("align", [1, 8])
def test_exact_resume_from_every_sample(align: int) -> None:
    config = _config({"mode": "best_fit", "open_bins": 3, "max_age": 5, "align": align})
    sources = [LengthList(TEXT[:30]), LengthList(CHATS[:30])]
    assert_exact_resume(lambda state: Stream(config, sources, state=state), num_samples=60)


def test_full_samples_of_long_conversations() -> None:
    """Of lengths with which whole documents alone leave gaps; parts of one text are never in one sample."""
    rng = np.random.default_rng(18)
    chats = np.clip(rng.lognormal(7.5, 0.5, 20_000), 600, 4096).astype(np.int64)
    text = np.maximum(rng.lognormal(6, 1, 20_000), 1).astype(np.int64)
    fills = {}
    for filler in (None, "split"):
        data = {
            "seq_length": 4096,
            "packing": "best_fit",
            "sources": {"text": {"weight": 0.2, "packing": filler}, "chat": {"weight": 0.8}},
        }
        plan = Stream(StreamConfig.from_dict(data), [LengthList(text), LengthList(chats)]).plan(0, 4000)
        fills[filler] = plan.tokens().sum() / (4000 * 4096)
        lengths = [chats[d] for s, _, d, *_ in plan.table.tolist() if s == 1]
        assert plan.table[plan.table[:, SOURCE] == 1, LENGTH].tolist() == lengths
    assert fills["split"] >= 0.995 > 0.99 > fills[None]
    for k in range(len(plan)):
        places = [(s, p) for s, p, *_ in plan.table[plan.starts[k] : plan.starts[k + 1]].tolist()]
        assert len(set(places)) == len(places)


def _parts(plan: Plan) -> list[list[tuple[int, int]]]:
    """(sample, tokens) of the parts of each piece of source 0, in the order of the piece."""
    samples = np.repeat(np.arange(len(plan)), np.diff(plan.starts)).tolist()
    mine = sorted((p, at, k, n) for (s, p, _, at, n), k in zip(plan.table.tolist(), samples, strict=True) if s == 0)
    return [[(k, n) for *_, k, n in group] for _, group in groupby(mine, key=lambda part: part[0])]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_text_that_fills_is_cut_seldom_and_its_parts_are_long_and_far_apart(share: float) -> None:
    """At 4,096 tokens a sample, of conversations that leave wide gaps; the figures are in docs/stream.md."""
    rng = np.random.default_rng(18)
    chats = np.clip(rng.lognormal(np.log(1365), 0.6, 30_000), 20, 4096).astype(np.int64)
    text = np.maximum(rng.lognormal(6.5, 1, 30_000), 1).astype(np.int64)
    sources = {"text": {"weight": share, "packing": "split"}, "chat": {"weight": round(1 - share, 2)}}
    config = StreamConfig.from_dict({"seq_length": 4096, "sources": sources})
    plan = Stream(config, [LengthList(text), LengthList(chats)]).plan(0, 4000)
    # Of the first pieces that are cut nearly all wait: with little text it takes a while until some come again.
    assert plan.tokens()[2000:].sum() / (2000 * 4096) >= 0.995
    pieces = _parts(plan)
    lengths = [n for parts in pieces if len(parts) > 1 for _, n in parts]
    assert min(lengths) >= 64 and len(lengths) > 1000
    assert min(b - a for parts in pieces for (a, _), (b, _) in pairwise(parts)) >= 256
    settled = [len(parts) for parts in pieces if 500 < parts[0][0] < 2500]
    assert sum(settled) / len(settled) < 2.6 and max(settled) <= 8


def test_the_shortest_part_can_be_set() -> None:
    text, chats = LengthList([700] * 3000), LengthList([300, 500, 650, 1000] * 3000)
    shortest = []
    for fragment in ({}, {"min_fragment": 100}):
        data = {"seq_length": 1024, "packing": {"mode": "best_fit"} | fragment}
        config = StreamConfig.from_dict(data | {"sources": {"text": {"packing": "split"}, "chat": {"weight": 3}}})
        assert StreamConfig.from_dict(config.to_dict()) == config
        shortest.append(min(n for parts in _parts(Stream(config, [text, chats]).plan(0, 1500)) for _, n in parts))
    assert shortest[0] < 100 <= shortest[1]


def test_what_was_cut_before_is_told_from_what_was_not_by_a_resume() -> None:
    """When so many pieces were cut that the first of them wait to fill again; also without some documents."""
    config = StreamConfig.from_dict({"seq_length": 64, "sources": {"text": {"packing": "split"}, "chat": {}}})
    sources = [LengthList([13, 30, 64, 200] * 2000), LengthList([40, 50, 63] * 3000)]
    twin = Stream(config, sources)
    expected = twin.plan(0, 2000)
    reference = reference_samples(config, {"text": [13, 30, 64, 200] * 2000, "chat": [40, 50, 63] * 3000}, 1200)
    rows = [expected.table[expected.starts[k] : expected.starts[k + 1]].tolist() for k in range(1200)]
    assert rows == [[list(segment) for segment in sample] for sample in reference]
    for at in (200, 700, 1100, 1600):
        state = StreamState.from_json(twin.state_at(at).to_json())
        assert at < 700 or len(state.tails) > 256
        rest = Stream(config, sources, state=state).plan(at, 2000)
        assert rest.digests.tolist() == expected.digests[at:].tolist()
    # A list of documents to skip takes some of both kinds out, at a resume and in the run that goes on.
    skipping = replace(config, skip=SkipConfig.from_dict({"documents": {"text": list(range(0, 8000, 3))}}))
    skips = Stream(skipping, sources, state=state)
    wanted = skips.plan(1600, 2000).digests.tolist()
    assert wanted != expected.digests[1600:].tolist()
    later = StreamState.from_json(skips.state_at(1700).to_json())
    assert Stream(skipping, sources, state=later).plan(1700, 2000).digests.tolist() == wanted[100:]


def test_another_packing_of_a_source_is_a_stage(tmp_path: Path) -> None:
    sources = _sources(tmp_path, 120)
    got: list[list[int]] = []
    state = _train(Stream(_config(), sources), 3, 6, 1, 1, got)

    def resumed(config: StreamConfig, on_change: OnChange, state: StreamState = state) -> Stream:
        return Stream(config, sources, state=state, on_change=on_change)

    with pytest.raises(StateError, match=r"sources\.text\.packing"):
        resumed(_config(text=None), "refuse")
    stream = resumed(_config(text=None), "stage")
    assert stream.accepted == ('at sample 18: sources.text.packing "split" -> null',)
    state = _train(stream, 3, 6, 2, 1, got)
    stream = resumed(_config(), "stage", state)
    state = _train(stream, 3, 6, 3, 1, got)
    got += _rest(resumed(_config("split"), "stage", state), tmp_path)
    counts = Counter(token for sample in got for token in sample)
    assert counts == dict.fromkeys([*range(1, 1 + sum(TEXT)), *range(CHAT, CHAT + sum(CHATS))], 2)


@pytest.mark.parametrize("packing", ["knapsack", "none"])
def test_only_best_fit_leaves_samples_open_to_be_filled(packing: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be packed by split if the others have packing {packing}"):
        _config(packing)
    with pytest.raises(ConfigError, match="in stage 'later'"):
        _config(stages=[{"from_samples": 9, "name": "later", "packing": packing}])
    with pytest.raises(ConfigError, match="packing"):
        _config(text="best_fit")


def test_without_a_packing_the_others_are_whole() -> None:
    config = StreamConfig.from_dict({"seq_length": 8, "sources": {"text": {"packing": "split"}, "chat": {}}})
    assert (config.packing.mode, config.packed_by) == ("best_fit", "best_fit filled with text")
    assert StreamConfig.from_dict(config.to_dict()) == config
    assert _config({"open_bins": 8}).packing.mode == "best_fit"
    assert _config({"align": 8}, text=None).packing.mode == "split"
    assert _config("split").packed_by == "split"


class Images(LengthList):
    whole = True


def test_documents_that_must_stay_whole_fill_nothing() -> None:
    with pytest.raises(ConfigError, match="would cut documents of source 'text' that must stay whole"):
        Stream(_config(), [Images([5]), LengthList([5])])


def test_the_command_line_says_what_fills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _sources(tmp_path, 120)
    config = tmp_path / "data.yaml"
    config.write_text(
        f"seq_length: {SEQ}\nsources:\n  text: {{path: text, packing: split}}\n  chat: {{path: chat, weight: 3}}\n"
    )
    assert main(["stream", str(config), "--samples", "0:20", "--summary"]) == 0
    assert "100.000 % of 32 a sample (best_fit filled with text)" in capsys.readouterr().out


# Weights by trained tokens


class Taught(LengthList):
    """A source that says which tokens are trained."""

    def __init__(self, masks: list[list[int]]) -> None:
        super().__init__([len(mask) for mask in masks])
        self.masks = masks

    def trained_spans(self, ids: Any) -> Spans:
        spans = [runs_of(np.array(self.masks[i], bool)) for i in ids]
        flat = np.array([span for document in spans for span in document], np.int32).reshape(-1, 2)
        return Spans(starts=np.cumsum([0, *map(len, spans)]), spans=flat)


MASKS = st.lists(st.lists(st.integers(0, 1), max_size=30), min_size=1, max_size=12).filter(lambda m: any(map(any, m)))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), MASKS, min_size=2), st.sampled_from([None, "split"]), st.integers(0, 9))
def test_trained_tokens_are_drawn_as_the_reference_draws_them(masks: Any, filler: Any, seed: int) -> None:
    sources = {name: {"weight": k + 1, "packing": filler if k == 0 else None} for k, name in enumerate(masks)}
    data = {"seed": seed, "seq_length": 12, "packing": "best_fit", "blend": {"unit": "trained"}, "sources": sources}
    config = StreamConfig.from_dict(data)
    lengths = {name: [len(mask) for mask in its] for name, its in masks.items()}
    expected = list(reference_samples(config, lengths, 40, masks))
    plan = Planner(Course.of(config), [Taught(its) for its in masks.values()]).advance(40)
    rows = [plan.table[plan.starts[k] : plan.starts[k + 1]].tolist() for k in range(len(plan))]
    assert rows == [[list(segment) for segment in sample] for sample in expected]


def test_weights_count_trained_tokens(tmp_path: Path) -> None:
    sources = _sources(tmp_path, 120)
    config = _config(blend={"unit": "trained"})
    stream = Stream(config, sources)
    plan = stream.plan(0, 80)
    trained = [0, 0]
    for source, _, document, offset, length in plan.table.tolist():
        inside = [max(min(b, offset + length) - max(a, offset), 0) for a, b in SPANS[document]]
        trained[source] += sum(inside) if source else length
    waiting = sum(s.length for s in stream.state_at(80).waiting)
    assert abs(trained[0] - trained[1]) <= waiting + 2 * SEQ
    assert stream.state_at(80).sources["chat"].tokens > 3 * stream.state_at(80).sources["text"].tokens / 2
    with pytest.raises(ConfigError, match="does not say which tokens are trained"):
        Stream(config, [sources[0], LengthList([5])])
    with pytest.raises(ConfigError, match="nothing of source 'chat' is trained"):
        Stream(config, [sources[0], Taught([[0] * 5])])
