"""The micro-batches of one rank, and the count of samples that the optimizer has trained: `TrainingData` from a stream,
`AttachedLoader` from a loader that saves its own state.

The only clock is ``engine.global_steps``. It determines which samples are trained; samples that were read ahead, handed
out without a step, or lost when a kill interrupted a step do not count and are handed out again after a resume. Steps
that were skipped because of an overflow (fp16) do count: their samples were seen, as in Megatron.

    handed out      up to one step more than what is trained; `Count` ensures that the next step trains exactly those

Faults (records that differed from the index) come with the batches of the rank that read them. Those of trained samples
are combined at every save, so that the state has all of them, and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from megaresume.batches.batch import Batch
from megaresume.batches.loader import StreamDataset, StreamLoader
from megaresume.checkpoint.host import StreamData, change_lines
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import on_all_ranks
from megaresume.checkpoint.records.envelope import DataState, stream_of
from megaresume.checkpoint.records.rank_log import RankLog, noted
from megaresume.checkpoint.session import Session
from megaresume.checkpoint.settings import LoaderOptions
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.engine_data import EngineData
from megaresume.hosts.deepspeed.witness import MicroBatch, fingerprint
from megaresume.hosts.feeds import RankFaults
from megaresume.hosts.loader_states import NO_LOADER, LoaderRecord, LoaderStates
from megaresume.hosts.loaders import LoaderReader, adapter_of
from megaresume.stream.batches import BatchSchedule, check_sizes
from megaresume.stream.dealing import deal
from megaresume.stream.errors import UsageError
from megaresume.stream.left_out import NO_FAULTS, Faults
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream


class TrainingData(StreamData, EngineData):
    """Iterates over this rank's micro-batches without end; created by `megaresume.attach`.

    Micro-step k of the step that begins at sample c gives data-parallel rank r of D the samples
    ``c + k*(D*m) + r*m .. + m``, or with balance others of that step. Batch sizes are read from the engine at the first
    micro-batch of every step.

    ``iter(data)`` is ``data`` itself: there is only one position, that of the engine. What was taken before and not
    trained is handed out again.
    """

    state_in_words = "no data state", "no data state", "the data state"

    def __init__(
        self,
        engine: Any,
        stream: Stream,
        session: Session,
        options: LoaderOptions,
        *,
        schedule: BatchSchedule | None,
        log: RankLog | None = None,
    ) -> None:
        super().__init__(engine, session)
        self.stream, self.options = stream, options
        self.balance, self._planned = options.balanced, schedule
        self._log = log
        self._reader: Iterator[Batch] | None = None
        self._set_base(int(engine.global_steps), None)

    def _set_base(self, step: int, state: StreamState | None) -> None:
        """Set the count: ``step`` optimizer steps have trained ``state.samples`` samples."""
        planned = self._planned or BatchSchedule.constant(int(self.engine.train_batch_size()))
        sample = 0 if state is None else self.stream.start
        schedule = planned.resumed(() if state is None else state.batches, sample)
        # Sizes that do not divide must fail now, on every rank, rather than in the middle of the ramp-up.
        micro = int(self.engine.train_micro_batch_size_per_gpu())
        check_sizes(schedule, sample, micro_batch_size=micro, dp_size=facts.data_size(self.engine))
        self._close()
        self._schedule = self.stream.schedule = schedule
        self._base_step, self._base_sample = step, sample
        self._count_from(step, sample)
        self._layout: tuple[int, int] | None = None
        #: whether the log of samples has this start.
        self._log_begun = False
        self._faults = RankFaults(NO_FAULTS if state is None else state.faults, sample)

    @property
    def schedule(self) -> BatchSchedule:
        """Global batch sizes of the whole run, past and planned."""
        return self._schedule

    def state(self) -> StreamState:
        """The state for exactly the trained samples; the same on every rank.

        It has the faults up to the last save.

        Raises:
            StateError: the engine has done steps that this data does not know about.
        """
        self._check_clock()
        return self.snapshot(self.samples_trained)

    @property
    def faults(self) -> Faults:
        """The faults in trained samples: those of all ranks up to the last save, and those of this rank since then."""
        return self._faults.up_to(self.samples_trained)

    @property
    def num_workers(self) -> int:
        """The number of worker processes of this rank."""
        return self.options.num_workers

    def prepare(self) -> None:
        """See `Data`: gathers the faults of all ranks."""
        on_all_ranks(self.check_save)
        self._faults.gather(self.samples_trained)

    def snapshot(self, samples: int) -> StreamState:
        """See `Data`."""
        state = self.stream.state_at(samples, batches=self._schedule.until(samples))
        return state.replace(faults=self._faults.known)

    def restore(self, state: DataState, choice: Choice | None = None) -> None:
        """Resume from a state, at the step that the engine counts. ``engine.load_checkpoint`` calls it.

        Raises:
            StateError: the state belongs to another config or other corpora; names the fields that differ.
            UsageError: the batch sizes do not divide by the ranks.
        """
        of_stream = stream_of(state)
        self.stream.restore(of_stream)
        self._set_base(int(self.engine.global_steps), of_stream)
        self._ready, self._closed = True, None

    def next_sample(self) -> int:
        """See `Data`."""
        return self._count.end

    def describe(self) -> list[str]:
        """See `Data`."""
        return change_lines(self.stream, self._schedule.size_at(self._base_sample))

    def __iter__(self) -> TrainingData:
        """Begin at the first micro-batch that is not trained. In the middle of an accumulation: continue."""
        self._begin_again()
        return self

    def _read(self) -> tuple[Any, MicroBatch]:
        if self._reader is None:
            self._reader = self._read_from(self._count.samples)
        batch = next(self._reader)
        self._faults.add(batch)
        samples, tokens = batch["samples"], batch["tokens"]
        what = MicroBatch(
            name=f"samples {int(samples.min())} to {int(samples.max())}",
            key=None if self._is_pipeline else int(fingerprint(tokens)),
            tokens=tokens.numel(),
            samples=() if self.host.losses is None else tuple(samples.tolist()),
            noted=None if self._log is None else noted(batch),
        )
        return self._transformed(batch), what

    def peek(self) -> Any:
        """The next micro-batch, without taking it: for shapes, warm-ups, graph captures.

        Any rank may call it alone. It is read separately each time; ``transform`` is applied.

        Raises:
            StateError: as ``next(data)``.
            StreamExhausted: the stream ends before it.
        """
        self._check_open()
        sample, index = self._count.samples, len(self._count.out)
        size = self._schedule.size_at(sample) if self._planned else int(self.engine.train_batch_size())
        if self._count.is_whole:  # what follows the current step
            sample, index = sample + size, 0
            size = self._schedule.size_at(sample) if self._planned else size
        numbers = deal(
            self.stream.plan(sample, sample + size),
            self.balance,
            micro_batch_size=int(self.engine.train_micro_batch_size_per_gpu()),
            dp_rank=facts.data_rank(self.engine),
            dp_size=facts.data_size(self.engine),
        )[index].tolist()
        batch = StreamDataset(self.stream, **self.options.batch_kwargs).__getitems__(numbers)
        if not self._is_pipeline:
            self._witness.know(int(fingerprint(batch["tokens"])))
        return self._transformed(batch)

    def _transformed(self, batch: Batch) -> Any:
        return batch if self.options.transform is None else self.options.transform(batch)

    def _open_step(self) -> None:
        """Determine the sizes of the next step, and check that all of its samples exist."""
        self._step_begins()
        self._check_clock()
        sample = self._count.samples
        size = self._settle_size(sample)
        micro = int(self.engine.train_micro_batch_size_per_gpu())
        # A reader knows the planned sizes in advance; an unplanned size needs a new reader.
        if self._layout not in (None, (size if self._planned is None else 0, micro)):
            self._close()
        self._layout = (size if self._planned is None else 0, micro)
        # Every rank raises here if the stream ends within the batch: a single rank without data would hang the others.
        self.stream.plan(sample + size - 1, sample + size)
        self._count.begin(size)
        self._per_step = size // (micro * facts.data_size(self.engine))

    def _settle_size(self, sample: int) -> int:
        """The global batch size of the step at ``sample``, set in the engine."""
        engine = self.engine
        engine_size = int(engine.train_batch_size())
        if self._planned is None:
            if engine_size != self._schedule.size_at(sample):
                schedule = BatchSchedule.constant(engine_size).resumed(self._schedule.segments, sample)
                self._schedule = self.stream.schedule = schedule
        elif engine_size != (size := self._schedule.size_at(sample)):
            facts.set_batch_size(engine, size)
            engine_size = size
        return engine_size

    def _note_step(self, batches: Sequence[MicroBatch]) -> None:
        """Log what the step trained: in the order of the model's forwards, if they were recognised."""
        if self._log is None or not batches:
            return
        seen = self._witness.seen(batches)  # waits for the device
        if not self._log_begun:
            self._log_begun = True
            self._log.start(
                step=self._base_step,
                samples=self._base_sample,
                dp_rank=facts.data_rank(self.engine),
                dp=facts.data_size(self.engine),
                micro_batch_size=int(self.engine.train_micro_batch_size_per_gpu()),
                balance=self.balance,
                pad_id=self.options.pad_id,
                digest=self.stream.digest_at(self._base_sample),
            )
        for batch in batches if seen is None else seen:
            if batch.noted is not None:
                self._log.add_noted(batch.noted)
        self._log.end_step(self._count.step, seen=seen is not None)

    def _read_from(self, sample: int) -> Iterator[Batch]:
        schedule, loading = self._schedule, self.options
        later = [segment for segment in schedule.segments if segment[0] > sample]
        loader = StreamLoader(
            self.stream,
            BatchSchedule(((0, schedule.size_at(sample)), *later)),
            micro_batch_size=int(self.engine.train_micro_batch_size_per_gpu()),
            dp_rank=facts.data_rank(self.engine),
            dp_size=facts.data_size(self.engine),
            start=sample,
            balance=self.balance,
            pin_memory=self.engine.device.type == "cuda" if loading.pin_memory is None else loading.pin_memory,
            **loading.reader_kwargs,
            **loading.batch_kwargs,
        )
        return iter(loader)

    def _close(self) -> None:
        """Stop reading ahead."""
        reader, self._reader = self._reader, None
        if isinstance(reader, Generator):
            reader.close()


