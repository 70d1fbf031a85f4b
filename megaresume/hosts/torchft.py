"""torchft: exact data while replicas leave and join.

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

What a step trains depends on its number alone; who trains it, on who is in its quorum:

    start_quorum     the samples of a step that was not committed are handed out again
    for batch        the samples are dealt to those who contribute, once the quorum is there: `Contributors`
    should_commit    only if all of them were dealt, once, by replicas at the same position: `Ballot`
      committed      the position moves on by the global batch
      not committed  it stays: the step is trained again, by whoever is there then
    a replica joins  it is given the position with the weights, by torchft

A step is in `torchft_steps`; how it is dealt and voted on, in `torchft_dealing`.

Checkpoints hold what a replica that joins is given. The first replica of the quorum saves; the others pass over it.
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

#: under which torchft sends our state, among its own, to a replica that joins; and under which a file has it.
KEY = "megaresume"


def _package() -> str:
    """Under which name torchft is installed."""
    names = ("torchft", "torchft-nightly")
    return next((name for name in names if any(importlib.metadata.distributions(name=name))), names[0])


class TorchftHost(TrainerHost):
    """See `TrainerHost`.

    Args:
        trainer: torchft's Manager.
        data: what it trains.
        global_batch_size: samples of a step, of all replicas together.
        log_samples: where each process writes down what it has trained; None: nowhere.
    """

    package = _package()
    words = loop_words(trainer="the manager", clock="manager.should_commit()", name="loop")
    forgotten = "loop.load() was not called"
    load = "loop.load() before the first step"
    begin_anew = "read its rank_00000.pt with torch.load, and save to another directory"
    device = None  # torchft gives no generators to a replica that joins

    def __init__(self, trainer: Any, data: Any, global_batch_size: int, log_samples: Any) -> None:
        super().__init__(trainer)
        self.data, self.global_batch_size, self._log_samples = data, global_batch_size, log_samples
        #: the membership of the ledger's last line: it has one whenever others than before make a step.
        self._ledger_membership = 0
        #: whether this replica has the lock of the directory, as the one that saves.
        self._owns_directory = False
        #: whether nothing was loaded yet, nor sent by another replica.
        self._has_no_state = True

    @property
    def step_samples(self) -> int:
        """Samples of what torchft counts as a step, of all replicas together."""
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
        """See `TrainerHost`. The directory is taken by whoever saves: other replicas save there, too."""
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
            # A number of its own: torchft has none that lasts.
            number = xxhash.xxh32_intdigest(f"{replica}/{rank()}".encode())
            self.dealt.log = on_all_ranks(lambda: RankLog(self._log_samples, rank=number, launch=0))

    def make_steps(self, **kwargs: Any) -> DealtSteps:
        """The steps of this replica; ``more``: arguments of `DealtSteps`."""
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
        """What torchft sends to a replica that joins, besides the weights. It asks in a thread of its own, between two
        steps."""
        steps = self.steps
        state = Envelope(state=steps.feed.snapshot(steps.samples), iteration=steps.step, framework=self.framework)
        sent = {"data": state.to_text(), "step": steps.step, "launch": self.dealt.membership}
        return {**sent, "rule": self.dealt.rule.parts}

    def take_state(self, given: Mapping[str, Any]) -> None:
        """This replica joins, or was behind: torchft has loaded the weights of another one, and this is its position.

        Raises:
            StateError: that one has other data, or deals it out in another way.
        """
        envelope = Envelope.read(given["data"])
        self.dealt.restart(given["launch"])
        # No choice of a checkpoint: what is restored are samples alone.
        self.steps.feed.restore(envelope.state, None)  # type: ignore[arg-type]
        self.dealt.rule.check_of_sender(given["rule"])
        self.steps.loaded(envelope.iteration, envelope.samples)
        self._has_no_state = False
        self.session.roots.mark_as_own(self._root)

    # A step

    def around_start_quorum(self, start_quorum: Any, *args: Any, **kwargs: Any) -> None:
        """Around ``Manager.start_quorum``: torchft asks who is there."""
        self.dealt.before_quorum()
        start_quorum(*args, **kwargs)
        self.dealt.after_quorum()

    def quorum_is_there(self) -> None:
        """After each quorum, before the step is dealt."""
        self._let_another_save()
        self._compare_step()

    def _let_another_save(self) -> None:
        """If this is not the first replica any more. Before anybody can commit this step, and save it."""
        if self._owns_directory and not self.is_first:
            self.session.hand_over(self._root)
            self._owns_directory = False

    def _compare_step(self) -> None:
        """Whether torchft counts the same steps, and no checkpoint waits to be loaded. Not if this replica is about to
        be given another one's state."""
        manager, steps = self.trainer, self.steps
        if manager.errored() or manager._healing:
            return
        steps.compare(manager.current_step())
        if self._has_no_state and not steps.step:
            # No collective: of a replica's processes, some may have been healed by now, and others not.
            check_fresh_start(self._root, cause=self.forgotten, load=self.load)
        self._has_no_state = False

    def around_allreduce(self, allreduce: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ``Manager.allreduce``, of gradients or of whatever else."""
        self.dealt.reduce(tensor, *args, **kwargs)
        return allreduce(tensor, *args, **kwargs)

    def around_should_commit(self, should_commit: Any, *args: Any, **kwargs: Any) -> bool:
        """Around ``Manager.should_commit``: the step is trained, does it count?"""
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
        """A line in the ledger if other replicas have made this step than the one before it."""
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
        """Save the step that was committed last, if this is the first replica, and nobody has saved it."""
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
        """See `TrainerHost`. The first replica says in the ledger that nothing is left to train."""
        self.dealt.stop_reading()
        if self.is_first:
            with replaced(self.session.roots, save_dir=self._root):
                self.session.finish()
        self.session.hand_over(self._root)
        self.session.close()


def _file() -> str:
    return f"rank_{rank():05d}.pt"


class ReplicaLoop(StepLoop):
    """The training loop of one replica; made by `megaresume.attach`. Every method is called on every replica.

    Iterate over it for the micro-batches of a step, between `start_quorum` and `should_commit` of torchft's Manager.
    """

    host: TorchftHost

    def __init__(self, host: TorchftHost) -> None:
        super().__init__(host)
        self.host = host

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this replica in the step whose quorum was asked for. With the asynchronous quorum, the
        first one may come before it: reading `weight` then waits for it.

        Raises:
            StateError: no quorum was asked for, or the data has ended.
        """
        with closing(self.host.dealt.batches()) as batches:  # type: ignore[type-var]
            yield from batches

    @property
    def weight(self) -> float:
        """The factor for the mean loss over the samples of the micro-batch handed out last, so that each sample
        of a step weighs the same, however many replicas there are and torchft divides by. 0 if this replica has no
        sample in it, or others are there than when it was read: it trains it only to take part in the all-reduce.
        Waits for the quorum: read it after the forward."""
        return self.host.dealt.weight

    @property
    def ends_step(self) -> bool:
        """Whether the micro-batch handed out last is the last one of its step: with torchft's DistributedDataParallel,
        all others go under ``model.no_sync()``."""
        return self.host.dealt.ends_step

    @property
    def is_over(self) -> bool:
        """Whether the data has no step any more."""
        return not self.steps.feed.has(self.steps.samples)

    def total(self, number: float) -> float:
        """The sum over all that contribute to the step, as of trained tokens. For a loss that is summed over tokens:
        after the last micro-batch, scale the gradients by the number of participants and divide by this.

        Args:
            number: of this process, without micro-batches of weight 0; if a replica has several processes, the mean of
                them.
        """
        return self.host.dealt.total(number)

    def save(self) -> None:
        """Save a checkpoint of the step that was committed last. The first replica of the quorum does.

        Raises, on every process of that replica:
            StateError: in the middle of a step.
            UsageError: the directory holds checkpoints that this run did not resume from.
            CheckpointError: files are missing, another job writes there, or the disk refuses.
        """
        self.host.save_now()

    def load(self) -> Resume | None:
        """Resume from the newest complete checkpoint. A replica that is behind others takes their state in its first
        quorum.

        Returns:
            where it continues; None if there is no checkpoint.

        Raises, on every process of a replica:
            CheckpointError: checkpoints are there, and none is complete.
            StateError: no data state, or of other data, or of other objects.
        """
        self.host.load_by(lambda choice, _: self.host.read(choice))
        return self.session.resumed

    def finish(self) -> None:
        """Nothing is left to train: say so in the ledger, and close. Raises CheckpointError."""
        self.host.end()

    def close(self) -> None:
        """Wait until all saves are on the disk, and let other replicas save."""
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
    """Give the replicas of torchft their data in an exact order while they leave and join. Call it on every replica,
    right after the Manager is made.

    Args:
        manager: torchft's Manager, with the weights that it gives to a replica that joins.
        data: a `DataLoader` or a `StreamLoader` of this replica's processes (``dp_rank``, ``dp_size``); micro-batches
            have as many samples as it says, or fewer.
        global_batch_size: samples of a step, of all replicas together: the same however many there are.
        checkpoints: where the run saves: one directory for all replicas.
        stop: when this replica saves and exits, with `megaresume.Stopped`.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.
        log_samples: a directory in which each process writes down which samples of which step it has trained, for
            ``megaresume verify --log-samples``.

    Raises:
        UsageError: another loader, or settings that do not fit.
        SetupError: directories or clocks differ between the processes of the replica, or ``log_samples`` cannot be
            written.
    """
    host = TorchftHost(manager, data, global_batch_size, log_samples)
    host.attach(checkpoints, stop, metrics)
    return ReplicaLoop(host)
