"""Corpora, arguments and Megatron's sampler for the tests of the provider."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

EOD = 0
VOCABULARY = 50_000


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    """A corpus written by megatron-core."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.tensor(list(document), dtype=torch.int32), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def documents(seed: int, num: int, *, low: int = 1, high: int = 90) -> list[list[int]]:
    """Documents of 1 to 90 tokens that end with EOD, which is nowhere else in them."""
    rng = np.random.default_rng(seed)
    return [
        [*rng.integers(1, VOCABULARY, length - 1).tolist(), EOD] for length in rng.integers(low, high, num).tolist()
    ]


def arguments(**changes: Any) -> argparse.Namespace:
    """What Megatron-LM's parser (core 0.16) gives for what the provider reads."""
    args = argparse.Namespace(
        seed=1234,
        seq_length=64,
        split=None,
        data_path=None,
        data_args_path=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        per_split_data_args_path=None,
        mock_data=False,
        sft=False,
        fim_data=False,
        perform_rl_step=False,
        full_validation=False,
        multiple_validation_sets=False,
        hybrid_context_parallel=False,
        phase_transition_iterations=None,
        dataloader_type="single",
        num_workers=0,
        micro_batch_size=2,
        global_batch_size=8,
        train_iters=20,
        train_samples=None,
        eval_iters=2,
        eval_interval=10,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask_in_dataloader=True,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        transformer_impl="transformer_engine",
    )
    for name, value in changes.items():
        setattr(args, name, value)
    return args


class Sampler:
    """Megatron's `MegatronPretrainingSampler`, as it stands in 0.8 to 0.19."""

    def __init__(self, total: int, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        assert consumed < total, f"no samples left to consume: {consumed}, {total}"
        self.total, self.consumed, self.size = total, consumed, micro_batch_size
        self.rank, self.stride = dp_rank, micro_batch_size * dp_size

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.consumed, self.total):
            batch.append(index)
            if len(batch) == self.stride:
                yield batch[self.rank * self.size : (self.rank + 1) * self.size]
                batch = []
