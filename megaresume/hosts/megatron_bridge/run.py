"""`Run`: one process of a run of Megatron-Bridge. What it trains is opened as soon as its ranks are known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.session.random_state import kept
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.session.session import Session
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.hosts.megatron_bridge.host import BridgeHost
from megaresume.hosts.torch.feeds import Feed, Samples, feed_of
from megaresume.hosts.torch.host import check_sizes
from megaresume.hosts.torch.loop import open_session
from megaresume.hosts.torch.steps import Steps, words_of
from megaresume.stream.errors import UsageError

#: what of a stream's batch Bridge takes.
_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


class Run:
    """See above. Made once for each config.

    Args:
        config: Bridge's.
        data: makes the loader of a data-parallel rank.
        validation: likewise what is evaluated.
        checkpoints: where it saves, and so on.
    """

    host: BridgeHost
    session: Session
    steps: Steps
    #: whether this rank reads batches: the stages in the middle of a pipeline do not.
    reads: bool

    def __init__(
        self,
        config: Any,
        data: Callable[[int, int], Any],
        validation: Callable[[int, int], Iterable[Any]] | None,
        checkpoints: Checkpoints,
    ) -> None:
        self.config, self._data, self._validation, self._checkpoints = config, data, validation, checkpoints
        self.is_open, self._has_begun, self.is_closed = False, False, False
        #: steps that Bridge has made.
        self.step = 0

    def open(self, groups: Any) -> None:
        """Make the loader, and open the session; once. Collective.

        Args:
            groups: Megatron-Core's ``ProcessGroupCollection``.

        Raises, on every rank:
            UsageError: no loader of megaresume's, or one of other ranks or sizes than the run's.
            CheckpointError: another job writes to ``checkpoint.save``.
        """
        if self.is_open:
            return
        _let_warnings_through()
        rank, ranks, stage, stages = groups.dp.rank(), groups.dp.size(), groups.pp.rank(), groups.pp.size()
        feed = on_all_ranks(lambda: _feed(self._data(rank, ranks), self.config, rank, ranks))
        self.reads = stage in (0, stages - 1)
        self.steps = Steps(
            feed,
            words_of(
                trainer="Megatron-Bridge",
                name="what config.dataset gives",
                clock="the optimizer step",
                other_count=(
                    "the batch size was changed while it ran, or train_state was changed by hand",
                    "leave both to pretrain()",
                ),
            ),
        )
        self.host = BridgeHost(self.config, self.steps)
        # Bridge saves and loads the generators of all ranks by itself.
        self.session = self.steps.session = open_session(self.host, feed, self._checkpoints, None, None, lambda: None)
        self.is_open = True

    def batches(self) -> Iterator[Any]:
        """The micro-batches of this rank, to the end of the data."""
        of_stream = isinstance(self.steps.feed, Samples)
        for batch in self.steps.to_the_end():
            yield {key: batch[key] for key in _KEYS if key in batch} if of_stream else batch

    def validation(self, groups: Any) -> Iterator[Any] | None:
        """The micro-batches of this rank for evaluations: each begins at the first one."""
        if self._validation is None:
            return None
        return self._evaluated(self._validation(groups.dp.rank(), groups.dp.size()))

    def _evaluated(self, loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            step = self.step
            with kept():  # an evaluation draws nothing from the generators of the training
                batches, batch = iter(loader), None
            while step == self.step:
                with kept():
                    following = next(batches, None)
                if following is None:
                    break
                batch = following
                yield batch
            if batch is None:
                raise UsageError("there is nothing to evaluate", found="no micro-batch, of validation's")

    def goes_on(self, *, is_over: bool) -> None:
        """A step begins, or nothing is left to train. Collective."""
        if not self._has_begun:
            self._has_begun = True
            self.session.begin(trains=not is_over, save_interval=self.config.checkpoint.save_interval)

    def stepped(self, state: Any) -> None:
        """Compare Bridge's count of steps and samples with ours, between two steps.

        Raises:
            StateError: they differ; or a step was made of other batches than its own.
        """
        self.step = state.step
        if not self.reads:
            self.steps.loaded(state.step, state.consumed_train_samples)
        elif state.step == self.steps.step + 1:
            self.steps.stepped()
        self.steps.compare(state.step, state.consumed_train_samples)

    def close(self, *, is_over: bool) -> None:
        """Say that nothing is left to train, if so, and let other jobs save; once. Collective."""
        if self.is_closed:
            return
        self.is_closed = True
        if is_over:
            self.goes_on(is_over=True)
            self.session.finish()
        self.session.close()


def _let_warnings_through() -> None:
    """Bridge's ``logger.filter_warnings`` silences every logger that there is: ours says what was passed over."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "megaresume" and isinstance(logger, logging.Logger):
            logger.filters = [one for one in logger.filters if getattr(one, "__name__", "") != "warning_filter"]


def _feed(loader: Any, config: Any, rank: int, ranks: int) -> Feed:
    """What a run is to train.

    Raises:
        UsageError: it is no loader of megaresume's, or one for other ranks, sizes or steps than the config's.
    """
    feed = feed_of(loader)
    train, sizes = config.train, feed.topology(0)
    length = getattr(feed.stream.config, "seq_length", None) if isinstance(feed, Samples) else None
    ramps = getattr(train, "rampup_batch_size", None)
    step = train.global_batch_size // (train.micro_batch_size * ranks)
    check_sizes(
        feed,
        "loader",
        "config",
        {
            "dp_rank": (loader.dp_rank, rank, "dp_rank=dp_rank, which data is given"),
            "dp_size": (loader.dp_size, ranks, "dp_size=dp_size, which data is given"),
            "micro-batches": (sizes.micro_batch_size, train.micro_batch_size, "config.train.micro_batch_size"),
            "samples of a step": (
                sizes.global_batch_size if not ramps else None,
                train.global_batch_size if not ramps else None,
                f"accumulation={step}" if isinstance(loader, DataLoader) else "config.train.global_batch_size",
            ),
            "the length of a sequence": (length, config.model.seq_length if length else None, "model.seq_length"),
        },
        layout=f"{ranks} data-parallel ranks",
        length="train.train_iters",
    )
    if not ramps and not feed.has((train.train_iters - 1) * train.global_batch_size):
        raise UsageError(
            "the data ends before the run does",
            found=f"train.train_iters={train.train_iters}, of {train.global_batch_size} samples each",
            expected="no more steps than the data has",
            action="leave max_epochs out of the data, or set train.train_iters lower",
        )
    return feed
