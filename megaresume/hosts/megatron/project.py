"""The kind and version of Megatron, told from the contents of its files, not their names, and without importing it.

Unrelated projects share the name ``megatron``: Megatron-LM (``megatron.training.*`` next to ``megatron.core``), pip's
megatron-core (the same from 0.17 on, and ``megatron.core`` alone before), Megatron-DeepSpeed in two families and
gpt-neox (where ``megatron.training`` is a module), Energon (``megatron.energon``). Several of them may be on one
``sys.path`` and share the namespace, so each module is looked up the way the import system would.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal, cast

from megaresume.hosts.importing import ask, find_spec
from megaresume.stream.errors import SetupError

Kind = Literal["megatron-lm", "megatron-deepspeed", "bigscience"]

#: Environment variable with the package name in a fork that renamed it.
PACKAGE_VARIABLE = "MEGARESUME_PACKAGE"

#: kind -> role -> module, below the package.
_LAYOUTS: Mapping[Kind, Mapping[str, str]] = {
    "megatron-lm": {
        "arguments": "training.arguments",
        "checkpointing": "training.checkpointing",
        "training": "training.training",
        "global_vars": "training.global_vars",
        "signals": "training.dist_signal_handler",
        "initialize": "training.initialize",
        "builder": "core.datasets.blended_megatron_dataset_builder",
        "schedules": "core.pipeline_parallel.schedules",
        "parallel_state": "core.parallel_state",
    },
    "megatron-deepspeed": {
        "arguments": "arguments",
        "checkpointing": "checkpointing",
        "training": "training",
        "global_vars": "global_vars",
        "signals": "dist_signal_handler",
        "initialize": "initialize",
        "schedules": "core.pipeline_parallel.schedules",
        "parallel_state": "core.parallel_state",
    },
    "bigscience": {
        "arguments": "arguments",
        "checkpointing": "checkpointing",
        "training": "training",
        "global_vars": "global_vars",
        "initialize": "initialize",
        "parallel_state": "mpu.initialize",
    },
}

#: What identifies a module of the project: a file of that name with these functions.
_CONTENT = {"arguments": "_add_data_args", "checkpointing": "check_checkpoint_args", "training": "pretrain"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A Megatron that this process imports or would import."""

    kind: Kind
    #: Directory that contains the package of the training code.
    root: Path
    #: For Megatron-LM and deepspeedai's Megatron-DeepSpeed: megatron-core's; for bigscience's: the package's own.
    version: str
    #: role -> dotted name, for those that exist: arguments, checkpointing, training, global_vars, initialize,
    #: schedules, parallel_state; builder, signals; engine (DeepSpeed's).
    modules: Mapping[str, str]

    def at_least(self, major: int, minor: int) -> bool:
        """Whether the version is this one or later; development versions count as their release."""
        return parse_version(self.version) >= (major, minor)

    @property
    def is_installed(self) -> bool:
        """Whether pip has installed it as megatron-core, and it is not a checkout on the path."""
        return any(self.root.glob("megatron_core-*.dist-info"))

    def __str__(self) -> str:
        return f"{self.kind} {self.version} in {self.root}"


def parse_version(version: str) -> tuple[int, int]:
    """(major, minor) of, say, ``0.16.1rc0``; a part that is not a number counts as 0."""
    numbers = [*(int(number) for number in re.findall(r"\d+", version)[:2]), 0, 0]
    return numbers[0], numbers[1]


def modules_to_watch() -> list[str]:
    """Dotted names of every module below the package that holds a name to wrap in any of the projects."""
    roles = ("arguments", "checkpointing", "training", "initialize", "builder", "signals", "schedules")
    names = [layout[role] for layout in _LAYOUTS.values() for role in roles if role in layout]
    return list(dict.fromkeys(f"{package_name()}.{name}" for name in names))


def package_name() -> str:
    """``megatron``, or the name of a fork's package from the environment."""
    return os.environ.get(PACKAGE_VARIABLE) or "megatron"


_current: Project | None = None


def current_project() -> Project:
    """The project of this process, found at the first call.

    Raises:
        SetupError: see `find_project`.
    """
    global _current
    if _current is None:
        _current = find_project()
    return _current


def find_project(package: str | None = None) -> Project:
    """Search ``sys.path`` for a Megatron whose training code we know. Imports nothing.

    Args:
        package: name of the package; None: ``megatron``, or what MEGARESUME_PACKAGE says.

    Raises:
        SetupError: there is none, or not one that we know.
    """
    package = package or package_name()
    kinds: tuple[Kind, ...] = ("megatron-lm", "megatron-deepspeed")
    for kind in kinds:
        texts = {role: _read(locate(f"{package}.{_LAYOUTS[kind][role]}")) for role in _CONTENT}
        if not all(_defines(texts[role], name) for role, name in _CONTENT.items()):
            continue
        if kind == "megatron-lm":
            return _project("megatron-lm", package)
        if not re.search(r"^\s*import deepspeed\b|\bdeepspeed\.initialize\(", texts["training"], re.MULTILINE):
            break
        # bigscience validates inside parse_args, and never reads Megatron's tracker.
        modern = _defines(texts["arguments"], "validate_args") and _defines(texts["checkpointing"], "read_metadata")
        return _project("megatron-deepspeed" if modern else "bigscience", package)
    raise _refusal(package)


