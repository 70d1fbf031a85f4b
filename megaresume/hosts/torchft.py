"""Exact data for torchft, while replicas leave and join.

    loop = megaresume.attach(manager, loader, global_batch_size=32, checkpoints="checkpoints")
    loop.load()
    while loop.step < 1000:
        optimizer.zero_grad()             # torchft's Optimizer: asks for the quorum of the next step
        for batch in loop:                # the samples of this replica in this step
            loss = model(batch).mean()
            (loss * loop.weight).backward()
        optimizer.step()                  # torchft decides whether the step is committed
        if loop.step % 100 == 0:
            loop.save()
    loop.finish()

What a step trains depends only on its number; who trains it depends on who is in its quorum:

    start_quorum     the samples of a step that was not committed are handed out again
    for batch        the samples are dealt to the contributors once the quorum is known: `Contributors`
    should_commit    only if all of them were dealt, once, by replicas at the same position: `Ballot`
      committed      the position advances by the global batch
      not committed  it stays: the step is trained again, by whoever is there then
    a replica joins  torchft sends it the position with the weights

A step is in `torchft_steps`; how it is dealt and voted on, in `torchft_dealing`.

Checkpoints contain what a joining replica is sent. The first replica of the quorum saves; the others skip it.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.host import Restored, Resume
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import on_all_ranks, on_rank_0, rank, world_size
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.names import deepspeed_tag
from megaresume.checkpoint.records.rank_log import RankLog
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.starts import check_fresh_start, record_membership
from megaresume.checkpoint.stopping import StopConditions
from megaresume.hosts.attach import check_new, refuse, replaced
from megaresume.hosts.feeds import Feed, feed_of
from megaresume.hosts.loop import StepLoop
from megaresume.hosts.steps import loop_words
from megaresume.hosts.torchft_dealing import OF_MANAGER, Share
from megaresume.hosts.torchft_dealt import DealtSteps
from megaresume.hosts.torchft_steps import ReplicaSteps
from megaresume.hosts.trainer import Hook, TrainerHost, check_checkpoints, check_whole_steps, write_all
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import StateError, UsageError

#: the key for our state in what torchft sends to a joining replica, and in a file.
KEY = "megaresume"


def _package() -> str:
    """The name under which torchft is installed."""
    names = ("torchft", "torchft-nightly")
    return next((name for name in names if any(importlib.metadata.distributions(name=name))), names[0])


class TorchftHost(TrainerHost):
    """torchft's Manager as a host, see `TrainerHost`.

    Args:
        trainer: torchft's Manager.
        data: the loader.
        global_batch_size: samples per step, over all replicas.
        log_samples: where each process records what it has trained; None: nowhere.
    """

    package = _package()
    words = loop_words(trainer="the manager", clock="manager.should_commit()", name="loop")
    forgotten = "loop.load() was not called"
    load = "loop.load() before the first step"
    begin_anew = "read its rank_00000.pt with torch.load, and save to another directory"
    device = None  # torchft sends no generators to a joining replica

    def __init__(self, trainer: Any, data: Any, global_batch_size: int, log_samples: Any) -> None:
        super().__init__(trainer)
        self.data, self.global_batch_size, self._log_samples = data, global_batch_size, log_samples
        #: the membership in the ledger's last line: a line is written whenever other replicas do a step than before.
        self._ledger_membership = 0
        #: whether this replica has the lock of the directory, as the one that saves.
        self._owns_directory = False
        #: whether no state was loaded so far, nor sent by another replica.
        self._has_no_state = True

    @property
    def step_samples(self) -> int:
        """Samples in what torchft counts as a step, over all replicas."""
        return self.global_batch_size

    # What a trainer declares

    def check(self) -> None:
        """See `TrainerHost`."""
        manager = self.trainer
        missing = [name for name in OF_MANAGER if not hasattr(manager, name)]
        check_new(manager, "Manager", missing=missing, headline="this is not a Manager of torchft's", expected="one")
        refuse(
            {
                "use_async_quorum=True": (
                    world_size() > 1 and manager._use_async_quorum,
                    "Manager(use_async_quorum=False), where a replica has several processes",
                )
            }
        )
        if manager.current_step():
            raise UsageError(
                "the manager has made steps before it was attached",
                found=f"manager.current_step() = {manager.current_step()}",
                expected="0",
                cause="its state was loaded by hand, or it has trained without megaresume",
                action="attach it right after it is made, and let loop.load() load its checkpoints",
            )
        size = self.global_batch_size
        if type(size) is not int or size < 1:
            raise UsageError(
                "bad global_batch_size",
                found=repr(size),
                expected="samples of a step, 1 or more",
                action="pass global_batch_size=64, for example",
            )

    def settings(self, given: Checkpoints) -> Checkpoints:
        """See `TrainerHost`."""
        given = check_checkpoints(given, "replicas that leave and join")
        if given.stage_to is not None:
            raise UsageError(
                "stage_to cannot be used with replicas that leave and join",
                found=f"Checkpoints(stage_to={os.fspath(given.stage_to)!r})",
                expected="not set",
                cause="another replica, on another machine, may save next",
                action="save_dir on storage that all replicas see",
            )
        return given

    def feed(self) -> Feed:
        """See `TrainerHost`."""
        loader, size = self.data, self.step_samples
        feed = feed_of(loader, whole_steps=True)
        if isinstance(loader, DataLoader):
            words = "leave it out: global_batch_size says how many micro-batches make a step"
            refuse({"accumulation": (loader.accumulation > 1 and f"{loader.accumulation}", words)}, expected="1")
            loader.ends_elsewhere = True
            loader.schedule = loader.stream.schedule = BatchSchedule.constant(size)
        elif any(one != size for _, one in loader.schedule.segments):
            raise UsageError(
                "the loader and global_batch_size disagree",
                found=f"{loader.schedule}",
                expected=f"BatchSchedule.constant({size})",
                action="give both the same number",
            )
        check_whole_steps(feed, "replicas that leave and join", "loop.step")
        loader.is_live = True
        return feed

    def open(
        self, feed: Feed, checkpoints: Checkpoints, stop: StopConditions | None = None, metrics: Any = None
    ) -> None:
        """See `TrainerHost`. Only the replica that saves takes the directory: others may save there, too."""
        assert checkpoints.save_dir is not None
        self._root = Path(checkpoints.save_dir)
        super().open(feed, replace(checkpoints, save_dir=None), stop, metrics)

    @property
    def save_dir(self) -> Path:
        """The directory where the run saves."""
        return self._root

    def begin(self) -> None:
        """See `TrainerHost`."""
        manager = self.trainer
        self.dealt = self.make_steps(step_begins=self.session.step_begins, quorum_is_there=self.quorum_is_there)
        manager.register_state_dict_fn(KEY, self.take_state, self.state_to_send)
        if self._log_samples is not None:
            replica = manager._replica_id or manager._store.get("replica_id").decode()
            # A number of our own: torchft has no permanent one.
            number = xxhash.xxh32_intdigest(f"{replica}/{rank()}".encode())
            self.dealt.log = on_all_ranks(lambda: RankLog(self._log_samples, rank=number, launch=0))

    def make_steps(self, **kwargs: Any) -> DealtSteps:
        """The steps of this replica; ``kwargs``: arguments of `DealtSteps`."""
        return ReplicaSteps(self.trainer, self.steps, samples=self.step_samples, **kwargs)

    def hooks(self) -> list[Hook]:
        """See `TrainerHost`."""
        functions: dict[str, Any] = {
            "start_quorum": self.around_start_quorum,
            "allreduce": self.around_allreduce,
            "should_commit": self.around_should_commit,
        }
        return [(self.trainer, name, function) for name, function in functions.items()]

    # A replica that joins

    def state_to_send(self) -> dict[str, Any]:
        """What torchft sends to a joining replica, besides the weights. Called in another thread, between two steps."""
        steps = self.steps
        state = Envelope(state=steps.feed.snapshot(steps.samples), iteration=steps.step, framework=self.framework)
        sent = {"data": state.to_text(), "step": steps.step, "launch": self.dealt.membership}
        return {**sent, "rule": self.dealt.rule.parts}

    def take_state(self, given: Mapping[str, Any]) -> None:
        """Set the position of this replica, which joined or was behind: torchft has loaded another one's weights.

        Raises:
            StateError: that one has other data, or deals it out by another rule.
        """
        envelope = Envelope.read(given["data"])
        self.dealt.restart(given["launch"])
        # Not a checkpoint's choice: only samples are restored.
        self.steps.feed.restore(envelope.state, None)  # type: ignore[arg-type]
        self.dealt.rule.check_of_sender(given["rule"])
        self.steps.loaded(envelope.iteration, envelope.samples)
        self._has_no_state = False
        self.session.roots.mark_as_own(self._root)

    # A step

    def around_start_quorum(self, start_quorum: Any, *args: Any, **kwargs: Any) -> None:
        """Wraps ``Manager.start_quorum``: torchft asks who is there."""
        self.dealt.before_quorum()
        start_quorum(*args, **kwargs)
        self.dealt.after_quorum()

    def quorum_is_there(self) -> None:
        """Called after each quorum, before the step is dealt."""
        self._let_another_save()
        self._compare_step()

    def _let_another_save(self) -> None:
        """Give up the directory if this is no longer the first replica; before anyone can commit and save this step."""
        if self._owns_directory and not self.is_first:
            self.session.hand_over(self._root)
            self._owns_directory = False

    def _compare_step(self) -> None:
        """Check that torchft counts the same steps, and no checkpoint waits to be loaded; unless this replica is about
        to get another one's state.
        """
        manager, steps = self.trainer, self.steps
        if manager.errored() or manager._healing:
            return
        steps.compare(manager.current_step())
        if self._has_no_state and not steps.step:
            # Not a collective: some processes of a replica may already have been healed, and others not.
            check_fresh_start(self._root, cause=self.forgotten, load=self.load)
        self._has_no_state = False

    def around_allreduce(self, allreduce: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps ``Manager.allreduce``, of gradients or anything else."""
        self.dealt.reduce(tensor, *args, **kwargs)
        return allreduce(tensor, *args, **kwargs)

    def around_should_commit(self, should_commit: Any, *args: Any, **kwargs: Any) -> bool:
        """Wraps ``Manager.should_commit``: the step is trained; does it count?"""
        made = self.dealt.commit(lambda: should_commit(*args, **kwargs))
        if made is None:
            return False
        self._note_members(*made)
        return True

    @property
    def is_first(self) -> bool:
        """Whether this is the replica that saves: the first of the quorum."""
        return bool(self.trainer.participating_rank() == 0)

    def _note_members(self, share: Share, membership: int) -> None:
        """Write a ledger line if other replicas have done this step than the one before."""
        if membership == self._ledger_membership:
            return
        self._ledger_membership = membership
        if not self.is_first:
            return
        assert self.dealt.contributors is not None
        steps, replicas = self.steps, len(self.dealt.contributors.replicas)
        state, topology = steps.feed.snapshot(steps.samples), replace(self.topology(), dp=share.size)
        details = {"replicas": replicas, "quorum": self.trainer._quorum_id, "launch": membership}
        on_rank_0(
            lambda: record_membership(self._root, iteration=steps.step, state=state, topology=topology, details=details)
        )

    # Checkpoints

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`."""
        return [_file()]

    def save_now(self) -> None:
        """Save the last committed step, if this is the first replica, and no other has saved it."""
        if not self.is_first or self.steps.step == self.session.settled_step:
            return
        if not self._owns_directory:
            self.session.take_over(self._root)
            self._owns_directory = True
        self.save_by(self._root, self._write_file, tag=deepspeed_tag(self.steps.step), tracker=False)

    def _write_file(self, save: Save) -> None:
        def write() -> None:
            save.tag_dir.mkdir(exist_ok=True)
            state = {**self.trainer._manager_state_dict(), KEY: {**self.carried(save), "processes": world_size()}}
            torch.save(state, save.tag_dir / _file())

        write_all(save, write)

    def read(self, choice: Choice) -> Restored:
        """Read the file of this process: for `Session.load`."""
        manager = self.trainer

        def read_file() -> dict[str, Any]:
            names = sorted(path.name for path in choice.tag_dir.glob("rank_*.pt"))
            if len(names) != world_size():
                raise StateError(
                    "the replica that saved the checkpoint had another number of processes",
                    found=f"{choice.tag_dir}: {', '.join(names)}",
                    expected=f"{world_size()} files",
                    action=f"resume with {len(names)} processes for each replica; the number of replicas is free",
                )
            state: dict[str, Any] = torch.load(choice.tag_dir / _file(), map_location="cpu", weights_only=False)
            if state["user"].keys() != manager._load_state_dict_fns.keys():
                raise StateError(
                    "the checkpoint holds other objects than the manager",
                    found=", ".join(sorted(state["user"])),
                    expected=", ".join(sorted(manager._load_state_dict_fns)),
                    cause="register_state_dict_fn was called for others when the checkpoint was saved",
                    action="register the same ones, before loop.load()",
                )
            return state

        state = on_all_ranks(read_file)
        for name, load in manager._load_state_dict_fns.items():
            if name != KEY:
                load(state["user"][name])
        manager.load_state_dict(state["torchft"])
        self.dealt.restart(state["user"][KEY]["launch"])
        self._has_no_state = False
        return self.resumed(state[KEY])

    def end(self) -> None:
        """See `TrainerHost`. The first replica records in the ledger that nothing is left to train."""
        self.dealt.stop_reading()
        if self.is_first:
            with replaced(self.session.roots, save_dir=self._root):
                self.session.finish()
        self.session.hand_over(self._root)
        self.session.close()


def _file() -> str:
    return f"rank_{rank():05d}.pt"


class ReplicaLoop(StepLoop):
    """The training loop of one replica; created by `megaresume.attach`. Call every method on every replica.

    Iterate over it for the micro-batches of a step, between `start_quorum` and `should_commit` of torchft's Manager.
    """

    host: TorchftHost

    def __init__(self, host: TorchftHost) -> None:
        super().__init__(host)
        self.host = host

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this replica in the step whose quorum was requested. With the asynchronous quorum, the
        first one may come before the quorum: then reading `weight` waits for it.

        Raises:
            StateError: no quorum was requested, or the data has ended.
        """
        with closing(self.host.dealt.batches()) as batches:  # type: ignore[type-var]
            yield from batches

    @property
    def weight(self) -> float:
        """The factor for the mean loss over the samples of the last micro-batch, which gives each sample of a step the
        same weight for any number of replicas by which torchft divides. 0 if this replica has no sample in it, or the
        members have changed since it was read: then it is only trained to take part in the all-reduce. Waits for the
        quorum: read it after the forward.
        """
        return self.host.dealt.weight

    @property
    def ends_step(self) -> bool:
        """Whether the last micro-batch handed out ends its step: with torchft's DistributedDataParallel, all others run
        under ``model.no_sync()``.
        """
        return self.host.dealt.ends_step

    @property
    def is_over(self) -> bool:
        """Whether the data has no more steps."""
        return not self.steps.feed.has(self.steps.samples)

    def total(self, number: float) -> float:
        """The sum of a number, such as trained tokens, over all contributors to the step. For a loss that is summed
        over tokens: after the last micro-batch, multiply the gradients by the number of participants and divide by
        this.

        Args:
            number: of this process, without micro-batches of weight 0; if a replica has several processes, their mean.
        """
        return self.host.dealt.total(number)

    def save(self) -> None:
        """Save a checkpoint of the last committed step. The first replica of the quorum writes it.

        Raises, on every process of that replica:
            StateError: in the middle of a step.
            UsageError: the directory has checkpoints that this run did not resume from.
            CheckpointError: files are missing, another job writes there, or a write fails.
        """
        self.host.save_now()

    def load(self) -> Resume | None:
        """Resume from the newest complete checkpoint. A replica that is behind gets its state in its first quorum.

        Returns:
            where it continues; None if there is no checkpoint.

        Raises, on every process of a replica:
            CheckpointError: there are checkpoints, but none is complete.
            StateError: no data state, or one for other data, or for other objects.
        """
        self.host.load_by(lambda choice, _: self.host.read(choice))
        return self.session.resumed

    def finish(self) -> None:
        """Record in the ledger that nothing is left to train, and close. Raises CheckpointError."""
        self.host.end()

    def close(self) -> None:
        """Wait until all saves are on the disk, and allow other replicas to save."""
        self.host.dealt.stop_reading()
        self.session.hand_over(self.host.save_dir)
        super().close()


def attach(
    manager: Any,
    data: DataLoader | StreamLoader,
    *,
    global_batch_size: int,
    checkpoints: Checkpoints,
    stop: StopConditions | None = None,
    metrics: Any = None,
    log_samples: str | os.PathLike[str] | None = None,
) -> ReplicaLoop:
    """Give torchft's replicas their data in an exact order while they leave and join. Call it on every replica, right
    after creating the Manager.

    Args:
        manager: torchft's Manager, with the weights that it sends to a joining replica.
        data: a `DataLoader` or a `StreamLoader` for this replica's processes (``dp_rank``, ``dp_size``); micro-batches
            have its batch size, or fewer samples.
        global_batch_size: samples per step over all replicas, for any number of them.
        checkpoints: where the run saves: one directory for all replicas.
        stop: when this replica saves and exits, with `megaresume.Stopped`.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.
        log_samples: a directory in which each process records which samples of which step it has trained, for
            ``megaresume verify --log-samples``.

    Raises:
        UsageError: another loader, or settings that do not fit.
        SetupError: directories or clocks differ between the processes of the replica, or ``log_samples`` cannot be
            written.
    """
    host = TorchftHost(manager, data, global_batch_size, log_samples)
    host.attach(checkpoints, stop, metrics)
    return ReplicaLoop(host)
