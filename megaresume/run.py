"""Run an unmodified training script with the hooks installed.

    torchrun --nproc-per-node 8 -m megaresume.run pretrain_gpt.py ARGS
    deepspeed --module megaresume.run pretrain_gpt.py ARGS
    python -m megaresume.run pretrain_gpt.py ARGS
    megaresume run pretrain_gpt.py ARGS
    torchrun -m megaresume.run -m package.pretrain ARGS
    torchrun -m megaresume.run train.py ARGS               a script with Hugging Face's Trainer

The script sees the same as with ``python pretrain_gpt.py ARGS``: ``sys.argv``, ``sys.path``, its own ``__main__``, its
tracebacks. Exit status: the script's; 1 for an error of megaresume inside it; 2 if it cannot be started.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from megaresume.checkpoint.ending import end, run_program, say
from megaresume.hosts import hugging_face_launch as hugging_face
from megaresume.hosts.megatron import hooks as megatron
from megaresume.hosts.megatron.project import find_project, package_name
from megaresume.stream.errors import MegaresumeError, SetupError, UsageError

USAGE = "usage: megaresume run SCRIPT [ARGS]   or   megaresume run -m MODULE [ARGS]"

#: How a script may put Megatron's checkout on the path.
_CHANGES_PATH = ("sys.path", "addsitedir")
#: A script that imports one of these trains with Hugging Face's Trainer.
_WITH_TRAINER = (
    *("transformers", "trl", "peft", "sentence_transformers", "llamafactory", "swift", "axolotl"),
    *("setfit", "pylate", "gliner", "FlagEmbedding"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    #: a file, or the dotted name of a module.
    target: str
    is_module: bool
    #: the arguments of the script: its sys.argv[1:].
    args: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script in this process, as ``__main__``.

    Args:
        argv: the script and its arguments; None: from this process's command line.

    Returns:
        exit status, if the script ends normally. ``SystemExit`` and other exceptions of the script pass through.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__.partition(chr(10))[0]}" if __doc__ else USAGE)
        return 0
    try:
        command = _parse(argv)
        code, module = _prepare(command)
    except UsageError as error:
        say(error)
        return 2
    try:
        _install(module)
        _execute(code, module)
    except MegaresumeError as error:
        return end(error)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = _WithoutOurFrames(sys.excepthook)
        raise
    return 0


def _execute(code: CodeType, module: ModuleType) -> None:
    exec(code, module.__dict__)


def _parse(argv: Sequence[str]) -> _Command:
    """Split the command line. Launchers put ``--local_rank=N`` before the script, for which it is meant."""
    words = list(argv)
    ahead: list[str] = []
    while words and words[0].startswith(("--local_rank=", "--local-rank=")):
        ahead.append(words.pop(0))
    is_module = words[:1] == ["-m"]
    if is_module:
        words.pop(0)
    if not words or words[0].startswith("-"):
        raise UsageError(
            "no script was given" if not words else f"what should be a script is a flag: {words[0]}",
            found=" ".join(argv) or "nothing",
            expected="the training script, and after it the flags of the script",
            action=USAGE.partition(": ")[2],
        )
    return _Command(target=words[0], is_module=is_module, args=(*ahead, *words[1:]))


def _prepare(command: _Command) -> tuple[CodeType, ModuleType]:
    """Compile the script, and make the process look as if Python had started it."""
    module = ModuleType("__main__")
    if command.is_module:
        # sys.path[0] is the working directory, as for `python -m`, unless a console script started us.
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        spec, code = _find_module(command.target)
        path, package = str(spec.origin), spec.parent
        names: dict[str, Any] = {"__spec__": spec, "__loader__": spec.loader, "__cached__": spec.cached}
        argv_0 = path
    else:
        # Made absolute as by Python: not normalised, or a link before a ".." would lead elsewhere.
        path = os.path.join(os.getcwd(), command.target)
        package, argv_0 = None, command.target
        if not os.path.isfile(path):
            raise UsageError(
                f"there is no script {command.target}",
                found="a directory" if os.path.isdir(path) else f"no file {path}",
                expected="a Python file",
                action="check the path; a module is started with -m MODULE",
            )
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        names = {"__spec__": None, "__loader__": SourceFileLoader("__main__", path), "__cached__": None}
        code = _compile(path)
    module.__dict__.update(names, __file__=path, __package__=package, __builtins__=builtins, __annotations__={})
    sys.argv[:] = [argv_0, *command.args]
    # The script's objects are pickled as __main__.NAME, and child processes run __main__.__file__ again.
    sys.modules["__main__"] = module
    return code, module


def _compile(path: str) -> CodeType:
    with open(path, "rb") as file:
        source = file.read()
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        sys.excepthook = _WithoutOurFrames(sys.excepthook)
        raise


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The spec and the code that ``python -m name`` runs."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, TypeError, ValueError):
        spec = None
    code = None if spec is None or spec.loader is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if spec is None or code is None:
        raise UsageError(
            f"there is no module {name} to be run",
            found=f"nothing that python -m {name} could run",
            expected="a module, or a package with __main__",
            action="check the name, PYTHONPATH and the working directory",
        )
    return spec, code


def _install(module: ModuleType) -> None:
    """Install the hooks, here and in child processes, and check that there is something to hook.

    Raises:
        SetupError: there is no Megatron on the path, no script that would put one there, and no transformers.
        UsageError: a flag of ours that does not exist for a Trainer's script.
    """
    is_megatrons = _trains_with_megatron(str(module.__file__))
    if not is_megatrons:
        sys.argv[1:] = hugging_face.take_flags(sys.argv[1:])
    megatron.install(launched=is_megatrons)
    megatron.install_in_children()
    hugging_face.install()


def _trains_with_megatron(script: str) -> bool:
    """Whether Megatron trains, and its parser accepts our flags; otherwise Hugging Face's Trainer does.

    pip's megatron-core may be there for other programs: it counts if the script imports it, or without transformers.

    Raises:
        SetupError: neither is available.
    """
    with open(script, encoding="utf-8", errors="replace") as file:
        source = file.read()
    imports_megatron = _imports(source, package_name())
    if not imports_megatron and any(_imports(source, package) for package in _WITH_TRAINER):
        return False
    changes_path = any(words in source for words in _CHANGES_PATH)
    try:
        project = find_project()
    except SetupError:
        # Then it is found, or refused, when the script imports it.
        if changes_path:
            return True
        if imports_megatron or not hugging_face.is_here():
            raise
        return False
    return imports_megatron or changes_path or not (project.is_installed and hugging_face.is_here())


def _imports(source: str, package: str) -> bool:
    return re.search(rf"^\s*(import|from)\s+{package}\b", source, re.MULTILINE) is not None


class _WithoutOurFrames:
    """An excepthook that hides the frames above the script's, and delegates to the previous hook.

    It is set when an exception leaves the script: so the script sees the hook that it expects, and Python still handles
    the end (exit status, signals, threads).
    """

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code is not _execute.__code__:
            trace = trace.tb_next
        trace = None if trace is None else trace.tb_next
        self.hook(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    run_program(main)
