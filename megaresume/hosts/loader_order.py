"""`check_order`: refuses loaders whose state lacks their order: a resume would silently repeat and lose samples.

A state says how far a loader has come in its order. If the order is drawn anew by every process, or in every pass, that
means nothing. Known cases, from reading and from trying (torchdata 0.11, datasets 5.2):

    torch's RandomSampler, WeightedRandomSampler,   not in a StatefulDataLoader's state: the next start draws others;
    SubsetRandomSampler                             with a seeded generator, from the second pass on
    torchdata.nodes.SamplerWrapper                  saves the number of the pass, but does not restore it in a
                                                    StatefulDistributedSampler; nothing of a RandomSampler
    snapshot_every_n_steps, and a sampler           a state to which batches must be added: near the end of a pass,
    that has a state                                there is none that can be loaded
    in_order=False                                  batches that came late, or early
    datasets: the buffer of IterableDataset.shuffle its content; it is filled again from a later position
    datasets: IterableDataset in worker processes   one that has read nothing since its state was loaded: its position
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch.utils.data as torch_data

from megaresume.stream.errors import UsageError

_DRAWS = (torch_data.RandomSampler, torch_data.WeightedRandomSampler, torch_data.SubsetRandomSampler)
_OURS = "or megaresume.DataLoader over the map-style dataset, whose order every start computes"


def check_order(loader: Any) -> None:
    """Raise a UsageError if a state of this loader is known not to contain its order."""
    for what, instead in itertools.chain(_of_torchdata(loader), _of_nodes(loader), _of_streaming(loader)):
        raise UsageError(
            "the state of this loader does not hold its order, so that a resume would repeat and lose samples",
            found=what,
            expected="a loader that is, once its state is loaded, where it was",
            action=f"{instead}; {_OURS}",
        )


def streaming_of(loader: Any) -> Any | None:
    """The ``IterableDataset`` of Hugging Face's datasets that a loader is, or reads."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return next((it for it in (loader, getattr(loader, "dataset", None)) if kind and isinstance(it, kind)), None)


def _of_torchdata(loader: Any) -> Iterator[tuple[str, str]]:
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if _draws(sampler) and not hasattr(sampler, "state_dict"):
            yield (
                f"a {_name(sampler)} of torch's",
                "shuffle=True, or torchdata.stateful_dataloader.sampler.RandomSampler, or a sampler with set_epoch",
            )
    if getattr(loader, "num_workers", 0) == 0:
        return
    if getattr(loader, "in_order", True) is False:
        yield "in_order=False, with worker processes", "leave in_order out"
    if (getattr(loader, "snapshot_every_n_steps", None) or 1) > 1 and hasattr(loader.sampler, "state_dict"):
        yield (
            f"snapshot_every_n_steps={loader.snapshot_every_n_steps}, with worker processes",
            "snapshot_every_n_steps=1",
        )


def _of_nodes(loader: Any) -> Iterator[tuple[str, str]]:
    nodes = sys.modules.get("torchdata.nodes")
    root = getattr(loader, "root", None)
    if nodes is None or not isinstance(root, nodes.BaseNode):
        return
    from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

    for node in _reached(root, nodes.BaseNode):
        if getattr(node, "in_order", True) is False and getattr(node, "num_workers", 0) > 0:
            yield f"a {_name(node)} with in_order=False", "in_order=True"
        sampler = node.sampler if isinstance(node, nodes.SamplerWrapper) else None
        if isinstance(sampler, StatefulDistributedSampler | RandomSampler) or _draws(sampler):
            yield f"a {_name(sampler)} in a node of torchdata.nodes", "torch.utils.data.DistributedSampler, with a seed"


def _of_streaming(loader: Any) -> Iterator[tuple[str, str]]:
    dataset = streaming_of(loader)
    if dataset is None:
        return
    from datasets.iterable_dataset import BufferShuffledExamplesIterable, _BaseExamplesIterable

    examples = _reached(dataset._ex_iterable, _BaseExamplesIterable)
    if any(isinstance(one, BufferShuffledExamplesIterable) for one in examples):
        yield "a streaming dataset with a buffer: .shuffle(...)", "a dataset that is shuffled before it is written"
    if getattr(loader, "num_workers", 0):
        yield "a streaming dataset in worker processes", "num_workers=0"


def _draws(sampler: Any) -> bool:
    return isinstance(sampler, _DRAWS) and type(sampler).__iter__ in [kind.__iter__ for kind in _DRAWS]


def _reached(first: Any, kind: Any) -> Iterator[Any]:
    """The objects of a kind among these and in them."""
    left, seen = [first], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for value in vars(one).values():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            left += [thing for thing in held if isinstance(thing, kind)]


def _name(thing: Any) -> str:
    return type(thing).__name__
