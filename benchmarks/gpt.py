"""The baseline: megatron-core's `GPTDataset`, blended over the same corpora and loaded the way Megatron-LM does."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.corpora import END_OF_DOCUMENT, SEQ_LENGTH, VOCABULARY, WEIGHTS


class Tokenizer:
    """What `GPTDatasetConfig` asks of a tokenizer."""

    vocab_size = VOCABULARY
    eod = END_OF_DOCUMENT
    pad = -1
    unique_identifiers: Mapping[str, Any] = {"class": "Tokenizer"}


def build(paths: Mapping[str, Path], num_samples: int, *, apart: bool = False, seq_length: int = SEQ_LENGTH) -> Any:
    """The blend of the corpora, by `BlendedMegatronDatasetBuilder`. Builds the indexes, or loads what is there.

    Args:
        paths: name -> prefix, the three sources of `WEIGHTS`.
        num_samples: samples of the run; the indexes hold as many.
        apart: keep documents apart as our batches do: position ids start again, no loss after the end of a document.
            Without it loss masks and position ids are made once and reused, which is the fastest that it can do.
        seq_length: tokens of a sample.
    """
    blend = [str(path) for path in paths.values()], list(WEIGHTS.values())
    return _build(blend, num_samples, seq_length, apart)


def build_one(path: Path, seq_length: int, num_samples: int) -> Any:
    """The `GPTDataset` of one corpus."""
    return _build(([str(path)], None), num_samples, seq_length, apart=False)


def _build(blend: tuple[list[str], list[float] | None], num_samples: int, seq_length: int, apart: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    logging.getLogger("megatron").setLevel(logging.ERROR)
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=blend,
        split="1,0,0",
        tokenizer=Tokenizer(),
        reset_position_ids=apart,
        reset_attention_mask=False,
        eod_mask_loss=apart,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, config)
    return builder.build()[0]


def forget_index(paths: Mapping[str, Path]) -> None:
    """Remove the indexes that `build` cached beside the corpora."""
    for path in paths.values():
        shutil.rmtree(path / "cache", ignore_errors=True)


class Sampler:
    """Megatron-LM's ``MegatronPretrainingSampler`` (megatron/legacy/data/data_samplers.py) on one rank."""

    def __init__(self, first: int, stop: int, micro_batch_size: int) -> None:
        self.first, self.stop, self.micro_batch_size = first, stop, micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.first, self.stop):
            batch.append(index)
            if len(batch) == self.micro_batch_size:
                yield batch
                batch = []
