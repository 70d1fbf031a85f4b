"""Loaders of a provider that Megatron calls once for every chunk of a virtual pipeline. In this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaresume.hosts.megatron.loaders import ItemOrder, build_with_loaders
from megaresume.stream.errors import UsageError


@pytest.mark.parametrize(
    ("first", "headline"),
    [(None, "a training loader is not that of the first chunk"), (object(), "this process has two training loaders")],
)
def test_a_loader_of_a_further_chunk(first: Any, headline: str) -> None:
    """Whether the first chunk had one decides what is wrong."""
    args = SimpleNamespace(consumed_train_samples=0, iteration=0)
    order = object.__new__(ItemOrder)
    order.batches = first
    current: Any = SimpleNamespace(args=args, loaded=None, order=order)

    def megatron(provide: Any) -> Any:
        return provide([8, 0, 0])

    assert build_with_loaders(current, megatron, lambda sizes: (None, "valid", "test")) == (None, "valid", "test")
    with pytest.raises(UsageError) as refused:
        build_with_loaders(current, megatron, lambda sizes: (object(), None, None))
    assert refused.value.headline == headline and "vp_stage" in str(refused.value.action)
