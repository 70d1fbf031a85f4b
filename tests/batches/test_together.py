"""Small micro-batches of text that are read several at once, against the same ones read one by one."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from megaresume.batches import loader as loader_module
from megaresume.batches.loader import StreamDataset, StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data.split import IndexedSource
from megaresume.stream.batches import Balance, BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, CorpusError, MegaresumeError
from megaresume.stream.stream import Stream


@pytest.fixture
def text(config):
    """The blend without the Python object: all tokens lie in arrays."""
    sources = {name: source for name, source in config["sources"].items() if name != "notes"}
    return config | {"sources": sources}


def loader_of(config, schedule=None, *, micro=1, **options):
    schedule = schedule or BatchSchedule.constant(micro)
    return StreamLoader(open_stream(config), schedule, micro_batch_size=micro, **({"prefetch": 0} | options))


def one_by_one(loader):
    for samples in loader.indices():
        yield loader.dataset.read(samples)


def taken(batches, num=10**9):
    """Up to so many batches, and the error that came then."""
    found = []
    try:
        found.extend(islice(batches, num))
    except MegaresumeError as error:
        return found, str(error)
    return found, None


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert list(a) == list(b)
        for key, value in a.items():
            pairs = zip(value, b[key], strict=True) if key == "cu_seqlens" else [(value, b[key])]
            assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs), key


@pytest.fixture
def blocks(monkeypatch):
    """The sizes of all that was read at once."""
    sizes = []
    read = StreamDataset.read_several

    def counted(self, micro_batches):
        sizes.append([len(samples) for samples in micro_batches])
        return read(self, micro_batches)

    monkeypatch.setattr(StreamDataset, "read_several", counted)
    monkeypatch.setattr(loader_module, "QUICK", 1e9)
    return sizes


STEP = Balance(objective="step", token_cost=100)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "micro, options",
    [
        (1, {}),
        (1, {"fields": ()}),
        (3, {"fields": ("labels",), "pad_id": 7}),
        (1, {"schedule": BatchSchedule.constant(6), "dp_rank": 1, "dp_size": 3}),
        (2, {"schedule": BatchSchedule.constant(16), "dp_rank": 1, "dp_size": 2, "balance": STEP}),
        (2, {"schedule": BatchSchedule.ramp_up(4, 4, 24, 16), "dp_rank": 0, "dp_size": 2}),
    ],
)
def test_the_same_batches(text, blocks, micro, options, prefetch):
    found, _ = taken(iter(loader_of(text, micro=micro, prefetch=prefetch, **options)), 700)
    assert_same(found, taken(one_by_one(loader_of(text, micro=micro, **options)), 700)[0])
    # Twice as many each time; a step that is longer than that is read in parts.
    assert all(len(sizes) <= 2**k for k, sizes in enumerate(blocks)) and max(map(len, blocks[:7])) >= 16
    assert max(sum(sizes) for sizes in blocks) * text["seq_length"] <= loader_module.TOKENS


def test_no_batch_knows_of_another(text, blocks):
    batches, _ = taken(iter(loader_of(text, micro=2)), 31)
    assert len(blocks) > 2
    before = [{key: value.clone() for key, value in b.items() if key != "cu_seqlens"} for b in batches]
    for key in before[0]:
        for batch in batches[::2]:
            batch[key].fill_(0)
        for batch, was in zip(batches[1::2], before[1::2], strict=True):
            tensor = batch[key]
            # Autograd refuses what was changed after it was used; a saved tensor is as large as its storage.
            assert torch.equal(tensor, was[key]) and tensor._version == 0
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("stage", [{"seq_length": 64}, {"packing": {"mode": "best_fit", "align": 16}}])
def test_a_stage_of_another_shape_begins(text, blocks, stage):
    staged = text | {"stages": [{"from_samples": 37} | stage]}
    found, _ = taken(iter(loader_of(staged)), 100)
    assert_same(found, taken(one_by_one(loader_of(staged)), 100)[0])
    # The stage begins at sample 37: what is planned together with it is read one by one.
    assert [len(sizes) for sizes in blocks[:7]] == [1, 2, 4, 8, 16, 1, 1]


def test_a_stage_that_begins_inside_a_micro_batch(text, blocks):
    staged = text | {"stages": [{"from_samples": 37, "seq_length": 64}]}
    found, error = taken(iter(loader_of(staged, micro=2)))
    with pytest.raises(ConfigError) as refused:
        loader_of(staged, micro=2).dataset.read([36, 37])
    assert (len(found), error) == (18, str(refused.value)) and blocks


@pytest.mark.parametrize("at_end", ["refuse", "deal", "drop"])
def test_the_end_comes_after_the_same_batches(text, blocks, at_end):
    finite = text | {"sources": {n: s | {"max_epochs": 1} for n, s in text["sources"].items()}}
    loaders = [loader_of(finite, BatchSchedule.constant(12), micro=2, dp_rank=1, dp_size=2) for _ in range(2)]
    for loader in loaders:
        loader.at_end = at_end
    (found, error), (expected, other) = taken(iter(loaders[0])), taken(one_by_one(loaders[1]))
    assert_same(found, expected)
    assert error == other and (error is None) == (at_end != "refuse") and len(found) > 50
    assert error is None or "the stream has ended" in error


@pytest.mark.parametrize("bad", [0, 1, 20, 133])
def test_an_error_comes_at_its_batch(text, blocks, bad):
    class Damaged(IndexedSource):
        def token_starts(self, ids):
            if document in ids:
                raise CorpusError(f"document {document} is damaged")
            return super().token_starts(ids)

    sources = [IndexedSource(text["sources"]["web"]["path"]), Damaged(text["sources"]["code"]["path"])]
    stream = Stream(StreamConfig.from_dict(text), sources)
    of_code = [[s.document for s in segments if s.source == 1] for segments in stream.plan(0, 200)]
    sample = next(k for k, documents in enumerate(of_code) if k >= bad and documents)
    document = of_code[sample][0]
    sample = next(k for k, documents in enumerate(of_code) if document in documents)
    loader = StreamLoader(stream, BatchSchedule.constant(1), micro_batch_size=1, prefetch=0)
    found, error = taken(iter(loader))
    assert (len(found), error) == (sample, f"document {document} is damaged")


def test_no_more_is_planned_ahead_than_at_once(text, blocks):
    """A state at the last step must not be planned from far before it."""
    loader = loader_of(text, BatchSchedule.constant(256), dp_rank=3, dp_size=256)
    for step, batch in enumerate(islice(loader, 40)):
        assert batch["samples"].tolist() == [256 * step + 3]
        assert loader.stream._blocks.front <= 256 * (step + 1) + 2 * loader.stream.block_samples
    assert max(map(len, blocks)) == 4


def test_what_is_slow_is_read_one_by_one(text, blocks, monkeypatch):
    monkeypatch.setattr(loader_module, "QUICK", 0)
    list(islice(loader_of(text), 40))
    assert blocks == [[1]] * 40


@pytest.mark.parametrize("options", [{"attention_mask": True}, {"fields": ("pairs",)}])
def test_not_with_fields_of_whole_micro_batches(text, options):
    assert not loader_of(text, **options).dataset.reads_several and loader_of(text).dataset.reads_several


def test_not_with_slow_sources(config, notes):
    assert not StreamDataset(open_stream(config, objects={"notes": notes})).reads_several


def test_two_stages_begin_inside_a_micro_batch(text):
    # The second one has the shape of before.
    stages = [{"from_samples": 37, "seq_length": 64}, {"from_samples": 38, "seq_length": text["seq_length"]}]
    dataset = StreamDataset(open_stream(text | {"stages": stages}))
    assert dataset.read([36]) and dataset.read([37]) and dataset.read([38])
    with pytest.raises(ConfigError, match="begins inside a micro-batch"):
        dataset.read([36, 37, 38])
