"""ZeRO's partitions at a load: use them, use an existing conversion, make one, or refuse.

    prepare_load     before the model is built: rank 0 checks and converts, or every rank refuses; uses no GPU memory
    conversion       within load_checkpoint, once the engine is known; the same decision

Rank 0 may work for an hour, and meanwhile no rank waits in a collective (`ranks.on_rank_0_for_long`).

A universal load restores what the optimizer holds; what DeepSpeed leaves out is restored here, and what cannot be is
refused in advance. It skips the module's own state dict, and with it

- persistent buffers (such as running means) and frozen parameters, which keep their values from the new process;
- under ZeRO 3, the settings of every parameter group but the first: all groups get the first one's weight decay;
- under ZeRO 3, a step count for each part of the optimizer: all share one tensor, which torch's optimizers then
  increase once for each part in every step.

Checked against DeepSpeed 0.19: engine.py ``_load_checkpoint``, zero/stage3.py
``load_hp_checkpoint_state_from_checkpoint_dir_stage3``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import on_all_ranks, on_rank_0_for_long, pauses, world_size
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.replay import Replay
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.conversion import Reporter, convert
from megaresume.hosts.deepspeed.load_rules import Partitions, check_zero, choose_to_load, read_universal
from megaresume.stream.errors import CheckpointError

_DOING = "converted a checkpoint"


def check_restorable(engine: Any) -> None:
    """Raise a CheckpointError if a universal load would silently leave something at its initial value."""
    buffers, frozen = _outside_the_optimizer(engine.module)
    if facts.is_pipeline(engine) and (buffers or frozen):
        what = "buffers and frozen parameters of a pipeline"
    elif facts.zero_stage(engine) == 3 and frozen:
        what = "frozen parameters under ZeRO 3"
    else:
        return
    raise CheckpointError(
        f"{what} are not in a universal checkpoint",
        found=f"{', '.join((*buffers, *frozen)[:5])}",
        expected="only parameters that are trained",
        action="start on the number of ranks that saved it",
    )


def restore_rest(engine: Any, tag_dir: Path) -> None:
    """Restore what DeepSpeed's universal load skipped. On every rank; reads files only if there is something.

    Args:
        engine: has loaded the checkpoint.
        tag_dir: of the universal checkpoint.
    """
    names = [name for kind in _outside_the_optimizer(engine.module) for name in kind]
    if names and not facts.is_pipeline(engine):
        saved = torch.load(facts.model_file(engine, tag_dir), map_location="cpu", weights_only=False)["module"]
        now = dict(engine.module.named_buffers()) | dict(engine.module.named_parameters())
        with torch.no_grad():
            for name in names:
                if name in saved:  # false after save_checkpoint(exclude_frozen_parameters=True)
                    now[name].copy_(saved[name])
    if facts.zero_stage(engine) != 3:
        return
    for part in engine.optimizer.optimizer.state.values():
        if torch.is_tensor(part.get("step")):
            part["step"] = part["step"].clone()
    if len(engine.optimizer.param_groups) > 1:
        path = tag_dir / "zero" / "optimizer_state.pt"
        state = torch.load(path, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]
        for group, before in zip(engine.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})


def _outside_the_optimizer(module: Any) -> tuple[list[str], list[str]]:
    """Names of persistent buffers, and of frozen parameters."""
    persistent = set(module.state_dict())
    buffers = [name for name, _ in module.named_buffers() if name in persistent]
    return buffers, [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def prepare_load(
    load_dir: str | os.PathLike[str],
    *,
    zero_stage: int,
    partitions: int | None = None,
    tag: str | None = None,
    elastic: bool = False,
) -> None:
    """Ensure that the checkpoint which ``load_checkpoint`` will use can be loaded by this number of ranks.

    Call it on every rank before the model is built: a refusal then comes before any GPU memory is used, and a
    conversion does not keep GPUs waiting. An empty directory is fine.

    Args:
        load_dir: the checkpoint root.
        zero_stage: of the future engine.
        partitions: ranks over which it will divide the optimizer state, data-parallel times context-parallel; None:
            all ranks.
        tag: exactly this checkpoint; None: the newest complete one.
        elastic: convert automatically if necessary.

    Raises, on every rank:
        CheckpointError: no checkpoint is complete, or another number of ranks saved it and ``elastic`` is not set
            (names the command to run); or the conversion fails.
    """
    if Replay.asked() is not None:
        return  # what it loads is already chosen, and it converts nothing
    now = Partitions(ranks=partitions or world_size(), zero_stage=zero_stage)

    def look(beat: Callable[[], None]) -> None:
        choice = choose_to_load(os.fspath(load_dir), tag, False, checksums=True, progress=lambda _size: beat())
        if choice is not None:
            _settle(choice, now, elastic, beat)

    on_rank_0_for_long(look, _DOING)


def conversion(choice: Choice, record: StepFile | None, now: Partitions, *, elastic: bool) -> str | None:
    """The tag of the universal checkpoint to load instead of the choice; None if that loads directly.

    Args:
        choice: what is to be loaded, the same on every rank.
        step: its record, as this rank read it.
        now: how the engine divides the optimizer state.
        elastic: convert automatically if necessary.

    Raises, on every rank: as `prepare_load`; or a rank does not see the conversion.
    """
    if record is None or not now.differ_from(record.topology):
        return None
    tag = on_rank_0_for_long(lambda beat: _settle(choice, now, elastic, beat), _DOING)
    on_all_ranks(lambda: _wait_for(choice.tag_dir, record.save_id))
    return tag


def _settle(choice: Choice, now: Partitions, elastic: bool, beat: Callable[[], None]) -> str | None:
    """Decide, and convert, on rank 0."""
    record = choice.record
    if record is None or not now.differ_from(record.topology):
        return None
    elastic = elastic and Replay.asked() is None  # a replay changes nothing of the run
    there = check_zero(choice, now, elastic=elastic, checksums=True) or convert(
        choice.tag_dir, save_id=record.save_id, made_by="job", report=Reporter(say=_say, beat=beat)
    )
    return there.path.name


def _say(words: str) -> None:
    # Printed, not logged: it explains why a job waits, whatever the program does with its logging.
    print(f"megaresume: {words}", flush=True)


def _wait_for(tag_dir: Path, save_id: str, timeout_seconds: float = 30.0) -> None:
    """Wait until the caches of shared filesystems show a conversion."""
    deadline = time.monotonic() + timeout_seconds
    for _ in pauses(0.5):
        try:
            if read_universal(tag_dir, save_id) is not None:
                return
            problem = "there is none"
        except CheckpointError as error:
            problem = str(error.found)
        if time.monotonic() >= deadline:
            raise CheckpointError(
                "this rank does not see the universal checkpoint",
                found=f"on {os.uname().nodename}, beside {tag_dir}: {problem}",
                expected="what rank 0 sees there",
                cause="the directory is not on a filesystem that all nodes share, or a cache lags behind",
                action="mount the same directory on every node; then start again",
            )
