"""Per-token losses under Megatron-LM, taken where its schedules pass them to the loss function, for ``losses`` in
``--megaresume-metrics``.

    forward_step_func(data_iterator, model) -> output_tensor, loss_func
      loss_func(output_tensor)                   on the last stage: the loss of each token, float[m, S]
      functools.partial(loss_func, loss_mask)    which of them count, as the scripts of Megatron-LM bind it

The samples are those of the micro-batch that the forward step has just read. All tensor-parallel ranks have these
losses; the first one takes them. Evaluations are ignored. As a script need not train on what its model returns, the
first loss is compared with the loss function's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megaresume.hosts.count import Count
from megaresume.hosts.megatron.arguments import Settings
from megaresume.hosts.megatron.project import Project, data_parallel, parallel_state
from megaresume.hosts.megatron.samples import RankDeal
from megaresume.hosts.token_losses import NEAR, TokenLosses, distance
from megaresume.stream.errors import UsageError
from megaresume.stream.stream import Stream

#: The last resort, for each error.
_INSTEAD = "leave losses out; docs/metrics.md says what megaresume takes them from"


def check(args: Any, project: Project, settings: Settings) -> None:
    """Refuse runs whose losses cannot be taken.

    Raises:
        UsageError: not Megatron-LM, not megaresume's data, or context parallelism.
    """
    parts = int(getattr(args, "context_parallel_size", None) or 1)
    if project.kind != "megatron-lm" or settings.mode != "stream":
        raise UsageError(
            "metrics: losses by source need Megatron-LM and a data config",
            found=f"{project}, mode {settings.mode}",
            expected="Megatron-LM, and --megaresume-data",
            action=_INSTEAD,
        )
    if parts > 1:
        raise UsageError(
            "metrics: losses by source are not taken under context parallelism",
            found=f"--context-parallel-size {parts}: each rank has the losses of a part of every sample",
            expected="--context-parallel-size 1",
            action=_INSTEAD,
        )


class Read(Protocol):
    """A counted iterator of micro-batches: see `megaresume.hosts.megatron.calls.Counted`."""

    count: Count[str]
    size: int
    latest: Any


class ScheduleLosses(TokenLosses):
    """Takes the losses from training steps.

    Args:
        every: take one in this many micro-batches of this rank.
        give: called with the sample numbers, the losses of their tokens, and which of them count.
        project: the Megatron of these ranks.
        settings: for the balance of the ranks.
        stream: returns the training stream.
        read: the iterators of this rank.
    """

    def __init__(
        self,
        every: int,
        give: Callable[[list[int], torch.Tensor, torch.Tensor], object],
        *,
        project: Project,
        settings: Settings,
        stream: Callable[[], Stream],
        read: Sequence[Read],
    ) -> None:
        super().__init__(every, lambda losses, mask: give(self._samples, losses, mask), instead=_INSTEAD)
        self._project, self._settings, self._stream, self._read = project, settings, stream, read
        #: Whether a schedule has asked, and whether the loss function is known to use these losses.
        self._is_asked = self._is_known = False
        self._samples: list[int] = []
        self._deal: RankDeal | None = None

    def step_made(self) -> None:
        """Called when a step is over."""
        if not self._is_asked:
            self.stop("the step was not made by a schedule of megatron-core")

    def watched(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the ``forward_step_func`` of a training step."""
        self._is_asked = True
        if parallel_state(self._project).get_tensor_model_parallel_rank() != 0:
            return forward_step

        @functools.wraps(forward_step)
        def with_losses(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            if data_iterator is None or getattr(data_iterator, "replaying", False):  # no data, or a rerun step
                return forward_step(data_iterator, *args, **kwargs)
            counted = self._counted(data_iterator)
            before = 0 if counted is None else counted.count.end
            result = forward_step(data_iterator, *args, **kwargs)
            if not self.wants():
                return result
            if counted is None or counted.count.end != before + counted.size:
                self.stop("it is unknown which micro-batch this forward step has read")
                return result
            output, loss_func = result
            return output, self._around(loss_func, counted) if callable(loss_func) else loss_func

        return with_losses

    def _counted(self, data_iterator: Any) -> Read | None:
        inner = getattr(data_iterator, "iterable", data_iterator)
        return next((one for one in self._read if one is inner), None)

    def _around(self, loss_func: Callable[..., Any], counted: Read) -> Callable[..., Any]:
        end, batch = counted.count.end, counted.latest

        def with_losses(output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = loss_func(output_tensor, *args, **kwargs)
            if not kwargs.get("non_loss_data", False):
                self._look(output_tensor, _mask(loss_func, batch, output_tensor), result, counted, end)
            return result

        return with_losses

    def _look(self, losses: Any, mask: Any, result: Any, counted: Read, end: int) -> None:
        """Take the losses of a micro-batch.

        Args:
            losses: one per token: float[m, S].
            mask: which of them count: [m, S], or the same number of values in another shape.
            result: what the loss function returned, its loss first.
            counted: the iterator that the micro-batch was read from.
            end: samples handed out up to and including it.
        """
        if not isinstance(losses, torch.Tensor) or mask is None:
            self.stop("the model does not give a loss for each token, or the batch has no loss mask")
        elif losses.is_cuda and torch.cuda.is_current_stream_capturing():
            self.stop("steps are captured as a CUDA graph")
        elif not self._is_known and not _is_loss_of(losses, mask, result):
            self.stop("the loss of the loss function is not that of its tokens, masked")
        else:
            self._is_known = True
            self._samples = self._samples_of(counted, end)
            self.take(losses, mask)

    def _samples_of(self, counted: Read, end: int) -> list[int]:
        """The numbers of its samples in the stream, as Megatron's sampler deals them."""
        rank, size = data_parallel(self._project)
        micro = counted.size // size
        first = end - counted.size + rank * micro
        places = list(range(first, first + micro))
        if (balance := self._settings.balance) is None:
            return places
        self._deal = self._deal or RankDeal(balance, micro_batch_size=micro, dp_rank=rank, dp_size=size)
        return self._deal.samples(self._stream(), places)


def _mask(loss_func: Any, batch: Any, losses: Any) -> Any:
    """The loss mask bound to a loss function, or else the batch's. None if neither has one."""
    size = losses.numel() if isinstance(losses, torch.Tensor) else -1
    bound = [*loss_func.args, *loss_func.keywords.values()] if isinstance(loss_func, functools.partial) else []
    known = [*bound, batch.get("loss_mask") if hasattr(batch, "get") else None]
    return next((one for one in known if isinstance(one, torch.Tensor) and one.numel() == size), None)


def _is_loss_of(losses: torch.Tensor, mask: torch.Tensor, result: Any) -> bool:
    """Whether the loss is the sum or mean of these losses. Waits for the device."""
    loss = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return False
    weights = mask.detach().reshape(-1).to(losses.device, torch.float64)
    total = float((losses.detach().reshape(-1).to(torch.float64) * weights).sum())
    return distance(float(loss.detach()), total, 1.0, float(weights.sum())) <= NEAR
