"""The training loop."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaresume.batches.batch import Batch
from megaresume.cluster.training.arguments import Arguments, stop_conditions
from megaresume.cluster.training.launch import announce
from megaresume.cluster.training.logging import SampleLog, StepRecord, Stopwatch, Trained
from megaresume.cluster.training.model import LossMeter, document_mask, loss_to_minimise
from megaresume.cluster.training.multimodal import Images
from megaresume.cluster.training.optimizer import LearningRate
from megaresume.cluster.training.validation import Validation
from megaresume.hosts.deepspeed.training_data import TrainingData
from megaresume.stream.batches import is_over
from megaresume.stream.errors import CorpusError, StreamExhausted


class Trainer:
    """Trains one engine on its data until the run is over.

    Args:
        args: the flags.
        engine: the DeepSpeed engine.
        data: attached to it.
        device: of this rank.
        rate: learning rate by sample.
        validation: what is measured between the steps.
        log: of steps.
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
        """Train, save, validate; returns when the run is over or --exit-interval says to stop.

        Raises:
            Stopped: the run was asked to stop, and saved.
        """
        stop = stop_conditions(self.args)
        if stop is not None:
            self.data.session.stop_when(stop, self.save)
        self.engine.train()
        validated_at = None
        if self.validation.has_held_out and self.engine.global_steps == 0:
            self.validate()  # what an untrained model knows: the other end of the curve
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
        """Save a checkpoint unless the last one is of this step."""
        step = int(self.engine.global_steps)
        if self.args.save is not None and step != self._saved_at:
            self.engine.save_checkpoint(self.args.save)
            self._saved_at = step
            announce(f"  successfully saved checkpoint at iteration {step} to {self.args.save}")

    def _step(self) -> StepRecord:
        """All micro-steps of one optimizer step."""
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
                batch = next(self.data)  # the first of a step also puts the batch size in force
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
        """float[m, S] losses and float32[m, S] loss mask, on the device."""
        self._check_tokens(batch)
        tokens, labels, mask, positions = (
            batch[name].to(self.device, non_blocking=True) for name in ("tokens", "labels", "loss_mask", "position_ids")
        )
        losses = self._forward(batch, tokens, positions, labels)
        return losses, mask

    def _logits(self, batch: Batch) -> torch.Tensor:
        """float[m, S, vocabulary], on the device."""
        self._check_tokens(batch)
        tokens, positions = (batch[name].to(self.device) for name in ("tokens", "position_ids"))
        logits = self._forward(batch, tokens, positions, None)
        group = parallel_state.get_tensor_model_parallel_group()
        # Not megatron-core's function for it, which needs a GPU.
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
        """The norm before clipping where DeepSpeed does not keep it: plain float32 without ZeRO."""
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