def locate(dotted: str) -> Path | None:
    """The file that ``import dotted`` would run, found without importing; None if there is no such module, or it is a
    namespace package.
    """
    parts = dotted.split(".")
    spec = _imported(parts[0]) or find_spec(parts[0])
    for depth in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = ".".join(parts[:depth])
        spec = _imported(name) or _below(name, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _imported(name: str) -> ModuleSpec | None:
    return getattr(sys.modules.get(name), "__spec__", None)


def _below(name: str, path: list[str]) -> ModuleSpec | None:
    """The spec of a submodule in these places. Python's own finder would need the parent of a namespace imported."""
    for finder in sys.meta_path:
        with contextlib.suppress(KeyError):  # one that asks Python's own, as pytest's does
            if finder is not PathFinder and (spec := ask(finder, name, path)) is not None:
                return spec
    portions: list[str] = []
    for place in path:
        find = getattr(pkgutil.get_importer(place), "find_spec", None)
        spec = None if find is None else find(name)
        if spec is not None and spec.loader is not None:
            return cast(ModuleSpec, spec)
        if spec is not None:
            portions.extend(spec.submodule_search_locations or ())
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def _read(path: Path | None) -> str:
    if path is None or path.suffix != ".py":
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _defines(source: str, function: str) -> bool:
    return re.search(rf"^def {function}\b", source, re.MULTILINE) is not None


def _project(kind: Kind, package: str) -> Project:
    names = {role: f"{package}.{name}" for role, name in _LAYOUTS[kind].items()}
    modules = {role: name for role, name in names.items() if locate(name) is not None}
    if kind != "megatron-lm":
        modules["engine"] = "deepspeed.runtime.engine"
    training = locate(modules["training"])
    assert training is not None  # its contents were read above
    root = training.parents[modules["training"].count(".")]
    return Project(kind=kind, root=root, version=_version(kind, package, root), modules=modules)


def _version(kind: Kind, package: str, root: Path) -> str:
    """The version of the core next to the training code; a core from elsewhere says nothing about the training code."""
    inner = "package_info" if kind == "bigscience" else "core.package_info"
    beside = root.joinpath(package, *inner.split(".")).with_suffix(".py")
    source = _read(beside if beside.is_file() else locate(f"{package}.{inner}"))
    fields = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?([\w.]*)['\"]?", source, re.MULTILINE))
    numbers = [fields[name] for name in ("MAJOR", "MINOR", "PATCH") if fields.get(name)]
    return ".".join(numbers) + fields.get("PRE_RELEASE", "") if numbers else "unknown"


def _refusal(package: str) -> SetupError:
    expected = (
        "Megatron-LM (megatron/training/training.py, core 0.8 or newer), or Megatron-DeepSpeed of deepspeedai or of "
        "bigscience (megatron/training.py with DeepSpeed)"
    )
    spec = _imported(package) or find_spec(package)
    if spec is None:
        return SetupError(
            f"there is no {package} to be imported",
            found=f"nothing called {package} on sys.path: {os.pathsep.join(path or '.' for path in sys.path)}",
            expected=expected,
            cause="the script is not in the checkout of Megatron, or PYTHONPATH does not name it",
            action=f"PYTHONPATH=/path/to/checkout, or {PACKAGE_VARIABLE}=NAME where a fork renamed the package",
        )
    places = ", ".join(str(place) for place in spec.submodule_search_locations or [spec.origin or package])
    cause: str | None = None
    action = "run the launcher with a script of one of these checkouts, or use megaresume.attach in your own loop"
    if locate(f"{package}.neox_arguments") or locate(f"{package}.neox_arguments.arguments"):
        headline, cause = "gpt-neox is not supported", "gpt-neox keeps no count of the samples consumed"
        action = "use megaresume.attach(engine, ...) in its training loop"
    elif locate(f"{package}.training.training") or locate(f"{package}.training.arguments"):
        headline = f"{package}.training is not the training code of Megatron-LM as we know it"
        cause = "a fork or a version that renamed " + " or ".join(sorted(set(_CONTENT.values())))
    elif locate(f"{package}.training"):
        headline = f"this {package} is too old, or runs without DeepSpeed"
        cause = "Megatron-LM before core 0.6 kept its training code in megatron/training.py"
    elif locate(f"{package}.core") or locate(f"{package}.core.package_info"):
        headline = f"no {package}.training: only megatron-core, the library, is there"
        cause = "the launcher wraps the code of Megatron-LM's scripts; pip's megatron-core has it from 0.17 on"
        action = "run from the checkout of Megatron-LM (PYTHONPATH=/path/to/Megatron-LM), or use megaresume.attach"
    elif locate(f"{package}.energon"):
        headline, cause = "no Megatron: only megatron-energon, the data loader", "PYTHONPATH does not name the checkout"
    else:
        headline = f"the package called {package} is not a Megatron that we know"
    return SetupError(headline, found=places, expected=expected, cause=cause, action=action)


def parallel_state(project: Project) -> Any:
    """Megatron's ``parallel_state`` module."""
    return importlib.import_module(project.modules["parallel_state"])


def data_parallel(project: Project) -> tuple[int, int]:
    """Data-parallel rank and size, as Megatron's samplers see them (context-parallel ranks share one)."""
    mpu = parallel_state(project)
    return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()


def coordinates(project: Project) -> str:
    """The coordinates of this process, for messages: ``tp 0, pp 1, dp 3, cp 0``."""
    mpu = parallel_state(project)
    names = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "dp": "data_parallel"}
    names["cp"] = "context_parallel"
    ranks = {short: getattr(mpu, f"get_{long}_rank", None) for short, long in names.items()}
    return ", ".join(f"{short} {rank()}" for short, rank in ranks.items() if rank is not None)


def end_of_document(project: Project) -> int:
    """The tokenizer's end-of-document token."""
    return int(importlib.import_module(project.modules["global_vars"]).get_tokenizer().eod)
