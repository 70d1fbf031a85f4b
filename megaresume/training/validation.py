"""Validation on the same samples every time: the first of the validation stream, whatever was trained and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state

from megaresume.loading.batch import Batch
from megaresume.loading.loader import StreamLoader
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.stream import Stream
from megaresume.training.loss import LossMeter

__all__ = ["Validation"]


class Validation:
    """Measures the loss on ``num_batches`` global batches from sample 0 of a stream.

    Args:
        stream: of the validation parts.
        num_batches: global batches.
        global_batch_size: samples; the final one, so that a ramp-up does not change what is measured.
        micro_batch_size: samples of a rank in one forward pass.
        pin_memory: page-locked batches.
    """

    def __init__(
        self, stream: Stream, *, num_batches: int, global_batch_size: int, micro_batch_size: int, pin_memory: bool
    ) -> None:
        self._batches = StreamLoader(
            stream,
            BatchSchedule.constant(global_batch_size),
            micro_batch_size=micro_batch_size,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            start=0,
            stop=num_batches * global_batch_size,
            pin_memory=pin_memory,
        )

    def measure(
        self,
        model: torch.nn.Module,
        token_losses: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
    ) -> tuple[float, int]:
        """Loss per token over all samples, and the number of tokens; the model is back in training mode after it.

        Args:
            model: what is measured.
            token_losses: batch -> (float[m, S] losses, float32[m, S] loss mask).
            device: of the model.
        """
        meter = LossMeter(device)
        model.eval()
        with torch.no_grad():
            batches: Iterator[Batch] = iter(self._batches)
            for batch in batches:
                meter.add(*token_losses(batch))
        model.train()
        return meter.reduce(parallel_state.get_data_parallel_group())
