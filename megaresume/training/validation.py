"""Validation on the same samples every time: the first of each validation set, whatever was trained and how.

Held-out accuracy: the share of trained tokens that the model finds right, on the same samples every time.

Every answer is read with the true tokens before it (teacher forcing), and the likeliest token counts. What is right
is kept by token, so that a reader can look at some alone (digits, yes and no), with the first answers in full.

    {"event": "held_out", "step": 40, "right": 310, "tokens": 500, "by_token": {"48": [20, 35], ...},
     "answers": [{"sample": 0, "column": 0, "source": "held_out", "document": 7,
                  "expected": [51, 32, 49], "predicted": [51, 32, 55]}, ...]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaresume.batches.batch import Batch
from megaresume.batches.loader import StreamLoader
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.stream import Stream
from megaresume.training.logging import Measured
from megaresume.training.model import LossMeter

#: answers that are kept in full; tokens that are counted one by one.
_ANSWERS, _TOKENS = 24, 512


class HeldOut:
    """Measures on ``num_batches`` global batches from sample 0 of a stream.

    Args:
        stream: of the held-out data.
        num_batches: global batches.
        global_batch_size: samples.
        micro_batch_size: samples of a rank in one forward pass.
        vocab_size: token ids below this exist.
    """

    def __init__(
        self, stream: Stream, *, num_batches: int, global_batch_size: int, micro_batch_size: int, vocab_size: int
    ) -> None:
        self._stream, self._vocab_size = stream, vocab_size
        self._names = [source.name for source in stream.config.sources]
        self._batches = StreamLoader(
            stream,
            BatchSchedule.constant(global_batch_size),
            micro_batch_size=micro_batch_size,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            start=0,
            stop=num_batches * global_batch_size,
        )

    def measure(
        self, model: torch.nn.Module, logits: Callable[[Batch], torch.Tensor], device: torch.device
    ) -> dict[str, Any]:
        """The fields of the event, the same on all ranks; the model is back in training mode after it.

        Args:
            model: what is measured.
            logits: batch -> float[m, S, vocabulary].
            device: of the model.
        """
        # counts: int64[2, vocabulary], right and all by label.
        counts = torch.zeros(2, self._vocab_size, dtype=torch.int64)
        answers: list[dict[str, Any]] = []
        model.eval()
        with torch.no_grad():
            for batch in self._batches:
                predicted = logits(batch)[..., : self._vocab_size].argmax(dim=-1).cpu()
                labels, trained = batch["labels"], batch["loss_mask"] > 0
                counts[0] += torch.bincount(labels[trained & (predicted == labels)], minlength=self._vocab_size)
                counts[1] += torch.bincount(labels[trained], minlength=self._vocab_size)
                if len(answers) < _ANSWERS:
                    answers += self._answers(batch, predicted)
        model.train()
        group = parallel_state.get_data_parallel_group()
        counts = counts.to(device)
        dist.all_reduce(counts, group=group)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, answers, group=group)
        everything = sorted((a for part in gathered for a in part), key=lambda a: (a["sample"], a["column"]))
        right, total = counts.tolist()
        common = sorted(range(self._vocab_size), key=lambda token: -total[token])[:_TOKENS]
        return {
            "right": sum(right),
            "tokens": sum(total),
            "by_token": {str(token): [right[token], total[token]] for token in sorted(common) if total[token]},
            "answers": everything[:_ANSWERS],
        }

    def _answers(self, batch: Batch, predicted: torch.Tensor) -> list[dict[str, Any]]:
        """Of every document of the batch that has trained tokens."""
        found = []
        for row, sample in enumerate(batch["samples"].tolist()):
            bounds = batch["cu_seqlens"][row].tolist()
            # zip: after the last document there may be a segment of padding.
            for (source, _, document, *_), start, end in zip(
                self._stream.plan(sample, sample + 1).table.tolist(), bounds, bounds[1:], strict=False
            ):
                trained = batch["loss_mask"][row, start:end] > 0
                if trained.any():
                    found.append(
                        {
                            "sample": sample,
                            "column": start,
                            "source": self._names[source],
                            "document": document,
                            "expected": batch["labels"][row, start:end][trained].tolist(),
                            "predicted": predicted[row, start:end][trained].tolist(),
                        }
                    )
        return found


class Validation:
    """Measures the loss on ``num_batches`` global batches from sample 0 of every set.

    Args:
        sets: name -> stream (`megaresume.batches.validation`).
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
