"""A user's script for the stand-in. DIE=latest: rank 0 is killed where the pointers would be written."""

import os
import signal

import torch
from megatron.global_vars import get_args
from megatron.training import pretrain


class Random(torch.utils.data.Dataset):
    """The user's own data."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"text": torch.randint(0, 256, (get_args().seq_length + 1,), generator=generator)}


def train_valid_test_datasets_provider(sizes: list[int]) -> tuple[Random, None, None]:
    return Random(sizes[0]), None, None


if os.environ.get("DIE") == "latest":
    from megaresume.checkpoint.save import commit

    commit.write_latest = lambda root, tag: os.kill(os.getpid(), signal.SIGKILL) if tag.endswith("8") else None

if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, lambda: torch.nn.Sequential(torch.nn.Linear(32, 1)))
