"""How many samples a resumed run needs, where Megatron asks for too few.

Megatron asks for what a whole run of today's flags takes (``train_iters * global_batch_size``), and begins at
``consumed_train_samples``. A run that took larger global batches so far, or evaluated more often, would come to the
end of its datasets before the end of its steps, and die there with a bare ``StopIteration``.

What is asked for is raised by what was consumed beyond these flags, so nothing is added where nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaresume.integrations.megatron.schedule import schedule_from_args

__all__ = ["needed_sizes"]


def needed_sizes(args: Any, project: Any, asked: Sequence[int | None]) -> tuple[int | None, ...]:
    """Samples of the train, validation and test set that last until the end of the run.

    Args:
        args: Megatron's arguments, after a checkpoint was loaded.
        project: which Megatron; None: what is known from the arguments alone.
        asked: what a builder is asked for; None (one epoch) and 0 (no such set) stay.

    Raises:
        UsageError: a schedule of batch sizes that Megatron would refuse too.
    """
    # --skip-train evaluates from sample 0 on; the cyclic sampler goes round, and shuffles by the size.
    if getattr(args, "skip_train", False) or getattr(args, "dataloader_type", None) == "cyclic":
        return tuple(asked)
    extra = (_train(args, project), _valid(args), 0)
    return tuple(size + more if size else size for size, more in zip(asked, extra, strict=True))


def _train(args: Any, project: Any) -> int:
    # With --train-samples, Megatron-LM derives the number of iterations before the data is built, and counts them.
    iterations = getattr(args, "train_iters", None)
    if not iterations:
        return 0
    consumed, left = _number(args, "consumed_train_samples"), max(int(iterations) - _number(args, "iteration"), 0)
    planned = _number(args, "train_samples") or int(iterations) * int(args.global_batch_size)
    return max(schedule_from_args(args, project).after(consumed, left) - planned, 0)


def _valid(args: Any) -> int:
    interval, iterations = _number(args, "eval_interval"), _number(args, "train_iters")
    if not interval or not iterations:
        return 0
    passed = min(_number(args, "iteration"), iterations) // interval
    passed = max(passed - _number(args, "start_eval_at_iter") // interval, 0)
    size = _number(args, "eval_global_batch_size") or int(args.global_batch_size)
    return max(_number(args, "consumed_valid_samples") - passed * _number(args, "eval_iters") * size, 0)


def _number(args: Any, name: str) -> int:
    return int(getattr(args, name, None) or 0)
