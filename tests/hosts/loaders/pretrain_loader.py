"""A training script with a loader of its own, for the stand-in of Megatron's training package."""

import json
import os
import sys
from pathlib import Path

os.environ["MINI_SHAPE"] = "0.17"
sys.path.insert(0, str(Path(__file__).parent.parent / "megatron" / "mini"))

import torch
from megatron.core import mpu
from megatron.training import pretrain
from megatron.training.global_vars import get_args
from mini_model import ModelType, forward_step, is_dataset_built_on_rank, model_provider
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import megaresume


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        tokens = (torch.arange(9) * (i + 1)) % 60
        ones = torch.ones(8)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": ones, "position_ids": torch.arange(8)}


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    if not is_dataset_built_on_rank():
        return None, None, None
    args, data = get_args(), Numbers()
    size, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    if "OURS" in os.environ:
        batch = args.micro_batch_size
        steps = args.global_batch_size // (batch * size)
        options = {"num_workers": args.num_workers, "dp_rank": rank, "dp_size": size} | json.loads(os.environ["OURS"])
        return megaresume.DataLoader(data, **{"batch_size": batch, "accumulation": steps} | options), None, None
    sampler = StatefulDistributedSampler(data, num_replicas=size, rank=rank, seed=9)
    batch = args.micro_batch_size
    loader = StatefulDataLoader(data, batch_size=batch, sampler=sampler, num_workers=args.num_workers, drop_last=True)
    return loader, None, None


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    provider = megaresume.provider(train_valid_test_datasets_provider)
    pretrain(provider, model_provider, ModelType.encoder_or_decoder, forward_step, args_defaults={})
