"""Exact data resume for a training loop with Hugging Face's Accelerate.

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loop = megaresume.attach(accelerator, loader)
    accelerator.load_state()
    for batch in loop:
        with accelerator.accumulate(model):
            ...
            optimizer.step()
        if loop.step % 100 == 0: accelerator.save_state()
    loop.finish()

See docs/accelerate.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.checkpoint.session.stopping import StopConditions
from megaresume.hosts.hugging_face.accelerated_loop import AcceleratedLoop, AcceleratorHost
from megaresume.hosts.hugging_face.backends import check_backend
from megaresume.hosts.instances import SLOT, check_new, refuse
from megaresume.hosts.torch.feeds import feed_of
from megaresume.hosts.torch.loop import check_checkpoints, open_session
from megaresume.hosts.torch.steps import Steps, words_of
from megaresume.stream.errors import UsageError


def attach(
    accelerator: Any,
    data: DataLoader | StreamLoader,
    *,
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
) -> AcceleratedLoop:
    """Give a loop with Accelerate its data in an exact order, and its checkpoints the state of that data. Call it on
    every rank, after ``accelerator.prepare`` and ``register_for_checkpointing``, and before ``load_state``.

    Args:
        accelerator: Accelerate's.
        data: not prepared: a `DataLoader`, or a `StreamLoader`.
        checkpoints: where the run saves, what it keeps, and so on. ``save_dir`` and ``keep_last`` may be left to
            ``ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=...)``.
        stop: when to save and exit, with `megaresume.Stopped`.

    Returns:
        what the loop iterates over.

    Raises, on every rank:
        UsageError: nothing is prepared, or a setting under which the data would be other data, by name.
        CheckpointError: another job writes to the directory.
    """
    feed = on_all_ranks(lambda: feed_of(data))
    on_all_ranks(lambda: check_accelerator(accelerator, data))
    checkpoints = on_all_ranks(lambda: _with_naming(checkpoints, accelerator.project_configuration))
    steps = Steps(feed, words_of(clock="optimizer.step()"))
    host = AcceleratorHost(accelerator, steps)
    session = steps.session = open_session(host, feed, checkpoints, accelerator.device, stop, lambda: loop.save())
    loop = AcceleratedLoop(host, session)
    setattr(accelerator, SLOT, loop)
    return loop


def check_accelerator(accelerator: Any, loader: DataLoader | StreamLoader) -> None:
    """Refuse what would be other data, or is not known to work.

    Raises:
        UsageError: naming the setting, and the way out.
    """
    check_new(accelerator, "Accelerator")
    if not accelerator._optimizers:
        raise UsageError(
            "nothing is prepared yet",
            found="no optimizer of this Accelerator",
            expected="model and optimizer = accelerator.prepare(model, optimizer), and megaresume.attach after it",
            action="call megaresume.attach after the last accelerator.prepare",
        )
    accumulation = getattr(loader, "accumulation", accelerator.gradient_accumulation_steps)
    ranks = f"rank {accelerator.process_index} of {accelerator.num_processes}"
    own = f"rank {loader.dp_rank} of {loader.dp_size}"
    kind = str(accelerator.distributed_type).removeprefix("DistributedType.")
    leave = "leave it out"
    refused = {
        "split_batches": (accelerator.split_batches, f"{leave}, and divide the batch size by the number of ranks"),
        "dispatch_batches": (accelerator.dispatch_batches, f"{leave}: every rank reads its own items"),
        "sync_with_dataloader=False": (
            not accelerator.gradient_state.sync_with_dataloader,
            f"{leave}: a step ends with its last micro-batch",
        ),
        "a loader of other ranks": (
            own != ranks and f"{own}; the Accelerator's is {ranks}",
            "leave dp_rank and dp_size out, and make the loader after the Accelerator",
        ),
        "gradient_accumulation_steps other than the loader's": (
            accumulation != accelerator.gradient_accumulation_steps
            and f"{accelerator.gradient_accumulation_steps}, and accumulation={accumulation}",
            "give DataLoader(accumulation=...) and Accelerator(gradient_accumulation_steps=...) the same number",
        ),
        "this way to train on several devices": (
            kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED") and kind,
            "train with DDP, FSDP2 or DeepSpeed",
        ),
        "several models under DeepSpeed": (
            kind == "DEEPSPEED" and len(accelerator._models) > 1 and f"{len(accelerator._models)} engines",
            "one engine that trains; what does not train need not be prepared",
        ),
        "tensor, context or sequence parallelism": (
            getattr(accelerator.parallelism_config, "non_data_parallel_size", 1) > 1,
            "train with DDP, FSDP2 or DeepSpeed: these ranks need the same batches, and each would get its own",
        ),
    }
    refuse(refused)
    check_backend(accelerator)


def _with_naming(checkpoints: Checkpoints, naming: Any) -> Checkpoints:
    """With what Accelerate's own settings say of directory and retention."""
    if naming.automatic_checkpoint_naming:
        if checkpoints.save_dir is None and naming.project_dir is not None:
            checkpoints = replace(checkpoints, save_dir=Path(naming.project_dir) / "checkpoints")
        if checkpoints.keep_last is None and naming.total_limit is not None:
            checkpoints = replace(checkpoints, keep_last=naming.total_limit)
    action = "ProjectConfiguration(project_dir, automatic_checkpoint_naming=True), or Checkpoints(save_dir=...)"
    check_checkpoints(checkpoints, "Accelerate's", action)
    return checkpoints
