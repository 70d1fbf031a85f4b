"""What happens around an engine's ``save_checkpoint`` and ``load_checkpoint``.

    save   state of the trained samples -> client_state["megaresume"]
           rank 0: marker -> all ranks: DeepSpeed's files -> rank 0: every file there? state, manifest, latest,
           tracker, ledger
    load   rank 0: choose -> all ranks: the same there? -> DeepSpeed's load of exactly that tag
           -> state from client_state, compared with the one beside the checkpoint -> the stream goes on from it

DeepSpeed's own ``latest`` is no commit marker: its rank 0 writes it, in place, while other ranks may still be writing
their files. So it is told not to, and the commit writes it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choose import Choice, choose
from megaresume.checkpoint.commit import begin_save, commit_save
from megaresume.checkpoint.confirm import confirm_choice
from megaresume.checkpoint.data_file import write_data_file
from megaresume.checkpoint.layout import deepspeed_tag, ledger_path
from megaresume.checkpoint.ledger import read_ledger
from megaresume.checkpoint.start import record_start
from megaresume.checkpoint.state_file import StepFile
from megaresume.checkpoint.topology import Topology
from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations.deepspeed_data import TrainingData
from megaresume.integrations.ranks import gather, is_rank_0, on_all_ranks, on_rank_0, same_on_all_ranks
from megaresume.integrations.resume import Resume
from megaresume.stream.errors import CheckpointError, StateError
from megaresume.stream.state import StreamState

__all__ = ["KEY", "Checkpoints"]

#: the one key that we add to DeepSpeed's client state, which shares a namespace with DeepSpeed's own.
KEY = "megaresume"

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves and loads one engine's checkpoints together with its data.

    Args:
        data: the engine's data.
        save_dir: where the run saves, if known beforehand: then the ledger learns of every start, also of one that
            dies before its first save.
    """

    def __init__(self, data: TrainingData, *, save_dir: str | None) -> None:
        self.data = data
        self.resume: Resume | None = None
        #: starts recorded in the ledger of the run, this one included; known on rank 0 from the first step on.
        self.attempt: int | None = None
        self._save_dir = save_dir
        self._choice: Choice | None = None
        self._start_recorded_in: set[Path] = set()

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
            StateError: the optimizer steps and the batches do not fit; or the ranks' states differ.
            CheckpointError: files are missing or empty, or the disk refuses. The pointers stay as they were.
        """
        engine, data = self.data.engine, self.data
        step = int(engine.global_steps)
        tag = deepspeed_tag(step) if tag is None else str(tag)
        state = on_all_ranks(data.state)
        same_on_all_ranks(
            f"iteration {step}, sample {state.samples}, digest {state.digest}",
            "the data that was trained",
            cause="the ranks have read different corpora, or count different optimizer steps",
            action="compare the corpora on the nodes: megaresume stream DATA.yaml",
        )
        self.record_start(save_dir)
        begin = on_rank_0(
            lambda: begin_save(
                save_dir,
                tag=tag,
                iteration=step,
                state=state,
                topology=self.topology(),
                latest=latest,
                tracker=latest,
            )
        )
        result = write(save_dir, tag=tag, client_state={**client_state, KEY: state.to_dict()}, save_latest=False)
        # Gathering the names is also the barrier behind the last write.
        files = sorted({file for files in gather(facts.expected_files(engine, save_dir, tag)) for file in files})

        def commit() -> tuple[str, ...]:
            notes = commit_save(begin, expected_files=files).notes
            if data.stream.origin is not None:
                write_data_file(Path(save_dir), data.stream.origin)
            return notes

        on_rank_0(commit)
        return result

    def record_start(self, save_dir: str | None = None) -> None:
        """Put this start into the ledger of the run, once. Writes on rank 0 only; no collective."""
        if save_dir is None and self._start_recorded_in:
            return  # asked for at every step
        save_dir = save_dir or self._save_dir
        if save_dir is None or not is_rank_0() or Path(save_dir).resolve() in self._start_recorded_in:
            return
        step, sample = self.data.base
        # What the marker of a killed save says is settled here, before the next save could overwrite it.
        record_start(
            save_dir,
            iteration=step,
            state=self.data.stream.state_at(sample, batches=self.data.schedule.until(sample)),
            choice=self._choice,
            topology=self.topology(),
        )
        self.attempt = sum(entry.kind == "start" for entry in read_ledger(ledger_path(Path(save_dir))).entries)
        self._start_recorded_in.add(Path(save_dir).resolve())

    # Load

    def load(self, read: Callable[..., tuple[Any, Any]], load_dir: str, tag: str | None, module_only: bool) -> Any:
        """Choose what to load, load it with ``read`` (DeepSpeed's method, its other arguments bound), restore the data.

        Returns:
            (path, client state) as DeepSpeed does; (None, None) where there is no checkpoint at all.

        Raises, on every rank:
            CheckpointError: what was asked for is not whole, nothing is, or the ranks see different directories; the
                number of ZeRO partitions changed and the checkpoint is not a universal one.
            StateError: no data state, or one that does not fit.
        """
        universal = facts.loads_universal(self.data.engine)
        choice = on_rank_0(lambda: _choose(load_dir, tag, universal))
        # Also a barrier: no rank may begin to load what another refuses.
        step_file = on_all_ranks(lambda: confirm_choice(load_dir, None if choice is None else choice.to_broadcast()))
        if choice is None:
            return None, None  # as DeepSpeed, without its warning on every rank
        self._report(choice)
        if not module_only:
            on_all_ranks(lambda: self._check_loadable(choice, step_file, universal))
        path, client_state = read(load_dir, tag=choice.tag)
        on_all_ranks(lambda: _check_loaded(path, choice))
        if not module_only:
            self._restore(choice, step_file, client_state)
        return path, client_state

    def _report(self, choice: Choice) -> None:
        if is_rank_0():
            for rejected in choice.rejected:
                log.warning("megaresume: passed over %s", rejected)
            for note in choice.notes:
                log.warning("megaresume: %s", note)

    def _check_loadable(self, choice: Choice, step_file: StepFile | None, universal: bool) -> None:
        """What DeepSpeed would fail on obscurely, or not notice at all."""
        if step_file is None and choice.step is None and not universal:
            raise _without_state(choice)
        before = None if step_file is None else step_file.topology
        if before is None or before.zero_stage is None or universal:
            return
        saved, now = before.dp * before.cp, facts.partitions(self.data.engine)
        if saved != now and max(before.zero_stage, int(self.data.engine.zero_optimization_stage())) > 0:
            source = choice.tag_dir
            raise CheckpointError(
                "DeepSpeed cannot load ZeRO optimizer state on another number of data-parallel ranks",
                found=f"{source.name}, saved with ZeRO {before.zero_stage} on {saved} data-parallel ranks; "
                f"{now} now, with ZeRO {self.data.engine.zero_optimization_stage()}",
                expected=f"{saved} data-parallel ranks, or a universal checkpoint",
                cause="the job was started on another number of nodes or GPUs",
                action=f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {source} "
                f'--output_folder {source}_universal, then set "checkpoint": {{"load_universal": true}} in the '
                "DeepSpeed config (--universal-checkpoint in megaresume.training). The data needs no conversion",
            )

    def _restore(self, choice: Choice, step_file: StepFile | None, client_state: Mapping[str, Any] | None) -> None:
        engine = self.data.engine

        def restore() -> StreamState:
            state = _state_of(choice, step_file, client_state)
            iteration = int(engine.global_steps)
            if step_file is not None and step_file.iteration != iteration:
                raise StateError(
                    "the weights and the data state are of different steps",
                    found=f"weights of iteration {iteration}, data state of iteration {step_file.iteration}",
                    expected="the same iteration",
                    cause="files of two checkpoints were mixed in one directory",
                    action="megaresume inspect DIR shows which checkpoints are whole; load one of those",
                )
            self.data.restore(state, step=iteration)
            return state

        state = on_all_ranks(restore)
        same_on_all_ranks(
            f"sample {state.samples}, digest {state.digest}",
            "the restored data state",
            cause="ranks have read different files",
            action="mount the same directory on every node",
        )
        self._choice = choice
        self._start_recorded_in.clear()
        self.resume = self._resume(choice, step_file, state)
        if is_rank_0():
            # Printed, not logged: it must be in the job's output whatever the program does with its logging.
            print(self.resume.line(), flush=True)
        if self.resume.repeated or self.resume.skipped:
            raise StateError(
                "the weights and the data state do not stand at the same sample",
                found=f"DeepSpeed trained {engine.global_samples} samples, the data state says {state.samples}",
                expected="the same number",
                cause="a part of the run was trained without megaresume, or global_samples was changed by hand",
                action="begin the data anew with load_checkpoint(..., load_module_only=True), or load another one",
            )

    def _resume(self, choice: Choice, step_file: StepFile | None, state: StreamState) -> Resume:
        engine = self.data.engine
        trained = int(engine.global_samples)
        return Resume(
            step=int(engine.global_steps),
            samples=state.samples,
            digest=state.digest,
            tag=choice.tag,
            before=None if step_file is None else step_file.topology,
            now=self.topology(),
            repeated=max(trained - state.samples, 0),
            skipped=max(state.samples - trained, 0),
        )


def _choose(load_dir: str, tag: str | None, universal: bool) -> Choice | None:
    if not universal or tag is not None:
        return choose(load_dir, tag=tag)
    pointer = Path(load_dir, "latest_universal")
    try:
        tag = pointer.read_text().strip()
    except OSError as error:
        raise CheckpointError(
            "load_universal is set, but there is no universal checkpoint",
            found=f"{pointer}: {error.strerror}",
            expected="the name of a directory that ds_to_universal wrote",
            action="convert one with deepspeed.checkpoint.ds_to_universal, or remove load_universal",
        ) from error
    choice, newest = choose(load_dir, tag=tag), choose(load_dir)
    if choice is not None and newest is not None and (newest.iteration or 0) > (choice.iteration or 0):
        raise CheckpointError(
            "the universal checkpoint is older than the newest checkpoint",
            found=f"{tag}, and {newest.tag} beside it",
            expected="the newest one, so that no step is trained twice",
            cause="load_universal was left in the config after the resume that needed it",
            action="remove load_universal (--universal-checkpoint); or convert the newest one; or, to go back on "
            f"purpose, ask for tag {tag}",
        )
    return choice


def _without_state(choice: Choice) -> StateError:
    return StateError(
        "the checkpoint has no data state",
        found=f"{choice.tag_dir}, written without megaresume",
        expected=f"the records of it in {choice.load_dir}/megaresume",
        cause="it was saved before megaresume.attach was added, or the directory megaresume was not copied along",
        action="copy the directory megaresume as well; or load the weights alone and begin the data anew: "
        "load_checkpoint(..., load_module_only=True)",
    )


def _check_loaded(path: object, choice: Choice) -> None:
    if path is None:
        raise CheckpointError(
            "DeepSpeed did not load the checkpoint",
            found=f"load_checkpoint returned None for {choice.tag_dir}",
            expected="the path of the checkpoint",
            cause="files that DeepSpeed needs are missing, or of another parallel layout",
            action=f"megaresume inspect {choice.load_dir}",
        )


def _state_of(choice: Choice, step_file: StepFile | None, client_state: Mapping[str, Any] | None) -> StreamState:
    """The state that rides with the weights, which must be the one that lies beside them."""
    within = (client_state or {}).get(KEY)
    if within is None:
        raise _without_state(choice)
    state = StreamState.from_json(within)
    if step_file is not None and step_file.state != state:
        raise StateError(
            "the data state in the checkpoint is not the one beside it",
            found=f"within: sample {state.samples}, digest {state.digest}",
            expected=f"beside: sample {step_file.state.samples}, digest {step_file.state.digest}",
            cause="a tag directory was copied over another one, or its records were",
            action=f"megaresume inspect {choice.load_dir}; load a checkpoint that is whole",
        )
    return state
