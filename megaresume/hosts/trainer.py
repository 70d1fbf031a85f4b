"""`TrainerHost`: a trainer of another library as the host of a `Session`, declared.

A trainer is one class in one file: its name, its refused settings, where it saves, its data, and which of its methods
handle the data. What is the same for all trainers is here:

    attach()    check -> settings -> feed -> open() -> begin() -> hooks
    open()      Steps, the one Count; the session, started
    iteration(), samples(), topology()               the answers required by `Host`, from the count
    load_by(), write_all(), carried(), resumed()     a load, and a save, by the trainer's own methods

docs/hosts.md builds one.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.chooser import Pick
from megaresume.checkpoint.ending import before_end, not_before_end
from megaresume.checkpoint.file_errors import writing
from megaresume.checkpoint.generators import kept
from megaresume.checkpoint.host import Host, Restored
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.random_state import RandomState
from megaresume.checkpoint.ranks import on_all_ranks, world_size
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.session import Session
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.checkpoint.system import Topology
from megaresume.hosts.attach import SLOT, hook
from megaresume.hosts.count import Words
from megaresume.hosts.feeds import Feed, check_same_data, check_shares
from megaresume.hosts.files import Background
from megaresume.hosts.frozen import FrozenWeights
from megaresume.hosts.steps import Steps, loop_words
from megaresume.hosts.unsaved import stepped_after_save
from megaresume.stream.errors import UsageError

T = TypeVar("T")

#: (object, name of a method, function called instead: it gets the method before its arguments).
Hook = tuple[Any, str, Callable[..., Any]]


class TrainerHost(Host):
    """The base of all hosts of trainers.

    A host must have: ``package``, ``words``, ``forgotten``, ``load``, ``begin_anew``, `check`, `settings`, `feed`,
    `begin`, `hooks`, `save_now`; ``device``, if the trainer has no attribute with that name. It may have:
    `check_first_save`, `kept`, `expected_files`, `Host.committed`, ``background``, ``frozen``.

    Its hooks must call
        steps.stepped()                      after an optimizer step, or also `steps.check_step()` before it
        steps.compare(step)                  if the trainer counts steps itself
        save_by(directory, write, tag=...)   instead of the trainer's save; ``write`` calls the trainer's own by
                                             `write_all`, and adds `carried(save)` to what it saves: the state must be
                                             in the file with the weights, as an entry of it, or as an object that the
                                             trainer asks for its state (`Carried`)
        load_by(read)                        instead of its load; ``read`` loads `choice.tag_dir` and returns
                                             `resumed(...)` for the result of `carried`
        end()                                when the trainer has trained all it wanted

    Args:
        trainer: the object of the library.
    """

    #: the distribution whose version is recorded.
    package: str
    #: words in errors: see `Words`.
    words: ClassVar[Words] = loop_words()
    #: the count of what it has trained, and its session: set by `open`.
    steps: Steps
    session: Session
    #: the writer of checkpoints that are written while training continues; None if there is none.
    background: Background | None = None
    #: weights that checkpoints may lack, see `FrozenWeights.note`; None: they hold all.
    frozen: FrozenWeights | None = None
    #: whether `check_first_save` was called.
    is_save_checked = False
    #: whether a scheduler was stepped after a save, which is reported once.
    is_scheduler_late = False
    #: whether files are being written or read: torch then creates an optimizer's state by a step without effect.
    is_at_files = False

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    # What a trainer declares

    def check(self) -> None:
        """Refuse an object that is not such a trainer, and settings that would change the data. On every rank.

        Raises:
            UsageError: names it, and what to do instead: see `check_new` and `refuse`.
        """

    def check_processes(self) -> None:
        """Refuse several processes that would each train separately, by this trainer's count: see `check_together`."""
        check_together(
            world_size(),
            "in torch.distributed",
            cause="torch.distributed is not initialised",
            action="call torch.distributed.init_process_group first; a run that is to train by itself is started "
            "without a launcher, or without WORLD_SIZE",
        )

    def settings(self, given: Checkpoints) -> Checkpoints:
        """Merge in the trainer's own directory and retention: see `merge_trainer_settings`, `check_checkpoints`."""
        return check_checkpoints(given)

    def feed(self) -> Feed:
        """The batches for the trainer. On every rank."""
        raise NotImplementedError

    @property
    def device(self) -> Any:
        """The device whose generators are saved with those of the CPU; None if the trainer saves generators itself."""
        return self.trainer.device

    def begin(self) -> None:
        """Replace the trainer's batches by ours, once the session is open."""

    def hooks(self) -> Iterable[Hook]:
        """The methods of this trainer, and of its parts, that handle its data."""
        return ()

    def check_first_save(self) -> None:
        """Before the first save of a start, refuse or warn about what its checkpoint would not restore. Collective."""

    def kept(self) -> Sequence[Any]:
        """What a checkpoint contains besides models and optimizers, if a user's own loop steps a scheduler in it: see
        `check_schedulers`.
        """
        return ()

    def save_now(self) -> Any:
        """Save because the run is to stop."""

    # The same for all

    def attach(self, checkpoints: Checkpoints, stop: StopConditions | None = None, metrics: Any = None) -> None:
        """Attach the trainer. Collective.

        Args:
            checkpoints: as given.
            stop: when to save and exit.
            metrics: sinks of live figures; None: no figures.

        Raises, on every rank:
            UsageError: see `check`, `settings` and `feed`.
            CheckpointError, SetupError, StateError: see `open`.
        """
        on_all_ranks(self.check)
        checkpoints = on_all_ranks(lambda: self.settings(checkpoints))
        self.open(on_all_ranks(self.feed), checkpoints, stop, metrics)
        self.begin()
        self.put_hooks()

    def watch(self, optimizers: Iterable[Any], *, once: bool = False) -> None:
        """Report each step of these optimizers, as a user's own loop may save between an optimizer step and the call
        that counts it: then the micro-batches that are out are in the weights. See `Steps.changed`.

        Args:
            optimizers: those that are not torch's are ignored.
            once: refuse two steps of one of them for the same micro-batches, see `Steps.steps_by`. ZeRO does one for
                each parameter group.
        """
        entered: set[Any] = set()

        def enters(optimizer: Any, *_: Any) -> None:
            entered.add(optimizer)

        def changed(optimizer: Any, *_: Any) -> None:
            if self.is_at_files:
                return
            if once and optimizer in entered:  # only the innermost, if a subclass's step calls its parent's
                entered.remove(optimizer)
                self.steps.steps_by(optimizer)
            self.steps.changed()

        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                if once:
                    optimizer.register_step_pre_hook(enters)
                optimizer.register_step_post_hook(changed)

    def put_hooks(self) -> None:
        """Hook the trainer's methods, and mark it as attached."""
        for owner, name, function in self.hooks():
            hook(owner, name, function)
        setattr(self.trainer, SLOT, self)

    def open(
        self, feed: Feed, checkpoints: Checkpoints, stop: StopConditions | None = None, metrics: Any = None
    ) -> None:
        """Start counting, and start the session. Collective.

        Raises, on every rank:
            UsageError: the loaders are for other ranks.
            StateError: their data or their steps differ.
            CheckpointError: another job writes to the directory.
            SetupError: directories or clocks differ between nodes.
        """
        self.steps = Steps(feed, self.words)
        self.framework = f"{self.package} {importlib.metadata.version(self.package)}"
        self.session = self.steps.session = open_session(self, feed, checkpoints, stop, metrics)
        if self.session.meter is not None:
            self.session.numbers, feed.loader.meter = self.steps.numbers, self.session.meter
            self.steps.on_step = self.session.meter.steps.stepped
        if self.background is not None:
            before_end(self.background.look_at_exit)

    def note_loss(self, loss: Any, *, is_scaled: bool = False) -> None:
        """Report the loss of a micro-batch: see `StepNumbers.loss`."""
        if self.session.meter is not None:
            self.session.meter.steps.loss(loss, is_scaled=is_scaled)

    def note_norm(self, norm: Any) -> None:
        """Report the norm of the step's gradients: see `StepNumbers.norm`."""
        if self.session.meter is not None:
            self.session.meter.steps.norm(norm)

    def end(self) -> None:
        """The run is complete: record that in the ledger, where launch scripts look, and release the lock."""
        self.session.finish()
        self.release()

    def release(self) -> None:
        """Wait until all saves are complete and on the disk, and let other jobs save there."""
        self.settle()
        self.session.close()
        if self.background is not None:
            not_before_end(self.background.look_at_exit)  # which would keep what was trained alive until then

    def iteration(self) -> int:
        """See `Host`."""
        return self.steps.step

    def samples(self) -> int:
        """See `Host`."""
        return self.steps.samples

    def topology(self) -> Topology:
        """See `Host`."""
        return self.steps.feed.topology(self.samples())

    def check_frozen(self, recorded: Mapping[str, Any]) -> None:
        """See `LeavesOut`."""
        if self.frozen is not None:
            self.frozen.check(recorded)

    def settle(self) -> None:
        """See `Host`."""
        if self.background is not None:
            self.background.settle()

    def is_saving(self) -> bool:
        """See `Host`."""
        return self.background is not None and self.background.is_saving()

    @property
    def save_dir(self) -> Path:
        """The directory where the run saves: `settings` ensures that it is known."""
        save_dir = self.session.roots.save_dir
        assert save_dir is not None
        return save_dir

    def carried(self, save: Save) -> dict[str, Any]:
        """Our entries in a checkpoint besides the weights, under plain names: data state, optimizer steps, samples."""
        return {"data": save.envelope.to_text(), "step": self.steps.step, "samples": self.steps.samples}

    def resumed(self, carried: Mapping[str, Any]) -> Restored:
        """The result for what `carried` returned, read back with the weights."""
        return self.resumed_at(carried["step"], carried["samples"], Envelope.read(carried["data"]))

    def resumed_at(self, step: int, samples: int | None, envelope: Envelope | None, result: Any = None) -> Restored:
        """The result of reading weights and our state.

        Args:
            step, samples: by the trainer's own count; None: it counts no samples.
            envelope: the data state; None: there is none.
            result: of the trainer's own method.
        """
        recorded = 0 if envelope is None else envelope.samples
        self.steps.loaded(step, recorded if samples is None else samples)
        return Restored(envelope=envelope, iteration=step, samples=samples, result=result)

    def load_by(
        self,
        read: Callable[[Choice, Topology | None], Restored],
        tag_dir: Path | None = None,
        *,
        root: Path | None = None,
        pick: Pick | None = None,
    ) -> Any:
        """`Session.load`; if it fails, nothing more is trained.

        Args:
            read: reads the files of this rank; also gets the layout of the run when it saved; None if unknown.
            tag_dir: exactly this checkpoint; None: the newest complete one, or that of ``pick``.
            root: the checkpoint root; None: where the run saves.
            pick: decides what to load: see `Session.choose`.
        """
        session = self.session
        if tag_dir is not None:
            root, pick = tag_dir.parent, session.exactly(tag_dir)

        def read_files(choice: Choice, beside: StepFile | None) -> Restored:
            return read(choice, None if beside is None else beside.topology)

        with self.steps.loading():
            return session.load(root or self.save_dir, read_files, pick=pick)

    def save_by(
        self, save_dir: str | os.PathLike[str], write: Callable[[Save], Any], *, tag: str, **kwargs: Any
    ) -> Any:
        """`Session.save`, refused within a step.

        Args:
            save_dir, write, kwargs: see `Session.save`.
            tag: name of the directory. If the trainer's names for checkpoints are not in `names.USUAL_TAGS`, add a row
                there: then ``megaresume inspect`` knows the step of a bare directory.

        Raises, on every rank:
            StateError: see `Count.check_save`.
        """

        def write_files(save: Save) -> Any:
            if not self.is_save_checked:
                self.is_save_checked = True
                self.check_first_save()
            return write(save)

        on_all_ranks(self.steps.check_save)
        result = self.session.save(save_dir, write_files, tag=tag, **kwargs)
        if not self.is_scheduler_late:
            is_late = stepped_after_save(self.kept())
            self.steps.on_next_step = lambda: setattr(self, "is_scheduler_late", is_late())
        return result


