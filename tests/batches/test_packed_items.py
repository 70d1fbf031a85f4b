"""`megaresume.DataLoader` with ``seq_length``: items packed into samples, as rows without padding.

What is in a row is read back from its position ids, and compared with the items of the dataset.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import megaresume
from megaresume.batches.items import flatten
from megaresume.stream.errors import ConfigError, CorpusError, StateError, UsageError
from tests.batches.conftest import endless

ITEMS, SEQ_LENGTH = 60, 64
#: items of the first five samples.
FIRST_5 = 15


class Texts(torch.utils.data.Dataset[Any]):
    """Item i has 1 to 40 tokens, the first of them 1000 + i."""

    def __init__(self, items: int = ITEMS, first: int = 0, *, labels: bool = False) -> None:
        self.items, self.first, self.labels = items, first, labels
        self.read = 0

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        i += self.first
        tokens = [1000 + i, *range(i * 17 % 40)]
        return {"input_ids": tokens, "number": i} | ({"labels": [-100, *tokens[1:]]} if self.labels else {})


def texts(batch: Any) -> list[list[int]]:
    """The items of a row, by where its positions begin again."""
    tokens, positions = batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist()
    starts = [k for k, position in enumerate(positions) if position == 0]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [*starts, len(tokens)]
    parts = [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]
    assert positions == [k for part in parts for k in range(len(part))]
    assert batch["max_length_q"] == batch["max_length_k"] == max(map(len, parts))
    return parts


def loaders(dp: int, batch_size: int, state: Any = None, dataset: Any = None, **options: Any) -> list[Any]:
    made = [
        megaresume.DataLoader(
            Texts() if dataset is None else dataset,
            batch_size,
            dp_rank=rank,
            dp_size=dp,
            **{"seq_length": SEQ_LENGTH} | options,
        )
        for rank in range(dp)
    ]
    for loader in made:
        if state is not None:
            loader.load_state_dict(state)
    return made


def merged(made: list[Any], micro_batches: int) -> list[list[int]]:
    """The items that the ranks were handed, in the order of the stream."""
    of_ranks = [[texts(batch) for batch in islice(endless(loader), micro_batches)] for loader in made]
    return [text for batches in zip_longest(*of_ranks, fillvalue=[]) for batch in batches for text in batch]


@pytest.fixture(scope="module")
def order() -> list[list[int]]:
    """Two epochs of one rank, sample by sample."""
    return merged(loaders(1, 1, max_epochs=2), 1000)


def whole() -> list[list[int]]:
    return [Texts()[i]["input_ids"] for i in range(ITEMS)]


def test_every_item_comes_whole_and_once_an_epoch(order: list[list[int]]) -> None:
    assert sorted(order) == sorted(whole() * 2)
    assert order != sorted(order)


@pytest.mark.parametrize("packing", ["best_fit", {"mode": "best_fit", "open_bins": 4}, "knapsack"])
def test_samples_are_full_and_never_more(packing: Any) -> None:
    (loader,) = loaders(1, 1, packing=packing, max_epochs=4)
    filled = [batch["input_ids"].numel() for batch in endless(loader)]
    assert max(filled) <= SEQ_LENGTH
    assert sum(filled) == 4 * sum(map(len, whole()))
    assert len(filled) <= sum(filled) / SEQ_LENGTH * 1.1 + 1


@pytest.mark.parametrize("before", [(1, 3, 1), (2, 1, 2), (3, 1, 1)])
@pytest.mark.parametrize("after", [(1, 2, 1), (2, 2, 1), (4, 1, 1)])
def test_exact_over_ranks_batches_and_accumulation(
    order: list[list[int]], before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    dp, size, accumulation = before
    first = loaders(dp, size, accumulation=accumulation, max_epochs=2)
    handed = merged(first, 2)
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states) and len(json.dumps(states[0])) < 6000
    dp, size, accumulation = after
    rest = merged(loaders(dp, size, json.loads(json.dumps(states[0])), accumulation=accumulation, max_epochs=2), 5)
    assert handed + rest == order[: len(handed + rest)]
    assert len(rest) > len(handed)


@pytest.mark.process
def test_workers_change_nothing(order: list[list[int]]) -> None:
    (loader,) = loaders(1, 2, num_workers=2, max_epochs=2)
    handed = []
    for batch in loader:
        handed += texts(batch)
        if loader.samples == 6:
            break
    rest = merged(loaders(1, 3, loader.state_dict(), num_workers=1, max_epochs=2), 1000)
    assert handed + rest == order


def test_a_for_is_an_epoch_and_all_of_them_are_the_stream(order: list[list[int]]) -> None:
    (loader,) = loaders(1, 1)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([text for batch in loader for text in texts(batch)])
        assert loader.epoch == epoch + 1
    both = [*epochs[0], *epochs[1]]
    assert both[: len(epochs[0])] == order[: len(epochs[0])]
    # What waits in open samples at the end of an epoch comes in the next one.
    assert len(epochs[0]) < ITEMS and len(loader) * SEQ_LENGTH >= sum(map(len, whole()))
    assert max(Counter(map(tuple, both)).values()) == 2


def test_the_last_for_ends_with_the_stream(order: list[list[int]]) -> None:
    (loader,) = loaders(1, 2, max_epochs=2)
    handed = [[text for batch in loader for text in texts(batch)] for _ in range(loader.epoch, 2)]
    assert handed[0] + handed[1] == order
    assert loader.epoch == 2 and list(loader) == []


def test_epoch_end_is_where_the_for_ends() -> None:
    for dp, size in [(1, 1), (2, 2)]:
        loader, *_ = loaders(dp, size)
        for _ in range(3):
            end = loader.epoch_end
            for _ in loader:
                pass
            assert end <= loader.samples < end + dp * size


def test_split_cuts_items_and_every_token_comes_once() -> None:
    (loader,) = loaders(1, 1, packing="split", max_epochs=1, dataset=Texts(labels=True))
    rows = list(loader)
    assert all(row["input_ids"].numel() == SEQ_LENGTH for row in rows[:-2])
    tokens = Counter(chain.from_iterable(row["input_ids"][0].tolist() for row in rows))
    assert tokens == Counter(chain.from_iterable(whole()))
    for row in rows:  # labels are the tokens, but for the first of each part
        begins = row["position_ids"] == 0
        assert torch.equal(row["labels"][~begins], row["input_ids"][~begins])
        assert set(row["labels"][begins].tolist()) == {-100}


def test_the_batch_is_that_of_transformers() -> None:
    from transformers import DataCollatorWithFlattening

    for labels in (False, True):
        items = [{k: v for k, v in Texts(labels=labels)[i].items() if k != "number"} for i in range(7)]
        theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(items)
        ours = flatten(items)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            same = torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
            assert (
                same and type(ours[key]) is type(value) and getattr(ours[key], "dtype", 0) == getattr(value, "dtype", 0)
            )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_loss_of_a_real_model_is_that_of_the_items_one_by_one(attention: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 1100, "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(**shape, num_hidden_layers=2, num_attention_heads=4, attn_implementation=attention)
    model = LlamaForCausalLM(config)  # a cache of keys, as in evaluation, would let attention cross items
    (loader,) = loaders(1, 3)
    batch = next(iter(loader))
    with torch.no_grad():
        packed = model(**batch, use_cache=False).loss
        one_by_one, targets = 0.0, 0
        for text in texts(batch):
            if len(text) > 1:
                tokens = torch.tensor([text])
                one_by_one += model(input_ids=tokens, labels=tokens).loss.item() * (len(text) - 1)
                targets += len(text) - 1
    assert targets > 100
    assert packed.item() == pytest.approx(one_by_one / targets, rel=1e-5)


def test_a_collate_fn_of_the_user_is_given_the_items() -> None:
    (loader,) = loaders(1, 2, collate_fn=list)
    items = next(iter(loader))
    assert len(items) > 3 and all(item == Texts()[item["number"]] for item in items)


class Table(Texts):
    """Has columns, as a table of Hugging Face."""

    def __getitem__(self, i: Any) -> Any:
        return [len(self[k]["input_ids"]) for k in range(len(self))] if i == "length" else super().__getitem__(i)


def test_lengths_from_a_column_a_list_or_a_function(order: list[list[int]]) -> None:
    counts = [len(text) for text in whole()]
    for dataset, lengths in [
        (Table(), "length"),
        (Texts(), counts),
        (Texts(), np.array(counts, np.int32)),
        (Texts(), lambda item: len(item["input_ids"])),
    ]:
        assert merged(loaders(1, 1, dataset=dataset, lengths=lengths), 5) == order[:FIRST_5]


def test_counted_lengths_are_kept(tmp_path: Path, order: list[list[int]]) -> None:
    first, again, other = Texts(), Texts(), Texts(first=1)
    loaders(1, 1, dataset=first, lengths_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    assert np.load(path).tolist() == [len(text) for text in whole()]
    loaders(1, 1, dataset=again, lengths_dir=tmp_path)
    assert first.read - again.read == ITEMS
    loaders(1, 1, dataset=other, lengths_dir=tmp_path)  # of other items
    assert len(list(tmp_path.iterdir())) == 2
    path.write_bytes(path.read_bytes()[:50])  # damaged
    made = loaders(1, 1, dataset=Texts(), lengths_dir=tmp_path)
    assert merged(made, 5) == order[:FIRST_5]
    assert np.load(path).tolist() == [len(text) for text in whole()]


def test_a_kept_length_that_is_damaged_is_counted_again(tmp_path: Path, order: list[list[int]]) -> None:
    """As a bit that flips on the disk: the length of one item is 0, and nobody would read it to see that it is not."""
    loaders(1, 1, dataset=Texts(), lengths_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    whole_file = path.read_bytes()
    with open(path, "r+b") as file:
        file.seek(128 + 8 * 3)  # after the header of NumPy's
        file.write(bytes(8))
    assert np.load(path)[3] == 0
    assert merged(loaders(1, 1, dataset=Texts(), lengths_dir=tmp_path), 5) == order[:FIRST_5]
    assert path.read_bytes() == whole_file


@pytest.mark.process
def test_workers_count(tmp_path: Path) -> None:
    loaders(1, 1, dataset=Texts(700), lengths_dir=tmp_path, num_workers=2)
    (path,) = tmp_path.iterdir()
    assert np.load(path).tolist() == [len(Texts()[i]["input_ids"]) for i in range(700)]


def test_a_blend_by_tokens_or_by_items() -> None:
    short, long = Texts(3000), [[7] * 50] * 3000

    def share(blend: Any) -> tuple[float, float]:
        datasets = {"short": (short, 1), "long": ([{"input_ids": tokens} for tokens in long], 1)}
        (loader,) = loaders(1, 20, dataset=datasets, blend=blend)
        parts = [text for batch in islice(loader, 10) for text in texts(batch)]
        of_long = [part for part in parts if part[0] == 7]
        return len(of_long) / len(parts), sum(map(len, of_long)) / sum(map(len, parts))

    assert share(None)[1] == pytest.approx(0.5, abs=0.05)
    assert share("documents")[0] == pytest.approx(0.5, abs=0.05)


def test_new_items_come_once() -> None:
    (loader,) = loaders(1, 2)
    handed = merged([loader], 4)
    state = loader.state_dict()
    with pytest.raises(StateError, match="70 items"):
        loaders(1, 2, state, dataset=Texts(70))
    (grown,) = loaders(1, 2, state, dataset=Texts(70), append="now", max_epochs=1, on_change="stage")
    rest = merged([grown], 1000)
    assert sorted(handed + rest) == sorted(Texts(70)[i]["input_ids"] for i in range(70))


def test_other_lengths_packing_or_samples_are_refused() -> None:
    (loader,) = loaders(1, 2)
    merged([loader], 2)
    state = loader.state_dict()
    for options, words in [
        ({"seq_length": 128}, "seq_length"),
        ({"packing": "knapsack"}, "packing"),
        ({"lengths": lambda item: len(item["input_ids"]) + 1}, "lengths"),
    ]:
        with pytest.raises(StateError, match=words):
            loaders(1, 2, state, **options)
    merged(loaders(1, 2, state, seq_length=128, on_change="stage"), 2)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"seq_length": 30}, ConfigError, r"longer than a sample(.|\n)*up to 40 tokens(.|\n)*packing='split'"),
        ({"seq_length": None, "lengths": "length"}, UsageError, "packing without the tokens of a sample"),
        ({"seq_length": None, "packing": "split"}, UsageError, "packing without the tokens of a sample"),
        ({"lengths": "length"}, UsageError, "no column of lengths"),
        ({"lengths": [1, 2, 3]}, UsageError, "60 whole numbers"),
        ({"lengths": [0.5] * ITEMS}, UsageError, "60 whole numbers"),
        ({"lengths": {"other": "length"}}, UsageError, "not those of the datasets"),
        ({"lengths": lambda item: item["words"]}, CorpusError, r"item 0 of dataset 'data' cannot be counted"),
        ({"batch_size": 100}, UsageError, "a step is larger than the dataset"),
        ({"packing": "best"}, ConfigError, "packing"),
    ],
)
def test_refused(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        loaders(1, options.pop("batch_size", 1), **options)


def test_an_item_that_is_not_as_long_as_it_was_said_to_be_is_refused() -> None:
    (loader,) = loaders(1, 1, lengths=[2] * ITEMS)
    with pytest.raises(CorpusError, match=r"item \d+ of dataset 'data' is not as long"):
        list(loader)


@pytest.mark.parametrize("skip", [None, {"samples": ["3:9"]}])
@pytest.mark.parametrize("max_epochs", [None, 3])
def test_where_epochs_end(skip: Any, max_epochs: int | None) -> None:
    options: dict[str, Any] = {"skip": skip, "max_epochs": max_epochs, "dataset": Texts(), "batch_size": 1}
    for seq_length in (SEQ_LENGTH, None):
        collate = None if seq_length else list
        loader = megaresume.DataLoader(**options, seq_length=seq_length, collate_fn=collate)
        ends = list(islice(loader.epoch_ends(), 3))
        counted = []
        for _ in range(3):
            assert loader.epoch_end == ends[len(counted)]
            for _ in loader:
                pass
            counted.append(loader.samples)
        assert counted == ends
        if max_epochs:
            assert (
                list(megaresume.DataLoader(**options, seq_length=seq_length, collate_fn=collate).epoch_ends()) == ends
            )


def test_settings_of_a_packing_without_its_mode() -> None:
    """They are those of the default, ``best_fit``."""
    items = [[1] * 5, [2] * 9, [3] * 4, [4] * 7]
    with_mode, without = (
        megaresume.DataLoader(items, batch_size=1, seq_length=16, packing=packing, max_epochs=1)
        for packing in ({"mode": "best_fit", "open_bins": 2}, {"open_bins": 2})
    )
    assert without.state_dict() == with_mode.state_dict()
    assert "open_bins" in json.dumps(without.state_dict())
