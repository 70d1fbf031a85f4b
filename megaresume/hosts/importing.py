"""Hooks for functions of modules that are not imported yet: act right after the import, wrap, chain, never twice.

    when_imported("megatron.training.training", apply)      at once if it is imported, otherwise as soon as it is
    wrap(module, "save_checkpoint", around_save_checkpoint) the name now refers to around_save_checkpoint(original)
    reaches(module.save_checkpoint, around_save_checkpoint) is our wrapper still called, whoever wrapped it since?

Others patch the same names (MindSpeed sets attributes and then searches all of ``sys.modules`` for the old object).
So a wrapper is found anywhere in the chain, even below one that has no ``__wrapped__``.

This file imports nothing heavy: every child process of a training run imports it when it starts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

#: An attribute of each of our wrappers: the factory that made it.
_MARK = "__megaresume__"

#: How many of other people's wrappers `reaches` looks through.
_MOST_WRAPPERS = 200

#: Modules that cannot contain a function of Megatron: most modules; and some act when looked at.
_STRANGERS = frozenset(sys.stdlib_module_names) | {
    *("torch", "numpy", "triton", "deepspeed", "megaresume"),
    *("boto3", "botocore", "mpmath", "networkx", "numba", "sympy", "tensorboard"),  # a thousand modules
}

_lock = threading.RLock()
_callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}
#: Modules whose import has begun through our finder, and whose callbacks were not all called.
_executing: set[str] = set()


def when_imported(module: str, apply: Callable[[ModuleType], None]) -> None:
    """Call ``apply(module)`` at once if the module is imported, and after every later import or reload of it.

    An exception in ``apply`` becomes the exception of the import. Registering the same function twice has no effect.

    Args:
        module: dotted name.
        apply: called within the import lock of the module: no other thread sees the module before it returns.
    """
    with _lock:
        waiting = _callbacks.setdefault(module, [])
        if apply in waiting:
            return
        waiting.append(apply)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        if module in _executing:
            return  # `_execute` will call it
    loaded = sys.modules.get(module)
    if loaded is None:
        return
    if getattr(getattr(loaded, "__spec__", None), "_initializing", False):
        # Another thread began to import it before we were registered: wait for it.
        loaded = importlib.import_module(module)
    apply(loaded)


def watched(module: str) -> bool:
    """Whether something waits for the import of this module, or was called for it."""
    return module in _callbacks


class _Finder:
    """First in ``sys.meta_path``: lets the others find the module, and extends its loader."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _callbacks:
            return None
        spec = find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _extend(spec.loader, fullname)
        return spec

    def invalidate_caches(self) -> None:
        """Do nothing: nothing is cached here."""


_finder = _Finder()


