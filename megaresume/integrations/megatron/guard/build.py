"""Around ``BlendedMegatronDatasetBuilder``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["around_builder_build", "around_builder_init"]


def around_builder_init(original: Callable[..., None]) -> Callable[..., None]:
    """``__init__(self, cls, sizes, is_built_on_rank, config)``: nothing is decided before it is asked to build."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    return init


def around_builder_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """``build(self) -> [train, valid, test]``."""

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    return build
