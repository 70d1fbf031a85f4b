"""In every Python process started by a hooked one: waits for the modules of its trainer, then installs the hooks.

Python imports this by name when it starts, because its directory comes first in PYTHONPATH. It loads one small file,
then runs the next sitecustomize on the path, and does nothing more.
"""

import os
import sys
from functools import partial
from importlib import import_module

_HERE = os.path.dirname(os.path.abspath(__file__))


def _wait() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  a child may run under another Python than the one that trains
        return
    try:
        from megaresume.hosts.importing import when_imported
    except ImportError:
        # If started from a checkout, that is on no path yet.
        sys.path.append(os.path.abspath(os.path.join(_HERE, *[os.pardir] * 3)))
        from megaresume.hosts.importing import when_imported
    if os.environ.get("MEGARESUME_ENDS_WITH"):
        from megaresume.hosts.writers import end_with_parent_of_spawned

        end_with_parent_of_spawned()
    for pair in os.environ["MEGARESUME_HOOKS"].split(","):
        name, _, installer = pair.partition("=")
        when_imported(name, partial(_install, installer))


def _install(installer: str, _module: object) -> None:
    import_module(installer).install()


def _next_sitecustomize() -> None:
    """Run the sitecustomize that this file hides, under its own name."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("MEGARESUME_HOOKS"):
    _wait()
_next_sitecustomize()
