import torch
from megatron.core import mpu

from megatron.training.global_vars import get_args


def build_pretraining_data_loader(dataset, consumed_samples):
    if dataset is None:
        return None
    args = get_args()
    if args.dataloader_type == "external":
        return dataset
    shape = dict(
        total_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=args.micro_batch_size,
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_size=mpu.get_data_parallel_world_size(),
    )
    kind = MegatronPretrainingSampler if args.dataloader_type == "single" else MegatronPretrainingRandomSampler
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=kind(**shape),
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
    )


class MegatronPretrainingSampler:
    """Rank r of D takes the samples c + r*m .. + m of every run of D*m samples, from c = consumed on."""

    def __init__(self, total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size):
        assert consumed_samples < total_samples, f"no samples left: {consumed_samples} of {total_samples}"
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.data_parallel_rank = micro_batch_size, data_parallel_rank
        self.stride = micro_batch_size * data_parallel_size

    def __len__(self):
        return self.total_samples

    def __iter__(self):
        for first in range(self.consumed_samples, self.total_samples - self.stride + 1, self.stride):
            begin = first + self.data_parallel_rank * self.micro_batch_size
            yield list(range(begin, begin + self.micro_batch_size))


class MegatronPretrainingRandomSampler(MegatronPretrainingSampler):
    """A permutation of each epoch, dealt out in buckets by data-parallel rank: another order on other ranks."""

    def __iter__(self):
        usable = self.total_samples - self.total_samples % self.stride
        epoch, done = divmod(self.consumed_samples, usable)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        per_rank = usable // self.stride * self.micro_batch_size
        order = torch.randperm(per_rank, generator=generator).tolist()[done // (self.stride // self.micro_batch_size) :]
        order = [self.data_parallel_rank * per_rank + i for i in order]
        for begin in range(0, len(order) - self.micro_batch_size + 1, self.micro_batch_size):
            self.consumed_samples += self.stride
            yield order[begin : begin + self.micro_batch_size]
