"""`Session`: how a training process loads and saves checkpoints. Differences between trainers are in a `Host`.

    start    check clocks, and that the directory (in both storages) is the same on all nodes and only used by this job
    load     choose    rank 0: the newest complete checkpoint; the others: do they see the same?
             read      the host: weights, and the data state stored with them
             accept    the state is of this step, and equals the one beside the checkpoint
             resume    restore data and random state, print one line
    begin    before the first step: check that nothing is overwritten, ledger line, count starts without progress
    save     snapshot  the state of the data, the same on all ranks
             marker -> files of each rank -> the host: model files -> commit; durable later (`durability`)
             files and commit are retried if they failed for a reason that may pass
    stop     all ranks agree at a step: save, close, exit
    finish   nothing is left to train: a ledger line that launch scripts look for
    close    wait until durable, finish copies, release the lock

Every method is called on all ranks; if it fails on one rank, all of them raise.
"""

from __future__ import annotations

import contextlib
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
    LeavesOut,
    Loaded,
    Restored,
    Resume,
    check_place,
    check_same,
    seed_of,
    without_state,
)
from megaresume.checkpoint.load.choose import check_not_root, choose
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
    """Loads and saves the checkpoints of one training process.

    Args:
        host: the trainer.
        data: the data being trained on; None if it is set later, before `resume` or `begin`.
        save_dir: where the run saves, if known in advance: the ledger then records starts that die before a save.
        stage_to: where checkpoints in ``save_dir`` are copied to.
        retention: which older checkpoints to keep.
        position_every: steps between two records of the current position, see `Positions`; None: none.
        max_starts: how many starts from one step without a save are allowed; 0: any number.
        checksums: compute checksums of all files after a save, and verify them at a load.
        compare_frozen: before the first step after a load, see `LeavesOut`.
        random: the generators of this rank; None if the framework saves them itself.
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
        compare_frozen: bool = True,
        random: RandomState | None = None,
        stop: StopConditions | None = None,
        on_stop: Callable[[], None] | None = None,
        retries: Retries | None = None,
        metrics: Any = None,
    ) -> None:
        #: the steps to repeat, and of which run; None: this is not a replay.
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
        #: optimizer steps done; may be called at any time and in any thread.
        self.step_now: Callable[[], int] = host.iteration
        self.roots = Roots(save_dir, stage_to, retention)
        self.max_starts, self.checksums = max_starts, checksums
        self.random, self._on_stop = random, on_stop
        #: the samples of this rank that were handed out last; None if unknown.
        self.numbers: Callable[[], Sequence[int]] | None = None
        #: seconds that this process spent waiting for data, and in saves.
        self.clocks = Clocks()
        #: reports live figures; None if not requested.
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
            compare_frozen=compare_frozen,
            retries=retries or Retries(),
            stopper=lambda: self.stopper,
            on_commit=self._is_committed,
        )
        self.stopper: Stopper | None = None if stop is None else Stopper(stop, save_seconds=lambda: self.save_seconds)
        self.loaded: Loaded | None = None
        #: the result of the last load.
        self.resumed: Resume | None = None
        #: optimizer steps of the checkpoint that was last saved or loaded; None: neither.
        self.settled_step: int | None = None
        #: optimizer steps, state and layout of the checkpoint that was last committed (on rank 0) or loaded; None:
        #: neither.
        self.committed: tuple[int, DataState, Topology] | None = None
        #: duration of the last save in seconds; None if there was none. On rank 0.
        self.save_seconds: float | None = None
        self.compare_frozen = compare_frozen
        #: what the loaded checkpoint records of frozen weights, until they are compared.
        self._frozen: Mapping[str, Any] | None = None
        self._position_every = position_every
        #: on rank 0, once training has begun.
        self._positions: Positions | None = None
        self._begun = False

    @property
    def attempt(self) -> int | None:
        """Number of starts in the run's ledger, including this one; None if none is recorded yet."""
        return self._starter.attempt

    def _record_start(self, root: Path, *, trains: bool = True) -> None:
        self._starter.record(root, None if self.loaded is None else self.loaded.choice, trains=trains)

    # Start

    def stop_when(self, conditions: StopConditions, save: Callable[[], None]) -> None:
        """Listen for a stop from now on, and save by this function: replaces ``stop`` and ``on_stop``."""
        self.stopper, self._on_stop = Stopper(conditions, save_seconds=lambda: self.save_seconds), save
        self.stopper.install()

    def start(self) -> None:
        """Compare the clocks, and take the lock of ``save_dir``. Call it before anything that takes long.

        Raises, on every rank:
            CheckpointError: another job writes there, or it cannot be written.
            SetupError: a node does not see it; or clocks differ, and the run stops at a time of day; or only some ranks
                know that this is a replay.
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
        """Load the newest complete checkpoint, or the requested one, and resume the data from it.

        Args:
            load_dir: the checkpoint root.
            read: reads the weights of the choice; also gets the record beside it.
            pick: decides what to load: see `choose`.
            weights_only: do not move the data.
            adopts: ``read`` builds a state if a checkpoint has none; otherwise such a checkpoint is refused unread.

        Returns:
            the result of the host's `Restored`; None if there is no checkpoint at all.

        Raises, on every rank:
            CheckpointError: the requested checkpoint is incomplete, or all are, or the ranks see different directories.
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
        """Rank 0 decides what to load; all ranks check that they see the same. Also a barrier: no rank may begin to
        load what another refuses.

        Args:
            load_dir: the checkpoint root.
            pick: decides, on rank 0; gets the place of this root's copies, if there are any, and ``damaged``. None: the
                newest complete checkpoint.
            damaged: tag directories that could not be read -> the reason; these are skipped.

        Returns:
            the choice, with its directory as this rank knows it, and the record beside it; None if there is no
            checkpoint at all, or ``pick`` leaves it to the framework.

        Raises, on every rank:
            CheckpointError: the requested checkpoint is incomplete, or all are, or the ranks see different directories.
        """
        self.host.settle()
        chooser = Chooser(self.host, self.roots, self.replay, checksums=self.checksums)
        return chooser.choose(load_dir, pick, damaged or {})

    def exactly(self, tag_dir: Path) -> Pick:
        """A pick for `load` and `choose` that requires this checkpoint. It raises a UsageError for a root."""

        def pick(_shared: Any, damaged: Any) -> Choice | None:
            check_not_root(tag_dir)
            return choose(tag_dir.parent, tag=tag_dir.name, checksums=self.checksums, damaged=damaged)

        return pick

    def accept(self, choice: Choice, beside: StepFile | None, read: Restored) -> None:
        """Accept what was read as the point to resume from.

        Raises, on every rank:
            StateError: there is no data state; or it is of another step than the weights, or differs from the one
                beside them.
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
        """Resume the data from what was loaded, restore the random state, and print a line about it.

        Args:
            position: samples after which the framework continues, if it was told to continue elsewhere or numbers its
                samples itself; None: those of the state.
            words: about the random state, if the framework restores it.

        Raises, on every rank:
            StateError: the state does not fit the data, the ranks have different ones, or the data is at another
                position than the weights (`check_place`).
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
        self._frozen = loaded.envelope.frozen if self.compare_frozen else None
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
        """Call before the first batch of a step: stops if requested; at the very first step, see `begin`.

        Raises, on every rank:
            Stopped: the run was asked to stop, and has saved; or a replay has done its last step.
            StateError: see `LeavesOut`.
        """
        if self.replay is not None:
            self._end_replay()
        if self.stopper is not None and (reason := self.stopper.agreed()) is not None:
            self._stop(self.stopper, reason)
        if self._frozen is not None and isinstance(self.host, LeavesOut):
            self.host.check_frozen(self._frozen)
            self._frozen = None
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
        """Record the current position before a step, if ``position_every`` is set. No collective; returns at once."""
        if self._positions is not None:
            self._positions.note(self.host.iteration(), self.host.samples)

    def begin(self, *, trains: bool = True, save_interval: int | None = None) -> None:
        """Record this start in the ledger of ``save_dir``, once.

        Args:
            trains: False: nothing is left to train; such a start does not count as one without progress.
            save_interval: steps between saves, if known.

        Raises, on every rank:
            UsageError: nothing was loaded, and the run would overwrite existing checkpoints.
            CheckpointError: too many starts without a save, or the directory cannot be written.
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
        """Start recording positions. On rank 0."""
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
        from megaresume.checkpoint.metrics.session_figures import make_meter  # deferred: only needed for figures

        return make_meter(metrics, self.clocks, self.host)

    def _watched(self) -> Watched:
        """What the meter reads at each step."""
        from megaresume.checkpoint.metrics.looker import Watched
        from megaresume.checkpoint.metrics.session_figures import figures_of_run

        # A load in the middle of a program is not a start.
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
        """The state of the data being trained on, the same on every rank.

        Args:
            iteration: optimizer steps done, if the host does not count them.

        Raises, on every rank:
            StateError: what was handed out does not match what was trained, or the ranks' states differ.
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
            write: writes the model files of this rank, including ``save.envelope``; may `Save.defer`. Anything that can
                fail on one rank must run in `on_all_ranks`: only what all of them raise is retried.
            tag: name of the tag directory.
            envelope: from `snapshot`, if it was taken already.
            is_untouched: whether nothing of the step that began is trained; for the random state.
            latest, tracker: whether the commit moves DeepSpeed's pointer, and Megatron's.

        Returns:
            the result of ``write``; None if the save failed, and the run is to continue (see `Retries`), or in a
            replay, which saves nothing.

        Raises, on every rank:
            Stopped: a replay has done its last step.
            StateError: see `snapshot`.
            UsageError: the directory has checkpoints that this run did not resume from; or it is not the run's.
            CheckpointError: files are missing or empty, another job writes there, or a write fails. The pointers are
                unchanged.
            SetupError: a node does not see the directory.
        """
        if self.passes_over_saves():
            return None
        data = self.data
        assert data is not None
        random = self.random
        undrawn = contextlib.nullcontext() if random is None else random.saving(is_untouched=is_untouched)
        with self.clocks.save(), undrawn:
            root = on_all_ranks(lambda: self.roots.named_for_save(save_dir))
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
        """Whether this is a replay, which saves nothing; if it has done its last step, it ends here, on all ranks.

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
        """Record the end of the save that began at ``began`` (monotonic clock). On rank 0."""
        self.save_seconds = time.monotonic() - began
        if self.stopper is not None and self.stopper.stopping:
            self.stopper.saved()

    # Stop, close

    def _end_replay(self) -> None:
        """End the program if this is a replay that has done its last step; on all ranks, at a step boundary."""
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
        # While signals are still caught: the next one would kill whatever is in progress.
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

        A program that ends with status 0 may have been stopped, or have had a time limit: launch scripts take a run as
        finished only if this line exists.

        Raises, on every rank:
            CheckpointError: another job has the directory now, or it cannot be written.
            Stopped: a replay has done its last step.
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
        """Like `finish`, for the checkpoint last committed or loaded, while the program exits and ranks no longer meet.

        On rank 0; allows other jobs to write. Raises CheckpointError.
        """
        if self.roots.save_dir is not None and self.committed is not None:
            _record_end(self.roots.save_dir, *self.committed)
            release(self.roots.save_dir)

    def take_over(self, root: Path) -> None:
        """Make this process group save to a directory where another group of the same run has saved: it starts there at
        the current step. Before the save.
        """
        self._starter.begin_at(self.host.iteration(), self.host.samples())
        self.roots.mark_as_own(root)

    def hand_over(self, root: Path) -> None:
        """Leave a directory to another process group of the same run, once everything saved is durable."""
        self.durability.close(is_saving=False)
        self.roots.let_go(root)

    def close(self) -> None:
        """Wait until everything saved is durable and copied, stop listening, and allow other jobs to write. On any
        rank; a later save takes the lock again.
        """
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
