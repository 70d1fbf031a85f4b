"""Exact data resume for a training loop of one's own, in plain torch.

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

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.paths import deepspeed_tag
from megaresume.checkpoint.session.host import Host, Reading, Resume, Save
from megaresume.checkpoint.session.random_state import RandomState
from megaresume.checkpoint.session.ranks import all_come, is_rank_0, on_all_ranks, same_on_all_ranks
from megaresume.checkpoint.session.session import Session
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.checkpoint.session.stopping import StopConditions
from megaresume.hosts.torch import files
from megaresume.hosts.torch.background import Background
from megaresume.hosts.torch.feeds import Feed, feed_of
from megaresume.hosts.torch.host import StepHost, write_all
from megaresume.hosts.torch.shares import check_averaged, check_shares
from megaresume.hosts.torch.steps import Steps
from megaresume.stream.errors import UsageError


class LoopHost(StepHost):
    """See `megaresume.checkpoint.session.host.Host`.

    Args:
        steps: what the loop has trained.
        objects: what it saves.
        writer: how.
    """

    background: Background
    framework = f"torch {torch.__version__}"
    forgotten = "loop.load() was not called"
    load = "loop.load() before the first step"
    begin_anew = "read its weights with torch.distributed.checkpoint or torch.load, and save to another directory"

    def __init__(self, steps: Steps, objects: files.Objects, writer: files.Writer) -> None:
        self.steps, self.objects, self.writer = steps, objects, writer
        self._group = files.own_group()
        self.background = Background(lambda save: steps.session.commit(save))

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`: what rank 0 writes last, after it has heard of the files of all ranks."""
        last = files.SINGLE if self.writer == "torch" else files.METADATA
        return [last] if is_rank_0() else []

    def write(self, save: Save) -> None:
        """Write the files of this rank: for `Session.save`."""
        held = self.held(save)
        future = write_all(save, lambda: files.write(self.objects, save.tag_dir, held, self.writer, self._group))
        if future is not None:
            self.background.begin(future, save)

    def read(self, choice: Choice) -> Reading:
        """Read the files of this rank: for `Session.load`."""
        return self.go_on(files.read(self.objects, choice.tag_dir, self._group))


