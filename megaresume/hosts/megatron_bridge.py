"""Exact data resume for Megatron-Bridge, which NeMo trains with.

    megaresume.attach(config, loader_of, checkpoints=megaresume.Checkpoints(save_dir="run"))
    pretrain(config, ...)

Bridge is not patched. It gets a checkpoint manager and a dataset provider by its own protocols, which are in
`megaresume.hosts.megatron_bridge_manager`. Importing this imports neither Bridge nor Megatron: `attach` does.

The data state is in ``iter_0000010`` next to the weights, in the one file with the state that is equal on all ranks,
together with the learning-rate schedule. Bridge's own count of samples is in its ``train_state.pt``.

Bridge creates its process groups, and `Manager` and `Provider`, itself: a run's data is opened when its ranks are
known, and there are no hooks. Only the first and last stages of a pipeline read batches; the others follow its counter.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.generators import kept
from megaresume.checkpoint.host import Restored
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.store.objects import is_store
from megaresume.checkpoint.system import Topology
from megaresume.hosts.attach import SLOT, check_new, refuse, replaced, require
from megaresume.hosts.feeds import Feed, StreamFeed, feed_of
from megaresume.hosts.steps import loop_words
from megaresume.hosts.trainer import Carried, TrainerHost, check_sizes, merge_trainer_settings, write_all
from megaresume.hosts.writers import ending_with_us
from megaresume.stream.errors import UsageError

#: imports Bridge.
_MANAGER = "megaresume.hosts.megatron_bridge_manager"
#: files that rank 0 writes after it has heard from all ranks that theirs are written.
_LAST = (".metadata", "metadata.json", "run_config.yaml", "train_state.pt")
#: keys of a stream's batch that Bridge uses.
_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")

#: (data-parallel rank, data-parallel size) -> the loader of that rank.
LoaderOf = Callable[[int, int], DataLoader | StreamLoader]
ValidationOf = Callable[[int, int], Iterable[Any]]


def attach(
    config: Any,
    data: LoaderOf,
    *,
    validation: ValidationOf | None = None,
    checkpoints: Checkpoints = Checkpoints(),
    metrics: Any = None,
) -> None:
    """Give a run of Megatron-Bridge its data in an exact order, and add the state of that data to its checkpoints. Call
    it on every rank, before ``pretrain(config, forward_step)`` or ``finetune(config, forward_step)``.

    It sets ``config.dataset`` and ``config.checkpoint.custom_manager_class``. With ``checkpoint.load`` the run
    continues from the newest complete checkpoint, on any number of ranks; Bridge's config says where and when it saves,
    and ``checkpoint.most_recent_k`` sets how many of the newest complete ones to keep.

    Args:
        config: Bridge's ``ConfigContainer``.
        data: a function of data-parallel rank and size that returns the loader of that rank: a `DataLoader` with
            batches that Bridge's forward step accepts, or a `StreamLoader`.
        validation: likewise for each evaluation, which reads from the beginning: any iterable of micro-batches, such as
            a loader of torch's. None if nothing is evaluated.
        checkpoints: what is kept besides the newest, how often a save is retried, and so on.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.

    Raises:
        UsageError: a setting that would change the data, or that is not known to work, by name; or already attached.
            Also at the start of the run, on every rank, for what is only known then.
    """
    host = BridgeHost(config, data, validation)
    host.check()
    host.checkpoints, host.metrics = host.settings(checkpoints), metrics
    own = config.checkpoint
    # Retention is the session's: Bridge would delete before the newer checkpoint is complete.
    own.most_recent_k, own.custom_manager_class = -1, f"{_MANAGER}.Manager"
    setattr(own, SLOT, host)
    config.dataset = importlib.import_module(_MANAGER).Provider.of(host)
    allowed = importlib.import_module("megatron.bridge.utils.instantiate_utils")
    if hasattr(allowed, "register_allowed_target_prefix"):
        allowed.register_allowed_target_prefix(f"{_MANAGER}.")


class Carrying(Carried):
    """A learning-rate schedule with the data state in what it saves and loads.

    Args:
        schedule: Megatron's ``OptimizerParamScheduler``.
        text: for the save that begins: see `Envelope.to_text`. After a load, what was found.
    """

    def __init__(self, schedule: Any, text: str = "") -> None:
        super().__init__()
        self._schedule, self.text = schedule, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def state_dict(self) -> dict[str, Any]:
        """See `Carried`: in addition to the schedule's own."""
        return {**self._schedule.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Carried`: the rest is the schedule's."""
        super().load_state_dict(state)
        self._schedule.load_state_dict({name: value for name, value in state.items() if name != self.KEY})


class BridgeHost(TrainerHost):
    """Megatron-Bridge as a host, see `TrainerHost`. Created once for each config.

    Args:
        trainer: Bridge's ``ConfigContainer``.
        data: returns the loader of a data-parallel rank.
        validation: likewise for evaluations; None: none.
    """

    package = "megatron-bridge"
    words = loop_words(
        trainer="Megatron-Bridge",
        name="what config.dataset gives",
        clock="the optimizer step",
        other_count=(
            "the batch size was changed while it ran, or train_state was changed by hand",
            "leave both to pretrain()",
        ),
    )
    forgotten = "checkpoint.load names another directory, or none, or it has lost latest_train_state.pt; or finetune"
    load = "checkpoint.load={directory}"
    begin_anew = "checkpoint.pretrained_checkpoint, and another directory as checkpoint.save and checkpoint.load"
    #: from `settings`; from `attach`; the data-parallel rank and size; whether this rank reads batches.
    checkpoints: Checkpoints
    metrics: Any
    ranks: tuple[int, int]
    reads: bool

    def __init__(self, trainer: Any, data: Callable[[int, int], Any], validation: ValidationOf | None) -> None:
        super().__init__(trainer)
        self._data, self._validation = data, validation
        self.is_open, self._has_begun, self.is_closed = False, False, False
        #: number of steps that Bridge has done.
        self.step = 0

    def check(self) -> None:
        """See `TrainerHost`."""
        config, validates = self.trainer, self._validation is not None
        own: Any = getattr(config, "checkpoint", None)
        needed = dict.fromkeys(("train", "model", "dataset", "validation"), config)
        needed |= dict.fromkeys(("save", "load", "most_recent_k", "custom_manager_class"), own)
        check_new(
            config,
            "config",
            missing=[name for name, owner in needed.items() if not hasattr(owner, name)],
            headline="this is not a config of Megatron-Bridge, or it is from another version",
            expected="a megatron.bridge ConfigContainer with its checkpoint; 0.6.2 was tried",
        )
        check_new(own, "config")
        restart, model = getattr(config, "inprocess_restart", None), config.model
        leave = "leave it out"
        refused: dict[str, tuple[Any, str]] = {
            "a remote checkpoint.save": (
                "://" in str(own.save) and own.save,
                "a directory that all nodes see, and Checkpoints(stage_to=...) for copies",
            ),
            "checkpoint.custom_manager_class": (own.custom_manager_class, leave),
            "checkpoint.ckpt_format": (own.ckpt_format != "torch_dist" and own.ckpt_format, "torch_dist"),
            "checkpoint.async_save": (own.async_save, f"{leave}: a save counts when all of its files are there"),
            "checkpoint.non_persistent_save_interval": (own.non_persistent_save_interval, "checkpoint.save_interval"),
            "checkpoint.load_optim=False": (not own.load_optim, "checkpoint.pretrained_checkpoint loads weights alone"),
            "train.num_epochs": (getattr(config.train, "num_epochs", None), "train.train_iters"),
            "a virtual pipeline": (
                getattr(model, "virtual_pipeline_model_parallel_size", None),
                "leave virtual_pipeline_model_parallel_size out: its chunks would read one loader",
            ),
            "inprocess_restart": (getattr(restart, "enabled", False), "restart the job"),
            "a model of several modules (MegatronMIMO)": (hasattr(model, "megatron_mimo_parallelism_config"), leave),
            "validation.eval_iters": (
                not validates and config.validation.eval_iters and f"{config.validation.eval_iters}, and no validation",
                "megaresume.attach(config, data, validation=...), or validation.eval_iters=0",
            ),
        }
        require(
            {
                "checkpoint.save": (own.save, "set it: what is not saved cannot be resumed"),
                "checkpoint.save_optim": (own.save_optim, "set it: no run can resume without the optimizer"),
            }
        )
        refuse(refused)

    @property
    def device(self) -> None:
        """See `TrainerHost`: Bridge saves and loads the generators of all ranks itself."""

    def settings(self, given: Checkpoints) -> Checkpoints:
        """See `TrainerHost`."""
        if given.stage_to is not None and is_store(given.stage_to):
            raise UsageError(
                "stage_to cannot be a URL with Megatron-Bridge",
                found=f"Checkpoints(stage_to={os.fspath(given.stage_to)!r})",
                expected="a directory, or none",
                cause="Bridge looks for checkpoints in checkpoint.load before it asks megaresume: on an empty machine "
                "it would load nothing",
                action="let checkpoint.save and checkpoint.load be a directory that all nodes see",
            )
        own = self.trainer.checkpoint
        most = own.most_recent_k if own.most_recent_k and own.most_recent_k > 0 else None
        most_is = "checkpoint.most_recent_k"
        place = "checkpoint.save", own.save
        return merge_trainer_settings(given, trainer="Megatron-Bridge", save_dir=place, keep_last=(most_is, most))

    def open_once(self, groups: Any) -> None:
        """Create the loader, and open the session; once. Collective.

        Args:
            groups: Megatron-Core's ``ProcessGroupCollection``.

        Raises, on every rank:
            UsageError: not a loader of megaresume's, or one for other ranks or sizes than the run's.
            CheckpointError: another job writes to ``checkpoint.save``.
        """
        if self.is_open:
            return
        _let_warnings_through()
        rank, ranks, stage, stages = groups.dp.rank(), groups.dp.size(), groups.pp.rank(), groups.pp.size()
        self.ranks, self.reads = (rank, ranks), stage in (0, stages - 1)
        self.open(on_all_ranks(self.feed), self.checkpoints, metrics=self.metrics)
        self.is_open = True

    def feed(self) -> Feed:
        """See `TrainerHost`.

        Raises:
            UsageError: it is not a loader of megaresume's, or one for other ranks, sizes or steps than the config's.
        """
        rank, ranks = self.ranks
        loader: Any = self._data(rank, ranks)
        feed, config = feed_of(loader), self.trainer
        train, sizes = config.train, feed.topology(0)
        length = getattr(feed.stream.config, "seq_length", None) if isinstance(feed, StreamFeed) else None
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

    def topology(self) -> Topology:
        """See `Host`."""
        model = self.trainer.model
        return replace(
            super().topology(),
            tp=model.tensor_model_parallel_size,
            pp=model.pipeline_model_parallel_size,
            cp=model.context_parallel_size,
        )

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`."""
        return list(_LAST) if is_rank_0() else []

    def write(self, save: Save, schedule: Any, write: Callable[[Any], object]) -> None:
        """Write the files of this rank by Bridge's own method, ``write(schedule)``: for `Session.save`."""
        write_all(save, ending_with_us()(lambda: write(Carrying(schedule, save.envelope.to_text()))))

    def read(self, choice: Choice, state: Any, schedule: Any, read: Callable[[Any], Any]) -> Restored:
        """Read the files of this rank by Bridge's own method, ``read(schedule)``: for `Session.load`.

        Args:
            choice: what to read.
            state: Bridge's ``GlobalState``, whose count of steps and samples is read.
            schedule: of the learning rate.
        """
        carrying = Carrying(schedule)
        with replaced(self.trainer.checkpoint, load=str(choice.tag_dir), ckpt_step=None):
            result = read(carrying)
        trained, envelope = state.train_state, Envelope.read(carrying.text) if carrying.text else None
        reading = self.resumed_at(trained.step, trained.consumed_train_samples, envelope, result)
        return replace(reading, counter="consumed_train_samples")

    def batches(self) -> Iterator[Any]:
        """The micro-batches of this rank, to the end of the data."""
        of_stream = isinstance(self.steps.feed, StreamFeed)
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
            with kept():  # an evaluation does not affect the generators of the training
                batches, batch = iter(loader), None
            while step == self.step:
                with kept():
                    following = next(batches, None)
                if following is None:
                    break
                batch = following
                yield batch
            if batch is None:
                raise UsageError(
                    "there is nothing to evaluate",
                    found="no micro-batch, of validation's",
                    expected="one for each rank",
                    action="pass validation with more samples, or set validation.eval_iters=0",
                )

    def step_begins(self, *, is_over: bool) -> None:
        """Note that a step begins, or that nothing is left to train. Collective."""
        if not self._has_begun:
            self._has_begun = True
            self.session.begin(trains=not is_over, save_interval=self.trainer.checkpoint.save_interval)
        self.session.note_position()

    def stepped(self, state: Any) -> None:
        """Compare Bridge's count of steps and samples with ours, between two steps.

        Raises:
            StateError: they differ; or a step was trained on other batches than its own.
        """
        self.step = state.step
        if not self.reads:
            self.steps.loaded(state.step, state.consumed_train_samples)
        elif state.step == self.steps.step + 1:
            self.steps.stepped()
        self.steps.compare(state.step, state.consumed_train_samples)

    def close(self, *, is_over: bool) -> None:
        """Record that nothing is left to train, if so, and let other jobs save; once. Collective."""
        if self.is_closed:
            return
        self.is_closed = True
        if is_over:
            self.step_begins(is_over=True)
            self.session.finish()
        self.session.close()


def _let_warnings_through() -> None:
    """Undo Bridge's ``logger.filter_warnings`` for our logger, which says what was skipped: it silences all loggers."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "megaresume" and isinstance(logger, logging.Logger):
            logger.filters = [one for one in logger.filters if getattr(one, "__name__", "") != "warning_filter"]
