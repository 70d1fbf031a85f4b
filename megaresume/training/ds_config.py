"""The DeepSpeed config that the flags mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megaresume.stream.errors import UsageError
from megaresume.training.arguments import Arguments

__all__ = ["deepspeed_config"]


#: DeepSpeed's own default, in elements: 2 GB a rank in float32, whatever the size of the model.
_BUCKET = 500_000_000


def deepspeed_config(args: Arguments, *, global_batch_size: int, num_parameters: int) -> dict[str, Any]:
    """Build the config for ``deepspeed.initialize``.

    Args:
        args: the flags; ``deepspeed_config`` names a file to start from.
        global_batch_size: samples of the first step.
        num_parameters: of this rank's model; no buffer needs to be larger.

    Raises:
        UsageError: the file cannot be read, or says something else than a flag.
    """
    ours: dict[str, Any] = {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": args.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }
    if args.bf16:
        ours["bf16"] = {"enabled": True}
    if args.fp16:
        ours["fp16"] = {"enabled": True}
    if args.universal_checkpoint:
        ours["checkpoint"] = {"load_universal": True}
    config = ours if args.deepspeed_config is None else _merge(_read(args.deepspeed_config), ours, where="")
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        config["zero_optimization"].setdefault(bucket, min(_BUCKET, max(num_parameters, 1)))
    return config


def _read(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read --deepspeed-config {path}", found=str(error), expected="JSON") from error
    if not isinstance(config, dict):
        raise UsageError(f"--deepspeed-config {path} is not a DeepSpeed config", found=type(config).__name__)
    # The optimizer and its schedule are the program's; batch sizes are flags.
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise UsageError(
                f"the DeepSpeed config has its own {key}",
                found=f"{key} in {path}",
                expected="--lr, --lr-decay-style, --weight-decay and so on",
                action=f"remove {key} from the file",
            )
    return config


def _merge(base: dict[str, Any], ours: dict[str, Any], *, where: str) -> dict[str, Any]:
    merged = dict(base)
    for key, value in ours.items():
        name = f"{where}.{key}" if where else key
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value, where=name)
        elif key in merged and merged[key] not in (value, "auto"):
            raise UsageError(
                "the DeepSpeed config and the flags disagree",
                found=f"{name} is {merged[key]!r} in the file, {value!r} by the flags",
                expected="the same, or 'auto' in the file",
                action=f"remove {name} from the file, or change the flag",
            )
        else:
            merged[key] = value
    return merged
