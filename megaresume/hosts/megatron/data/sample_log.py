"""``--megaresume-log-samples DIR``: every process that is handed training batches writes down what it was handed.

    DataLoader -> [here] -> RerunDataIterator -> get_batch

Below Megatron's own replay, so that a step which is computed again is written once; and above the workers, so that
what was read ahead and lost is not. Items bring their numbers and identities along; `get_batch` never sees those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megaresume.checkpoint.session.rank_log import RankLog, images_of
from megaresume.hosts.megatron.data.form import SampleForm
from megaresume.hosts.megatron.data.order import StreamOrder
from megaresume.hosts.megatron.data.provider import data_parallel
from megaresume.hosts.megatron.data.samples import HASH_KEY, SAMPLE_KEY
from megaresume.hosts.megatron.host import MegatronHost


def logged(current: MegatronHost, order: StreamOrder, form: SampleForm, iterators: Any, *, chunk: int) -> Any:
    """What Megatron's ``build_train_valid_test_data_iterators`` returned, the training iterator with a log.

    Args:
        current: the host; its settings name the directory.
        order: the training stream.
        form: of the items.
        iterators: (train, valid, test); None where this rank reads no data.
        chunk: of the virtual pipeline.

    Raises:
        SetupError: the log cannot be written.
    """
    directory = current.settings.log_samples
    train, *others = iterators
    if directory is None or train is None:
        return iterators
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    log = RankLog(directory, rank=rank, launch=current.launch, chunk=chunk)
    inner = getattr(train, "iterable", None)
    batches = _Logged(train if inner is None else inner, current, order, form, log)
    if inner is None:
        train = batches
    else:
        train.iterable = batches
    return (train, *others)


class _Logged:
    """Hands batches on; a line whenever a step is complete."""

    def __init__(self, batches: Any, current: MegatronHost, order: StreamOrder, form: SampleForm, log: RankLog) -> None:
        self._batches: Iterator[dict[str, Any]] = iter(batches)
        self._order, self._form, self._log = order, form, log
        rank, size = data_parallel(current.project)
        self._share = size
        args = current.args
        # Steps since the beginning of this process, on top of those that were done.
        self._step, self._sample = int(args.iteration), order.position
        log.start(
            step=self._step,
            samples=order.position,
            dp_rank=rank,
            dp=size,
            micro_batch_size=int(args.micro_batch_size),
            pad_id=form.eod if form.text and form.eod is not None else 0,
            digest=order.stream.digest_at(order.position),
            balance=order.balance,
        )

    def __iter__(self) -> _Logged:
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._batches)
        take = batch.__getitem__ if self._form.identity else batch.pop
        samples, hashes = take(SAMPLE_KEY).numpy(), take(HASH_KEY).numpy()
        tokens = batch["text"][:, :-1] if self._form.text else batch["tokens"]
        masks = np.asarray(batch["loss_mask"]) if self._form.masks_of_the_plan else None
        self._log.add(samples, hashes, np.asarray(tokens), images_of(batch), masks)
        size = self._order.schedule.size_at(self._sample)
        if self._log.noted * self._share >= size:
            self._step, self._sample = self._step + 1, self._sample + size
            self._log.end_step(self._step)
        return batch
