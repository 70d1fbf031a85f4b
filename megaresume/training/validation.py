"""Validation on the same samples every time: the first of each validation set, whatever was trained and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from megatron.core import parallel_state

from megaresume.loading.batch import Batch
from megaresume.loading.loader import StreamLoader
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.stream import Stream
from megaresume.training.logging import Measured
from megaresume.training.loss import LossMeter

__all__ = ["Validation"]


class Validation:
    """Measures the loss on ``num_batches`` global batches from sample 0 of every set.

    Args:
        sets: name -> stream (`megaresume.loading.validation`).
        num_batches: global batches of each.
        global_batch_size: samples; the final one, so that a ramp-up does not change what is measured.
        micro_batch_size: samples of a rank in one forward pass.
        pin_memory: page-locked batches.
    """

    def __init__(
        self,
        sets: Mapping[str, Stream],
        *,
        num_batches: int,
        global_batch_size: int,
        micro_batch_size: int,
        pin_memory: bool,
    ) -> None:
        self._samples = num_batches * global_batch_size
        self._loaders = {
            name: StreamLoader(
                stream,
                BatchSchedule.constant(global_batch_size),
                micro_batch_size=micro_batch_size,
                dp_rank=parallel_state.get_data_parallel_rank(),
                dp_size=parallel_state.get_data_parallel_world_size(),
                start=0,
                stop=self._samples,
                pin_memory=pin_memory,
            )
            for name, stream in sets.items()
        }

    def measure(
        self,
        model: torch.nn.Module,
        token_losses: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
    ) -> dict[str, Measured]:
        """Each set by name: loss per token over all samples; the model is back in training mode after it.

        Args:
            model: what is measured.
            token_losses: batch -> (float[m, S] losses, float32[m, S] loss mask).
            device: of the model.
        """
        model.eval()
        found = {}
        with torch.no_grad():
            for name, loader in self._loaders.items():
                meter = LossMeter(device)
                batches: Iterator[Batch] = iter(loader)
                for batch in batches:
                    meter.add(*token_losses(batch))
                loss, tokens = meter.reduce(parallel_state.get_data_parallel_group())
                digest = loader.stream.digest_at(self._samples)
                found[name] = Measured(loss=loss, tokens=tokens, digest=digest)
        model.train()
        return found
