"""How a Trainer shares out a model: DDP, DeepSpeed or FSDP; what follows for its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaresume.checkpoint.topology import Topology
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.instances import refuse, replaced
from megaresume.stream.errors import CheckpointError

#: what a checkpoint has inside that only this back-end writes, as patterns, and how to train with it again.
_WRITTEN = {
    "DeepSpeed": (("global_step*",), "TrainingArguments(deepspeed=...)"),
    "FSDP": (("pytorch_model_fsdp*", "optimizer.bin", "optimizer_[0-9]*"), "TrainingArguments(fsdp=...)"),
    "DDP": (("optimizer.pt",), "neither deepspeed nor fsdp"),
}


def backend_of(trainer: Any) -> str:
    """``DeepSpeed``, ``FSDP`` or ``DDP``, also of one rank."""
    return "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP" if trainer.is_fsdp_enabled else "DDP"


def zero_stage(trainer: Any) -> int | None:
    """Of DeepSpeed: 0 to 3; None: another back-end."""
    return int(trainer.accelerator.state.deepspeed_plugin.zero_stage) if trainer.is_deepspeed_enabled else None


def check_backend(trainer: Any) -> None:
    """Refuse ways of saving that cannot be committed.

    Raises:
        UsageError: naming the setting.
    """
    refused: dict[str, tuple[Any, str]] = {
        "fsdp with XLA": (getattr(trainer, "is_fsdp_xla_enabled", False), "it was not tried: train with DDP or FSDP2"),
    }
    if trainer.is_fsdp_enabled:
        version = trainer.accelerator.state.fsdp_plugin.fsdp_version
        refused["FSDP1"] = version == 1, "it was not tried: leave version out of fsdp_config, or set it to 2"
    if trainer.is_deepspeed_enabled:
        config: Mapping[str, Any] = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        saving = config.get("checkpoint") or {}
        refused |= {
            "checkpoint.writer of DeepSpeed": (saving.get("writer"), "leave it out: it writes after the save"),
            "datastates_ckpt of DeepSpeed": (config.get("datastates_ckpt"), "leave it out: it writes after the save"),
            "checkpoint.use_node_local_storage of DeepSpeed": (
                saving.get("use_node_local_storage"),
                "leave it out, and save to a directory that every rank sees",
            ),
            "checkpoint.load_universal of DeepSpeed": (
                saving.get("load_universal"),
                "leave it out, and start on as many ranks as saved the checkpoint",
            ),
        }
    refuse("attach_trainer", refused, expected="not set")


def check_loadable(trainer: Any, tag_dir: Path, before: Topology | None, begin_anew: str) -> None:
    """Refuse a checkpoint of which this back-end would not load all.

    Args:
        trainer: that is to load it.
        tag_dir: ``checkpoint-N``.
        before: how the run was laid out when it saved; None: not known.
        begin_anew: how to load weights alone.

    Raises:
        CheckpointError: another back-end wrote it; it has no optimizer; or ZeRO divided it over other ranks.
    """
    now, stage, ranks = backend_of(trainer), zero_stage(trainer), trainer.args.world_size
    wrote = [name for name, (patterns, _) in _WRITTEN.items() if any(any(tag_dir.glob(p)) for p in patterns)]
    if now not in wrote:
        raise CheckpointError(
            f"the checkpoint was not written with {now}" if wrote else "the checkpoint has no optimizer",
            found=f"{tag_dir}, written with {wrote[0]}" if wrote else f"{tag_dir}, written with save_only_model",
            expected=f"one that was written with {now}",
            cause="the state of the optimizer would not be loaded",
            action=f"train with {_WRITTEN[wrote[0]][1]}; or {begin_anew}" if wrote else begin_anew,
        )
    if stage and before is not None and before.dp != ranks:
        raise CheckpointError(
            "DeepSpeed cannot load ZeRO optimizer state on another number of ranks",
            found=f"{tag_dir.name}, saved with ZeRO {before.zero_stage} on {before.dp} ranks; {ranks} now",
            expected=f"{before.dp} ranks",
            cause="the job was started on another number of nodes or GPUs",
            action=f"start on {before.dp} ranks; or {begin_anew}. With FSDP, or DeepSpeed's engine in a loop of your "
            "own under megaresume.attach, a run goes on with any number of ranks",
        )


def expected_files(trainer: Any, save_dir: Path, tag: str) -> Sequence[str] | None:
    """What this rank writes into a checkpoint; None: not known beforehand."""
    if not trainer.is_deepspeed_enabled:
        return None
    engine = trainer.model_wrapped
    inner = f"global_step{engine.global_steps}"
    return [f"{inner}/{name}" for name in facts.expected_files(engine, str(save_dir / tag), inner)]


@contextlib.contextmanager
def failing_late(trainer: Any) -> Iterator[list[Exception]]:
    """Within it, a rank that cannot write a file goes on to the collectives in which the others wait for it; what was
    raised is in the list that is given."""
    save = trainer._save
    with contextlib.ExitStack() as stack:
        errors: list[Exception] = []
        if trainer.is_deepspeed_enabled:
            errors = stack.enter_context(facts.failing_late(trainer.model_wrapped))

        def late(*args: Any, **more: Any) -> None:
            try:
                save(*args, **more)
            except Exception as error:  # noqa: BLE001  raised later, on every rank
                errors.append(error)

        stack.enter_context(replaced(trainer, _save=late))
        yield errors
