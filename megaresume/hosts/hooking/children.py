"""Hooks in the Python processes that a hooked one starts, through the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

#: Environment variable for child processes: ``MODULE=INSTALLER``, separated by commas. When the first is imported, the
#: second is too, and its ``install()`` is called.
CHILDREN_VARIABLE = "MEGARESUME_HOOKS"

#: On its path, Python runs our sitecustomize.py when it starts.
_STARTUP = Path(__file__).with_name("startup")


def install_in_children(installer: str, modules: Iterable[str]) -> None:
    """Make Python processes that this one starts call ``install()`` of a module of ours. Twice changes nothing.

    Args:
        installer: dotted name of our module.
        modules: the modules that they wait for; one that imports none of them pays next to nothing.
    """
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(_STARTUP) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *path])
    waiting = [pair for pair in os.environ.get(CHILDREN_VARIABLE, "").split(",") if pair]
    pairs = [*waiting, *(f"{module}={installer}" for module in modules)]
    os.environ[CHILDREN_VARIABLE] = ",".join(dict.fromkeys(pairs))