class AttachedLoader(LoaderStates, EngineData):
    """The batches of an engine from a loader that saves its own state. Iterate over it; created by `attach_loader`.

    As in `TrainingData`, ``engine.global_steps`` is the only clock: what was handed out without a step does not count,
    and is handed out again after a resume.
    """

    state_in_words = "no state of the loader", "a loader at its beginning", "the states"

    def __init__(self, engine: Any, loader: Any, session: Session) -> None:
        super().__init__(engine, session)
        self.dp_rank, self.dp_size = facts.data_rank(engine), facts.data_size(engine)
        self.reader = None if loader is None else LoaderReader(adapter_of(loader), lambda: self.batches_trained)
        self._set_base(int(engine.global_steps), NO_LOADER.to_state(0), NO_LOADER)

    def _set_base(self, step: int, state: DataState, record: LoaderRecord) -> None:
        """Set the count: ``step`` optimizer steps have led to this state."""
        self._begin(state)
        #: batches of this rank that steps have trained, since the start of the run.
        self.batches_trained = record.batches
        self._sizes = list(record.sizes)
        self._count_from(step, state.samples, reads=self.reader is not None)

    @property
    def num_workers(self) -> int:
        """The number of worker processes of the loader."""
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
        batch = next(self._require_reader())
        return batch, self._as_known(batch, f"batch {number} of this rank")

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
        """Called before ``engine.step()``: all ranks come here, also those that read no batches."""
        self._step_begins()
        super().before_step()

    def before_train_batch(self) -> None:
        """Begin a step of a pipeline engine, on every rank."""
        self._step_begins()
        super().before_train_batch()

    def _check_clock(self) -> None:
        if self.reader is None and self._ready:  # a rank that reads no batches has none that could show a step
            while self._count.step < int(self.engine.global_steps):
                self._open_step()
                self._note_step(self._count.stepped())
                self._witness.clear()
        super()._check_clock()

    def _note_step(self, batches: Sequence[MicroBatch]) -> None:
        self.batches_trained += self._per_step

    def _open_step(self) -> None:
        count, size = self._count, int(self.engine.train_batch_size())
        if count.size:
            return
        if not self._sizes or self._sizes[-1][1] != size:
            self._sizes.append((count.samples, size))
        count.begin(size)
        self._per_step = int(self.engine.gradient_accumulation_steps())

    def prepare(self) -> None:
        """See `Data`: takes the states of all ranks' loaders for exactly the trained batches."""
        on_all_ranks(self.check_save)
        samples = self.samples_trained
        self._take(
            samples,
            trained=self.batches_trained,
            sizes=tuple(size for size in self.schedule.segments if size[0] < samples or size[0] == 0),
        )

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`."""
        record, step = LoaderRecord.from_state(state), int(self.engine.global_steps)
        self._set_base(step, state, record)
        self._put_back(record, choice, choice.iteration or step)
        self._ready, self._closed = True, None

    def next_sample(self) -> int | None:
        """See `Data`."""
        if self.reader is None:
            return None
        share = self.dp_size * int(self.engine.train_micro_batch_size_per_gpu())
        return self._count.samples + (self.reader.handed - self.batches_trained) * share
