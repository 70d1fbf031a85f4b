"""Batches against a slow assembly in plain Python from the documents themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megaresume.batches.assemble import Assembler, make_batch
from megaresume.batches.batch import document_mask
from megaresume.batches.open import open_stream


def expected_row(segments, texts, seq_length, align, pad_id):
    """(tokens, labels, loss_mask, position_ids, bounds) of one sample, token by token."""
    tokens, labels, mask, positions, bounds = [], [], [], [], [0]
    for segment in segments:
        document = texts[segment.source][segment.document]
        bounds[-1:] = [len(tokens)]
        for i in range(segment.length):
            at = segment.offset + i
            tokens.append(int(document[at]))
            has_next = at + 1 < len(document)
            labels.append(int(document[at + 1]) if has_next else 0)
            mask.append(1.0 if has_next else 0.0)
            positions.append(i)
        while len(tokens) % align:
            tokens.append(pad_id)
            labels.append(0)
            mask.append(0.0)
            positions.append(positions[-1] + 1)
        bounds.append(None)
    # padding behind the last segment begins where another one would
    end = len(tokens)
    starts = [b for b in bounds if b is not None]
    if end < seq_length:
        starts.append(end)
        for i in range(seq_length - end):
            tokens.append(pad_id)
            labels.append(0)
            mask.append(0.0)
            positions.append(i)
    return tokens, labels, mask, positions, [*starts, seq_length]


def starts_of(segments, align):
    starts, column = [], 0
    for segment in segments:
        starts.append(column)
        column += -(-segment.length // align) * align
    return starts


@pytest.mark.parametrize("packing", ["best_fit", "split", "none"])
@pytest.mark.parametrize("align", [1, 16])
def test_batches_hold_the_documents_of_the_plan(config, notes, texts, packing, align):
    config = config | {"packing": {"mode": packing, "align": align}}
    stream = open_stream(config, objects={"notes": notes})
    assembler = Assembler(stream.sources, seq_length=128, align=align, pad_id=9)
    batch = make_batch(stream.plan(3, 150), assembler)
    for row, segments in enumerate(stream.plan(3, 150)):
        tokens, labels, mask, positions, bounds = expected_row(segments, texts, 128, align, 9)
        assert batch["tokens"][row].tolist() == tokens
        assert batch["labels"][row].tolist() == labels
        assert batch["loss_mask"][row].tolist() == mask
        assert batch["position_ids"][row].tolist() == positions
        assert batch["cu_seqlens"][row].tolist() == bounds
        assert starts_of(segments, align) == bounds[: len(segments)]
    assert batch["samples"].tolist() == list(range(3, 150))
    assert all(s.dtype == torch.int32 for s in batch["cu_seqlens"])


def test_a_label_is_never_a_token_of_another_document(config, notes, texts):
    """Every trained label follows its token in one document, also where the document was cut."""
    stream = open_stream(config | {"packing": "split"}, objects={"notes": notes})
    batch = make_batch(stream.plan(0, 60), Assembler(stream.sources, seq_length=128))
    cut = 0
    for row, segments in enumerate(stream.plan(0, 60)):
        column = 0
        for s in segments:
            document = texts[s.source][s.document].tolist()
            last = column + s.length - 1
            at_end = s.offset + s.length == len(document)
            assert batch["loss_mask"][row, last].item() == (0.0 if at_end else 1.0)
            if not at_end:
                cut += 1
                assert batch["labels"][row, last].item() == document[s.offset + s.length]
            column += s.length
    assert cut > 10


def test_the_mask_separates_documents_and_is_causal():
    bounds = [torch.tensor([0, 3, 5, 8], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)]
    mask = document_mask(bounds, 8)
    assert mask.shape == (2, 1, 8, 8) and mask.dtype == torch.bool
    of = [0, 0, 0, 1, 1, 2, 2, 2]
    for i in range(8):
        for j in range(8):
            assert mask[0, 0, i, j].item() == (of[i] != of[j] or j > i)
            assert mask[1, 0, i, j].item() == (j > i)


def test_an_object_that_gives_another_length_than_it_promised_is_refused(config, notes):
    class Shrinking(type(notes)):
        def get(self, i):
            return super().get(i)[:-1]

    from megaresume.stream.errors import CorpusError

    stream = open_stream(config, objects={"notes": Shrinking(notes.documents)})
    with pytest.raises(CorpusError, match="notes"):
        make_batch(stream.plan(0, 200), Assembler(stream.sources, seq_length=128))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_every_dtype_of_a_corpus(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 100, n).astype(dtype) for n in (40, 3, 0, 77, 1)]
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(tmp_path / "c.idx"))
    stream = open_stream({"seq_length": 32, "sources": {"c": str(tmp_path / "c")}})
    batch = make_batch(stream.plan(0, 8), Assembler(stream.sources, seq_length=32))
    for row, segments in enumerate(stream.plan(0, 8)):
        assert batch["tokens"][row].tolist() == expected_row(segments, [documents], 32, 1, 0)[0]
