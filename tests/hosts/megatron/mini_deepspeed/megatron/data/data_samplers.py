"""The sequential sampler."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(kw_only=True)
class MegatronPretrainingSampler:
    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __iter__(self) -> Iterator[list[int]]:
        whole = self.micro_batch_size * self.data_parallel_size
        for first in range(self.consumed_samples, self.total_samples - whole + 1, whole):
            start = first + self.data_parallel_rank * self.micro_batch_size
            yield list(range(start, start + self.micro_batch_size))
