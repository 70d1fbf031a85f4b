"""Megatron's items of conversations and of text that fills, against megaresume's own loader and against the raw files.

The tokens of both corpora count up, so that a token tells its document and its place: what a label, a position and the
bounds of an attention must be follows from the tokens of a sample alone, without any plan.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from benchmarks.corpora import write_corpus
from megaresume.batches.loader import StreamLoader
from megaresume.data.layout import bin_path
from megaresume.data.spans import has_spans
from megaresume.hosts.megatron.provider import form_of
from megaresume.hosts.megatron.samples import IDENTITY_VARIABLE, SAMPLE_KEY, SampleDataset
from megaresume.hosts.megatron.streams import StreamOrder, open_streams
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.data_yaml import PackingConfig
from megaresume.stream.errors import UsageError
from megaresume.stream.state import StreamState
from tests.corpora import write_spans

SEQ = 32
RANDOM = random.Random(180)
#: value of the first token of the conversations.
CHAT = 1_000_000
LENGTHS = {
    1: [RANDOM.choice([2, 9, 20, 31, 32, 50, 130]) for _ in range(150)],
    CHAT: [RANDOM.choice([1, 3, 7, 12, 18, 25, 32]) for _ in range(150)],
}
#: some begin with a token that is trained, some train nothing, some end with one that is not.
SPANS = [
    RANDOM.choice([[(n // 3, n)], [(0, 1), (n - 1, n)][: 1 + (n > 2)], [], [(0, n // 2 + 1)]]) for n in LENGTHS[CHAT]
]
SPANS = [[(a, b) for a, b in spans if a < b] for spans in SPANS]
STARTS = {first: first + np.cumsum([0, *lengths]) for first, lengths in LENGTHS.items()}

APART = {"create_attention_mask_in_dataloader": False, "dataloader_inter_document_masking": True}
PACKED = {"create_attention_mask_in_dataloader": False, "sft": True}


@dataclass(frozen=True)
class Place:
    """Where a token is from."""

    document: tuple[int, int]
    place: int
    last: bool
    trained: bool


def place_of(token: int) -> Place:
    first = CHAT if token >= CHAT else 1
    document = int(np.searchsorted(STARTS[first], token, side="right")) - 1
    place, length = token - int(STARTS[first][document]), LENGTHS[first][document]
    trained = first == 1 or any(a <= place < b for a, b in SPANS[document])
    return Place((first, document), place, place == length - 1, trained)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("conversations")
    for name, first in (("text", 1), ("chat", CHAT)):
        lengths = LENGTHS[first]
        prefix = write_corpus(directory / name, np.array(lengths, np.int32), sparse=True)
        np.arange(first, first + sum(lengths), dtype="<i4").tofile(bin_path(prefix))
    write_spans(directory / "chat", LENGTHS[CHAT], SPANS)
    return directory


def begin(corpora: Path, packing: Any, state: StreamState | None = None, batch: int = 8) -> StreamOrder:
    """The training stream of a data.yaml, as Megatron's host opens it; ``filled``: text fills beside best_fit."""
    filled = packing == "filled"
    mapping = {
        "packing": {"mode": "best_fit", "open_bins": 4} if filled else packing,
        "sources": {
            "text": {"path": "text", "split": "1,0,0"} | ({"packing": "split"} if filled else {}),
            "chat": {"path": "chat", "split": "1,0,0"},
        },
    }
    file = corpora / "data.yaml"
    file.write_text(yaml.safe_dump(mapping))
    args = kit.arguments(seq_length=SEQ, eval_iters=0)
    position = 0 if state is None else state.samples
    return StreamOrder(
        open_streams(args, str(file), state=state),
        saved=state,
        position=position,
        iteration=position // batch,
        schedule=BatchSchedule.constant(batch),
    )


def dataset_of(order: StreamOrder, **flags: Any) -> SampleDataset:
    config = order.stream.config
    form = form_of(
        kit.arguments(seq_length=SEQ, **flags),
        config.packing,
        text=False,
        eod=lambda: 0,
        spans=["chat"],
        fillers=["text"] if any(config.fillers) else [],
    )
    return SampleDataset(order.stream, form, num_samples=400)


@pytest.fixture(autouse=True)
def with_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IDENTITY_VARIABLE, "1")


def check_apart(item: dict[str, Any]) -> int:
    """An item in which documents are kept apart, by its tokens alone; how many labels are there without counting."""
    tokens, masked = item["tokens"].tolist(), 0
    filled = len(tokens) - (tokens[::-1].index(next(t for t in tokens[::-1] if t)))
    bounds = [0]
    for i, token in enumerate(tokens[:filled]):
        here = place_of(token)
        if i and (place_of(tokens[i - 1]).document != here.document or tokens[i - 1] + 1 != token):
            bounds.append(i)
        assert item["position_ids"][i] == i - bounds[-1]
        if here.last:
            assert item["loss_mask"][i] == 0
            continue
        following = place_of(token + 1)
        assert item["labels"][i] == token + 1 and item["loss_mask"][i] == following.trained
        masked += not following.trained
    assert not item["loss_mask"][filled:].any() and not any(tokens[filled:])
    bounds += [filled] * (filled < SEQ) + [SEQ]
    if "cu_seqlens" in item:
        assert torch.unique_consecutive(item["cu_seqlens"]).tolist() == bounds
        assert item["max_seqlen"] == max(b - a for a, b in itertools.pairwise(bounds))
    if "attention_mask" in item:
        sees = torch.zeros(SEQ, SEQ, dtype=torch.bool)
        for a, b in itertools.pairwise(bounds):
            sees[a:b, a:b] = torch.ones(b - a, b - a).tril().bool()
        assert torch.equal(~item["attention_mask"][0], sees)
    return masked


