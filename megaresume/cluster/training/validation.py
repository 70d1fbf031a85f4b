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
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaresume.batches.batch import Batch
from megaresume.batches.loader import StreamLoader
from megaresume.cluster.training.arguments import Arguments
from megaresume.cluster.training.model import LossMeter
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.stream import Stream

#: answers that are kept in full; tokens that are counted one by one.
_ANSWERS, _TOKENS = 24, 512


class Validation:
    """Measures the loss on the first ``--eval-iters`` global batches of every validation set, and the accuracy on the
    first ``--megaresume-held-out-iters`` of the held-out data. Nothing of either kind: it is False.

    Args:
        args: the flags.
        sets: name -> stream (`megaresume.batches.open`).
        held_out: None: no accuracy is measured.
        global_batch_size: samples; the final one, so that a ramp-up does not change what is measured.
        vocab_size: token ids below this exist.
        device: of the model.
    """

    def __init__(
        self,
        args: Arguments,
        *,
        sets: Mapping[str, Stream],
        held_out: Stream | None,
        global_batch_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._vocab_size, self._device = vocab_size, device

        def batches(stream: Stream, number: int) -> StreamLoader:
            return StreamLoader(
                stream,
                BatchSchedule.constant(global_batch_size),
                micro_batch_size=args.micro_batch_size,
                dp_rank=parallel_state.get_data_parallel_rank(),
                dp_size=parallel_state.get_data_parallel_world_size(),
                start=0,
                stop=number * global_batch_size,
                pin_memory=device.type == "cuda",
            )

        self._samples = args.eval_iters * global_batch_size
        self._sets = {name: batches(stream, args.eval_iters) for name, stream in sets.items()}
        self._held_out = None if held_out is None else batches(held_out, args.megaresume_held_out_iters)

    def __bool__(self) -> bool:
        return bool(self._sets) or self.has_held_out

    @property
    def has_held_out(self) -> bool:
        """Whether `accuracy` can be asked."""
        return self._held_out is not None

    def losses(
        self, model: torch.nn.Module, token_losses: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[str, dict[str, Any]]:
        """By name of the set: ``loss`` per token over all samples, ``tokens``, and the rolling ``digest`` of the
        samples: the same digest, the same samples. The model is back in training mode after it.

        Args:
            model: what is measured.
            token_losses: batch -> (float[m, S] losses, float32[m, S] loss mask).
        """
        found = {}
        with _evaluated(model):
            for name, batches in self._sets.items():
                meter = LossMeter(self._device)
                for batch in batches:
                    meter.add(*token_losses(batch))
                loss, tokens = meter.reduce(parallel_state.get_data_parallel_group())
                digest = batches.stream.digest_at(self._samples)
                found[name] = {"loss": loss, "loss_hex": loss.hex(), "tokens": tokens, "digest": digest}
        return found

    def accuracy(self, model: torch.nn.Module, logits: Callable[[Batch], torch.Tensor]) -> dict[str, Any]:
        """The fields of the event, the same on all ranks; the model is back in training mode after it.

        Args:
            model: what is measured.
            logits: batch -> float[m, S, vocabulary].
        """
        assert self._held_out is not None
        # counts: int64[2, vocabulary], right and all by label.
        counts = torch.zeros(2, self._vocab_size, dtype=torch.int64)
        answers: list[dict[str, Any]] = []
        with _evaluated(model):
            for batch in self._held_out:
                predicted = logits(batch)[..., : self._vocab_size].argmax(dim=-1).cpu()
                labels, trained = batch["labels"], batch["loss_mask"] > 0
                counts[0] += torch.bincount(labels[trained & (predicted == labels)], minlength=self._vocab_size)
                counts[1] += torch.bincount(labels[trained], minlength=self._vocab_size)
                if len(answers) < _ANSWERS:
                    answers += _answers(self._held_out.stream, batch, predicted)
        group = parallel_state.get_data_parallel_group()
        counts = counts.to(self._device)
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


def _answers(stream: Stream, batch: Batch, predicted: torch.Tensor) -> list[dict[str, Any]]:
    """Of every document of the batch that has trained tokens."""
    found = []
    for row, sample in enumerate(batch["samples"].tolist()):
        bounds = batch["cu_seqlens"][row].tolist()
        # zip: after the last document there may be a segment of padding.
        for (source, _, document, *_), start, end in zip(
            stream.plan(sample, sample + 1).table.tolist(), bounds, bounds[1:], strict=False
        ):
            trained = batch["loss_mask"][row, start:end] > 0
            if trained.any():
                found.append(
                    {
                        "sample": sample,
                        "column": start,
                        "source": stream.config.sources[source].name,
                        "document": document,
                        "expected": batch["labels"][row, start:end][trained].tolist(),
                        "predicted": predicted[row, start:end][trained].tolist(),
                    }
                )
    return found


@contextmanager
def _evaluated(model: torch.nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()
