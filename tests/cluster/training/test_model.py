"""Attention never crosses a document; the optimizer; the losses."""

from __future__ import annotations

import torch

from megaresume.batches.batch import document_mask as reference_mask
from megaresume.cluster.training.launch import Arguments, parse_arguments
from megaresume.cluster.training.model import (
    WEIGHT_DECAY,
    LossMeter,
    build_model,
    build_optimizer,
    document_mask,
    loss_to_minimise,
    padded_vocabulary,
)

CPU = torch.device("cpu")
BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --megaresume-data d.yaml --lr 0.01"


def arguments(more: str = "") -> Arguments:
    return parse_arguments(f"{BASE} --train-iters 1 {more}".split())


#: two rows of 12: documents of 5, 4, and 3 places of padding; one document of 12.
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], list(range(12))])


def test_the_mask_is_that_of_the_loader() -> None:
    bounds = [torch.tensor([0, 5, 9, 12], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)]
    assert torch.equal(document_mask(POSITIONS), reference_mask(bounds, 12))


def test_a_document_does_not_see_another(groups: None) -> None:
    torch.manual_seed(0)
    model = build_model(arguments(), vocab_size=50, seq_length=12, device=CPU)
    tokens = torch.randint(0, 50, (2, 12))
    labels = torch.randint(0, 50, (2, 12))

    def losses(of: torch.Tensor) -> torch.Tensor:
        return model(of, POSITIONS, document_mask(POSITIONS), labels=labels)

    changed = tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 50
    before, after = losses(tokens), losses(changed)
    assert torch.equal(before[1], after[1])
    # Neither the tokens before it nor the other document feel it; the tokens behind it do.
    assert torch.equal(before[0, :2], after[0, :2])
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert (before[0, 2:5] != after[0, 2:5]).all()


def test_a_packed_document_has_the_loss_that_it_has_alone(groups: None) -> None:
    model = build_model(arguments(), vocab_size=50, seq_length=12, device=CPU)
    tokens, labels = torch.randint(0, 50, (1, 12)), torch.randint(0, 50, (1, 12))
    packed = model(tokens, POSITIONS[:1], document_mask(POSITIONS[:1]), labels=labels)
    positions = torch.arange(4)[None]
    alone = model(tokens[:, 5:9], positions, document_mask(positions), labels=labels[:, 5:9])
    torch.testing.assert_close(packed[:, 5:9], alone)


def test_weights_follow_from_the_seed(groups: None) -> None:
    one = build_model(arguments(), vocab_size=50, seq_length=12, device=CPU)
    torch.rand(100)
    other = build_model(arguments(), vocab_size=50, seq_length=12, device=CPU)
    third = build_model(arguments("--seed 5"), vocab_size=50, seq_length=12, device=CPU)
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), third.parameters(), strict=True))


def test_vectors_are_not_decayed(groups: None) -> None:
    model = build_model(arguments(), vocab_size=50, seq_length=12, device=CPU)
    optimizer = build_optimizer(arguments(), model, CPU)
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (WEIGHT_DECAY, 0.0)
    assert all(p.ndim > 1 for p in matrices["params"]) and all(p.ndim == 1 for p in vectors["params"])


def test_vocabulary_is_padded_as_megatron_does() -> None:
    assert padded_vocabulary(50257, arguments()) == 50304
    assert padded_vocabulary(50257, arguments("--tensor-model-parallel-size 2")) == 50432


def test_the_gradient_does_not_depend_on_the_micro_batch(groups: None) -> None:
    """A row of one token and a row of twelve: cut in two, their mean is that of the whole."""
    losses = torch.rand(2, 12, requires_grad=True)
    mask = torch.ones(2, 12)
    mask[0, 1:] = 0
    (whole,) = torch.autograd.grad(loss_to_minimise(losses, mask), losses)
    rows = [torch.autograd.grad(loss_to_minimise(losses[k : k + 1], mask[k : k + 1]) / 2, losses)[0] for k in (0, 1)]
    torch.testing.assert_close(whole, sum(rows))


def test_the_reported_loss_is_per_trained_token(groups: None) -> None:
    meter = LossMeter(CPU)
    meter.add(torch.full((1, 4), 2.0), torch.tensor([[1.0, 0, 0, 0]]))
    meter.add(torch.full((1, 4), 4.0), torch.tensor([[1.0, 1, 1, 0]]))
    assert meter.reduce(None) == (14 / 4, 4)
