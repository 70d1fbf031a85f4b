"""Items against those of megatron-core's own GPTDataset, and against the plan that they are made of."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.batches.open import open_stream
from megaresume.hosts.megatron.provider import form_of, warnings_of
from megaresume.hosts.megatron.samples import HASH_KEY, IDENTITY_VARIABLE, SAMPLE_KEY, SampleDataset, SampleForm
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.data_yaml import PackingConfig
from megaresume.stream.errors import CorpusError, StreamExhausted, UsageError
from megaresume.stream.stream import Stream

SEQ = 64
SPLIT, BEST_FIT = PackingConfig(mode="split"), PackingConfig(mode="best_fit")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.write_corpus(tmp_path_factory.mktemp("samples") / "text", kit.documents(1, 300))


@pytest.fixture(scope="module")
def one_each(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of exactly one sample, with ends of documents inside too, all beginning with the same token."""
    rng = np.random.default_rng(2)
    texts = rng.integers(1, kit.VOCABULARY, (50, SEQ))
    texts[:, 0] = 7
    texts[:, -1] = kit.EOD
    texts[np.arange(50), rng.integers(1, SEQ - 1, 50)] = kit.EOD
    return kit.write_corpus(tmp_path_factory.mktemp("one") / "each", texts.tolist())


@pytest.fixture(autouse=True)
def with_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IDENTITY_VARIABLE, "1")


def stream_of(path: str, packing: Any = "split", **changes: Any) -> Stream:
    source = {"path": path, **{key: changes.pop(key) for key in ("max_epochs",) if key in changes}}
    return open_stream({"seed": 5, "seq_length": SEQ, "packing": packing, "sources": {"text": source}, **changes})


def dataset_of(stream: Stream, args: Any, **more: Any) -> SampleDataset:
    form = form_of(args, stream.config.packing, text=more.pop("text", False), eod=lambda: kit.EOD)
    return SampleDataset(stream, form, num_samples=100, **more)


FLAGS = [
    {},
    {"reset_position_ids": True},
    {"reset_attention_mask": True},
    {"eod_mask_loss": True},
    {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
    {"create_attention_mask_in_dataloader": False},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "default")
def test_items_are_those_of_the_real_gpt_dataset(one_each: str, flags: dict[str, bool], tmp_path: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = kit.VOCABULARY, kit.EOD, -1, {"class": "Tokenizer"}

    given = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False) | flags
    create = given.pop("create_attention_mask_in_dataloader", True)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ,
        blend=([one_each], None),
        split="1,0,0",
        path_to_cache=str(tmp_path),
        tokenizer=Tokenizer(),
        create_attention_mask=create,
        **given,
    )
    theirs = GPTDataset(
        GPTDataset.build_low_level_dataset(one_each, config), one_each, np.arange(50), 49, Split.train, config
    )
    # Samples with the second token as their name: the order differs, the items must not.
    expected = {int(item["tokens"][1]): item for item in (theirs[i] for i in range(49))}
    ours = dataset_of(stream_of(one_each), kit.arguments(**flags))
    compared = 0
    for item in ours.__getitems__(range(50)):
        if int(item["tokens"][1]) not in expected:
            continue
        other = expected[int(item["tokens"][1])]
        assert set(other) == set(item) - {SAMPLE_KEY, HASH_KEY}
        for key, value in other.items():
            assert value.dtype == item[key].dtype and torch.equal(value, item[key]), key
        compared += 1
    assert compared == 49


def goes_on_with(last: int, after: int) -> set[int]:
    """What may follow the last token of a sample: after the end of a document, the next sample; else, its own document,
    whose rest lies in a later sample."""
    if last == kit.EOD:
        return {after}
    return {b for document in kit.documents(1, 300) for a, b in itertools.pairwise(document) if a == last}


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "default")
def test_a_label_of_split_is_the_token_after_it(corpus: str, flags: dict[str, bool]) -> None:
    items = dataset_of(stream_of(corpus), kit.arguments(**flags)).__getitems__(range(60))
    for item, after in itertools.pairwise(items):
        assert torch.equal(item["labels"][:-1], item["tokens"][1:])
        assert int(item["labels"][-1]) in goes_on_with(int(item["tokens"][-1]), int(after["tokens"][0]))
        expected = torch.ones(SEQ)
        if flags.get("eod_mask_loss"):
            expected[item["tokens"] == kit.EOD] = 0
        assert torch.equal(item["loss_mask"], expected)