class Carried:
    """The data state in a trainer's checkpoint, as an object that the trainer asks for its state."""

    #: its key there.
    KEY = "megaresume"

    def __init__(self) -> None:
        #: from the save that begins, or the load that ended: see `Envelope.to_text`.
        self.text = ""

    def state_dict(self) -> dict[str, Any]:
        """The entry to save; before a load, the entry to look for."""
        return {self.KEY: self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the entry found by a load; a checkpoint that megaresume did not write has none."""
        self.text = str(state.get(self.KEY, ""))


def write_all(save: Save, write: Callable[[], T]) -> T:
    """Write the files of this rank in a save; if that fails on one rank, every rank raises, with our explanation."""

    def write_files() -> T:
        with writing(save.tag_dir):
            return write()

    return on_all_ranks(write_files)


def open_session(
    host: TrainerHost, feed: Feed, checkpoints: Checkpoints, stop: StopConditions | None, metrics: Any
) -> Session:
    """Create and start the session of a host: see `TrainerHost.open`."""
    on_all_ranks(host.check_processes)
    check_shares(feed)
    rank, device = feed.loader.dp_rank, host.device
    session = Session(
        host,
        feed,
        **checkpoints.session_kwargs,
        random=None if device is None else RandomState(host.iteration, device, lambda: f"data-parallel rank {rank}"),
        stop=stop,
        on_stop=lambda: host.save_now(),
        metrics=metrics,
    )
    session.start()
    check_same_data(feed)
    if session.stopper is not None:
        session.stopper.install()
    return session


def undrawn(evaluate: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Hooked on an evaluation: it draws nothing from the generators of the training, also between a save and the next
    step, since a resume would not do it again."""
    with kept():
        return evaluate(*args, **kwargs)


# What settings are refused


def check_together(known: int, where: str, *, cause: str, action: str) -> None:
    """Refuse processes that were started together, but would each train separately.

    Args:
        known: number of processes that train together, by the trainer's count.
        where: the source of that number.
        cause, action: for the error.

    Raises:
        UsageError: the process group is larger, or without one, the launcher started more.
    """
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    started = world_size() if has_group else int(os.environ.get("WORLD_SIZE") or 1)
    if known < started:
        raise UsageError(
            "each process would train the whole dataset by itself",
            found=f"{started} processes {'in torch.distributed' if has_group else 'by WORLD_SIZE'}, {where} {known}",
            expected="the same number",
            cause=cause,
            action=action,
        )


def check_sizes(
    feed: Feed, loader: str, trainer: str, sizes: Mapping[str, tuple[Any, Any, str]], *, layout: str, length: str
) -> None:
    """Refuse a loader for other ranks or steps than those of the trainer that reads from it.

    Args:
        feed: of the loader.
        loader, trainer: their names in errors.
        sizes: name -> the loader's, the trainer's, and what makes both equal.
        layout: of the trainer, for errors.
        length: its setting for the length of the run.

    Raises:
        UsageError: names the first one; or the data may end with a short step, which no such trainer can train.
    """
    if isinstance(feed.loader, DataLoader):
        feed.loader.ends_elsewhere = True
    for name, (found, expected, action) in sizes.items():
        if found != expected:
            raise UsageError(
                f"the {loader} and the {trainer} disagree about {name}",
                found=f"{found}, of the {loader}",
                expected=f"{expected}, of the {trainer}: {layout}",
                action=f"make the {loader} with {action}",
            )
    check_whole_steps(feed, f"the {trainer}", length)


def check_whole_steps(feed: Feed, trainer: str, length: str) -> None:
    """Refuse data that may end with a short step.

    Args:
        feed: of the loader.
        trainer: cannot train it; named in the error.
        length: other ways to set the length of the run.

    Raises:
        UsageError: it may.
    """
    ends = any(source.max_epochs is not None for source in feed.stream.config.sources)
    if ends and not feed.whole_steps:
        raise UsageError(
            f"the last step of the data may be short, which {trainer} cannot train",
            found="a DataLoader with max_epochs",
            expected="whole steps",
            action=f"drop_last=True leaves out the remainder; or no max_epochs, and {length} for the length",
        )


def merge_trainer_settings(
    checkpoints: Checkpoints,
    *,
    trainer: str = "this trainer",
    save_dir: tuple[str, Any],
    keep_last: tuple[str, Any],
) -> Checkpoints:
    """The settings for a trainer that itself determines where it saves, and how many checkpoints it keeps.

    Args:
        checkpoints: without these two settings.
        trainer: its name in the error.
        save_dir, keep_last: name and value of its own settings.

    Raises:
        UsageError: one of them was also given here.
    """
    own = {
        "save_dir": (f"{trainer} saves to its own {save_dir[0]}, {save_dir[1]!r}", save_dir[0]),
        "keep_last": (f"{trainer} keeps as many as its own {keep_last[0]} says", keep_last[0]),
    }
    for name, (cause, theirs) in own.items():
        if given := getattr(checkpoints, name):
            raise UsageError(
                f"{name} cannot be used with megaresume.attach under {trainer}",
                found=f"Checkpoints({name}={given!r})",
                expected="not set",
                cause=cause,
                action=f"leave {name} out, and set {theirs}",
            )
    return replace(checkpoints, save_dir=save_dir[1], keep_last=keep_last[1] or None)


_ACTION = "Checkpoints(save_dir='checkpoints'); a checkpoint of any writer loads on any number of ranks"


def check_checkpoints(checkpoints: Checkpoints, trainer: str = "a loop", action: str = _ACTION) -> Checkpoints:
    """The settings for a trainer that leaves it to us where it saves.

    Args:
        checkpoints: as given.
        trainer, action: for the error.

    Raises:
        UsageError: no ``save_dir``.
    """
    if checkpoints.save_dir is None:
        raise UsageError(
            f"{trainer} cannot save by these checkpoints",
            found="no save_dir",
            expected="the directory to save to",
            action=action,
        )
    return checkpoints
