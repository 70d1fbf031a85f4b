"""Command line, in the shape of Megatron-DeepSpeed's."""

import argparse

import torch.distributed as dist


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--universal-checkpoint", action="store_true")
    parser.add_argument("--seed", type=int, default=1234)
    for flag in ("--train-iters", "--seq-length", "--micro-batch-size", "--global-batch-size", "--save-interval"):
        parser.add_argument(flag, type=int)
    for flag in ("--save", "--load", "--load-tag", "--log"):
        parser.add_argument(flag)
    for flag in ("--finetune", "--reset-iteration"):
        parser.add_argument(flag, action="store_true")
    parser = _add_data_args(parser)
    return validate_args(parser.parse_args())


def validate_args(args: argparse.Namespace) -> argparse.Namespace:
    args.deepspeed = True
    args.consumed_train_samples = args.consumed_valid_samples = args.iteration = 0
    args.data_parallel_size = args.world_size = dist.get_world_size()
    args.eval_iters, args.eval_interval, args.train_samples, args.rampup_batch_size = 0, 1000, None, None
    return args


def _add_data_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("data")
    group.add_argument("--data-path", nargs="*")
    group.add_argument("--split", default="969,30,1")
    group.add_argument("--num-workers", type=int, default=0)
    group.add_argument("--dataloader-type", default="single")
    return parser