@pytest.mark.parametrize("packing", ["split", "best_fit", "none"])
@pytest.mark.parametrize("text", [False, True])
def test_an_item_is_a_function_of_its_number(corpus: str, packing: str, text: bool) -> None:
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    dataset = dataset_of(stream_of(corpus, packing), kit.arguments(**flags), text=text)
    together = dataset.__getitems__([*range(40, 48), 3, 90, 91])
    spawned = pickle.loads(pickle.dumps(dataset))
    for item, number in zip(together, [*range(40, 48), 3, 90, 91], strict=True):
        for again in (
            dataset[number],
            spawned[number],
            dataset_of(stream_of(corpus, packing), kit.arguments(**flags), text=text)[number],
        ):
            assert set(again) == set(item)
            assert all(torch.equal(again[key], item[key]) for key in item)
        assert int(item[SAMPLE_KEY]) == number


def test_numbers_count_from_the_start_of_a_phase(corpus: str) -> None:
    late = dataset_of(stream_of(corpus), kit.arguments(), first=24)
    assert torch.equal(late[3]["tokens"], dataset_of(stream_of(corpus), kit.arguments())[27]["tokens"])
    assert int(late[3][SAMPLE_KEY]) == 27


@pytest.mark.parametrize("packing", ["best_fit", "none", {"mode": "split", "align": 4}])
def test_documents_are_kept_apart(corpus: str, packing: Any) -> None:
    """Against the plan: position ids, labels, loss and mask of every segment on its own."""
    stream = stream_of(corpus, packing)
    align = stream.config.packing.align
    source = stream.sources[0]
    for number, item in enumerate(dataset_of(stream, kit.arguments()).__getitems__(range(30))):
        column, seen = 0, torch.zeros(SEQ)
        sees = torch.zeros(SEQ, SEQ, dtype=torch.bool)
        starts = []
        for segment in stream.plan(number, number + 1).segments(number):
            starts.append(column)
            document = torch.from_numpy(source.get(segment.document).astype(np.int64))  # type: ignore[attr-defined]
            end = column + segment.length
            part = document[segment.offset : segment.offset + segment.length]
            assert torch.equal(item["tokens"][column:end], part)
            assert torch.equal(item["position_ids"][column:end], torch.arange(segment.length))
            following = document[segment.offset + 1 : segment.offset + segment.length + 1]
            assert torch.equal(item["labels"][column : column + len(following)], following)
            seen[column : column + len(following)] = 1
            column = -(-end // align) * align
        assert torch.equal(item["loss_mask"], seen)
        for begin, stop in zip(starts, [*starts[1:], end], strict=True):
            sees[begin:stop, begin:stop] = torch.ones(stop - begin, stop - begin).tril().bool()
        assert torch.equal(~item["attention_mask"][0, :end], sees[:end])


def test_bounds_where_megatron_takes_them(corpus: str) -> None:
    """From 0.19: filled up to S + 1; --sft from 0.16 to 0.18: as long as it is, of one sample."""
    later = {"dataloader_inter_document_masking": True, "create_attention_mask_in_dataloader": False}
    padded = dataset_of(stream_of(corpus, "best_fit"), kit.arguments(**later))
    exact = dataset_of(
        stream_of(corpus, "best_fit"),
        kit.arguments(sft=True, micro_batch_size=1, create_attention_mask_in_dataloader=False),
    )
    assert exact.form.cu_seqlens == "exact" and padded.form.cu_seqlens == "padded"
    for number in range(30):
        one, other = padded[number], exact[number]
        assert "attention_mask" not in one and one["cu_seqlens"].shape == (SEQ + 1,)
        assert one["cu_seqlens"].dtype == other["cu_seqlens"].dtype == torch.int32
        bounds = other["cu_seqlens"]
        assert torch.equal(one["cu_seqlens"][: len(bounds)], bounds) and (one["cu_seqlens"][len(bounds) :] == SEQ).all()
        starts = [0]
        for segment in padded.stream.plan(number, number + 1).segments(number):
            starts.append(starts[-1] + segment.length)
        assert bounds.tolist() == ([*starts, SEQ] if starts[-1] < SEQ else starts)
        lengths = bounds[1:] - bounds[:-1]
        assert one["max_seqlen"] == lengths.max() and one["max_seqlen"].shape == () and lengths.min() > 0
        expected = torch.cat([torch.arange(int(length)) for length in lengths])
        assert torch.equal(one["position_ids"], expected)
    collated = torch.utils.data.default_collate(padded.__getitems__(range(4)))
    assert collated["cu_seqlens"].shape == (4, SEQ + 1) and collated["max_seqlen"].shape == (4,)


def test_bounds_divide_under_context_parallelism(corpus: str) -> None:
    flags = {"sft": True, "micro_batch_size": 1, "create_attention_mask_in_dataloader": False}
    flags |= {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(UsageError, match="align: 8"):
        dataset_of(stream_of(corpus, {"mode": "best_fit", "align": 4}), kit.arguments(**flags))
    dataset = dataset_of(stream_of(corpus, {"mode": "best_fit", "align": 8}), kit.arguments(**flags))
    items = [dataset[i] for i in range(30)]
    assert all((item["cu_seqlens"] % 8 == 0).all() and item["cu_seqlens"][-1] == SEQ for item in items)
    assert max(len(item["cu_seqlens"]) for item in items) > 3
    assert SAMPLE_KEY not in items[0]  # 0.18 and later cut every tensor of the batch along the sequence


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"micro_batch_size": 2, "create_attention_mask_in_dataloader": False}, "--micro-batch-size 1"),
        ({"micro_batch_size": 1}, "--no-create-attention-mask-in-dataloader"),
    ],
)
def test_packed_samples_need(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(UsageError) as error:
        form_of(kit.arguments(sft=True, **changes), BEST_FIT, text=False, eod=lambda: kit.EOD)
    assert advice in str(error.value.action)


def test_sft_before_it_packed_is_as_everything(corpus: str) -> None:
    args = kit.arguments(sft=True)
    del args.hybrid_context_parallel  # up to 0.15
    assert form_of(args, BEST_FIT, text=False, eod=lambda: kit.EOD).cu_seqlens is None


# Megatron-DeepSpeed


def masks_of(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What its get_batch makes of ``text`` with the three flags (get_ltor_masks_and_position_ids)."""
    tokens = text[:-1]
    allowed, loss_mask, positions = torch.ones(SEQ, SEQ).tril(), torch.ones(SEQ), torch.arange(SEQ)
    loss_mask[tokens == kit.EOD] = 0
    previous = 0
    for i in positions[tokens == kit.EOD].clone().tolist():
        allowed[i + 1 :, : i + 1] = 0
        positions[i + 1 :] -= i + 1 - previous
        previous = i + 1
    return allowed < 0.5, loss_mask, positions


def test_text_gives_what_the_keys_say(corpus: str) -> None:
    """Over best_fit: where there is loss, its get_batch sees the same tokens, labels, positions and masks as ours."""
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    keys = dataset_of(stream_of(corpus, "best_fit"), kit.arguments())
    texts = dataset_of(stream_of(corpus, "best_fit"), kit.arguments(**flags), text=True)
    for number in range(40):
        item, text = keys[number], texts[number]["text"]
        assert text.dtype == torch.int64 and text.shape == (SEQ + 1,)
        mask, loss_mask, positions = masks_of(text)
        assert torch.equal(loss_mask, item["loss_mask"])
        counts = loss_mask == 1
        assert torch.equal(text[:-1][counts], item["tokens"][counts])
        assert torch.equal(text[1:][counts], item["labels"][counts])
        assert torch.equal(positions[counts], item["position_ids"][counts])
        assert torch.equal(mask[counts], item["attention_mask"][0][counts])


def test_text_over_split_ends_with_the_token_after_it(corpus: str) -> None:
    items = dataset_of(stream_of(corpus), kit.arguments(), text=True).__getitems__(range(50))
    for item, after in itertools.pairwise(items):
        assert int(item["text"][-1]) in goes_on_with(int(item["text"][-2]), int(after["text"][0]))
    whole = torch.cat([item["text"][:-1] for item in items])
    keys = dataset_of(stream_of(corpus), kit.arguments()).__getitems__(range(50))
    assert torch.equal(whole, torch.cat([item["tokens"] for item in keys]))


def test_text_that_would_be_wrong_is_refused(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--reset-attention-mask --eod-mask-loss") as error:
        form_of(kit.arguments(reset_position_ids=True), BEST_FIT, text=True, eod=lambda: kit.EOD)
    assert "--reset-position-ids" not in error.value.action
    endless = kit.write_corpus(tmp_path / "endless", [[5] * 20] * 30)
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    dataset = dataset_of(stream_of(endless, "best_fit"), kit.arguments(**flags), text=True)
    with pytest.raises(CorpusError, match="end-of-document token"):
        dataset[0]


def test_a_stream_that_ends_is_padded_without_loss(tmp_path: Path) -> None:
    """30 documents of 10 tokens: 4 samples and 44 tokens."""
    path = kit.write_corpus(tmp_path / "short", [[*range(i, i + 9), kit.EOD] for i in range(1, 31)])
    item = dataset_of(stream_of(path, max_epochs=1), kit.arguments())[4]
    assert item["loss_mask"].tolist() == [1] * 43 + [0] * 21
    assert item["tokens"][44:].tolist() == [0] * 20


def test_a_global_batch_that_the_stream_does_not_have_is_refused_as_a_whole(tmp_path: Path) -> None:
    """5 samples, global batches of 2 and then of 4: no rank is given one of a batch that others find empty."""
    path = kit.write_corpus(tmp_path / "short", [[*range(i, i + 9), kit.EOD] for i in range(1, 31)])
    stream = stream_of(path, max_epochs=1)
    stream.schedule = BatchSchedule(((0, 2), (2, 4)))
    dataset = dataset_of(stream, kit.arguments())
    assert len(dataset.__getitems__([0, 1])) == 2
    for sample in (2, 3, 4, 5):
        with pytest.raises(StreamExhausted, match="sample 5 was asked for, the stream has 5 samples"):
            dataset.__getitems__([sample])


def test_which_tokenizer_is_asked() -> None:
    """Without a flag that needs it, none: data can be read where there is no tokenizer."""

    def none() -> int:
        raise AssertionError("asked")

    assert form_of(kit.arguments(), SPLIT, text=False, eod=none) == SampleForm(attention_mask=True, identity=True)
    assert form_of(kit.arguments(reset_position_ids=True), BEST_FIT, text=False, eod=none).eod is None


def test_warnings() -> None:
    def about(packing: PackingConfig = BEST_FIT, text: bool = False, **changes: Any) -> list[str]:
        args = kit.arguments(**changes)
        return warnings_of(args, form_of(args, packing, text=text, eod=lambda: kit.EOD), packing)

    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    assert "transformer_engine ignores" in about()[0]
    assert "no attention mask" in about(create_attention_mask_in_dataloader=False)[0]
    assert "--dataloader-inter-document-masking" in about(dataloader_inter_document_masking=False)[0]
    assert "fused softmax" in about(transformer_impl="local", masked_softmax_fusion=True)[0]
    assert "flash" in about(text=True, use_flash_attn=True, **flags)[0]
    assert not about(transformer_impl="local") and not about(SPLIT)
    assert not about(dataloader_inter_document_masking=True)


def test_a_batch_may_be_copied(corpus: str) -> None:
    """Rerun mode copies batches shallowly and replays them."""
    batch = torch.utils.data.default_collate(dataset_of(stream_of(corpus), kit.arguments()).__getitems__([0, 1]))
    again = copy.copy(batch)
    batch["tokens"] = None
    assert again["tokens"].shape == (2, SEQ)


def test_identity_is_there_when_asked_for(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(corpus)
    for text in (False, True):
        item = dataset_of(stream, kit.arguments(), text=text)[7]
        assert item[SAMPLE_KEY] == 7 and int(item[HASH_KEY]) == stream.plan(7, 8).hashes.view(np.int64)[0]
    monkeypatch.delenv(IDENTITY_VARIABLE)
    assert not {SAMPLE_KEY, HASH_KEY} & set(dataset_of(stream, kit.arguments())[7])
