"""Exact data resume for a custom training loop, in plain torch.

    loop = megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints=Checkpoints(save_dir=...))
    loop.load()
    for epoch in range(loader.epoch, 3):
        for batch in loop:
            ...
            optimizer.step()
            loop.stepped()
            if loop.step % 100 == 0:
                loop.save()
    loop.finish()

See docs/torch.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.host import Restored, Resume
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.meetings import all_come, meeting_group
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks, same_on_all_ranks
from megaresume.checkpoint.records.names import deepspeed_tag
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.hosts import files
from megaresume.hosts.feeds import Feed, feed_of
from megaresume.hosts.files import Background
from megaresume.hosts.frozen import FrozenWeights, entries, has_tensors, weights_of
from megaresume.hosts.parallelism import check_averaged, check_together, discard_unreduced, reshard, unreduced
from megaresume.hosts.replicas import check_parameters, warn_of_differing
from megaresume.hosts.trainer import TrainerHost, write_all
from megaresume.hosts.unsaved import Beginning, check_all, check_schedulers, gradients_at_save, warn_of_gradients
from megaresume.stream.errors import UsageError

if TYPE_CHECKING:
    from megaresume.checkpoint.metrics.meter import Meter


_SCHEDULER = "make it before: megaresume.attach({'model': model, 'optimizer': optimizer, 'scheduler': scheduler}, ...)"
_INNER = (
    "save both: megaresume.attach({'model': model, 'optimizer': optimizer, 'inner': optimizer.base_optimizer}, ...)"
)


class LoopHost(TrainerHost):
    """See `TrainerHost`.

    Args:
        trainer: what the loop saves, by name.
        data, writer, context_parallel: see `attach`.
    """

    package = "torch"
    objects: files.Objects
    background: Background
    frozen: FrozenWeights
    forgotten = "loop.load() was not called"
    load = "loop.load() before the first step"
    _beginning: Beginning | None = None
    #: whether gradients were accumulated across a save, which is reported once.
    is_accumulation_known = False
    begin_anew = "read its weights with torch.distributed.checkpoint or torch.load, and save to another directory"

    def __init__(
        self,
        trainer: Mapping[str, Any],
        data: DataLoader | StreamLoader,
        writer: files.Writer,
        context_parallel: int,
    ) -> None:
        super().__init__(trainer)
        self.data, self.writer, self.context_parallel = data, writer, context_parallel
        self.background = Background(lambda save: self.session.commit(save))
        self.frozen = FrozenWeights(lambda: weights_of(self.objects.modules))
        #: see `gradients_at_save`.
        self._gradients: dict[Any, Callable[[], bool]] = {}

    def check(self) -> None:
        """See `TrainerHost`."""
        if self.writer not in get_args(files.Writer):
            raise UsageError.unknown(
                "writer", self.writer, get_args(files.Writer), action="leave writer out for the usual one"
            )
        reshard(one for one in self.trainer.values() if isinstance(one, torch.nn.Module))
        self.objects = files.Objects(self.trainer)

    def feed(self) -> Feed:
        """See `TrainerHost`."""
        feed = feed_of(self.data)
        check_averaged(self.objects.modules.values(), self.data.dp_size, self.context_parallel)
        return feed

    def open(
        self, feed: Feed, checkpoints: Checkpoints, stop: StopConditions | None = None, metrics: Any = None
    ) -> None:
        """See `TrainerHost`."""
        check_together(list(self.objects.modules.values()), feed.loader.dp_rank)
        super().open(feed, checkpoints, stop, metrics)

    @property
    def device(self) -> Any:
        """See `TrainerHost`."""
        return self.objects.device

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`: what rank 0 writes last, after it has heard from all ranks that their files are written."""
        last = files.SINGLE if self.writer == "torch" else files.METADATA
        return [last] if is_rank_0() else []

    def write(self, save: Save) -> None:
        """Write the files of this rank, for `Session.save`."""
        models = on_all_ranks(lambda: self.objects.model_states(full=self.writer == "torch"))
        self.frozen.note(
            save, lambda _: entries(models), self._optimizers, may_be_elsewhere=lambda: has_tensors(self.kept())
        )
        carried = self.carried(save)
        future = write_all(
            save, lambda: files.write(self.objects, models, save.tag_dir, carried, self.writer, self._group)
        )
        if future is not None:
            self.background.begin(future, save)

    def check_first_save(self) -> None:
        """See `TrainerHost`."""
        on_all_ranks(
            lambda: check_all(
                self.objects.modules.values(),
                self._optimizers,
                self.kept(),
                self._beginning,
                scheduler=_SCHEDULER,
                inner=_INNER,
            )
        )
        if self.writer == "torch":
            check_parameters(self.objects.modules)
        warn_of_differing(self.objects.hashes(), joins=self.writer != "torch")

    def check_schedulers(self) -> None:
        """See the function of this name."""
        check_schedulers(self._optimizers, self.kept(), _SCHEDULER)
        self._beginning = self._beginning or Beginning(self.objects.modules.values(), self.kept())

    @property
    def _optimizers(self) -> list[Any]:
        return [optimizer for optimizer, _ in self.objects.optimizers.values()]

    def kept(self) -> Sequence[Any]:
        """See `TrainerHost`."""
        return list(self.objects.others.values())

    def read(self, choice: Choice) -> Restored:
        """Read the files of this rank, for `Session.load`."""
        reshard(self.objects.modules.values())
        discard_unreduced(self.objects.modules.values())
        return self.resumed(files.read(self.objects, choice.tag_dir, self._group))

    def begin(self) -> None:
        """See `TrainerHost`."""
        same_on_all_ranks(
            f"{self.writer}: {', '.join(self.objects.names)}",
            "what is saved, and by which writer",
            cause="megaresume.attach was given other objects or another writer: their saves would wait for one another",
            action="give it the same names and writer on every rank",
        )
        self._group, self.meeting = files.own_group(), meeting_group()
        self.watch(self._optimizers, once=True)
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._check_gradients)

    def put_hooks(self) -> None:
        """Hook nothing: the loop calls the methods of `Loop`, and a mapping has no attribute to mark it as attached."""

    def save_now(self) -> None:
        """Save the last step that was made. Collective."""
        reshard(self.objects.modules.values())
        self.save_by(self.save_dir, self.write, tag=deepspeed_tag(self.steps.step), tracker=False)
        if not self.is_accumulation_known:
            stepped = self.steps.stepped_by
            yet_to_step = [one for one in self._optimizers if one not in stepped]
            self._gradients = gradients_at_save(yet_to_step, unreduced(self.objects.modules.values()))

    def _check_gradients(self, optimizer: Any, *_: Any) -> None:
        if optimizer in self._gradients and self._gradients.pop(optimizer)():
            warn_of_gradients(optimizer)
            self.is_accumulation_known = True
            self._gradients.clear()


