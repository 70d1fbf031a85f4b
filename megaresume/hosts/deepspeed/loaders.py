"""A loader with a state of its own, and a DeepSpeed engine.

    engine, *_ = deepspeed.initialize(...)
    data = megaresume.attach(engine, loader)             # Energon's or torchdata's, made for this data-parallel rank
    engine.load_checkpoint("checkpoints")                # nothing there yet: the loader begins
    for batch in data:
        ...
        engine.backward(loss)
        last = engine.is_gradient_accumulation_boundary()  # asked before the step: whether it ends one
        engine.step()
        if last and engine.global_steps % 100 == 0: engine.save_checkpoint("checkpoints")

Hooks, clock and commit are those of a stream; see docs/data-loader.md.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import DataState
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.session.session import Session
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.engine_data import EngineData
from megaresume.hosts.deepspeed.hooks import hook, session_of
from megaresume.hosts.deepspeed.host import EngineHost
from megaresume.hosts.deepspeed.witness import MicroBatch, fingerprint, tokens_of
from megaresume.hosts.loaders.adapters import LoaderReader, adapter_of
from megaresume.hosts.loaders.states import NO_LOADER, Captured, LoaderRecord, capture, restore_states
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import StateError, UsageError


def attach_loader(engine: Any, loader: Any, *, checkpoints: Checkpoints = Checkpoints()) -> AttachedLoader:
    """Make the state of a loader part of an engine's checkpoints. Call it on every rank, right after
    ``deepspeed.initialize`` and before ``engine.load_checkpoint``.

    Args:
        engine: what ``deepspeed.initialize`` returned first; ZeRO 0 to 3, or a pipeline engine.
        loader: Energon's ``get_savable_loader(...)``, torchdata's ``StatefulDataLoader(...)``, or any iterable with
            ``state_dict`` and ``load_state_dict``. Its batches are this rank's micro-batches; it deals samples out to
            data-parallel ranks itself. None on a rank that receives its batches from another one.
        checkpoints: not ``elastic`` and ``adopt``.

    Returns:
        the batches: iterate over it, or pass it to ``engine.train_batch(data_iter=...)``. It never ends: a loader that
        ends is begun again, with ``set_epoch`` of its sampler.

    Raises, on every rank:
        UsageError: no DeepSpeed engine, a loader without a state or of another rank, or settings that do not apply.
        CheckpointError: another job writes to ``save_dir``.
        SetupError: a node does not see it.
    """
    facts.check_engine(engine)
    if checkpoints.elastic or checkpoints.adopt:
        raise UsageError(
            "the state of a loader belongs to the ranks that saved it, and cannot be reconstructed",
            found=f"Checkpoints(elastic={checkpoints.elastic}, adopt={checkpoints.adopt})",
            expected="neither, with a loader",
            action="remove them; a stream can change the number of ranks: megaresume.attach(engine, 'data.yaml')",
        )
    on_all_ranks(lambda: _check_rank(engine, loader))
    host = EngineHost(engine)
    session = session_of(host, checkpoints)
    session.start()
    attached = on_all_ranks(lambda: AttachedLoader(engine, loader, session))
    hook(engine, attached)
    return attached


def _check_rank(engine: Any, loader: Any) -> None:
    """Raise a UsageError for a loader of megaresume's that is of another rank than the engine, or that ends."""
    if not isinstance(loader, DataLoader):
        return
    loader.ends_elsewhere = True
    if any(source.max_epochs is not None for source in loader.stream.config.sources):
        raise UsageError(
            "a loader that ends cannot be attached to an engine",
            found="DataLoader(max_epochs=...)",
            expected="a DataLoader without max_epochs: the batches of an engine never end",
            cause="the engine counts steps, and the last one of the data may be short",
            action="leave max_epochs out, and stop when engine.global_steps is EPOCHS * len(loader) // accumulation",
        )
    own, ours = (loader.dp_rank, loader.dp_size), (facts.data_rank(engine), facts.data_size(engine))
    if own != ours:
        raise UsageError(
            "the loader and the engine are on different data-parallel ranks",
            found="rank {} of {}".format(*own),
            expected="rank {} of {}".format(*ours),
            action="leave dp_rank and dp_size out, or, with pipeline or sequence parallelism, give those of the engine",
        )


