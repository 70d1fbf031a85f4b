"""Small packages with the shapes of the three upstream layouts, and doubles of the wrapper factories that say who ran.

The functions have upstream's names, places and by-name imports, and do next to nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ARGUMENTS = """
    import argparse

    def _add_data_args(parser):
        parser.add_argument("--data-path", nargs="*")
        return parser

    def parse_args(extra_args_provider=None):
        parser = _add_data_args(argparse.ArgumentParser(allow_abbrev=False))
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        return parser.parse_known_args()[0]

    def validate_args(args, defaults={}):
        return args
"""

CHECKPOINTING = """
    from {parent}.global_vars import get_args
    {imports}
    def check_checkpoint_args(checkpoint_args):
        pass

    def read_metadata(tracker_filename):
        return 3, False

    def save_checkpoint(iteration, model, optimizer, opt_param_scheduler):
        {save}

    def load_checkpoint(model, optimizer, opt_param_scheduler, load_arg="load"):
        read_metadata("tracker")
        check_checkpoint_args(get_args())
        return 3
"""

TRAINING = """
    {imports}
    from {parent}.checkpointing import load_checkpoint
    from {parent}.checkpointing import save_checkpoint
    from {parent}.initialize import initialize_megatron

    def build_train_valid_test_data_iterators(provider):
        return provider([1, 2, 3])

    def pretrain(provider, extra_args_provider=None):
        initialize_megatron(extra_args_provider)
        load_checkpoint(None, None, None)
        data = build_train_valid_test_data_iterators(provider)
        save_checkpoint(3, None, None, None)
        return data
"""

GLOBAL_VARS = """
    _ARGS = None

    def get_args():
        return _ARGS

    def set_args(args):
        global _ARGS
        _ARGS = args
"""

INITIALIZE = """
    from {parent}.arguments import parse_args{validate}
    from {parent}.global_vars import set_args

    def initialize_megatron(extra_args_provider=None):
        args = parse_args(extra_args_provider)
        {call}
        set_args(args)
"""

PACKAGE_INFO = """
    MAJOR = {major}
    MINOR = {minor}
    PATCH = 0
    PRE_RELEASE = {pre!r}
"""

BUILDER = """
    class BlendedMegatronDatasetBuilder:
        def __init__(self, cls, sizes, is_built_on_rank, config):
            self.sizes = sizes

        def build(self):
            return self.sizes
"""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = text.splitlines()
    path.write_text("\n".join(line.removeprefix("    ") for line in lines) + "\n")


def write_wheel(root: Path, version: tuple[int, int] = (0, 16), package: str = "megatron", pre: str = "") -> Path:
    """megatron-core alone, as pip installs it: below a namespace."""
    core = root / package / "core"
    _write(core / "__init__.py", "")
    _write(core / "parallel_state.py", "")
    _write(core / "package_info.py", PACKAGE_INFO.format(major=version[0], minor=version[1], pre=pre))
    _write(core / "datasets" / "__init__.py", "")
    _write(core / "datasets" / "blended_megatron_dataset_builder.py", BUILDER)
    return root


def write_lm(
    root: Path, version: tuple[int, int] = (0, 16), package: str = "megatron", *, core: bool = True, pre: str = ""
) -> Path:
    """Megatron-LM: megatron/training/*.py, and megatron.core beside it."""
    parent, home = f"{package}.training", root / package / "training"
    _write(home / "__init__.py", "    from .training import pretrain")
    _write(home / "arguments.py", ARGUMENTS)
    imports = "from .async_utils import schedule_async_save\n"
    save = "schedule_async_save(iteration)"
    _write(home / "checkpointing.py", CHECKPOINTING.format(parent=parent, imports=imports, save=save))
    imports = f"from {package}.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder"
    _write(home / "training.py", TRAINING.format(parent=parent, imports=imports))
    _write(home / "global_vars.py", GLOBAL_VARS)
    by_name = {"validate": ", validate_args", "call": "validate_args(args)"}
    _write(home / "initialize.py", INITIALIZE.format(parent=parent, **by_name))
    _write(home / "async_utils.py", "    def schedule_async_save(request):\n        pass")
    samplers = root / package / ("training/datasets" if version >= (0, 16) else "legacy/data") / "data_samplers.py"
    _write(samplers, "")
    return write_wheel(root, version, package, pre) if core else root


def write_flat(root: Path, kind: str = "megatron-deepspeed") -> Path:
    """Megatron-DeepSpeed: megatron/*.py; kind "bigscience", or "plain" for a Megatron-LM of old without DeepSpeed."""
    home = root / "megatron"
    bigscience = kind == "bigscience"
    without = "validate_args" if bigscience else "\0"
    _write(home / "__init__.py", "    from .initialize import initialize_megatron")
    _write(home / "arguments.py", ARGUMENTS.replace(without, "_validate"))
    text = CHECKPOINTING.format(parent="megatron", imports="", save="model[0].save_checkpoint('save', client_state={})")
    _write(home / "checkpointing.py", text.replace("read_metadata", "_read") if bigscience else text)
    _write(
        home / "training.py", TRAINING.format(parent="megatron", imports="" if kind == "plain" else "import deepspeed")
    )
    _write(home / "global_vars.py", GLOBAL_VARS)
    by_name = {"validate": "" if bigscience else ", validate_args", "call": "" if bigscience else "validate_args(args)"}
    _write(home / "initialize.py", INITIALIZE.format(parent="megatron", **by_name))
    _write(home / "data" / "__init__.py", "")
    _write(home / "data" / "data_samplers.py", "")
    if bigscience:
        _write(home / "package_info.py", "    MAJOR = 1\n    MINOR = 1.5\n")
        _write(home / "mpu" / "__init__.py", "")
        _write(home / "mpu" / "initialize.py", "")
    else:
        write_wheel(root, (0, 2))
    return root


def script(path: Path, text: str) -> Path:
    """Write a training script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


#: Replaces the wrapper factories: each wrapper says its name, then does what was there. Run where a process starts.
DOUBLES = """
import functools, os
from megaresume.hosts.megatron import seams

def around(self, original):
    @functools.wraps(original)
    def said(*args, **kwargs):
        os.write(1, f"hook {self.path}\\n".encode())  # in one piece, whoever else writes
        return original(*args, **kwargs)
    return said

seams.Factory.__call__ = around
"""

#: `python -c HOOKED_RUN SCRIPT ARGS`: the launcher with the doubles.
HOOKED_RUN = DOUBLES + "import sys\nfrom megaresume.run import main\nsys.exit(main())\n"


def run_python(
    *words: str | Path, path: list[Path] | tuple[Path, ...] = (), cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """A Python process with this PYTHONPATH and no rank in its environment."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "PYTHONPATH")}
    clean |= {"PYTHONPATH": os.pathsep.join(str(entry) for entry in path), **env}
    command = [sys.executable, *(str(word) for word in words)]
    return subprocess.run(command, env=clean, cwd=cwd, capture_output=True, text=True, timeout=120)
