"""`attach`: exact data resume for a DeepSpeed engine, in the user's own training loop.

    engine, *_ = deepspeed.initialize(...)
    data = megaresume.attach(engine, "data.yaml")
    engine.load_checkpoint("checkpoints")          # nothing there yet: starts at sample 0
    for batch in data:
        loss = ...
        engine.backward(loss)
        last = engine.is_gradient_accumulation_boundary()  # asked before the step: whether it ends one
        engine.step()
        if last and engine.global_steps % 100 == 0: engine.save_checkpoint("checkpoints")

See `deepspeed_hooks` and docs/deepspeed.md.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megaresume.checkpoint.progress import MAX_STARTS
from megaresume.checkpoint.retention import Retention
from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations import in_flight
from megaresume.integrations.claiming import claim_directory
from megaresume.integrations.clocks import check_clocks
from megaresume.integrations.deepspeed_checkpoint import Checkpoints
from megaresume.integrations.deepspeed_data import TrainingData
from megaresume.integrations.deepspeed_hooks import hook
from megaresume.integrations.ranks import is_rank_0, on_all_ranks, on_rank_0, same_on_all_ranks
from megaresume.integrations.resume import Resume
from megaresume.integrations.staged import Staged
from megaresume.integrations.stop_conditions import StopConditions, Stopped
from megaresume.integrations.stopping import Stopper
from megaresume.loading.batch import Batch
from megaresume.loading.loader import StartMethod
from megaresume.loading.open import open_stream
from megaresume.runs.rank_log import RankLog
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import OnChange
from megaresume.stream.errors import UsageError
from megaresume.stream.fingerprints import same_corpora
from megaresume.stream.skips import SkipConfig
from megaresume.stream.stream import Stream

__all__ = ["Attached", "attach"]


class Attached(TrainingData):
    """The data of an engine, and what became of its last load. Iterate over it; made by `attach`."""

    checkpoints: Checkpoints
    _stopper: Stopper | None = None
    _save_at_stop: Callable[[], None] | None = None

    @property
    def resume(self) -> Resume | None:
        """What the last ``engine.load_checkpoint`` restored; None: nothing, this is a fresh start."""
        return self.checkpoints.resume

    @property
    def attempt(self) -> int | None:
        """Which start of the run this is, from 1; on rank 0, once the first step has begun in a known ``save_dir``."""
        return self.checkpoints.attempt

    def stop_when(self, conditions: StopConditions, save: Callable[[], None] | None) -> None:
        """Listen from now on; see `attach`."""
        self._stopper = Stopper(
            conditions, save_seconds=lambda: in_flight.seconds(self.engine) or self.checkpoints.save_seconds
        )
        self._save_at_stop = save
        self._stopper.install()

    def close(self) -> None:
        """Stop reading ahead, and listening, at the end of a run; nothing is handed out any more."""
        left = None
        if self._stopper is not None:
            left = self._stopper.seconds_left()
            self._stopper.uninstall()
        super().close()
        if self.checkpoints.staged is not None:
            self.checkpoints.staged.close(left)
        self.checkpoints.release()

    def __iter__(self) -> Attached:
        """See `TrainingData`."""
        super().__iter__()
        if not len(self._taken):  # what was out was only looked at
            self.checkpoints.random.step_begins_again()
        return self

    def __next__(self) -> Any:
        """See `TrainingData`."""
        is_first = self.checkpoints.random.step_begins()
        batch = super().__next__()
        if is_first:
            self.checkpoints.random.first_is_out()
        return batch

    def before_train_batch(self) -> None:
        """See `TrainingData`."""
        self.checkpoints.random.step_begins()
        super().before_train_batch()

    def _open_step(self) -> None:
        if self._stopper is not None and (reason := self._stopper.agreed()) is not None:
            self._stop(self._stopper, reason)
        super()._open_step()
        self.checkpoints.begin()

    def _stop(self, stopper: Stopper, reason: str) -> None:
        step = int(self.engine.global_steps)
        if step and step != self.checkpoints.settled_step:
            (self._save_at_stop or self.checkpoints.save_here)()
        # While signals are still caught: what is in flight when the program ends dies of the next one.
        in_flight.settle(self.engine)
        stopper.saved()
        status = stopper.conditions.status
        if is_rank_0():
            saved = "saved" if step == self.checkpoints.settled_step else "nothing saved"
            print(f"megaresume: {reason}: {saved} at step {step}; exits with status {status}, not finished", flush=True)
        self.close()
        raise Stopped(reason, status)


def attach(
    engine: Any,
    data: Stream | str | os.PathLike[str] | Mapping[str, Any] | Sequence[str],
    *,
    num_workers: int = 0,
    prefetch: int = 2,
    start_method: StartMethod | None = None,
    pin_memory: bool | None = None,
    attention_mask: bool = False,
    pad_id: int = 0,
    transform: Callable[[Batch], Any] | None = None,
    schedule: BatchSchedule | None = None,
    save_dir: str | os.PathLike[str] | None = None,
    log_samples: str | os.PathLike[str] | None = None,
    seq_length: int | None = None,
    seed: int | None = None,
    split: str | None = None,
    objects: Mapping[str, object] | None = None,
    on_change: OnChange = "refuse",
    skip: SkipConfig | Mapping[str, Any] | Sequence[str] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    stop: StopConditions | None = None,
    on_stop: Callable[[], None] | None = None,
    max_starts: int = MAX_STARTS,
    elastic: bool = False,
    adopt: bool = False,
    verify_checkpoint: bool = False,
    stage_to: str | os.PathLike[str] | None = None,
) -> Attached:
    """Give an engine its data, and its checkpoints the state of that data. Call it on every rank, right after
    ``deepspeed.initialize`` and before ``engine.load_checkpoint``.

    Micro-batch size, data-parallel rank and size, and gradient accumulation steps are the engine's. Attaching twice
    replaces the data; hooks are not stacked.

    Args:
        engine: what ``deepspeed.initialize`` returned first; ZeRO 0 to 3, or a pipeline engine.
        data: path of a data.yaml; the mapping in it; what follows ``--data-path``, as a list; or a `Stream`.
        num_workers: worker processes; 0: a thread, which is faster for corpora of tokens.
        prefetch: micro-batches read ahead (by each worker); 0: on demand.
        start_method: of worker processes.
        pin_memory: page-locked batches; None: on a CUDA device.
        attention_mask: add the document-diagonal mask, bool[m, 1, S, S], to every batch.
        pad_id: token written where there is no document.
        transform: makes of a batch what the model wants, for example ``((tokens, position_ids), labels)`` for a
            pipeline engine.
        schedule: global batch sizes to come, for a ramp-up; the engine's batch size then follows it. None: the
            engine's own, read anew at every step.
        save_dir: where the run saves its checkpoints: with it the ledger there records every start, also of a
            process that dies before its first save. No other job may write there meanwhile.
        log_samples: directory: every rank writes there what it was handed in every step, for `megaresume verify`.
        skip: what is not to be trained, in addition to what the data config says: ``["1000:1200"]``, or ``{"samples":
            [...], "documents": {"web": [17]}}``. See docs/skips.md.
        adopt: go on from a checkpoint that was written without megaresume, with its weights, optimizer and step: the
            samples that DeepSpeed counted are taken as trained, and the stream begins behind them. Otherwise it is
            refused. May stay for good: it says nothing about checkpoints that have a data state.
        elastic: convert a ZeRO checkpoint that another number of ranks saved, when it is loaded. Otherwise that is
            refused, with the command to run. See docs/checkpoints.md.
        verify_checkpoint: take checksums of all files at every save, and compare them at every load: a bit that the
            storage flipped is noticed, and the checkpoint before is loaded. Otherwise sizes are compared.
        stage_to: an existing directory on shared storage: what is saved to ``save_dir``, fast local storage that all
            ranks see, is copied there in the background, and loaded from whichever is newer. See docs/checkpoints.md.
        keep_last: after every save, delete the weights of complete checkpoints but the newest so many; None: keep all.
        keep_every: keep those besides whose step this divides. See docs/checkpoints.md.
        stop: at the end of the step in which one of these happens, save to ``save_dir`` and raise `Stopped`, which
            ends the process with exit status 0 (or another of your choice). See docs/checkpoints.md.
        on_stop: how to save then, on every rank; None: ``engine.save_checkpoint(save_dir)``.
        max_starts: refuse to start from one place more often than that without a save in between; 0: never refuse.
        seq_length, seed, split, objects, on_change: see `megaresume.loading.open.open_stream`.

    Returns:
        the data: iterate over it, or pass it to ``engine.train_batch(data_iter=...)``.

    Raises on every rank:
        UsageError: no DeepSpeed engine, settings that cannot be committed, sizes that do not divide, or ``stop``
            or ``stage_to`` without a place to save to.
        CheckpointError: another job writes to ``save_dir``.
        ConfigError, CorpusError: the data cannot be opened.
        SetupError: data, ``save_dir`` or clocks differ between nodes.
    """
    facts.check_engine(engine)
    retention = Retention(keep_last=keep_last, keep_every=keep_every)
    if stop is not None and save_dir is None and on_stop is None:
        raise UsageError(
            "there is nowhere to save to when the run is asked to stop",
            found="stop= without save_dir=",
            expected="the directory of the checkpoints",
            action="megaresume.attach(engine, data, save_dir=..., stop=...)",
        )

    if stage_to is not None and save_dir is None:
        raise UsageError(
            "what is to be copied is not said",
            found="stage_to= without save_dir=",
            expected="the local directory of the checkpoints",
            action="megaresume.attach(engine, data, save_dir=..., stage_to=...)",
        )

    # Before anything that takes long.
    check_clocks(needed=stop is not None and stop.before_end is not None)
    staged = None if stage_to is None or save_dir is None else Staged(os.fspath(save_dir), stage_to, retention)
    if save_dir is not None and staged is None:
        claim_directory(save_dir)

    opened: list[Stream] = []

    def open_data() -> Stream:
        if not opened:
            ours = {"seq_length": seq_length, "seed": seed, "split": split, "objects": objects, "on_change": on_change}
            stream = data if isinstance(data, Stream) else open_stream(data, **ours)  # type: ignore[arg-type]
            stream.fingerprints  # noqa: B018  computed here, where an error reaches every rank
            opened.append(stream)
        return opened[0]

    # Rank 0 first: it leaves the fingerprints beside the corpora, and the other ranks need not compute them again.
    on_rank_0(lambda: bool(open_data()))
    stream = on_all_ranks(open_data)
    order = repr((stream.config.to_dict(), sorted(stream.fingerprints.items())))
    same_on_all_ranks(
        hashlib.sha256(order.encode()).hexdigest()[:16],
        "the data",
        cause="the nodes have different copies of data.yaml or of a corpus",
        action="compare data.yaml and the sizes of the .idx files on the nodes",
    )
    if is_rank_0():
        for line in same_corpora(stream.fingerprints):
            print(f"megaresume: WARNING: {line}", flush=True)
    attached = Attached(
        engine,
        stream,
        schedule=schedule,
        num_workers=num_workers,
        prefetch=prefetch,
        start_method=start_method,
        pin_memory=engine.device.type == "cuda" if pin_memory is None else pin_memory,
        attention_mask=attention_mask,
        pad_id=pad_id,
        transform=transform,
        log=None if log_samples is None else _open_log(log_samples),
    )
    if asked := SkipConfig.from_dict(skip, where="skip="):
        on_all_ranks(lambda: stream.skip(asked))
    attached.checkpoints = Checkpoints(
        attached,
        save_dir=None if save_dir is None else os.fspath(save_dir),
        retention=retention,
        max_starts=max_starts,
        elastic=elastic,
        adopt=adopt,
        verify=verify_checkpoint,
        staged=staged,
    )
    if stop is not None:
        attached.stop_when(stop, on_stop)
    hook(engine, attached)
    return attached


def _open_log(directory: str | os.PathLike[str]) -> RankLog:
    import torch.distributed as dist

    launch = on_rank_0(time.time_ns)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return on_all_ranks(lambda: RankLog(directory, rank=rank, launch=launch))
