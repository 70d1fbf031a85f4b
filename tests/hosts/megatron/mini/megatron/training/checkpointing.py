import os
import shutil
import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.num_microbatches_calculator import update_num_microbatches

from .async_utils import is_empty_async_queue, schedule_async_save
from .global_vars import get_args
from .mini import kill_if, outlive_if
from .utils import print_rank_0


def get_checkpoint_tracker_filename(checkpoints_path):
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def checkpoint_exists(checkpoints_path):
    return checkpoints_path is not None and os.path.isfile(get_checkpoint_tracker_filename(checkpoints_path))


def get_checkpoint_name(checkpoints_path, iteration, release=False):
    return os.path.join(checkpoints_path, "release" if release else f"iter_{iteration:07d}")


def _legacy_file(checkpoint_name):
    tp, pp = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    several = mpu.get_pipeline_model_parallel_world_size() > 1
    return os.path.join(checkpoint_name, f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if several else ""), "model_optim_rng.pt")


def read_metadata(tracker_filename):
    iteration, release = 0, False
    with open(tracker_filename) as file:
        text = file.read().strip()
    try:
        iteration = int(text)
    except ValueError:
        release = text == "release"
        if not release:
            print_rank_0(f"ERROR: Invalid metadata file {tracker_filename}. Exiting")
            sys.exit()
    assert iteration > 0 or release, f"error parsing metadata file {tracker_filename}"
    newest = torch.tensor([iteration])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(newest, op=torch.distributed.ReduceOp.MAX)
    return int(newest.item()), release


def check_checkpoint_args(checkpoint_args):
    args = get_args()
    for name in ("seq_length", "vocab_size"):
        assert getattr(args, name) == getattr(checkpoint_args, name), name


def generate_state_dict(args, model, iteration=None, sharded=False):
    """What a checkpoint holds. Pipeline stages train copies of the model, so that stage 0's is the one that counts."""
    weights = dict(model[0].state_dict())
    if sharded:
        replica = (torch.distributed.get_rank(), 0, 0)
        weights = {name: ShardedTensor.from_rank_offsets(name, w, replica_id=replica) for name, w in weights.items()}
    state = {"args": args, "checkpoint_version": 3.0, "model": weights}
    if iteration is not None:
        state["iteration"] = iteration
    return state


