"""`install`: wrap Megatron's functions so that they also keep the order of the data.

Nothing of Megatron is imported here. The names are wrapped as soon as their modules are imported (at once if they
already are), so every later ``from … import save_checkpoint`` binds the wrapped function.

For an edited script: `provider` around its datasets provider, `extra_args_provider` around its flags.

    pretrain(megaresume.provider(train_valid_test_datasets_provider), model_provider, ...,
             extra_args_provider=megaresume.extra_args_provider(add_args))

Both turn refusals into a message without a traceback, as the launcher does: see `show_refusals`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megaresume.checkpoint.ending import show_refusals
from megaresume.hosts import importing
from megaresume.hosts.importing import when_imported, wrap
from megaresume.hosts.megatron import calls
from megaresume.hosts.megatron.arguments import add_arguments
from megaresume.hosts.megatron.project import current_project, modules_to_watch
from megaresume.hosts.megatron.seams import check_installed as check_installed
from megaresume.hosts.megatron.seams import seams_of
from megaresume.stream.errors import SetupError, UsageError

#: role -> the function before which `check_installed` runs: the first ones called after every patcher.
_CHECKED = {"checkpointing": "load_checkpoint", "training": "build_train_valid_test_data_iterators"}


def install(*, launched: bool = False) -> None:
    """Wrap Megatron's functions, now or when their modules are imported. Installing twice changes nothing.

    If another patcher has since replaced a function, installing again wraps the replacement.

    Args:
        launched: by `megaresume.run`, so any training in this process is meant to be hooked.

    Raises:
        SetupError: a name that we need is missing, or this is not a Megatron that we know. Raised at once, or when
            the module is imported.
    """
    for name in modules_to_watch():
        _watch(name)
    calls.process.launched |= launched
    when_imported("torch.optim.optimizer", calls.watch_optimizers)


def _watch(name: str) -> None:
    when_imported(name, _on_import)
    if name in _seen:
        _on_import(sys.modules[name])


#: Modules that `_on_import` has seen.
_seen: set[str] = set()


def _on_import(module: ModuleType) -> None:
    """Wrap what we need in a module that has just been imported."""
    _seen.add(module.__name__)
    try:
        project = current_project()
    except SetupError:
        if not module.__name__.endswith(".schedules"):
            raise
        return  # a program that uses only megatron-core; its optimizer steps are watched
    for role, name in project.modules.items():
        if name != module.__name__:
            continue
        for seam in seams_of(project):
            seam.apply(module, role, project)
        if role in _CHECKED:
            wrap(module, _CHECKED[role], _checked)
    if "engine" in project.modules and project.modules["engine"] != module.__name__:
        _watch(project.modules["engine"])


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before each call, check that no other patcher has replaced one of our wrappers."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        from megaresume.hosts.megatron.host import megatron_host  # deferred: needs Megatron's arguments

        if megatron_host().settings.mode != "off":
            check_installed()
        return original(*args, **kwargs)

    return checked


def install_in_children() -> None:
    """Make Python processes started by this one wait for Megatron's modules too."""
    importing.install_in_children(__name__, modules_to_watch())


F = Callable[..., Any]


def provider(base: F | None = None) -> F:
    """Wrap a ``train_valid_test_datasets_provider``. Also installs the hooks. Call it before or after the imports.

    Args:
        base: the script's own provider, ``(train_val_test_num_samples[, vp_stage]) -> train, valid, test``, which is
            called unless the stream replaces it. None if there is none, so the stream must.

    Returns:
        a function with the signature, name and attributes (``is_distributed``) of ``base``.

    Raises:
        SetupError: this is not a Megatron that we know, or a name that we need is not there.
        UsageError: raised by the call of the function, if there is neither ``base`` nor a stream.
    """
    show_refusals()
    install()
    if base is None:
        return _only_stream()

    @functools.wraps(base)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        check_installed()
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

    # Megatron then calls it on every rank that needs data, not only on the first of each tensor-parallel group.
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    return train_valid_test_datasets_provider


def extra_args_provider(base: F | None = None) -> F:
    """Wrap an ``extra_args_provider`` so that it adds its flags and ours, each once.

    Args:
        base: the script's own, ``(parser) -> parser``; None if there is none.

    Returns:
        ``(parser) -> parser``.
    """
    show_refusals()
    install()

    def add_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_arguments(parser if base is None else base(parser) or parser)

    return add_ours if base is None else functools.wraps(base)(add_ours)