def find_spec(fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """The spec from the other finders of this process, without importing anything.

    Args:
        fullname: dotted name.
        path: ``submodule_search_locations`` of the parent; None for a top-level name.
        target: as in ``importlib``.
    """
    for finder in list(sys.meta_path):
        if (spec := ask(finder, fullname, path, target)) is not None:
            return spec
    return None


def ask(finder: Any, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Ask one finder; returns None for ours."""
    find = getattr(finder, "find_spec", None)
    return None if finder is _finder or find is None else find(fullname, path, target)


def _extend(loader: Any, fullname: str) -> None:
    """Call the callbacks after ``loader.exec_module``.

    The method is replaced on the loader itself: wrapping the loader would hide its other features: its type, its source
    lines for tracebacks, its resources.
    """
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        if module.__name__ == fullname:
            _execute(module, execute)
        else:  # a loader for several modules, as for a zip file
            execute(module)

    loader.exec_module = exec_module


def _execute(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    name = module.__name__
    with _lock:
        _executing.add(name)
    try:
        execute(module)
        module = sys.modules.get(name, module)  # it may have replaced itself there
        done = 0
        while True:
            with _lock:  # a callback, or another thread, may register another one
                if done == len(_callbacks[name]):
                    _executing.discard(name)
                    return
                callback = _callbacks[name][done]
            callback(module)
            done += 1
    finally:
        _executing.discard(name)


def wrap(owner: ModuleType | type, name: str, make: Callable[[Any], Any]) -> bool:
    """Replace ``owner.name`` by ``make(original)``, also where others have imported it by name.

    Args:
        owner: a module or a class.
        name: the name of a function in it.
        make: takes the function, returns its replacement. It is compared by ``==``: if one is already in the chain of
            wrappers, nothing happens.

    Returns:
        whether something was wrapped.

    Raises:
        AttributeError: the owner has no such name.
    """
    with _lock:
        original = getattr(owner, name)
        if reaches(original, make):
            return False
        is_elsewhere = sys.getrefcount(original) > _REFERENCES_OF_ONE
        replacement = functools.update_wrapper(make(original), original)
        setattr(replacement, _MARK, make)
        setattr(owner, name, replacement)
        if is_elsewhere and isinstance(owner, ModuleType):
            _rebind(original, replacement)
        return True


def _references_of_one() -> int:
    """What Python counts for a function that one module holds, asked as `wrap` asks."""
    names = {"function": lambda: None}
    original = names["function"]
    return sys.getrefcount(original)


#: More, and other modules may hold the function too. Looking through all of them takes a tenth of a second a dozen
#: times, and most functions are wrapped as soon as their module is imported, when nobody else has them.
_REFERENCES_OF_ONE = _references_of_one()


def names_of_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """The modules that may hold a function of a trainer: each with its name, and the names in it."""
    for name, module in list(sys.modules.items()):
        # By its type: cffi's library objects claim to be modules, but have no names.
        if name.partition(".")[0] not in _STRANGERS and issubclass(type(module), ModuleType):
            yield name, object.__getattribute__(module, "__dict__")  # without triggering lazy modules


def _rebind(old: Any, new: Any) -> None:
    """Replace the object in modules that did ``from … import name`` earlier."""
    for _, names in names_of_modules():
        for key in [key for key, value in list(names.items()) if value is old]:
            names[key] = new


def reaches(function: Any, make: Callable[[Any], Any]) -> bool:
    """Whether a call of ``function`` may reach a wrapper made by ``make``.

    Looks through ``__wrapped__``, closures, partials, bound methods, default arguments, and the globals used in the
    code of a function.
    """
    queue: list[Any] = [function]
    seen: set[int] = set()
    while queue and len(seen) < _MOST_WRAPPERS:
        current = queue.pop(0)
        if id(current) in seen or not callable(current):
            continue
        seen.add(id(current))
        if getattr(current, "__dict__", {}).get(_MARK) == make:
            return True
        queue.extend(_called_by(current))
    return False


def _called_by(function: Any) -> Iterator[Any]:
    names = getattr(function, "__dict__", {})
    if "__wrapped__" in names:
        yield names["__wrapped__"]
    if isinstance(function, functools.partial):
        yield function.func
        yield from function.args
        yield from function.keywords.values()
    if hasattr(function, "__func__"):
        yield function.__func__
    if not isinstance(function, FunctionType):
        # An object with __call__, which keeps what it wraps in an attribute.
        if not isinstance(function, type) and type(function).__module__ != "builtins":
            yield from names.values()
        return
    yield from contents(function.__closure__)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _globals_named(function.__code__, function.__globals__)


def contents(closure: Iterable[CellType] | None) -> Iterator[Any]:
    """What a function refers to as variables around it, by its ``__closure__``."""
    for cell in closure or ():
        with contextlib.suppress(ValueError):  # not yet assigned
            yield cell.cell_contents


def _globals_named(code: CodeType, known: dict[str, Any]) -> Iterator[Any]:
    """Functions that the code looks up: ``_original(...)`` and ``module._original(...)``."""
    for name in code.co_names:
        value = known.get(name)
        if isinstance(value, FunctionType | functools.partial):
            yield value
        elif isinstance(value, ModuleType):
            attributes = object.__getattribute__(value, "__dict__")
            yield from (attributes[other] for other in code.co_names if isinstance(attributes.get(other), FunctionType))


# Hooks in the Python processes that a hooked one starts, through the environment


#: Environment variable for child processes: ``MODULE=INSTALLER``, separated by commas. When the former is imported, so
#: is the latter, and its ``install()`` is called.
CHILDREN_VARIABLE = "MEGARESUME_HOOKS"

#: A directory that makes Python run our sitecustomize.py when it starts, if on its path.
_STARTUP = Path(__file__).with_name("startup")


def install_in_children(installer: str, modules: Iterable[str]) -> None:
    """Make Python processes started by this one call ``install()`` of a module of ours. Calling it twice has no effect.

    Args:
        installer: dotted name of our module.
        modules: the import of any of these triggers the call; a process that imports none of them loses hardly any
            time.
    """
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(_STARTUP) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *path])
    waiting = [pair for pair in os.environ.get(CHILDREN_VARIABLE, "").split(",") if pair]
    pairs = [*waiting, *(f"{module}={installer}" for module in modules)]
    os.environ[CHILDREN_VARIABLE] = ",".join(dict.fromkeys(pairs))
