import functools
import inspect
import os
import sys

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator, RerunState, get_rerun_state_machine

from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.global_vars import get_args, get_signal_handler
from megatron.training.initialize import initialize_megatron
from megatron.training.mini import kill_if, log_step
from megatron.training.utils import print_rank_0

#: which call shape of `pretrain` this process has; the scripts set it.
SHAPE = os.environ.get("MINI_SHAPE", "0.17")


def _pretrain(provider, model_provider, forward_step_func, extra_args_provider=None, args_defaults={}, parsed=False):
    initialize_megatron(extra_args_provider=extra_args_provider, args_defaults=args_defaults, parsed=parsed)
    args = get_args()
    model, optimizer = setup_model_and_optimizer(model_provider)
    if args.num_virtual_stages is not None:
        iterators = []
        for stage in range(args.num_virtual_stages):
            assert "vp_stage" in inspect.signature(provider).parameters
            part = functools.partial(provider, vp_stage=stage)
            if getattr(provider, "is_distributed", False):
                part.is_distributed = True
            iterators.append(build_train_valid_test_data_iterators(part))
        train_data_iterator, valid_data_iterator, test_data_iterator = map(list, zip(*iterators, strict=True))
    else:
        train_data_iterator, valid_data_iterator, test_data_iterator = build_train_valid_test_data_iterators(provider)
    iteration = args.iteration
    if args.do_train and not args.skip_train:
        iteration = train(forward_step_func, model, optimizer, train_data_iterator, valid_data_iterator)
        if args.save and iteration != 0 and iteration % (args.save_interval or 1) != 0:
            save_checkpoint(iteration, model, optimizer, None, 0, {}, train_data_iterator=train_data_iterator)
    maybe_finalize_async_save(blocking=True, terminate=True)
    print_rank_0(f"done at iteration {iteration}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def pretrain(
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    process_non_loss_data_func=None,
    extra_args_provider=None,
    args_defaults={},
):
    """The call shape up to 0.17."""
    _pretrain(train_valid_test_dataset_provider, model_provider, forward_step_func, extra_args_provider, args_defaults)


def _pretrain_0_18(
    cfg_container,
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    process_non_loss_data_func=None,
):
    _pretrain(train_valid_test_dataset_provider, model_provider, forward_step_func, parsed=True)


def _pretrain_from_0_19(
    cfg_container,
    train_valid_test_dataset_provider,
    model_type,
    forward_step_func,
    model_provider=None,
    process_non_loss_data_func=None,
):
    model_provider = model_provider or cfg_container.build_model
    _pretrain(train_valid_test_dataset_provider, model_provider, forward_step_func, parsed=True)


pretrain = {"0.18": _pretrain_0_18, "0.19": _pretrain_from_0_19}.get(SHAPE, pretrain)


def setup_model_and_optimizer(model_provider):
    args = get_args()
    chunks = args.num_virtual_stages or 1
    model = [model_provider() for _ in range(chunks)]
    optimizer = torch.optim.SGD(model[0].parameters(), lr=args.lr)
    if args.load is not None or args.pretrained_checkpoint is not None:
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(model, optimizer, None)
    else:
        args.iteration, args.num_floating_point_operations_so_far = 0, 0
    return model, optimizer


def get_train_valid_test_num_samples():
    args = get_args()
    train_samples = args.train_samples or args.train_iters * args.global_batch_size
    iters = args.train_iters or args.train_samples // args.global_batch_size
    eval_iters = (iters // args.eval_interval + 1) * args.eval_iters
    return train_samples, eval_iters * args.global_batch_size, args.eval_iters * args.global_batch_size


def build_train_valid_test_datasets(build_train_valid_test_datasets_provider):
    return build_train_valid_test_datasets_provider(get_train_valid_test_num_samples())


def build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider):
    args = get_args()
    train = valid = test = None
    if args.iteration > 0 and args.consumed_train_samples == 0:
        args.consumed_train_samples = args.iteration * args.global_batch_size
    is_distributed = getattr(build_train_valid_test_datasets_provider, "is_distributed", False)
    flags = torch.tensor([0, 0, 0])
    if is_distributed or mpu.get_tensor_model_parallel_rank() == 0:
        datasets = build_train_valid_test_datasets(build_train_valid_test_datasets_provider)
        train = build_pretraining_data_loader(datasets[0], args.consumed_train_samples)
        if args.eval_iters:
            valid = build_pretraining_data_loader(datasets[1], args.consumed_valid_samples)
            test = build_pretraining_data_loader(datasets[2], 0)
        flags = torch.tensor([int(part is not None) for part in (train, valid, test)])
    torch.distributed.broadcast(flags, 0)
    args.do_train, args.do_valid, args.do_test = (bool(flag) for flag in flags.tolist())
    return train, valid, test


def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider):
    args = get_args()
    loaders = build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider)

    def iterator(loader):
        if loader is None:
            return None
        if args.dataloader_type == "external":
            return RerunDataIterator(loader)
        return RerunDataIterator(iter(_cycled(loader)) if args.dataloader_type == "cyclic" else iter(loader))

    return tuple(iterator(loader) for loader in loaders)


def _cycled(loader):
    while True:
        yield from loader


#: what each chunk has read in the step.
read_in_step = []


