"""How Accelerate shards a model (DDP, DeepSpeed or FSDP), in a loop or the Trainer, and its effect on checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaresume.checkpoint.system import Topology
from megaresume.hosts.attach import refuse
from megaresume.hosts.deepspeed import engine as facts
from megaresume.stream.errors import CheckpointError

#: back-end -> (patterns of the contents that tell its checkpoints from those of the back-ends before it; how to train
#: with it again).
Written = Mapping[str, tuple[Sequence[str], str]]


def backend_of(accelerator: Any) -> str:
    """``DeepSpeed``, ``FSDP`` or ``DDP``, also with a single rank."""
    if accelerator.state.deepspeed_plugin is not None:
        return "DeepSpeed"
    return "FSDP" if getattr(accelerator.state, "fsdp_plugin", None) is not None else "DDP"


def engine_of(accelerator: Any) -> Any:
    """DeepSpeed's engine; None with another back-end, or if nothing is prepared yet."""
    return getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)


def zero_stage(accelerator: Any) -> int | None:
    """DeepSpeed's ZeRO stage, 0 to 3; None with another back-end."""
    plugin = accelerator.state.deepspeed_plugin
    return None if plugin is None else int(plugin.zero_stage)


def check_backend(accelerator: Any) -> None:
    """Refuse ways of saving that cannot be committed.

    Args:
        accelerator: Accelerate's.

    Raises:
        UsageError: names the setting.
    """
    refused: dict[str, tuple[Any, str]] = {}
    if (backend := backend_of(accelerator)) == "FSDP":
        version = accelerator.state.fsdp_plugin.fsdp_version
        refused["FSDP1"] = version == 1, "it was not tried: use FSDP2 (fsdp_version=2)"
    if backend == "DeepSpeed":
        config: Mapping[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
        saving = config.get("checkpoint") or {}
        refused |= {
            "checkpoint.writer of DeepSpeed": (saving.get("writer"), "leave it out: it writes after the save"),
            "datastates_ckpt of DeepSpeed": (config.get("datastates_ckpt"), "leave it out: it writes after the save"),
            "checkpoint.use_node_local_storage of DeepSpeed": (
                saving.get("use_node_local_storage"),
                "leave it out, and save to a directory that every rank sees, or with stage_to= to a disk of each node",
            ),
            "checkpoint.load_universal of DeepSpeed": (
                saving.get("load_universal"),
                "leave it out, and start on as many ranks as saved the checkpoint",
            ),
        }
    refuse(refused, expected="not set")


def check_loadable(
    accelerator: Any, tag_dir: Path, before: Topology | None, *, written: Written, begin_anew: str
) -> None:
    """Refuse a checkpoint that this back-end would not load completely.

    Args:
        accelerator: the one that is to load it.
        tag_dir: ``checkpoint-N``.
        before: how the run was laid out when it saved; None if unknown.
        written: how to tell the checkpoints of each back-end.
        begin_anew: how to load only the weights.

    Raises:
        CheckpointError: another back-end wrote it; it has no optimizer; or ZeRO partitioned it over other ranks.
    """
    now = backend_of(accelerator)
    wrote = next((name for name, (patterns, _) in written.items() if any(any(tag_dir.glob(p)) for p in patterns)), None)
    if now != wrote:
        raise CheckpointError(
            f"the checkpoint was not written with {now}" if wrote else "the checkpoint has no optimizer",
            found=f"{tag_dir}, written with {wrote}" if wrote else f"{tag_dir}, written with save_only_model",
            expected=f"one that was written with {now}",
            cause="the state of the optimizer would not be loaded",
            action=f"train with {written[wrote][1]}; or {begin_anew}" if wrote else begin_anew,
        )
    facts.check_ranks(zero_stage(accelerator), before, accelerator.num_processes, tag_dir.name, begin_anew=begin_anew)


def expected_files(accelerator: Any, save_dir: Path, tag: str, *, inner: Callable[[Any], str]) -> list[str] | None:
    """The files that this rank writes into a checkpoint; None if not known in advance.

    Args:
        accelerator: Accelerate's.
        save_dir, tag: the checkpoint's.
        inner: returns, for the engine, the directory inside the checkpoint that DeepSpeed writes to.
    """
    if (engine := engine_of(accelerator)) is None:
        return None
    name = inner(engine)
    return [f"{name}/{file}" for file in facts.expected_files(engine, str(save_dir / tag), name)]
