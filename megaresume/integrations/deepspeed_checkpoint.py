"""What happens around an engine's ``save_checkpoint`` and ``load_checkpoint``.

    save   state of the trained samples -> client_state["megaresume"]
           rank 0: marker -> all ranks: random state, DeepSpeed's files -> rank 0: every file there? state, manifest,
           latest, tracker, ledger
    load   rank 0: choose -> all ranks: the same there? -> DeepSpeed's load of exactly that tag
           -> state from client_state, compared with the one beside the checkpoint -> the stream goes on from it
           -> all ranks: random state

What concerns one tag directory alone is in `deepspeed_tags`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.fresh import check_fresh_start
from megaresume.checkpoint.layout import deepspeed_tag, ledger_path
from megaresume.checkpoint.ledger import read_ledger
from megaresume.checkpoint.lock import release
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.progress import MAX_STARTS, NOTHING_TO_TRAIN, check_progress
from megaresume.checkpoint.retention import KEEP_ALL, Retention
from megaresume.checkpoint.start import record_start
from megaresume.checkpoint.state_file import StepFile
from megaresume.checkpoint.topology import Topology
from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations import in_flight
from megaresume.integrations.claiming import claim_directory
from megaresume.integrations.deepspeed_data import TrainingData
from megaresume.integrations.deepspeed_tags import (
    KEY,
    choose_tag,
    read_tag,
    state_within,
    write_tag,
)
from megaresume.integrations.generators import Snapshot
from megaresume.integrations.loadable import BEGIN_ANEW, without_state
from megaresume.integrations.random_state import RandomState
from megaresume.integrations.ranks import gather, is_rank_0, on_all_ranks, on_rank_0, same_on_all_ranks
from megaresume.integrations.resume import Resume, change_lines
from megaresume.integrations.staged import Staged
from megaresume.stream.errors import MegaresumeError, StateError
from megaresume.stream.state import StreamState

__all__ = ["KEY", "Checkpoints"]


class Checkpoints:
    """Saves and loads one engine's checkpoints together with its data.

    Args:
        data: the engine's data.
        save_dir: where the run saves, if known beforehand, and claimed: then the ledger learns of every start, also of
            one that dies before its first save.
        retention: which older checkpoints stay.
        max_starts: starts from one place without a save that are let through; 0: any number.
        elastic: convert a ZeRO checkpoint of another number of ranks by itself.
        adopt: go on from a checkpoint that was written without megaresume.
        verify: take checksums of all files at a save, and compare them at a load.
        staged: where what is saved to ``save_dir`` is copied to; None: nowhere.
    """

    def __init__(
        self,
        data: TrainingData,
        *,
        save_dir: str | None,
        retention: Retention = KEEP_ALL,
        max_starts: int = MAX_STARTS,
        elastic: bool = False,
        adopt: bool = False,
        verify: bool = False,
        staged: Staged | None = None,
    ) -> None:
        self.data = data
        self.verify = verify
        self.staged = staged
        self.elastic = elastic
        self.adopt = adopt
        self.resume: Resume | None = None
        #: starts recorded in the ledger of the run, this one included; known on rank 0 from the first step on.
        self.attempt: int | None = None
        #: optimizer steps of the checkpoint that was saved or loaded last; None: neither.
        self.settled_step: int | None = None
        #: how long the last save took; None: none was made.
        self.save_seconds: float | None = None
        self.random = RandomState(data.engine)
        self._random_state: Snapshot = {}
        self._save_dir = save_dir
        self._retention = retention
        self._max_starts = max_starts
        self._begun = False
        self._choice: Choice | None = None
        self._start_recorded_in: set[Path] = set()
        #: directories that this run may save to: it went on from what is there, or there was nothing.
        self._own: set[Path] = set()
        #: directories whose lock this run has held, the same on every rank.
        self._claimed = set() if save_dir is None else {Path(save_dir).resolve()}

    def topology(self) -> Topology:
        """How the run is laid out now."""
        now = facts.topology(self.data.engine, num_workers=self.data.num_workers)
        # In a ramp-up the engine learns of its batch size only when the next step begins.
        return dataclasses.replace(now, global_batch_size=self.data.schedule.size_at(self.data.samples_trained))

    # Save

    def save(
        self, write: Callable[..., Any], save_dir: str, tag: str | None, client_state: Mapping[str, Any], latest: bool
    ) -> Any:
        """Save a checkpoint with ``write`` (DeepSpeed's method, its other arguments bound) and commit it.

        Raises, on every rank:
            StateError: the optimizer steps and the batches do not fit, the ranks' states differ, or an accumulation is
                not over.
            UsageError: the directory holds checkpoints that this run did not go on from.
            CheckpointError: files are missing or empty, another job writes there, or the disk refuses. The pointers
                stay as they were.
            SetupError: a node does not see the directory.
        """
        engine = self.data.engine
        began = time.monotonic()
        step = int(engine.global_steps)
        tag = deepspeed_tag(step) if tag is None else str(tag)
        self._random_state = self.random.at_save(is_untouched=self.data.is_untouched)  # before anything else could draw
        on_all_ranks(self.data.check_save)
        state = self._take_state()
        same_on_all_ranks(
            f"iteration {step}, sample {state.samples}, digest {state.digest}",
            "the data that was trained",
            cause="the ranks have read different corpora, or count different optimizer steps",
            action="compare the corpora on the nodes: megaresume stream DATA.yaml",
        )
        self._claim(save_dir)
        self._check_fresh(save_dir)
        self.record_start(save_dir)
        staged = self.staged if self.staged is not None and self.staged.holds(save_dir) else None
        result = write_tag(
            engine,
            functools.partial(write, save_dir),
            save_dir,
            tag=tag,
            iteration=step,
            state=state,
            topology=self.topology,
            client_state=client_state,
            latest=latest,
            origin=self._origin(),
            write_beside=lambda: self._write_beside(Path(os.path.abspath(save_dir)), step, tag),
            retention=self._retention if staged is None else KEEP_ALL,  # local ones go behind their copies
            checksums=self.verify,
            committed=None if staged is None else functools.partial(staged.submit, step, tag),
        )
        self.settled_step, self.save_seconds = step, time.monotonic() - began
        return result

    def _claim(self, save_dir: str) -> None:
        """Before the first save to a directory that nobody named beforehand. Collective."""
        place = Path(save_dir).resolve()
        if place not in self._claimed:
            claim_directory(save_dir)
            self._claimed.add(place)

    def release(self) -> None:
        """Let other jobs write: nothing is saved any more. On any rank; a later save takes the lock again."""
        if not in_flight.is_pending(self.data.engine):
            for directory in self._claimed:
                release(directory)

    def save_here(self) -> None:
        """Save to the directory that was named beforehand."""
        assert self._save_dir is not None  # `attach` has seen to it
        self.data.engine.save_checkpoint(self._save_dir)

    # What is a stream's own; the states of other people's loaders come and go in their own way.

    def _take_state(self) -> StreamState:
        """The state of what is trained, the same on every rank. Collective."""
        state = on_all_ranks(self.data.state)
        self.data.share_faults(gather)
        return state.replace(faults=self.data.faults)

    def _start_state(self, sample: int) -> StreamState:
        """The state at which this process began."""
        return self.data.stream.state_at(sample, batches=self.data.schedule.until(sample))

    def _origin(self) -> Mapping[str, Any] | None:
        """For data.yaml."""
        return self.data.stream.origin

    def _write_beside(self, root: Path, step: int, tag: str) -> tuple[FileEntry, ...]:
        """Write what this rank adds in ``<save>/megaresume``; see `write_tag`."""
        return (self.random.write(self._random_state, root, step, tag),)

    def _put_back(self, state: StreamState, choice: Choice) -> None:
        """Go on from a state. On every rank; raises on its own."""
        self.data.restore(state, step=int(self.data.engine.global_steps))

    def _change_lines(self, state: StreamState) -> list[str]:
        """What was accepted at the resume, in words."""
        return change_lines(self.data.stream, self.data.schedule.size_at(state.samples))

    def record_start(self, save_dir: str | None = None, *, trains: bool = True) -> None:
        """Put this start into the ledger of the run, once. Writes on rank 0 only; no collective.

        ``trains``: False where nothing is left to train; such a start is none that led to no save.
        """
        if save_dir is None and self._start_recorded_in:
            return  # asked for at every step
        save_dir = save_dir or self._save_dir
        if save_dir is None or not is_rank_0() or Path(save_dir).resolve() in self._start_recorded_in:
            return
        step, sample = self.data.base
        staged = self.staged if self.staged is not None and self.staged.holds(save_dir) else None
        if staged is not None:
            staged.adopt()
        # What the marker of a killed save says is settled here, before the next save could overwrite it.
        record_start(
            save_dir,
            iteration=step,
            state=self._start_state(sample),
            choice=self._choice,
            topology=self.topology(),
            details=None if trains else {NOTHING_TO_TRAIN: True},
        )
        self.attempt = sum(entry.kind == "start" for entry in read_ledger(ledger_path(Path(save_dir))).entries)
        self._start_recorded_in.add(Path(save_dir).resolve())
        if staged is not None:
            staged.start()
        elif not trains:
            release(save_dir)  # nothing more is written

    def begin(self) -> None:
        """Before a step, on every rank; what it does, it does before the first one. Collective.

        Raises, on every rank:
            UsageError: nothing was loaded, and the run would save over what is there.
            CheckpointError: starts lead to no save.
        """
        if self._begun:
            return
        save_dir, step = self._save_dir, self.data.base[0]
        if save_dir is not None:
            self._check_fresh(save_dir)
            self.record_start()
            on_rank_0(lambda: check_progress(save_dir, iteration=step, max_starts=self._max_starts))
        self._begun = True

    def _check_fresh(self, save_dir: str) -> None:
        """Raise a UsageError, on every rank, if a save would replace what this run did not go on from. Collective."""
        place = Path(save_dir).resolve()
        if place in self._own:
            return
        places = [place]
        if self.staged is not None and self.staged.holds(save_dir):
            places.append(self.staged.shared)

        def check() -> None:
            for directory in places:
                check_fresh_start(
                    directory,
                    cause="engine.load_checkpoint was forgotten, was given another directory, or load_module_only=True",
                    load=f"engine.load_checkpoint({save_dir!r}) before the first step",
                )

        on_rank_0(check)
        self._own.add(place)

    # Load

    def load(self, read: Callable[..., tuple[Any, Any]], load_dir: str, tag: str | None, module_only: bool) -> Any:
        """Choose what to load, load it with ``read`` (DeepSpeed's method, its other arguments bound), restore the data.

        Returns:
            (path, client state) as DeepSpeed does; (None, None) where there is no checkpoint at all.

        Raises, on every rank:
            CheckpointError: what was asked for is not whole, nothing is, or the ranks see different directories; the
                number of ZeRO partitions changed, and the checkpoint is not converted or cannot be.
            StateError: no data state, or one that does not fit.
        """
        in_flight.settle(self.data.engine)
        universal = facts.loads_universal(self.data.engine)
        shared = self.staged.shared if self.staged is not None and self.staged.holds(load_dir) else None
        choice, step_file = choose_tag(load_dir, tag, universal, checksums=self.verify, shared=shared)
        if choice is None:
            self._own.add(Path(load_dir).resolve())
            return None, None  # as DeepSpeed, without its warning on every rank

        def check() -> None:
            if step_file is None and choice.step is None and not universal and not self.adopt:
                raise without_state(choice, BEGIN_ANEW)

        if not module_only:
            on_all_ranks(check)
        facts.forget_gradients(self.data.engine)
        loaded, path, client_state = read_tag(
            self.data.engine, read, choice, step_file, elastic=self.elastic, optimizer=not module_only
        )
        if not module_only:
            self._restore(loaded, step_file, client_state)
            self._own.add(Path(load_dir).resolve())
        return path, client_state

    def _restore(self, choice: Choice, step_file: StepFile | None, client_state: Mapping[str, Any] | None) -> None:
        engine = self.data.engine

        def restore() -> StreamState:
            if self.adopt and step_file is None and choice.step is None and KEY not in (client_state or {}):
                state = self._adopted(choice)
            else:
                state = state_within(choice, step_file, client_state, BEGIN_ANEW)
            iteration = int(engine.global_steps)
            if step_file is not None and step_file.iteration != iteration:
                raise StateError(
                    "the weights and the data state are of different steps",
                    found=f"weights of iteration {iteration}, data state of iteration {step_file.iteration}",
                    expected="the same iteration",
                    cause="files of two checkpoints were mixed in one directory",
                    action="megaresume inspect DIR shows which checkpoints are whole; load one of those",
                )
            self._put_back(state, choice)
            return state

        try:
            state = on_all_ranks(restore)
        except MegaresumeError as error:
            self.data.not_restored(error)
            raise
        same_on_all_ranks(
            f"sample {state.samples}, digest {state.digest}",
            "the restored data state",
            cause="ranks have read different files",
            action="mount the same directory on every node",
        )
        before = None if step_file is None else step_file.topology
        words = self.random.restore(choice, before, self.topology(), seed=int(state.config.get("seed", 0)))
        self._choice = choice
        self.settled_step = int(engine.global_steps)
        self._start_recorded_in.clear()
        self.resume = self._resume(choice, before, state, words)
        if is_rank_0():
            # Printed, not logged: it must be in the job's output whatever the program does with its logging.
            print(self.resume.line(), flush=True)
            for line in self._change_lines(state):
                print(line, flush=True)
        if self.resume.repeated or self.resume.skipped:
            raise StateError(
                "the weights and the data state do not stand at the same sample",
                found=f"DeepSpeed trained {engine.global_samples} samples, the data state says {state.samples}",
                expected="the same number",
                cause="a part of the run was trained without megaresume, or global_samples was changed by hand",
                action="begin the data anew with load_checkpoint(..., load_module_only=True), or load another one",
            )

    def _adopted(self, choice: Choice) -> StreamState:
        """The state behind as many samples as DeepSpeed has counted: trained, though nobody knows which they were."""
        samples, size = int(self.data.engine.global_samples), int(self.data.engine.train_batch_size())
        note = f"{samples} samples up to {choice.tag} were trained without megaresume, in another order"
        if is_rank_0():
            print(f"megaresume: {note}; the stream begins behind them", flush=True)
        return self.data.stream.state_at(samples, batches=((0, size),), overrides=(note,))

    def _resume(self, choice: Choice, before: Topology | None, state: StreamState, random: str) -> Resume:
        engine = self.data.engine
        trained = int(engine.global_samples)
        return Resume(
            step=int(engine.global_steps),
            samples=state.samples,
            digest=state.digest,
            tag=choice.tag,
            before=before,
            now=self.topology(),
            random=random,
            repeated=max(trained - state.samples, 0),
            skipped=max(state.samples - trained, 0),
        )