class StepLoop:
    """A training loop over `Steps`, and its checkpoints. Call every method on every rank."""

    def __init__(self, host: TrainerHost) -> None:
        self.steps, self.session, self._release = host.steps, host.session, host.release

    @property
    def step(self) -> int:
        """Optimizer steps made since the start of the run."""
        return self.steps.step

    @property
    def samples(self) -> int:
        """Samples trained by these steps, on all ranks together."""
        return self.steps.samples

    @property
    def meter(self) -> Meter | None:
        """The meter of the live figures, for ``loop.meter.losses(batch, token_loss)``; None without ``metrics=``."""
        return self.session.meter

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, as `DataLoader` counts them."""
        return int(self.steps.feed.loader.epoch)

    def __len__(self) -> int:
        """Micro-batches per epoch, as `DataLoader` counts them."""
        return len(self.steps.feed.loader)

    def __bool__(self) -> bool:
        """Always True, whatever the length."""
        return True

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank: see `Steps`."""
        return iter(self.steps)

    def __getattr__(self, name: str) -> Any:
        """Other attributes that programs expect of a loader."""
        if name in ("batch_sampler", "batch_size", "dataset", "num_workers", "sampler", "set_epoch"):
            return getattr(self.steps.feed.loader, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def finish(self) -> None:
        """Record in the ledger that nothing is left to train, for launch scripts to see, then `close`."""
        self.session.finish()
        self.close()

    def close(self) -> None:
        """Wait until all saves are complete and on disk, and let other jobs save there."""
        self._release()


class Loop(StepLoop):
    """A training loop and its checkpoints; made by `megaresume.attach`. Call every method on every rank.

    Iterate over it for batches. Iterating ends with an epoch of a `DataLoader`, or with the data of a `StreamLoader`.
    """

    def __init__(self, host: LoopHost) -> None:
        super().__init__(host)
        self.host = host

    def __iter__(self) -> Iterator[Any]:
        """See `StepLoop`."""
        self.host.check_schedulers()
        return super().__iter__()

    @property
    def ends_step(self) -> bool:
        """Whether the last micro-batch handed out ends its step; the same before and after `stepped`.

        Raises:
            StateError: the loop iterates over the loader itself. It would never step, and never save.
        """
        if self.steps.is_idle:
            self.steps.feed.check_unread(self.steps.samples)
        return self.steps.ends_step

    def stepped(self) -> None:
        """Call after each optimizer step, which took all micro-batches since the one before; also if a GradScaler
        skipped it. Not collective.

        Raises:
            StateError: no micro-batch was taken, or not all of a step's.
        """
        self.steps.stepped()
        self.host.background.look()

    def save(self) -> None:
        """Save a checkpoint of this step.

        Raises, on every rank:
            StateError: in the middle of a step, or the ranks disagree on what they trained.
            UsageError: only some ranks call it, or the directory holds checkpoints that this run did not resume from.
            CheckpointError: files are missing, another job writes there, or the disk fails.
        """
        all_come("loop.save()", self.host.meeting)
        self.host.save_now()

    def load(self, directory: str | os.PathLike[str] | None = None, *, tag: str | None = None) -> Resume | None:
        """Resume from the newest complete checkpoint: restores the objects given to `megaresume.attach`.

        Args:
            directory: the checkpoint root; None: where the loop saves.
            tag: exactly this checkpoint: ``global_step100``.

        Returns:
            where the run continues; None if there is no checkpoint and it starts afresh.

        Raises, on every rank:
            CheckpointError: what was asked for is not complete, or the ranks see different directories.
            StateError: the checkpoint has no data state, or one of other data, or other objects.
            UsageError: a relative directory, after the working directory was changed.
        """
        root = self.host.save_dir if directory is None else Path(directory)
        self.host.load_by(lambda choice, _: self.host.read(choice), None if tag is None else root / tag, root=root)
        return self.session.resumed


def attach(
    objects: Mapping[str, Any],
    data: DataLoader | StreamLoader,
    *,
    checkpoints: Checkpoints,
    writer: files.Writer = "dcp",
    stop: StopConditions | None = None,
    metrics: Any = None,
    context_parallel: int = 1,
) -> Loop:
    """Give a training loop its data in an exact order, and complete checkpoints. Call it on every rank, after wrapping
    the model and creating the optimizer.

    Args:
        objects: what a checkpoint holds, by name: modules (DDP, FSDP2 and torch.compile included), their optimizers,
            and anything else with ``state_dict`` and ``load_state_dict`` that is the same on every rank: schedulers,
            scalers.
        data: a `DataLoader`, or a `StreamLoader`.
        checkpoints: where the run saves (``save_dir``), what it keeps, and so on.
        writer: ``dcp``: torch.distributed.checkpoint. ``dcp_async``: the same, while training continues; the checkpoint
            counts after the last byte of all ranks. ``torch``: one file, written by rank 0.
        stop: when to save and exit, with `megaresume.Stopped`.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.
        context_parallel: number of processes that train the same samples together; DDP or FSDP averages over them too.

    Raises, on every rank:
        UsageError: another kind of loader, one for other ranks, objects that cannot be saved, or unsuitable settings.
        StateError: the ranks have different data, objects or writers.
        CheckpointError: another job writes to the directory.
        SetupError: directories or clocks differ between nodes.
    """
    host = LoopHost(objects, data, writer, context_parallel)
    host.attach(checkpoints, stop, metrics)
    return Loop(host)
