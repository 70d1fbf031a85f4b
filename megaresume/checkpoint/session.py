"""`Session`: how one training process loads and saves checkpoints. What differs between trainers is in a `Host`.

    start    clocks agree, the directory is the same on all nodes and only this job's (on both storages)
    load     choose    rank 0: the newest complete checkpoint; the others: the same there?
             read      the host: weights, and the state of the data that is stored with them
             accept    of this step, and the one that lies beside the checkpoint
             resume    data restored, random state put back, one line for the log
    begin    before the first step: nothing else is saved over, a line in the ledger, starts without progress counted
    save     snapshot  the state of what is trained, the same on all ranks
             marker -> files of each rank -> the host: model files -> commit; durable later (`durability`)
             the files, and the commit, are tried again if they failed for a reason that may pass
    stop     all ranks agree at a step: save, close, exit
    finish   nothing is left to train: a line in the ledger, by which launch scripts know it
    close    durable, copies finished, lock released

Every method is called on all ranks; if it fails on one rank, all of them raise.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megaresume.batches.masked import REPLAY_VARIABLE
from megaresume.checkpoint.chooser import Chooser, Pick
from megaresume.checkpoint.file_errors import read_undamaged, reading
from megaresume.checkpoint.host import (
    Data,
    HasLoggers,
    Host,
    Loaded,
    Restored,
    Resume,
    check_place,
    check_same,
    seed_of,
    without_state,
)
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.lock.lock import release, take
from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.checkpoint.random_state import RandomState
from megaresume.checkpoint.ranks import gather, is_rank_0, known_to_all, on_all_ranks, on_rank_0, same_on_all_ranks
from megaresume.checkpoint.records.candidates import run_of
from megaresume.checkpoint.records.envelope import DataState, Envelope
from megaresume.checkpoint.records.position import Positions
from megaresume.checkpoint.records.step_file import StepFile, new_id
from megaresume.checkpoint.replay import METRICS, Replay
from megaresume.checkpoint.roots import Roots
from megaresume.checkpoint.save.durability import Durability
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention
from megaresume.checkpoint.save.retries import Retries
from megaresume.checkpoint.saver import Save, Saver
from megaresume.checkpoint.starter import Starter
from megaresume.checkpoint.starts import MAX_STARTS, check_progress, record_end
from megaresume.checkpoint.stopping import StopConditions, Stopped, Stopper, check_clocks
from megaresume.checkpoint.system import Topology, process_age
from megaresume.stream.errors import UsageError

if TYPE_CHECKING:
    from megaresume.checkpoint.metrics.looker import Watched
    from megaresume.checkpoint.metrics.meter import Meter

log = logging.getLogger(__name__)

T = TypeVar("T")


class Session:
    """See above.

    Args:
        host: what trains.
        data: what is trained; None if it is set later, before `resume` or `begin`.
        save_dir: where the run saves, if known beforehand: the ledger then records starts that die before a save.
        stage_to: where checkpoints in ``save_dir`` are copied to.
        retention: which older checkpoints stay.
        position_every: steps between two notes of how far the run is, see `Positions`; None: there are none.
        max_starts: how many starts from one step without a save are allowed; 0: any number.
        checksums: take checksums of all files after a save, and compare them at a load.
        random: the generators of this rank; None if the framework saves them by itself.
        stop: when to save and exit.
        on_stop: how to save then; None if the host is told to stop by other means.
        retries: what to do if a save fails for a reason that may pass.
        metrics: sinks of live figures, see `megaresume.checkpoint.metrics.words`; None: no figures.
    """

    def __init__(
        self,
        host: Host,
        data: Data | None = None,
        *,
        save_dir: str | os.PathLike[str] | None = None,
        stage_to: str | os.PathLike[str] | None = None,
        retention: Retention = KEEP_ALL,
        position_every: int | None = None,
        max_starts: int = MAX_STARTS,
        checksums: bool = True,
        random: RandomState | None = None,
        stop: StopConditions | None = None,
        on_stop: Callable[[], None] | None = None,
        retries: Retries | None = None,
        metrics: Any = None,
    ) -> None:
        #: which steps of which run are trained again; None: this is a run of its own.
        self.replay = Replay.asked()
        if self.replay is not None:
            save_dir, stage_to, retention, metrics = self.replay.out, None, KEEP_ALL, METRICS
            position_every = None
        if position_every is not None and position_every < 1:
            raise UsageError(
                "position_every (--megaresume-position-every) must be at least 1",
                found=position_every,
                expected="steps",
                action="leave it out to note nothing between saves",
            )
        self.host, self.data = host, data
        #: optimizer steps made, at any time and in any thread.
        self.step_now: Callable[[], int] = host.iteration
        self.roots = Roots(save_dir, stage_to, retention)
        self.max_starts, self.checksums = max_starts, checksums
        self.random, self._on_stop = random, on_stop
        #: the samples of this rank that were handed out last; None if nobody knows.
        self.numbers: Callable[[], Sequence[int]] | None = None
        #: seconds that this process waits for data, and in saves.
        self.clocks = Clocks()
        #: tells live figures; None if nobody asked for them.
        self.meter = self._meter_of(metrics)
        #: makes complete checkpoints durable, in the background.
        self.durability = Durability(checksums=checksums)
        self._starter = Starter(host, self.roots, self.durability, self._state)
        self._saver = Saver(
            host,
            self.roots,
            self.durability,
            random=random,
            retention=retention,
            checksums=checksums,
            retries=retries or Retries(),
            stopper=lambda: self.stopper,
            on_commit=self._is_committed,
        )
        self.stopper: Stopper | None = None if stop is None else Stopper(stop, save_seconds=lambda: self.save_seconds)
        self.loaded: Loaded | None = None
        #: what the last load restored.
        self.resumed: Resume | None = None
        #: optimizer steps of the checkpoint that was saved or loaded last; None: neither.
        self.settled_step: int | None = None
        #: optimizer steps, state and layout of the checkpoint that was committed or loaded last; None: neither.
        #: Of what was committed, on rank 0.
        self.committed: tuple[int, DataState, Topology] | None = None
        #: how long the last save took; None if none was made. On rank 0.
        self.save_seconds: float | None = None
        self._position_every = position_every
        #: on rank 0, once training has begun.
        self._positions: Positions | None = None
        self._begun = False

    @property
    def attempt(self) -> int | None:
        """Starts recorded in the ledger of the run, this one included; None if none is recorded yet."""
        return self._starter.attempt

    def _record_start(self, root: Path, *, trains: bool = True) -> None:
        self._starter.record(root, None if self.loaded is None else self.loaded.choice, trains=trains)

    # Start

    def stop_when(self, conditions: StopConditions, save: Callable[[], None]) -> None:
        """Listen for a stop from now on, and save in this way: in place of ``stop`` and ``on_stop``."""
        self.stopper, self._on_stop = Stopper(conditions, save_seconds=lambda: self.save_seconds), save
        self.stopper.install()

    def start(self) -> None:
        """Compare the clocks, and take the lock of ``save_dir``. Before anything that takes long.

        Raises, on every rank:
            CheckpointError: another job writes there, or it cannot be written.
            SetupError: a node does not see it; or clocks differ, and the run is to stop at a time of day; or not all
                ranks know that this is a replay.
            UsageError: ``stage_to`` is not a place for copies.
        """
        check_clocks(needed=self.stopper is not None and self.stopper.conditions.before_end is not None)
        same_on_all_ranks(
            "no replay" if self.replay is None else self.replay.to_text(),
            f"${REPLAY_VARIABLE}",
            cause="the launcher gives the environment of megaresume replay to some of the processes only",
            action=f"let it hand {REPLAY_VARIABLE} on, as mpirun -x {REPLAY_VARIABLE} does",
        )
        if self.replay is not None and is_rank_0():
            print(self.replay.line(), flush=True)
        self.durability.machines  # noqa: B018  collective at the first call
        self.roots.start(self.durability)

    # Load

    def load(
        self,
        load_dir: str | os.PathLike[str],
        read: Callable[[Choice, StepFile | None], Restored],
        *,
        pick: Pick | None = None,
        weights_only: bool = False,
        adopts: bool = False,
    ) -> Any:
        """Load the newest complete checkpoint, or what is asked for, and let the data resume from it.

        Args:
            load_dir: the checkpoint root.
            read: reads the weights of what was chosen; is also given the record beside it.
            pick: decides what to load: see `choose`.
            weights_only: the data stays where it is.
            adopts: ``read`` builds a state if a checkpoint has none; otherwise such a checkpoint is refused unread.

        Returns:
            what the host's `Restored` hands back; None if there is no checkpoint at all.

        Raises, on every rank:
            CheckpointError: what was asked for is not whole, nothing is, or the ranks see different directories.
            StateError: no data state, or one that does not fit.
        """

        def read_one(damaged: Mapping[Path, str]) -> tuple[Choice, StepFile | None, Restored] | None:
            choice, beside = self.choose(load_dir, pick, damaged)
            if choice is None:
                return None
            if beside is None and choice.record is None and not (weights_only or adopts):
                raise known_to_all(without_state(choice, self.host.begin_anew))
            with reading(choice):
                return choice, beside, read(choice, beside)

        was_read = read_undamaged(read_one)
        if was_read is None:
            return None
        choice, beside, found = was_read
        if not weights_only:
            self.accept(found.choice or choice, beside, found)
            self.resume()
            self.roots.mark_as_own(load_dir)
        return found.result

    def choose(
        self, load_dir: str | os.PathLike[str], pick: Pick | None = None, damaged: Mapping[Path, str] | None = None
    ) -> tuple[Choice | None, StepFile | None]:
        """Rank 0 decides what to load; all ranks see the same there. Also a barrier: no rank may begin to load what
        another refuses.

        Args:
            load_dir: the checkpoint root.
            pick: decides, on rank 0; is given where the copies of this root are, if anywhere, and ``damaged``. None:
                the newest complete checkpoint.
            damaged: tag directories that could not be read, with the reason: passed over.

        Returns:
            the choice, its directory as this rank knows it, and the record beside it; None if there is no checkpoint
            at all, or ``pick`` leaves it to the framework.

        Raises, on every rank:
            CheckpointError: what was asked for is not whole, nothing is, or the ranks see different directories.
        """
        self.host.settle()
        chooser = Chooser(self.host, self.roots, self.replay, checksums=self.checksums)
        return chooser.choose(load_dir, pick, damaged or {})

    def exactly(self, tag_dir: Path) -> Pick:
        """Require this checkpoint and no other in `load` and `choose`."""
        return lambda _shared, damaged: choose(
            tag_dir.parent, tag=tag_dir.name, checksums=self.checksums, damaged=damaged
        )

    def accept(self, choice: Choice, beside: StepFile | None, read: Restored) -> None:
        """Take what was read as what the run resumes from.

        Raises, on every rank:
            StateError: there is no data state; or it is of another step than the weights, or not the one beside them.
        """

        def check() -> Envelope:
            if read.envelope is None:
                raise without_state(choice, self.host.begin_anew)
            check_same(read.envelope, read, beside, choice)
            return read.envelope

        envelope = on_all_ranks(check)
        topology = read.topology or (None if beside is None else beside.topology)
        self.loaded = Loaded(
            choice=choice, envelope=envelope, topology=topology, samples=read.samples, counter=read.counter
        )

    def resume(self, *, position: int | None = None, words: str | None = None) -> None:
        """Let the data resume from what was loaded, restore the random state, and print a line about it.

        Args:
            position: samples after which the framework continues, if it was told to continue elsewhere or numbers the
                samples that it reads by itself; None: those of the state.
            words: about the random state, if the framework restores it by itself.

        Raises, on every rank:
            StateError: the state does not fit the data, the ranks were given different ones, or the data is at another
                place than the weights (`check_place`).
        """
        loaded, data = self.loaded, self.data
        assert loaded is not None and data is not None
        choice, state = loaded.choice, loaded.envelope.state
        on_all_ranks(lambda: data.restore(state, choice))
        trained, counter = loaded.samples, loaded.counter
        if trained is None:
            trained, counter = state.samples, f"the data state alone: {self.host.framework} counts no samples"
        if data.counts_by:
            counter = f"{counter}, by {data.counts_by}"
        expected = trained if position is None else position
        places = gather(on_all_ranks(lambda: check_place(data, expected, counter)))
        at = next((place for place in places if place is not None), position)
        resumed_at = state if position is None else on_all_ranks(lambda: data.snapshot(position))
        same_on_all_ranks(
            f"sample {resumed_at.samples}, digest {resumed_at.digest}",
            "the restored data state",
            cause="ranks have read different files",
            action="mount the same directory on every node",
        )
        now = self.host.topology()
        if self.random is not None:
            words = self.random.restore(choice, loaded.topology, now, seed=seed_of(state))
        self.settled_step = self.host.iteration()
        self.committed = self.settled_step, resumed_at, now
        self._starter.begin_at(self.settled_step, resumed_at.samples)
        if self.meter is not None and self._begun:
            self.meter.begin(self._watched())
        self.roots.mark_as_own(choice.load_dir)
        self.resumed = Resume(
            step=self.settled_step,
            samples=resumed_at.samples,
            digest=resumed_at.digest,
            tag=choice.tag,
            before=loaded.topology,
            now=now,
            random=words,
            repeated=None if at is None else max(trained - at, 0),
            skipped=None if at is None else max(at - trained, 0),
            counter=counter,
            order_changed=data.changed,
        )
        if is_rank_0():
            # Printed, not logged: it must be in the job's output whatever the program does with its logging.
            print(self.resumed.line(), flush=True)
            for line in data.describe():
                print(line, flush=True)

    # Steps

    def step_begins(self) -> None:
        """Before the first batch of a step: stop if that was asked for; and before the very first, see `begin`.

        Raises, on every rank:
            Stopped: the run was asked to stop, and has saved; or a replay has made its last step.
        """
        if self.replay is not None:
            self._end_replay()
        if self.stopper is not None and (reason := self.stopper.agreed()) is not None:
            self._stop(self.stopper, reason)
        if not self._begun:
            self.begin()
        elif self.meter is not None:
            self.meter.start()
            if self.meter.pending is not None and isinstance(self.host, HasLoggers):
                self.meter.give(self.host.log)
        self.note_position()
        if self.random is not None:
            self.random.step_begins()

    def note_position(self) -> None:
        """Before a step: note how far the run is, if ``position_every`` asks for it. No collective; returns at once."""
        if self._positions is not None:
            self._positions.note(self.host.iteration(), self.host.samples)

    def begin(self, *, trains: bool = True, save_interval: int | None = None) -> None:
        """Record this start in the ledger of ``save_dir``, once.

        Args:
            trains: False: nothing is left to train; such a start does not count as one without progress.
            save_interval: steps between saves, if that is known.

        Raises, on every rank:
            UsageError: nothing was loaded, and the run would save over what is there.
            CheckpointError: starts lead to no save, or the directory cannot be written.
        """
        iteration, _ = self._starter.began_at()
        if (replay := self.replay) is not None and replay.tag is not None and self.loaded is None:
            raise UsageError(
                "the program of this replay did not load a checkpoint",
                found=f"training begins at step {iteration}",
                expected=f"{replay.tag}, in place of the checkpoint that the program asks for",
                cause=self.host.forgotten,
                action=self.host.load.format(directory=replay.run),
            )
        if (root := self.roots.save_dir) is not None:
            self._record_start(root, trains=trains)
            if trains:
                most = self.max_starts
                on_rank_0(
                    lambda: check_progress(root, iteration=iteration, save_interval=save_interval, max_starts=most)
                )
        if self.meter is not None and trains:
            self.meter.begin(self._watched())
        if self._position_every is not None and trains and is_rank_0():
            self._note_positions(self._position_every)
        self._begun = True

    def _note_positions(self, every: int) -> None:
        """On rank 0."""
        root = self.roots.save_dir
        if root is None or (run := run_of(root)) is None:
            return
        stream, copies = getattr(self.data, "stream", None), self.roots.copies_of(root)
        self._positions = Positions(
            root,
            every,
            run=run,
            start=self.attempt or 1,
            digest=lambda samples: None if stream is None else stream.digest_at(samples),
            send=None if copies is None or copies.place is None else copies.place.put_position,
        )

    def _meter_of(self, metrics: Any) -> Meter | None:
        if not metrics:
            return None
        from megaresume.checkpoint.metrics.session_figures import make_meter  # deferred: only for figures

        return make_meter(metrics, self.clocks, self.host)

    def _watched(self) -> Watched:
        """What the meter reads at each step."""
        from megaresume.checkpoint.metrics.looker import Watched
        from megaresume.checkpoint.metrics.session_figures import figures_of_run

        # After a load in the middle of a program nothing was started.
        age, root = 0.0 if self._begun else process_age(), self.roots.save_dir
        return Watched(
            stream=getattr(self.data, "stream", None),
            samples=self.host.samples,
            step=self.step_now,
            numbers=self.numbers,
            root=root,
            run=(None if root is None else run_of(root)) or new_id(),
            attempt=self.attempt or 1,
            born=time.time() - (age or 0.0),
            of_run=lambda marks: figures_of_run(root, marks),
        )

    # Save

    def snapshot(self, iteration: int | None = None) -> Envelope:
        """The state of what is trained, the same on every rank.

        Args:
            iteration: optimizer steps done, if the host does not count them by itself.

        Raises, on every rank:
            StateError: what was handed out and what was trained do not fit, or the ranks' states differ.
        """
        data, samples = self.data, self.host.samples()
        assert data is not None
        data.prepare()
        state = on_all_ranks(lambda: self._state(samples))
        envelope = Envelope(
            state=state,
            iteration=self.host.iteration() if iteration is None else iteration,
            framework=self.host.framework,
        )
        same_on_all_ranks(
            f"iteration {envelope.iteration}, sample {state.samples}, digest {state.digest}, "
            f"checksum {envelope.to_dict()['checksum']}",
            "the data that was trained",
            cause="the ranks have read different corpora, or count different optimizer steps",
            action="compare the corpora on the nodes: megaresume stream DATA.yaml",
        )
        return envelope

    def _state(self, samples: int) -> DataState:
        """The state from `Data.snapshot`; on rank 0, written and read back as a check."""
        data = self.data
        assert data is not None
        state = data.snapshot(samples)
        if is_rank_0():
            data.read_back(state)
        return state

    def save(
        self,
        save_dir: str | os.PathLike[str],
        write: Callable[[Save], Any],
        *,
        tag: str,
        envelope: Envelope | None = None,
        is_untouched: bool = False,
        latest: bool = True,
        tracker: bool = True,
    ) -> Any:
        """Save a checkpoint, and commit it.

        Args:
            save_dir: the checkpoint root.
            write: writes the model files of this rank, with ``save.envelope`` among them; may `Save.defer`. What can
                fail on one rank alone it does in `on_all_ranks`: only what all of them raise is tried again.
            tag: name of the tag directory.
            envelope: of `snapshot`, if it was taken already.
            is_untouched: whether nothing of the step that began is trained; for the random state.
            latest, tracker: whether the commit moves DeepSpeed's pointer, and Megatron's.

        Returns:
            what ``write`` did; None if the save failed, and the run is to continue (see `Retries`), or in a replay,
            which saves nothing.

        Raises, on every rank:
            Stopped: a replay has made its last step.
            StateError: see `snapshot`.
            UsageError: the directory holds checkpoints that this run did not resume from; or it is not the run's.
            CheckpointError: files are missing or empty, another job writes there, or the disk refuses. The pointers
                stay as they were.
            SetupError: a node does not see the directory.
        """
        if self.passes_over_saves():
            return None
        data = self.data
        assert data is not None
        with self.clocks.save():
            root = on_all_ranks(lambda: self.roots.named_for_save(save_dir))
            if self.random is not None:  # before anything else could draw
                self.random.at_save(is_untouched=is_untouched)
            state = envelope or self.snapshot()
            if self.meter is not None:
                self.meter.saves(state.iteration, state.samples)
            self.host.settle()
            save = self._saver.save(
                root,
                state,
                write,
                data=data,
                tag=tag,
                latest=latest,
                tracker=tracker,
                before=lambda: self._record_start(root),
            )
        if save is None:
            return None
        self.settled_step = state.iteration
        if self.meter is not None:
            self.meter.saved(state.iteration, state.samples)
        return save.result

    def passes_over_saves(self) -> bool:
        """Whether this is a replay, which saves nothing; one that has made its last step ends here, on all ranks.

        Raises:
            Stopped: it has.
        """
        self._end_replay()
        return self.replay is not None

    def commit(self, save: Save) -> bool:
        """Commit a save that was deferred: see `Saver.commit`."""
        return self._saver.commit(save)

    def _is_committed(self, save: Save) -> None:
        record = save.pending.record
        self.committed = record.iteration, record.state, record.topology
        self.is_saved(save.began)

    def is_saved(self, began: float) -> None:
        """Note that the save that began at ``began`` (monotonic clock) is over. On rank 0."""
        self.save_seconds = time.monotonic() - began
        if self.stopper is not None and self.stopper.stopping:
            self.stopper.saved()

    # Stop, close

    def _end_replay(self) -> None:
        """End the program if this is a replay, and has made its last step; on all ranks, at a step boundary."""
        if self.replay is None or self.host.iteration() < self.replay.last:
            return
        reason = f"replayed to step {self.replay.last}, the program ends here"
        if is_rank_0():
            print(f"megaresume: {reason}", flush=True)
        self.close()
        raise Stopped(reason, 0)

    def _stop(self, stopper: Stopper, reason: str) -> None:
        step = self.host.iteration()
        if step and step != self.settled_step and self._on_stop is not None:
            self._on_stop()
        # While signals are still caught: what is in flight when the program ends dies of the next one.
        self.host.settle()
        stopper.saved()
        status = stopper.conditions.status
        if is_rank_0():
            saved = "saved" if step == self.settled_step else "nothing saved"
            print(f"megaresume: {reason}: {saved} at step {step}; exits with status {status}, not finished", flush=True)
        self.close()
        raise Stopped(reason, status)

    def finish(self) -> None:
        """Record in the ledger of ``save_dir`` that nothing is left to train. After the last save, before `close`.

        A program that ends with status 0 may have been stopped, or given a number of minutes: launch scripts take a
        run as finished only if this line is there.

        Raises, on every rank:
            CheckpointError: another job has the directory now, or it cannot be written.
            Stopped: a replay has made its last step.
        """
        self._end_replay()
        root, data = self.roots.save_dir, self.data
        if root is None:
            return
        assert data is not None
        self.host.settle()
        iteration, samples, topology = self.host.iteration(), self.host.samples(), self.host.topology()

        on_rank_0(lambda: _record_end(root, iteration, data.snapshot(samples), topology))

    def finish_at_exit(self) -> None:
        """The same with the checkpoint that was committed or loaded last. On rank 0, as the program ends and no ranks
        meet any more; lets other jobs write. Raises CheckpointError."""
        if self.roots.save_dir is not None and self.committed is not None:
            _record_end(self.roots.save_dir, *self.committed)
            release(self.roots.save_dir)

    def take_over(self, root: Path) -> None:
        """From now on this process group saves to a directory that another one of the same run has saved to: it
        starts there at the current step. Before the save."""
        self._starter.begin_at(self.host.iteration(), self.host.samples())
        self.roots.mark_as_own(root)

    def hand_over(self, root: Path) -> None:
        """Another process group of the same run is to save there: wait until what was saved is durable, and let it."""
        self.durability.close(is_saving=False)
        self.roots.let_go(root)

    def close(self) -> None:
        """Wait until what was saved is durable and copied, stop listening, and let other jobs write. On any rank; a
        later save takes the lock again."""
        left = None
        if self._positions is not None:
            self.note_position()
            self._positions.close()
            self._positions = None
        if self.meter is not None:
            self.meter.close()
        if self.stopper is not None:
            left = self.stopper.seconds_left()
            self.stopper.uninstall()
        is_saving = self.host.is_saving()
        self.durability.close(left, is_saving=is_saving)
        self.roots.close(left, is_saving=is_saving)


def _record_end(root: Path, iteration: int, state: DataState, topology: Topology) -> None:
    """Record the end of the run in the ledger. On rank 0."""
    take(root)
    record_end(root, iteration=iteration, state=state, topology=topology)