def micro_batches(dataset: SampleDataset, start: int, stop: int, micro: int, dp: int) -> Iterator[tuple[int, Any]]:
    """(rank, batch) as Megatron's sampler and torch's collation make them, of all ranks."""
    for rank in range(dp):
        for samples in kit.Sampler(stop, start, micro, rank, dp):
            yield rank, torch.utils.data.default_collate(dataset.__getitems__(samples))


LAYOUTS = [(2, 2), (1, 4), (4, 1), (8, 1)]


@pytest.mark.parametrize(
    "packing", ["filled", "best_fit", "knapsack", "none", {"mode": "best_fit", "align": 4}], ids=str
)
@pytest.mark.parametrize("flags", [{}, APART, PACKED], ids=["mask", "apart", "sft"])
def test_items_are_those_of_the_loader_and_of_the_raw_files(corpora: Path, packing: Any, flags: dict[str, Any]) -> None:
    aligned = isinstance(packing, dict)
    for (micro, dp), (start, state) in itertools.product(LAYOUTS, ((0, None), (24, "saved"))):
        if flags is PACKED and micro > 1:
            continue
        if state is not None:  # as a resume in the middle, of what another process has saved
            state = StreamState.from_json(begin(corpora, packing).snapshot(start).to_json())
        dataset = dataset_of(begin(corpora, packing, state), micro_batch_size=micro, **flags)
        ours = begin(corpora, packing, state)
        of_rank = [
            iter(
                StreamLoader(
                    ours.stream,
                    ours.schedule,
                    micro_batch_size=micro,
                    dp_rank=rank,
                    dp_size=dp,
                    start=start,
                    attention_mask=True,
                    prefetch=0,
                )
            )
            for rank in range(dp)
        ]
        masked = 0
        for rank, batch in micro_batches(dataset, start, start + 48, micro, dp):
            expected = next(of_rank[rank])
            assert batch[SAMPLE_KEY].tolist() == expected["samples"].tolist()
            for key in ("tokens", "labels", "loss_mask", "position_ids"):
                assert torch.equal(batch[key], expected[key]) and batch[key].dtype == expected[key].dtype, key
            for row in range(micro):
                if "cu_seqlens" in batch:
                    bounds = torch.unique_consecutive(batch["cu_seqlens"][row])
                    assert torch.equal(bounds, expected["cu_seqlens"][row])
                else:
                    assert torch.equal(batch["attention_mask"][row], expected["attention_mask"][row])
                if not aligned:
                    masked += check_apart({key: value[row] for key, value in batch.items()})
        assert aligned or masked > 100


@pytest.mark.parametrize("flags", [{}, APART, {"reset_position_ids": True}], ids=["mask", "apart", "reset"])
def test_over_split_the_mask_is_that_of_the_token_after_it(corpora: Path, flags: dict[str, Any]) -> None:
    """As GPTDataset's, a label is the token after it, be it of another document: it counts where that token does."""
    items = [dataset_of(begin(corpora, "split"), **flags)[number] for number in range(61)]
    apart = dataset_of(begin(corpora, "split"), **flags).__getitems__([*range(8, 16), 3, 30])
    ends = {True: 0, False: 0}
    for item, after in itertools.pairwise(items):
        tokens = item["tokens"].tolist()
        last = place_of(tokens[-1])
        following = [*tokens[1:], int(after["tokens"][0]) if last.last else tokens[-1] + 1]
        assert item["labels"].tolist() == following
        assert item["loss_mask"].tolist() == [place_of(token).trained for token in following]
        if last.last:
            ends[place_of(following[-1]).trained] += 1
        for a, b in itertools.pairwise(tokens):
            ends[place_of(b).trained] += place_of(a).last
    assert min(ends.values()) > 10
    for item in apart:
        assert all(torch.equal(value, items[int(item[SAMPLE_KEY])][key]) for key, value in item.items())


def test_no_loss_after_the_end_of_document_token_if_asked(corpora: Path) -> None:
    """--eod-mask-loss takes away what the spans leave, and gives nothing back."""
    eod = int(STARTS[CHAT][7]) - 1
    order = begin(corpora, "filled")
    plain = dataset_of(order)
    args = kit.arguments(seq_length=SEQ, eod_mask_loss=True)
    form = form_of(args, order.stream.config.packing, text=False, eod=lambda: eod, spans=["chat"], fillers=["text"])
    for one, other in zip(
        plain.__getitems__(range(60)),
        SampleDataset(order.stream, form, num_samples=60).__getitems__(range(60)),
        strict=True,
    ):
        assert torch.equal(other["loss_mask"], one["loss_mask"] * (one["tokens"] != eod))
        assert torch.equal(other["labels"], one["labels"])


def test_what_gets_no_mask_is_refused_before_the_first_batch(corpora: Path) -> None:
    """Megatron-DeepSpeed's get_batch makes the mask of the tokens, and finds documents by their last one."""
    assert [has_spans(source) for source in begin(corpora, "filled").stream.sources] == [True, False]
    flags = kit.arguments(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    for more, found in (
        ({"spans": ["chat"]}, "spans of trained tokens: chat"),
        ({"fillers": ["text"]}, "split of text"),
    ):
        with pytest.raises(UsageError) as error:
            form_of(flags, PackingConfig(mode="best_fit"), text=True, eod=lambda: 0, **more)
        assert found in str(error.value.found)
