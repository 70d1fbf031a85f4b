"""`install`: from now on Megatron's functions do what they did, and keep the order of the data.

Nothing of Megatron is imported here. The names are wrapped as soon as their modules are imported (at once where they
are imported already), so every later ``from … import save_checkpoint`` binds the wrapped function.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megaresume.integrations.megatron.importing import when_imported, wrap
from megaresume.integrations.megatron.project import current_project, modules_to_watch
from megaresume.integrations.megatron.seams import seams_of
from megaresume.stream.errors import SetupError

__all__ = ["CHILDREN_VARIABLE", "check_installed", "install", "install_in_children"]

#: Environment variable for child processes: the modules to wait for, separated by commas.
CHILDREN_VARIABLE = "MEGARESUME_HOOKS"

#: On its path, Python runs our sitecustomize.py when it starts.
_CHILDREN = Path(__file__).with_name("children")

#: role -> the function before whose work `check_installed` runs: the first ones that are called after every patcher.
_CHECKED = {"checkpointing": "load_checkpoint", "training": "build_train_valid_test_data_iterators"}


def install(*, launched: bool = False) -> None:
    """Wrap Megatron's functions, now or when their modules are imported. Installing twice changes nothing.

    After another patcher has replaced a function, installing again wraps the replacement.

    Args:
        launched: by `megaresume.run`: then any training in this process is meant to be hooked.

    Raises:
        SetupError: at once or from the import of the module: a name that we need is not there, or this is no Megatron
            that we know.
    """
    for name in modules_to_watch():
        _watch(name)
    if launched:
        _launched.append(True)
    when_imported("torch.optim.optimizer", _watch_steps)


#: not empty: the launcher runs this process.
_launched: list[bool] = []


def _watch_steps(module: ModuleType) -> None:
    from megaresume.integrations.megatron.calls import watch_optimizers  # deferred: it costs more than the rest

    watch_optimizers(module, launched=bool(_launched))


def _watch(name: str) -> None:
    when_imported(name, _on_import)
    if name in _seen:
        _on_import(sys.modules[name])


#: Modules that `_on_import` has seen.
_seen: set[str] = set()


def _on_import(module: ModuleType) -> None:
    """Wrap what we need of a module that has just been imported."""
    _seen.add(module.__name__)
    try:
        project = current_project()
    except SetupError:
        if not module.__name__.endswith(".schedules"):
            raise
        return  # a program on megatron-core alone; its optimizer steps are watched
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
    """Before the call: make sure that no other patcher has put a wrapper of ours aside."""

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        from megaresume.integrations.megatron.host import megatron_host  # deferred: it needs Megatron's arguments

        if megatron_host().settings.mode != "off":
            check_installed()
        return original(*args, **kwargs)

    return checked


def check_installed() -> None:
    """Make sure that a call of each name still comes to our wrapper, wherever Megatron calls it from.

    Raises:
        SetupError: another patcher replaced a function that we had wrapped, or a module was never seen.
    """
    project = current_project()
    for seam in seams_of(project):
        for role in (seam.role, *seam.used_by):
            module = sys.modules.get(project.modules.get(role, ""))
            if module is not None and not seam.replaceable and not seam.is_reached_from(module):
                raise seam.lost(module)


def install_in_children() -> None:
    """Make Python processes that this one starts wait for Megatron's modules too, through the environment."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(_CHILDREN) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_CHILDREN), *path])
    os.environ[CHILDREN_VARIABLE] = ",".join(modules_to_watch())
