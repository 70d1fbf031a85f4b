"""For a script that is edited: `provider` around its datasets provider, `extra_args_provider` around its flags.

pretrain(megaresume.provider(train_valid_test_datasets_provider), model_provider, ...,
         extra_args_provider=megaresume.extra_args_provider(add_args))

Both make refusals a message without a traceback, as the launcher does: see `show_refusals`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from megaresume.integrations.megatron import calls, hooks
from megaresume.integrations.megatron.arguments import add_arguments
from megaresume.integrations.refusals import show_refusals
from megaresume.stream.errors import UsageError

__all__ = ["extra_args_provider", "provider"]

F = Callable[..., Any]


def provider(base: F | None = None) -> F:
    """Wrap a ``train_valid_test_datasets_provider``; installs the hooks, and may be called before or after the imports.

    Args:
        base: the script's own provider, ``(train_val_test_num_samples[, vp_stage]) -> train, valid, test``; it is
            called unless the stream takes its place. None: there is none, so the stream has to.

    Returns:
        a function with the signature, the name and the attributes (``is_distributed``) of ``base``.

    Raises:
        SetupError: this is no Megatron that we know, or a name that we need is not there.
        UsageError: when called: there is no ``base`` and no stream.
    """
    show_refusals()
    hooks.install()
    if base is None:
        return _only_stream()

    @functools.wraps(base)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hooks.check_installed()
        calls.check_provider()
        return base(*args, **kwargs)

    return wrapped


def _only_stream() -> F:
    def train_valid_test_datasets_provider(train_val_test_num_samples: Any, vp_stage: int | None = None) -> Any:
        raise UsageError(
            "there are no datasets",
            found="megaresume.provider() around no provider, and no --megaresume-data",
            expected="a provider of the script's own, or our stream",
            action="--megaresume-data data.yaml, or --megaresume-mode stream with --data-path",
        )

    # Megatron then calls it on every rank that needs data, not on the first of each tensor-parallel group alone.
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    return train_valid_test_datasets_provider


def extra_args_provider(base: F | None = None) -> F:
    """Wrap an ``extra_args_provider``: its flags and ours, each once.

    Args:
        base: the script's own, ``(parser) -> parser``; None: there is none.

    Returns:
        ``(parser) -> parser``.
    """
    show_refusals()
    hooks.install()

    def add_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_arguments(parser if base is None else base(parser) or parser)

    return add_ours if base is None else functools.wraps(base)(add_ours)