def scheduled(forward_step_func, data_iterator, model, num_microbatches, forward_only=False):
    """The forward and backward passes of a step, by a schedule of megatron-core."""
    args = get_args()
    return get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=forward_only,
    )


def train_step(forward_step_func, iterators, model, optimizer, iteration):
    """One optimizer step; returns what Megatron does since 0.10: losses by name, ..., gradient norm, zeros in it."""
    args = get_args()
    if "MINI_SCHEDULE" in os.environ:
        optimizer.zero_grad()
        read_in_step[:] = []
        scheduled(forward_step_func, iterators, model, get_num_microbatches())
        optimizer.step()
        return {"lm loss": torch.zeros(())}, 0, False, False, 0, 0.0, None
    chunks = iterators if isinstance(iterators, list) else [iterators]
    read = read_in_step[:] = [[] for _ in chunks]
    optimizer.zero_grad()
    total = torch.zeros(())
    for _ in range(get_num_microbatches()):
        for chunk, data_iterator in enumerate(chunks):
            loss, hashes = forward_step_func(data_iterator, model[0])
            read[chunk].append(hashes)
            if chunk == 0:
                (loss / get_num_microbatches()).backward()
                total += loss.detach() / get_num_microbatches()
    if "MINI_FILL" in os.environ:
        maybe_finalize_async_save(blocking=True)  # the disk is filled before a save, not in the middle of another
    kill_if("step", iteration)
    if iteration == args.mini_rerun_at:
        return {}, 0, True, True, 16, None, None
    size = mpu.get_data_parallel_world_size()
    for weight in model[0].parameters():
        grad = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        torch.distributed.all_reduce(grad, group=mpu.get_data_parallel_group())
        weight.grad = grad / size
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model[0].parameters()])
    optimizer.step()
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
    return {"lm loss": total.double() / size}, 0, False, False, 0, float(norm), None


def train(forward_step_func, model, optimizer, train_data_iterator, valid_data_iterator):
    args = get_args()
    iteration = args.iteration

    def save(non_persistent=False):
        save_checkpoint(
            iteration,
            model,
            optimizer,
            None,
            0,
            {},
            non_persistent_ckpt=non_persistent,
            train_data_iterator=train_data_iterator,
        )

    while iteration < args.train_iters if args.train_iters else args.consumed_train_samples < args.train_samples:
        maybe_finalize_async_save(blocking=False)
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        size = mpu.get_data_parallel_world_size() * args.micro_batch_size * get_num_microbatches()
        # 0-based, as in releases before 0.17: the version is that of megatron.core
        if iteration in args.iterations_to_skip:
            for _ in range(get_num_microbatches()):
                if train_data_iterator is not None:
                    next(train_data_iterator)
            iteration += 1
            args.consumed_train_samples += size
            args.skipped_train_samples += size
            continue
        args.curr_iteration = iteration
        losses, *_ = train_step(forward_step_func, train_data_iterator, model, optimizer, iteration + 1)
        if not losses:
            get_rerun_state_machine().state = RerunState.WILL_RERUN_FROM_CHECKPOINT
            save()
            maybe_finalize_async_save(blocking=True)
            sys.exit(16)
        for chunk, micro in enumerate(read_in_step):
            if mpu.get_tensor_model_parallel_rank() == 0 and any(micro):
                log_step(
                    args.mini_log,
                    iteration=iteration + 1,
                    consumed=args.consumed_train_samples,
                    dp=mpu.get_data_parallel_rank(),
                    pp=mpu.get_pipeline_model_parallel_rank(),
                    cp=mpu.get_context_parallel_rank(),
                    chunk=chunk,
                    micro=micro,
                    loss=float(losses["lm loss"]),
                )
        iteration += 1
        args.consumed_train_samples += size
        stop = args.exit_signal_handler and any(get_signal_handler().signals_received())
        saved = False
        if args.save and args.save_interval and iteration % args.save_interval == 0:
            save()
            saved = True
        elif args.save and args.non_persistent_save_interval and iteration % args.non_persistent_save_interval == 0:
            save(non_persistent=True)
        leave = stop or (args.exit_interval and iteration % args.exit_interval == 0)
        if leave:
            if args.save and not saved:
                save()
            maybe_finalize_async_save(blocking=True)
            torch.distributed.barrier()
            sys.exit(0)
        if valid_data_iterator is not None and args.eval_iters and iteration % args.eval_interval == 0:
            evaluate(forward_step_func, valid_data_iterator, model, iteration)
    return iteration


def evaluate(forward_step_func, data_iterator, model, iteration):
    args = get_args()
    maybe_finalize_async_save(blocking=True)
    assert not args.mini_fail_in_evaluation
    if "MINI_SCHEDULE" in os.environ:
        with torch.no_grad():
            scheduled(forward_step_func, data_iterator, model, args.eval_iters * get_num_microbatches(), True)
        args.consumed_valid_samples += args.eval_iters * args.global_batch_size
        return
    chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    read = []
    with torch.no_grad():
        for _ in range(args.eval_iters * get_num_microbatches()):
            for chunk in chunks:
                read.append(forward_step_func(chunk, model[0])[1])
    args.consumed_valid_samples += args.eval_iters * args.global_batch_size
    if mpu.get_tensor_model_parallel_rank() == 0 and any(read):
        log_step(args.mini_log, valid=iteration, dp=mpu.get_data_parallel_rank(), micro=read)
