"""Saving and loading through the engine, with the calls and the two pointers of Megatron-DeepSpeed."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.global_vars import get_args


def check_checkpoint_args(checkpoint_args: Any) -> None:
    assert get_args().seq_length == checkpoint_args.seq_length


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    return int(Path(tracker_filename).read_text()), False


def save_checkpoint(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    args = get_args()
    state_dict = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    model[0].save_checkpoint(args.save, client_state=state_dict)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(args.save, "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load") -> int:
    args = get_args()
    load_dir = getattr(args, load_arg)
    only = {"load_optimizer_states": False, "load_lr_scheduler_states": False, "load_module_only": True}
    loaded_dir, state_dict = model[0].load_checkpoint(
        load_dir, load_module_strict=True, tag=args.load_tag, **(only if args.finetune else {})
    )
    if loaded_dir is None:
        print(f"WARNING: could not find the metadata file {load_dir}", flush=True)
        return 0
    if args.finetune or args.reset_iteration:
        model[0].global_steps = 0
        return 0
    check_checkpoint_args(state_dict["args"])
    args.consumed_train_samples = state_dict["args"].consumed_train_samples
    return int(state_dict["iteration"])