class AttachedLoader(EngineData):
    """The batches of an engine from a loader that saves its own state. Iterate over it; made by `attach_loader`.

    As in `TrainingData`, ``engine.global_steps`` is the only clock: what was handed out and not yet stepped on does not
    count, and is handed out again after a resume.
    """

    def __init__(self, engine: Any, loader: Any, session: Session) -> None:
        super().__init__(engine, session)
        self.reader = None if loader is None else LoaderReader(adapter_of(loader), lambda: self.batches_trained)
        #: a batch that was looked at and not taken.
        self._ahead: list[Any] = []
        #: of the last snapshot.
        self._captured: Captured | None = None
        self._set_base(int(engine.global_steps), NO_LOADER.to_state(0), NO_LOADER)

    def _set_base(self, step: int, state: DataState, record: LoaderRecord) -> None:
        """Count from here: ``step`` optimizer steps have led to this state."""
        #: where this process began, and at the last `prepare`.
        self._states = [state]
        #: batches of this rank that steps have trained on, since the start of the run.
        self.batches_trained = record.batches
        self._sizes = list(record.sizes)
        self._count_from(step, state.samples, reads=self.reader is not None)

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader."""
        return 0 if self.reader is None else self.reader.adapter.facts().workers

    @property
    def schedule(self) -> BatchSchedule:
        """Global batch sizes up to now."""
        now = (self._count.samples + self._count.size, int(self.engine.train_batch_size()))
        sizes = [*self._sizes, now] if not self._sizes or self._sizes[-1][1] != now[1] else self._sizes
        return BatchSchedule(((0, sizes[0][1]), *sizes[1:]))

    def __iter__(self) -> AttachedLoader:
        return self

    def _read(self) -> tuple[Any, MicroBatch]:
        number = self.batches_trained + len(self._count.out)
        batch = self._ahead.pop() if self._ahead else next(self._require_reader())
        tokens = None if self._is_pipeline else tokens_of(batch)
        if tokens is None:
            return batch, MicroBatch(f"batch {number} of this rank")
        return batch, MicroBatch(f"batch {number} of this rank", key=int(fingerprint(tokens)), tokens=tokens.numel())

    def peek(self) -> Any:
        """A copy of the batch that ``next(data)`` gives next, without taking it: for shapes, warm-ups, graph captures.
        After ``engine.load_checkpoint``: a loader cannot go back."""
        self._count.check()
        if self._closed is not None:
            raise self._closed
        self._check_clock()
        if not self._ahead:
            self._random.step_begins()  # what the loader draws for it is drawn again after a resume
            self._ahead.append(next(self._require_reader()))
        if not self._is_pipeline and (tokens := tokens_of(self._ahead[0])) is not None:
            self._witness.know(int(fingerprint(tokens)))
        return copy.deepcopy(self._ahead[0])

    def _require_reader(self) -> LoaderReader:
        if self.reader is None:
            raise UsageError(
                "this rank has no loader",
                found="megaresume.attach(engine, None), and next(data)",
                expected="a rank that receives its batches from another one",
                action="give megaresume.attach the loader on the ranks that read batches",
            )
        return self.reader

    def before_step(self) -> None:
        """Before ``engine.step()``: here all ranks are, also those that read no batches."""
        self._step_begins()
        super().before_step()

    def before_train_batch(self) -> None:
        """Begin a step of a pipeline engine, on every rank."""
        self._step_begins()
        super().before_train_batch()

    def _check_clock(self) -> None:
        if self.reader is None and self._ready:  # a rank that reads no batches has none that could tell of a step
            while self._count.step < int(self.engine.global_steps):
                self._open_step()
                self._note_step(self._count.stepped(), seen=False)
        super()._check_clock()

    def _note_step(self, batches: Sequence[MicroBatch], *, seen: bool) -> None:
        self.batches_trained += self._per_step

    def _open_step(self) -> None:
        count, size = self._count, int(self.engine.train_batch_size())
        if count.size:
            return
        if not self._sizes or self._sizes[-1][1] != size:
            self._sizes.append((count.samples, size))
        count.begin(size)
        self._per_step = int(self.engine.gradient_accumulation_steps())

    def _not_restored(self) -> StateError:
        return StateError(
            "the engine is past its first step, but no state of the loader was restored",
            found=f"iteration {self.engine.global_steps}, a loader at its beginning",
            expected="the states of the checkpoint that the engine was loaded from",
            cause="load_checkpoint was called before megaresume.attach, or not through the engine",
            action="call megaresume.attach right after deepspeed.initialize, before engine.load_checkpoint",
        )

    def prepare(self) -> None:
        """See `Data`: the states of all ranks' loaders for exactly the trained batches."""
        on_all_ranks(self.check_save)
        samples = self.samples_trained
        self._captured = capture(
            self.reader,
            dp_rank=facts.data_rank(self.engine),
            dp_size=facts.data_size(self.engine),
            trained=self.batches_trained,
            sizes=tuple(size for size in self.schedule.segments if size[0] < samples or size[0] == 0),
        )
        self._states[1:] = [self._captured.record.to_state(samples)]

    def snapshot(self, samples: int) -> DataState:
        """See `Data`."""
        return next(state for state in reversed(self._states) if state.samples == samples)

    def write_files(self, save_dir: Path, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """See `Data`."""
        assert self._captured is not None
        return self._captured.write(save_dir, iteration, tag)

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`."""
        record, step = LoaderRecord.from_state(state), int(self.engine.global_steps)
        self._set_base(step, state, record)
        restore_states(
            self.reader,
            record,
            root=choice.load_dir,
            iteration=choice.iteration or step,
            tag=choice.tag.removesuffix("_universal"),
            dp_rank=facts.data_rank(self.engine),
            dp=facts.data_size(self.engine),
        )
        self._ready, self._closed = True, None
