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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

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
from megaresume.hosts.attach import replaced
from megaresume.hosts.feeds import Feed, check_averaged, feed_of
from megaresume.hosts.files import Background
from megaresume.hosts.left_out import Beginning, check_all, check_schedulers
from megaresume.hosts.replicas import warn_of_differing
from megaresume.hosts.trainer import TrainerHost, write_all
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
    forgotten = "loop.load() was not called"
    load = "loop.load() before the first step"
    _beginning: Beginning | None = None
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

    def check(self) -> None:
        """See `TrainerHost`."""
        if self.writer not in get_args(files.Writer):
            raise UsageError.unknown(
                "writer", self.writer, get_args(files.Writer), action="leave writer out for the usual one"
            )
        self.objects = files.Objects(self.trainer)

    def feed(self) -> Feed:
        """See `TrainerHost`."""
        feed = feed_of(self.data)
        check_averaged(self.objects.modules.values(), self.data.dp_size, self.context_parallel)
        return feed

    @property
    def device(self) -> Any:
        """See `TrainerHost`."""
        return self.objects.device

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`: what rank 0 writes last, after it has heard of the files of all ranks."""
        last = files.SINGLE if self.writer == "torch" else files.METADATA
        return [last] if is_rank_0() else []

    def write(self, save: Save) -> None:
        """Write the files of this rank: for `Session.save`."""
        carried = self.carried(save)
        with replaced(self, is_at_files=True):
            future = write_all(save, lambda: files.write(self.objects, save.tag_dir, carried, self.writer, self._group))
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
        warn_of_differing(self.objects.hashes(), joins=self.writer != "torch")

    def check_schedulers(self) -> None:
        """See the function."""
        check_schedulers(self._optimizers, self.kept(), _SCHEDULER)
        self._beginning = self._beginning or Beginning(self.objects.modules.values(), self.kept())

    @property
    def _optimizers(self) -> list[Any]:
        return [optimizer for optimizer, _ in self.objects.optimizers.values()]

    def kept(self) -> Sequence[Any]:
        """See `TrainerHost`."""
        return list(self.objects.others.values())

    def read(self, choice: Choice) -> Restored:
        """Read the files of this rank: for `Session.load`."""
        with replaced(self, is_at_files=True):
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

    def put_hooks(self) -> None:
        """Hook nothing: the loop calls what `Loop` has, and a mapping has no attribute to note that it is attached."""

    def save_now(self) -> None:
        """Save the step that was made last. Collective."""
        self.save_by(self.save_dir, self.write, tag=deepspeed_tag(self.steps.step), tracker=False)


class StepLoop:
    """A training loop over `Steps`, and its checkpoints. Every method is called on every rank."""

    def __init__(self, host: TrainerHost) -> None:
        self.steps, self.session, self._release = host.steps, host.session, host.release

    @property
    def step(self) -> int:
        """Optimizer steps made, since the start of the run."""
        return self.steps.step

    @property
    def samples(self) -> int:
        """Samples that they trained, all ranks together."""
        return self.steps.samples

    @property
    def meter(self) -> Meter | None:
        """Of the live figures, for ``loop.meter.losses(batch, token_loss)``; None without ``metrics=``."""
        return self.session.meter

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, as `DataLoader` counts them."""
        return int(self.steps.feed.loader.epoch)

    def __len__(self) -> int:
        """Micro-batches of an epoch, as `DataLoader` counts them."""
        return len(self.steps.feed.loader)

    def __bool__(self) -> bool:
        """Whatever its length."""
        return True

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank: see `Steps`."""
        return iter(self.steps)

    def __getattr__(self, name: str) -> Any:
        """What programs ask a loader for."""
        if name in ("batch_sampler", "batch_size", "dataset", "num_workers", "sampler", "set_epoch"):
            return getattr(self.steps.feed.loader, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def finish(self) -> None:
        """Nothing is left to train: say so in the ledger, by which launch scripts know it, and `close`."""
        self.session.finish()
        self.close()

    def close(self) -> None:
        """Wait until all saves are complete and on the disk, and let other jobs save there."""
        self._release()


class Loop(StepLoop):
    """A training loop and its checkpoints; made by `megaresume.attach`. Every method is called on every rank.

    Iterate over it for batches: to the end of an epoch of a `DataLoader`, or of the data of a `StreamLoader`.
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
        """Whether the micro-batch handed out last is the last one of its step; the same before and after `stepped`."""
        return self.steps.ends_step

    def stepped(self) -> None:
        """Say that an optimizer step was made, of all micro-batches since the one before; also one that a GradScaler
        skipped. No collective.

        Raises:
            StateError: none was taken, or not all of a step's.
        """
        self.steps.stepped()
        self.host.background.look()

    def save(self) -> None:
        """Save a checkpoint of this step.

        Raises, on every rank:
            StateError: in the middle of a step; or the ranks disagree on what they trained.
            UsageError: some ranks alone call it; or the directory holds checkpoints that this run did not resume from.
            CheckpointError: files are missing, another job writes there, or the disk refuses.
        """
        all_come("loop.save()", self.host.meeting)
        self.host.save_now()

    def load(self, directory: str | os.PathLike[str] | None = None, *, tag: str | None = None) -> Resume | None:
        """Resume from the newest complete checkpoint, with what `megaresume.attach` was given to save.

        Args:
            directory: the checkpoint root; None: where the loop saves.
            tag: exactly this checkpoint: ``global_step100``.

        Returns:
            where it continues; None if there is no checkpoint, and it begins.

        Raises, on every rank:
            CheckpointError: what was asked for is not whole, or the ranks see different directories.
            StateError: no data state, or of other data, or of other objects.
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
    """Give a training loop its data in an exact order, and complete checkpoints. Call it on every rank, after the model
    is wrapped and the optimizer is made.

    Args:
        objects: what a checkpoint holds, by name: modules (DDP, FSDP2 and torch.compile included), their optimizers,
            and whatever else has ``state_dict`` and ``load_state_dict``, alike on every rank: schedulers, scalers.
        data: a `DataLoader`, or a `StreamLoader`.
        checkpoints: where the run saves, ``save_dir``, what it keeps, and so on.
        writer: ``dcp``: torch.distributed.checkpoint. ``dcp_async``: the same, while training continues; the checkpoint
            counts after the last byte of all ranks. ``torch``: one file, which rank 0 writes.
        stop: when to save and exit, with `megaresume.Stopped`.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.
        context_parallel: processes that train the same samples together and over which DDP or FSDP averages as well.

    Raises, on every rank:
        UsageError: another loader, loaders of other ranks, objects that cannot be saved, or settings that do not fit.
        StateError: the ranks have other data, objects or writers.
        CheckpointError: another job writes to the directory.
        SetupError: directories or clocks differ between nodes.
    """
    host = LoopHost(objects, data, writer, context_parallel)
    host.attach(checkpoints, stop, metrics)
    return Loop(host)
