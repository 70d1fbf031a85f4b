"""The training loop, and the measurements between its steps.

Validation uses the same samples every time, the first of each validation set, whatever was trained and how.

Held-out accuracy: the share of trained tokens that the model predicts correctly, on the same samples every time.

Every answer is predicted with the true tokens before it (teacher forcing), taking the likeliest token. Correct tokens
are counted by token, so that a reader can select some (digits, yes and no), and the first answers are kept in full.

    {"event": "held_out", "step": 40, "right": 310, "tokens": 500, "by_token": {"48": [20, 35], ...},
     "answers": [{"sample": 0, "column": 0, "source": "held_out", "document": 7,
                  "expected": [51, 32, 49], "predicted": [51, 32, 55]}, ...]}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaresume.batches.batch import Batch
from megaresume.batches.loader import StreamLoader
from megaresume.cluster.training.launch import Arguments, announce, stop_conditions
from megaresume.cluster.training.logging import SampleLog, StepRecord, Stopwatch, Trained
from megaresume.cluster.training.model import LearningRate, LossMeter, document_mask, loss_to_minimise
from megaresume.cluster.training.vision import Images
from megaresume.hosts.deepspeed.training_data import TrainingData
from megaresume.stream.batches import BatchSchedule, is_over
from megaresume.stream.errors import CorpusError, StreamExhausted
from megaresume.stream.stream import Stream

#: answers kept in full; tokens counted one by one.
_ANSWERS, _TOKENS = 24, 512


class Validation:
    """Measures the loss on the first ``--eval-iters`` global batches of every validation set, and the accuracy on the
    first ``--megaresume-held-out-iters`` of the held-out data. False if there is neither.

    Args:
        args: the flags.
        sets: name -> stream (`megaresume.batches.open`).
        held_out: None if no accuracy is measured.
        global_batch_size: samples; the final one, so that a ramp-up does not change the measurement.
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
        """Whether `accuracy` can be measured."""
        return self._held_out is not None

    def losses(
        self, model: torch.nn.Module, token_losses: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[str, dict[str, Any]]:
        """The losses of each set by name: ``loss`` per token over all samples, ``tokens``, and the rolling ``digest``.

        Args:
            model: the model.
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
        """The fields of the event, the same on all ranks; afterwards the model is in training mode again.

        Args:
            model: the model.
            logits: batch -> float[m, S, vocabulary].
        """
        assert self._held_out is not None
        # counts: int64[2, vocabulary], correct and all, by label.
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
    """The answers of every document in the batch that has trained tokens."""
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


class Trainer:
    """Trains one engine on its data until the run is finished.

    Args:
        args: the flags.
        engine: the DeepSpeed engine.
        data: attached to the engine.
        device: of this rank.
        rate: learning rate by sample.
        validation: measured between the steps.
        log: for steps.
        vocab_size: token ids below this exist.
    """

    def __init__(
        self,
        args: Arguments,
        engine: Any,
        data: TrainingData,
        *,
        device: torch.device,
        rate: LearningRate,
        validation: Validation,
        log: SampleLog,
        vocab_size: int,
    ) -> None:
        self.args, self.engine, self.data, self.device = args, engine, data, device
        self.rate, self.validation, self.log = rate, validation, log
        self.vocab_size = vocab_size
        self._saved_at = int(engine.global_steps)
        self._stream_ended = False

    def train(self) -> None:
        """Train, save, validate; returns when the run is finished or --exit-interval is reached.

        Raises:
            Stopped: the run was asked to stop, and saved.
        """
        stop = stop_conditions(self.args)
        if stop is not None:
            self.data.session.stop_when(stop, self.save)
        self.engine.train()
        validated_at = None
        if self.validation.has_held_out and self.engine.global_steps == 0:
            self.validate()  # an untrained model's accuracy: the start of the curve
        while not self.finished():
            try:
                record = self._step()
            except StreamExhausted as end:
                announce(f"megaresume: the stream has ended, and with it the run: {end.found}")
                self._stream_ended = True
                break
            self.log.step(record)
            if record.step % self.args.log_interval == 0:
                announce(record.line("-" if self.args.train_iters is None else str(self.args.train_iters)))
            if self.validation and record.step % self.args.eval_interval == 0:
                self.validate()
                validated_at = record.step
            if self.args.save_interval is not None and record.step % self.args.save_interval == 0:
                self.save()
            if self._stops_here(record.step):
                self.save()
                return
        self.save()
        if self.validation and validated_at != self.engine.global_steps:
            self.validate()

    def finished(self) -> bool:
        """Whether all steps or samples of the run are trained."""
        return is_over(int(self.engine.global_steps), self.data.samples_trained, **self.args.length)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train: `finished`, or the stream has ended."""
        return self._stream_ended or self.finished()

    def validate(self) -> None:
        """Measure and log the validation loss and the held-out accuracy."""
        step = int(self.engine.global_steps)
        for name, found in self.validation.losses(self.engine, self._token_losses).items():
            self.log.validation(step=step, name=name, **found)
        if self.validation.has_held_out:
            self.log.held_out(step=step, **self.validation.accuracy(self.engine, self._logits))

    def save(self) -> None:
        """Save a checkpoint, unless the last one is of this step."""
        step = int(self.engine.global_steps)
        if self.args.save is not None and step != self._saved_at:
            self.engine.save_checkpoint(self.args.save)
            self._saved_at = step
            announce(f"  successfully saved checkpoint at iteration {step} to {self.args.save}")

    def _step(self) -> StepRecord:
        """Train all micro-steps of one optimizer step."""
        began = time.perf_counter()
        engine, first = self.engine, self.data.samples_trained
        lr = self.rate.at(first)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        meter, trained = LossMeter(self.device), Trained()
        last, norm = False, None
        waiting = Stopwatch()
        while not last:
            with waiting:
                batch = next(self.data)  # the first one of a step also sets the batch size
            trained.add(batch, content=self.log.enabled)
            losses, mask = self._token_losses(batch)
            meter.add(losses, mask)
            last = engine.is_gradient_accumulation_boundary()
            engine.backward(loss_to_minimise(losses, mask))
            norm = self._gradient_norm() if last else None
            engine.step()
        group = parallel_state.get_data_parallel_group()
        loss, tokens = meter.reduce(group)
        samples, order, content, ranks = trained.collect(group, self.device)
        size = samples[1] - samples[0]
        seconds = time.perf_counter() - began
        if self.args.megaresume_min_step_seconds > seconds:
            time.sleep(self.args.megaresume_min_step_seconds - seconds)
            seconds = time.perf_counter() - began
        return StepRecord(
            step=int(engine.global_steps),
            samples=samples,
            order=order,
            content=content if self.log.enabled else None,
            ranks=ranks if self.log.enabled else None,
            digest=self.data.stream.digest_at(samples[1]),
            loss=loss,
            lr=lr,
            grad_norm=_number(norm if norm is not None else engine.get_global_grad_norm()),
            tokens=tokens,
            global_batch_size=size,
            seconds=seconds,
            data_seconds=round(waiting.seconds, 6),
            tokens_per_second=size * self.data.stream.config.seq_length / seconds,
        )

    def _token_losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses, float[m, S], and the loss mask, float32[m, S], on the device."""
        self._check_tokens(batch)
        tokens, labels, mask, positions = (
            batch[name].to(self.device, non_blocking=True) for name in ("tokens", "labels", "loss_mask", "position_ids")
        )
        losses = self._forward(batch, tokens, positions, labels)
        return losses, mask

    def _logits(self, batch: Batch) -> torch.Tensor:
        """The logits, float[m, S, vocabulary], on the device."""
        self._check_tokens(batch)
        tokens, positions = (batch[name].to(self.device) for name in ("tokens", "position_ids"))
        logits = self._forward(batch, tokens, positions, None)
        group = parallel_state.get_tensor_model_parallel_group()
        # megatron-core's function for this needs a GPU.
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, logits.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    def _forward(
        self, batch: Batch, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor | None
    ) -> torch.Tensor:
        images = {"images": Images.of(batch, self.device)} if "pixel_values" in batch else {}
        out: torch.Tensor = self.engine(tokens, positions, document_mask(positions), labels=labels, **images)
        return out

    def _check_tokens(self, batch: Batch) -> None:
        highest = int(batch["tokens"].max())
        if highest >= self.vocab_size:
            raise CorpusError(
                "a corpus holds a token that the vocabulary does not have",
                found=f"token {highest} in samples {batch['samples'].tolist()}",
                expected=f"tokens below {self.vocab_size}",
                cause="--vocab-size is not that of the tokenizer that made the corpus",
                action=f"--vocab-size {highest + 1} at least",
            )

    def _gradient_norm(self) -> torch.Tensor | None:
        """The norm before clipping if DeepSpeed does not provide it, in plain float32 without ZeRO."""
        args = self.args
        if args.zero_stage or args.bf16 or args.tensor_model_parallel_size > 1:
            return None
        return torch.nn.utils.get_total_norm([p.grad for p in self.engine.module.parameters() if p.grad is not None])

    def _stops_here(self, step: int) -> bool:
        """Whether --exit-interval ends this process after the step."""
        if self.args.exit_interval is None or step % self.args.exit_interval:
            return False
        announce(f"exiting program at iteration {step}")
        return True


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