def save_checkpoint(
    iteration,
    model,
    optimizer,
    opt_param_scheduler,
    num_floating_point_operations_so_far,
    checkpointing_context=None,
    non_persistent_ckpt=False,
    train_data_iterator=None,
    preprocess_common_state_dict_fn=None,
    release=False,
):
    args = get_args()
    save_dir = args.save
    if non_persistent_ckpt:
        save_dir = args.non_persistent_global_ckpt_dir or os.path.join(save_dir, "non_persistent")
        cleanup_old_non_persistent_checkpoint(save_dir)
    checkpoint_name = get_checkpoint_name(save_dir, iteration, release)
    print_rank_0(f"saving checkpoint at iteration {iteration:7d} to {save_dir} in {args.ckpt_format} format")
    request = None
    if args.ckpt_format == "torch":
        if mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
            path = _legacy_file(checkpoint_name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            state = generate_state_dict(args, model, iteration)
            torch.save(state | {"num_floating_point_operations_so_far": num_floating_point_operations_so_far}, path)
    else:
        state = generate_state_dict(args, model, iteration, sharded=True)
        state["num_floating_point_operations_so_far"] = num_floating_point_operations_so_far
        if torch.distributed.get_rank() == 0:
            os.makedirs(checkpoint_name, exist_ok=True)
        torch.distributed.barrier()
        outlive_if(iteration)
        request = dist_checkpointing.save(
            state,
            checkpoint_name,
            async_sharded_save=bool(args.async_save),
            preprocess_common_before_consistancy_check=preprocess_common_state_dict_fn,
        )
    kill_if("files", iteration)
    if not args.async_save:
        torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        tracker_filename = get_checkpoint_tracker_filename(save_dir)

        def iter_finalize_fn():
            with open(tracker_filename, "w") as file:
                file.write("release" if release else str(iteration))
            print_rank_0(f"  successfully saved checkpoint from iteration {iteration:7d} to {save_dir}")
            kill_if("tracker", iteration)

        if args.async_save:
            request.add_finalize_fn(iter_finalize_fn)
        else:
            iter_finalize_fn()
    if args.async_save:
        schedule_async_save(request)
        print_rank_0(f"  scheduled an async checkpoint save at iteration {iteration:7d} to {save_dir}")
    torch.distributed.barrier()


def cleanup_old_non_persistent_checkpoint(save_dir, leave_ckpt_num=1):
    """As upstream: everything called iter_* anywhere below is a checkpoint, whose name ends in its number."""
    if torch.distributed.get_rank() == 0:
        found = sorted(Path(save_dir).rglob("iter_*"), key=lambda path: int(path.name[len("iter_") :]))
        for path in found[:-leave_ckpt_num]:
            shutil.rmtree(path)


def _load_base_checkpoint(load_dir, args, model, rank0=False):
    """(state, release), or (None, False) where there is no checkpoint."""
    iteration, release = -1, False
    directory = load_dir
    tracker = None
    if load_dir is not None:
        tracker = get_checkpoint_tracker_filename(load_dir)
        if os.path.isfile(tracker):
            iteration, release = read_metadata(tracker)
    if args.ckpt_step:
        iteration = args.ckpt_step
    if args.non_persistent_ckpt_type == "global" and load_dir is not None:
        other = args.non_persistent_global_ckpt_dir or os.path.join(load_dir, "non_persistent")
        if os.path.isfile(get_checkpoint_tracker_filename(other)):
            newest, _ = read_metadata(get_checkpoint_tracker_filename(other))
            if newest >= iteration:
                iteration, directory = newest, other
    if iteration == -1:
        print_rank_0(f"WARNING: could not find the metadata file {tracker}")
        print_rank_0("    will not load any checkpoints and will start from random")
        if args.exit_on_missing_checkpoint:
            print_rank_0(">> '--exit-on-missing-checkpoint' set ... exiting. <<")
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            sys.exit()
        return None, False
    checkpoint_name = get_checkpoint_name(directory, iteration, release)
    if dist_checkpointing.check_is_distributed_checkpoint(checkpoint_name):
        if rank0:
            return dist_checkpointing.load_common_state_dict(checkpoint_name), release
        return dist_checkpointing.load(generate_state_dict(args, model, sharded=True), checkpoint_name), release
    return torch.load(_legacy_file(checkpoint_name), map_location="cpu", weights_only=False), release


def load_checkpoint(
    ddp_model, optimizer, opt_param_scheduler, load_arg="load", strict=True, checkpointing_context=None
):
    args = get_args()
    load_dir = getattr(args, load_arg)
    if args.pretrained_checkpoint is not None and not checkpoint_exists(load_dir):
        load_dir = args.pretrained_checkpoint
        args.finetune = True
    if args.ckpt_format == "torch_dist":
        _load_base_checkpoint(load_dir, args, ddp_model, rank0=True)
    state_dict, release = _load_base_checkpoint(load_dir, args, ddp_model)
    if state_dict is None:
        return 0, 0
    if args.override_ckpt_iteration is not None:
        state_dict["iteration"] = args.override_ckpt_iteration
        state_dict["args"].consumed_train_samples = args.override_ckpt_iteration * args.global_batch_size
    iteration = 0 if args.finetune or release else state_dict["iteration"]
    if "args" in state_dict and not args.finetune:
        checkpoint_args = state_dict["args"]
        check_checkpoint_args(checkpoint_args)
        args.consumed_train_samples = getattr(checkpoint_args, "consumed_train_samples", 0)
        args.skipped_train_samples = getattr(checkpoint_args, "skipped_train_samples", 0)
        update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
        args.consumed_valid_samples = getattr(checkpoint_args, "consumed_valid_samples", 0)
    else:
        print_rank_0("could not find arguments in the checkpoint ...")
    ddp_model[0].load_state_dict(state_dict["model"], strict=strict)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    print_rank_0(f"  successfully loaded checkpoint from {load_dir} at iteration {iteration}")
    return iteration, state_dict.get("num_floating_point_operations_so_far", 0)


__all__ = ["is_empty_async_queue", "load_checkpoint", "save_checkpoint"]
