"""The main loop, in the shape of Megatron-DeepSpeed's: load, build the data, train, save."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from megatron.arguments import parse_args
from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.core import parallel_state
from megatron.data.data_samplers import MegatronPretrainingSampler
from megatron.global_vars import get_args, set_args

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def pretrain(provider: Callable[[list[int]], Any], model_provider: Callable[[], torch.nn.Module]) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    parallel_state.initialize_model_parallel()
    set_args(parse_args())
    args = get_args()
    config = {
        "train_micro_batch_size_per_gpu": int(os.environ.get("MINI_ENGINE_MICRO_BATCH", args.micro_batch_size)),
        "train_batch_size": args.global_batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": args.zero_stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
        "checkpoint": {"load_universal": args.universal_checkpoint},
        "steps_per_print": 1 << 40,
    }
    torch.manual_seed(1)
    model = model_provider()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    args.iteration = load_checkpoint([engine], None, None) if args.load else 0
    iterator, _, _ = build_train_valid_test_data_iterators(provider)
    train(engine, iterator)
    dist.destroy_process_group()


def build_train_valid_test_data_iterators(provider: Callable[[list[int]], Any]) -> tuple[Any, Any, Any]:
    args = get_args()
    total = args.train_iters * args.global_batch_size
    datasets = provider([total, 0, 0])
    sampler = MegatronPretrainingSampler(
        total_samples=len(datasets[0]),
        consumed_samples=args.consumed_train_samples,
        micro_batch_size=args.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )
    loader = torch.utils.data.DataLoader(datasets[0], batch_sampler=sampler, num_workers=args.num_workers)
    return iter(loader) if args.consumed_train_samples < total else None, None, None


def train(engine: Any, iterator: Iterator[Any]) -> None:
    args, iteration = get_args(), get_args().iteration
    with open(f"{args.log}.{dist.get_rank()}", "a", encoding="utf-8") as log:
        while iteration < args.train_iters:
            for _ in range(engine.gradient_accumulation_steps()):
                text = next(iterator)["text"]
                rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:12] for row in text]
                print(json.dumps([args.consumed_train_samples, rows]), file=log, flush=True)
                engine.backward(engine(text[:, :-1].float() / 256.0).pow(2).mean())
                engine.step()
            iteration += 1
            args.consumed_train_samples += args.global_batch_size
            if args.save and iteration % args.save_interval == 0:
                save_checkpoint(iteration, [engine], None, None)