class StepLoop:
    """A training loop over `Steps`, and its checkpoints. Every method is called on every rank."""

    def __init__(self, host: StepHost, session: Session) -> None:
        self.steps, self.session = host.steps, session

    @property
    def step(self) -> int:
        """Optimizer steps made, since the start of the run."""
        return self.steps.step

    @property
    def samples(self) -> int:
        """Samples that they trained, all ranks together."""
        return self.steps.samples

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank: see `Steps`."""
        return iter(self.steps)

    def finish(self) -> None:
        """Nothing is left to train: say so in the ledger, by which launch scripts know it, and `close`."""
        self.session.finish()
        self.close()

    def close(self) -> None:
        """Wait until all saves are complete and on the disk, and let other jobs save there."""
        self.session.host.settle()
        self.session.close()


class Loop(StepLoop):
    """A training loop and its checkpoints; made by `megaresume.attach`. Every method is called on every rank.

    Iterate over it for batches: to the end of an epoch of a `DataLoader`, or of the data of a `StreamLoader`.
    """

    def __init__(self, host: LoopHost, session: Session) -> None:
        super().__init__(host, session)
        self.host = host

    @property
    def ends_step(self) -> bool:
        """Whether the micro-batch handed out last is the last one of its step."""
        return self.steps.is_whole

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
            UsageError: some ranks alone call it; or the directory holds checkpoints that this run did not go on from.
            CheckpointError: files are missing, another job writes there, or the disk refuses.
        """
        all_come("loop.save()")
        on_all_ranks(self.steps.check_save)
        self.session.save(self.host.save_dir, self.host.write, tag=deepspeed_tag(self.step), tracker=False)

    def load(self, directory: str | os.PathLike[str] | None = None, *, tag: str | None = None) -> Resume | None:
        """Go on from the newest complete checkpoint, with what `megaresume.attach` was given to save.

        Args:
            directory: the checkpoint root; None: where the loop saves.
            tag: exactly this checkpoint: ``global_step100``.

        Returns:
            where it goes on; None: there is no checkpoint, and it begins.

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
    context_parallel: int = 1,
) -> Loop:
    """Give a training loop its data in an exact order, and complete checkpoints. Call it on every rank, after the model
    is wrapped and the optimizer is made.

    Args:
        objects: what a checkpoint holds, by name: modules (DDP, FSDP2 and torch.compile included), their optimizers,
            and whatever else has ``state_dict`` and ``load_state_dict``, alike on every rank: schedulers, scalers.
        data: a `DataLoader`, or a `StreamLoader`.
        checkpoints: where the run saves, ``save_dir``, what it keeps, and so on.
        writer: ``dcp``: torch.distributed.checkpoint. ``dcp_async``: the same, while training goes on; the checkpoint
            counts after the last byte of all ranks. ``torch``: one file, which rank 0 writes.
        stop: when to save and exit, with `megaresume.Stopped`.
        context_parallel: processes that train the same samples together and over which DDP or FSDP averages as well.

    Raises, on every rank:
        UsageError: another loader, loaders of other ranks, objects that cannot be saved, or settings that do not fit.
        CheckpointError: another job writes to the directory.
        SetupError: directories or clocks differ between nodes.
    """
    on_all_ranks(lambda: _check(checkpoints, writer))
    feed = on_all_ranks(lambda: feed_of(data))
    saved = on_all_ranks(lambda: files.Objects(objects))
    check_averaged(saved.modules.values(), data.dp_size, context_parallel)
    steps = Steps(feed)
    host = LoopHost(steps, saved, writer)
    session = steps.session = open_session(host, feed, checkpoints, host.objects.device, stop, lambda: loop.save())
    loop = Loop(host, session)
    atexit.register(host.background.look_at_exit)
    return loop


def open_session(
    host: Host,
    feed: Feed,
    checkpoints: Checkpoints,
    device: Any,
    stop: StopConditions | None,
    on_stop: Callable[[], None],
) -> Session:
    """The session of a loop, started. Collective.

    Args:
        host: of the loop.
        feed: what it trains.
        checkpoints: where it saves.
        device: whose generators are saved, besides those on the CPU; None: the trainer saves generators by itself.
        stop, on_stop: when it is to save and exit, and how it saves then.

    Raises, on every rank:
        UsageError: the loaders are not those of all ranks.
        StateError: they have other data, or make other steps.
    """
    check_shares(feed)
    rank = feed.loader.dp_rank
    session = Session(
        host,
        feed,
        **checkpoints.of_session,
        random=None if device is None else RandomState(host.iteration, device, lambda: f"data-parallel rank {rank}"),
        stop=stop,
        on_stop=on_stop,
    )
    session.start()
    stream = feed.stream
    on_all_ranks(lambda: bool(stream.fingerprints))
    same_on_all_ranks(
        repr((stream.config.to_dict(), sorted(stream.fingerprints.items()), stream.skips)),
        "the data",
        cause="the nodes have different copies of it, or it was made with random numbers, or with other skips",
        action="make the data from the same files, and with the same seed and skips, on every rank",
    )
    if session.stopper is not None:
        session.stopper.install()
    return session


_ACTION = "Checkpoints(save_dir='checkpoints'); a checkpoint of any writer loads on any number of ranks"


def check_checkpoints(checkpoints: Checkpoints, whose: str = "a loop's", action: str = _ACTION) -> None:
    """Raise a UsageError unless a loop can save by these settings. ``whose, action``: for the error."""
    found = {"save_dir": checkpoints.save_dir, "elastic": checkpoints.elastic, "adopt": checkpoints.adopt}
    if found["save_dir"] is None or found["elastic"] or found["adopt"]:
        raise UsageError(
            f"these checkpoints are none of {whose}",
            found=", ".join(f"{name}={value}" for name, value in found.items()),
            expected="save_dir, and neither elastic nor adopt, which are DeepSpeed's",
            action=action,
        )


def _check(checkpoints: Checkpoints, writer: str) -> None:
    check_checkpoints(checkpoints)
    if writer not in get_args(files.Writer):
        raise UsageError("unknown writer", found=repr(writer), expected=", ".join(get_args(files.Writer)))
