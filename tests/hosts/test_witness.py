"""What `Witness` says of micro-batches that resemble each other. In this process; real loops are in test_loops.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megaresume.hosts.deepspeed.witness import MicroBatch, Witness, _weights, fingerprint

A, B, C = (torch.full((8,), number) for number in (1, 2, 3))


def named(*tokens: torch.Tensor) -> list[MicroBatch]:
    return [MicroBatch(f"batch {n}", int(fingerprint(one)), 8) for n, one in enumerate(tokens)]


def judged(taken: Sequence[torch.Tensor], trained: Sequence[Sequence[torch.Tensor]]) -> tuple[list[str], list[str]]:
    """Those of ``taken`` that are not trained, and those that are twice, if each of ``trained`` has a backward."""
    witness, out = Witness(), named(*taken)
    for batch in out:
        witness.know(batch.key)
    weight = torch.nn.Parameter(torch.ones(8))
    for turn, inputs in enumerate(trained):
        forward = witness.look(inputs, out, turn)
        assert forward is not None
        loss = weight.sum()
        witness.watch(forward, {"loss": loss, "scale": weight})
        witness.backward(loss.backward)
    return [str(batch) for batch in witness.untrained(out)], [str(batch) for batch in witness.trained_twice(out)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_fingerprint_is_the_same_on_every_device(dtype: torch.dtype) -> None:
    tokens = torch.arange(8192).remainder(251).to(dtype).reshape(2, -1)
    weights = _weights(8192, torch.device("cpu"))
    exact = sum(token * weight for token, weight in zip(tokens.flatten().tolist(), weights.tolist(), strict=True))
    elsewhere = (tokens.reshape(-1).to(torch.int64) * weights).sum()  # as on a GPU
    assert int(fingerprint(tokens)) == int(elsewhere) == (exact + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(
    ("taken", "trained", "untrained", "twice"),
    [
        ([A, B], [[A], [B]], [], []),
        ([A, B], [[A], [B], [A]], [], ["batch 0"]),
        ([A, B], [[A], [A]], ["batch 1"], []),
        ([A, A], [[A], [A]], [], []),  # the same text, taken twice
        ([A, A], [[A], [A], [A]], [], ["batch 0", "batch 1"]),  # one of them
        ([A, B, C], [[A, B], [B, C], [C, A]], [], []),  # the labels of each are the tokens of the next one
        ([A, B], [[A, B], [B, C], [C]], [], []),  # and one more backward, of something else
    ],
)
def test_batches_that_are_alike(
    taken: Sequence[torch.Tensor],
    trained: Sequence[Sequence[torch.Tensor]],
    untrained: list[str],
    twice: list[str],
) -> None:
    assert judged(taken, trained) == (untrained, twice)


@pytest.mark.parametrize("passes", ["grad", "grad, backward", "backward, grad", "backward, backward"])
def test_passes_that_only_read_gradients_count_if_there_are_no_others(passes: str) -> None:
    """Past the engine: torch.autograd.grad of a weight and of an input; and a backward, also of some weights alone."""
    witness, out, net = Witness(), named(A), torch.nn.Linear(8, 1)
    for number, name in enumerate(passes.split(", ")):
        forward, inputs = witness.look([A], out, 0), torch.ones(8, requires_grad=True)
        assert forward is not None
        witness.watch(forward, outputs := net(inputs))
        if name == "grad":
            torch.autograd.grad(outputs.sum(), [net.weight, inputs])
        else:
            torch.autograd.backward(outputs.sum(), inputs=[net.bias] if number else None)
    assert witness.untrained(out) == []
    assert witness.trained_twice(out) == (out if passes == "backward, backward" else [])


def test_no_hook_stays_on_a_parameter_that_the_model_gives_out() -> None:
    witness, weight = Witness(), torch.nn.Parameter(torch.ones(2))
    forward = witness.look([A], named(A), 0)
    assert forward is not None
    witness.watch(forward, (weight, weight * 2))
    weight.sum().backward()
    assert not forward.passes and not weight._backward_hooks
