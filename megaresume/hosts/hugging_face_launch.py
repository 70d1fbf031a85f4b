"""Trainers of scripts that do not know us: each is attached when it begins to train. For `megaresume.run`.

    torchrun -m megaresume.run train.py ARGS --megaresume-keep-every 1000

The hook is on ``transformers.Trainer.train``, which the Trainers of TRL, LLaMA-Factory, ms-swift and Axolotl also call,
in this process or in one that it starts. It calls `attach`, and resumes from the newest complete checkpoint in
``output_dir``, whatever the script says about resuming. A loop that trains without a Trainer is refused at its first
step.

Our flags are taken from the script's command line, and passed to child processes by the environment.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megaresume.checkpoint.ending import show_refusals
from megaresume.checkpoint.flags import PREFIX, take_settings
from megaresume.checkpoint.settings import GROUPS, Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.hosts import importing
from megaresume.hosts.attach import SLOT
from megaresume.hosts.importing import when_imported, wrap
from megaresume.stream.errors import SetupError, UsageError

#: Environment variable for this process and its children: our flags as JSON. If set, the launcher runs for Hugging
#: Face's Trainer, and every training should be hooked.
SETTINGS_VARIABLE = "MEGARESUME_TRAINER"

_TRAINER = "transformers.trainer"
_OPTIMIZER = "torch.optim.optimizer"
#: one of them is imported if something is attached, which then checks its steps itself.
_PROOFS = ("megaresume.hosts.trainer", "megaresume.hosts.deepspeed.attach")

#: output_dir of each Trainer that was attached in this process.
_trained: set[Path] = set()


def is_here() -> bool:
    """Whether transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def take_flags(argv: Sequence[str]) -> list[str]:
    """Save our flags for `install`, here and in children.

    Args:
        argv: the command line of the script.

    Returns:
        the words that are not ours.

    Raises:
        UsageError: a flag that does not exist for a Trainer's script, or a bad value.
    """
    said, left = take_settings(GROUPS, "trainer", argv)
    mode = said.get("launch", {}).get("mode", "off")
    if mode != "off":
        raise UsageError(
            "this mode is for Megatron",
            found=f"{PREFIX}mode {mode}",
            expected=f"{PREFIX}mode off, or nothing",
            action="leave it out: the order of a Trainer's train_dataset is megaresume's",
        )
    os.environ[SETTINGS_VARIABLE] = json.dumps(said)
    return left


def install() -> None:
    """Attach Trainers from now on, here and in children. Installing twice has no effect."""
    if _said().get("launch", {}).get("mode") == "off":
        return
    is_launched = SETTINGS_VARIABLE in os.environ
    importing.install_in_children(__name__, [_TRAINER, _OPTIMIZER] if is_launched else [_TRAINER])
    when_imported(_TRAINER, _hook)
    if is_launched:
        when_imported(_OPTIMIZER, _watch_steps)


def _said() -> Mapping[str, Mapping[str, Any]]:
    said: dict[str, dict[str, Any]] = json.loads(os.environ.get(SETTINGS_VARIABLE, "{}"))
    return said


def _hook(module: ModuleType) -> None:
    wrap(module.Trainer, "train", _around_train)


def _around_train(train: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.train``, which first attaches the Trainer."""

    @functools.wraps(train)
    def attached_train(
        trainer: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        from megaresume.checkpoint.ranks import on_rank_0
        from megaresume.hosts.hugging_face import TransformersHost  # deferred: torch

        host: TransformersHost | None = getattr(trainer, SLOT, None)
        if host is not None:  # attached by the script, whose call has come through our hook
            return train(trainer, resume_from_checkpoint, trial, *args, **kwargs)
        show_refusals()
        output_dir = Path(trainer.args.output_dir).absolute()
        _check_output_dir(output_dir)
        host = _attached(trainer)
        path = on_rank_0(lambda: _resume_from(output_dir, resume_from_checkpoint))
        return host.train(functools.partial(train, trainer), path, trial, *args, **kwargs)

    return attached_train


def _attached(trainer: Any) -> Any:
    from megaresume.hosts.hugging_face import attach  # deferred: torch

    said = _said()
    data, stop, launch = (said.get(group, {}) for group in ("data_options", "stop", "launch"))
    options: dict[str, Any] = {**data, **{name: launch[name] for name in ("append", "metrics") if name in launch}}
    attach(
        trainer,
        checkpoints=Checkpoints(**said.get("checkpoints", {})),
        stop=StopConditions(**stop) if stop else None,
        **options,
    )
    return getattr(trainer, SLOT)


def _check_output_dir(output_dir: Path) -> None:
    if re.fullmatch(r"v\d+-\d{8}-\d{6}", output_dir.name):
        raise UsageError(
            "every start has another output_dir",
            found=str(output_dir),
            expected="the same one, in which the next start finds the checkpoints",
            cause="ms-swift adds a version and the time to it",
            action="--add_version false",
        )
    if output_dir in _trained:
        raise UsageError(
            "two Trainers of one process have the same output_dir",
            found=str(output_dir),
            expected="an output_dir for each",
            cause="the second one would resume from what the first has saved there",
            action="give the second Trainer its own output_dir",
        )
    _trained.add(output_dir)


def _resume_from(output_dir: Path, asked: Any) -> Any:
    """The checkpoint to resume from: one in ``output_dir`` that the script names, or the newest complete one.

    Scripts that look for the newest one by name may find one that a kill left incomplete; and one outside
    ``output_dir`` is what the run began from.
    """
    from transformers.trainer_utils import get_last_checkpoint

    if not asked or isinstance(asked, bool):
        return True
    newest: str | None = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None  # type: ignore[no-untyped-call]
    path = Path(asked).resolve()
    is_older = path.parent == output_dir.resolve() and newest is not None and path != Path(newest).resolve()
    return asked if newest is None or is_older else True


def _watch_steps(module: ModuleType) -> None:
    """Refuse the first step in a process where nothing was attached."""

    def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not any(name in sys.modules for name in _PROOFS):
            show_refusals()
            raise _not_attached(type(optimizer).__name__)
        handle.remove()  # it would prevent a step from being compiled

    handle = module.register_optimizer_step_pre_hook(before_step)


def _not_attached(optimizer: str) -> SetupError:
    return SetupError(
        "training begins, and megaresume does not know its data",
        found=f"a step of {optimizer}, and no transformers.Trainer.train was called in this process",
        expected="a Trainer, by whose train method the script trains",
        cause="its own training loop, as with Accelerate, or in a Trainer that does not call transformers' train",
        action=f"call megaresume.attach in that loop; or {PREFIX}mode off, which records nothing",
    )
