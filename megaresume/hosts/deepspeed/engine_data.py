"""`EngineData`: common to an engine's data, whether from a stream, from items or from a loader.

The engine's own calls are the clock of its `Count`; on every rank

    next(data)                take()
    engine.step()             use() within an accumulation; at its end check_step(), with what the model was given
    engine.global_steps       increased by one: stepped(). A pipeline engine takes and steps within ``train_batch``
    engine.save_checkpoint    check_save()
    engine.load_checkpoint    loaded()

Counting shows how many micro-batches were taken and how many trained; it cannot show that two were taken, one of which
was evaluated and the other trained twice, or that one had no backward. `megaresume.hosts.deepspeed.witness` can.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from megaresume.checkpoint.host import Resume
from megaresume.checkpoint.metrics.meter import Meter
from megaresume.checkpoint.random_state import RandomState
from megaresume.checkpoint.session import Session
from megaresume.checkpoint.stopping import Stopped
from megaresume.hosts.count import Count, Words
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.host import Batches, EngineHost
from megaresume.hosts.deepspeed.witness import Forward, MicroBatch, Witness, fingerprint, tokens_of
from megaresume.stream.batches import Balance
from megaresume.stream.errors import MegaresumeError, StateError, UsageError

_WORDS = Words(
    trainer="the engine",
    clock="engine.step()",
    next="next(data) asks for more",
    untrained=(
        "one was used for something else (its shape, a warm-up, an evaluation), was passed over with `continue`, had "
        "no backward, or a wrapper reads ahead; or one was evaluated or dropped, and another trained in its place",
        "data.peek() shows the next batch without taking it, LoaderOptions(prefetch=N) reads ahead, "
        "DataOptions(skip=...) leaves samples out; docs/deepspeed-loops.md lists each of these loops with its fix",
    ),
    incomplete=(
        "a micro-batch was trained twice, or one that is not of this data; iter(data) was called while one was out, "
        "which is then handed out again; or the batch size was changed in the middle of a step",
        "train what next(data) gives, once; for a ramp-up pass schedule= to megaresume.attach; see docs/deepspeed.md",
    ),
    early_save=(
        "the loop asks after every micro-step, or asks is_gradient_accumulation_boundary() after engine.step(), which "
        "then speaks of the next micro-step",
        "ask before engine.step(): last = engine.is_gradient_accumulation_boundary(); save if last",
    ),
    other_count=(
        "the engine trained on other batches, or was loaded without its load_checkpoint method",
        "feed the engine from this data alone, and load it with engine.load_checkpoint",
    ),
)


class EngineData(Batches):
    """The micro-batches of one rank, clocked by the engine's optimizer steps."""

    #: counts what is handed out and what is trained.
    _count: Count[MicroBatch]

    balance: Balance | None = None
    #: words for errors: the state that a load restores, the position without one, and what it should be.
    state_in_words: ClassVar[tuple[str, str, str]]

    def __init__(self, engine: Any, session: Session) -> None:
        self.engine, self.session = engine, session
        assert isinstance(session.host, EngineHost)
        self.host = session.host
        self.host.batches = session.data = self
        self._is_pipeline = facts.is_pipeline(engine)
        self._witness = Witness()
        #: the last micro-batch that had a forward; whether its losses are wanted.
        self._with_losses: MicroBatch | None = None
        self._wants_losses = False
        #: micro-batches that were looked at and not taken.
        self._ahead: list[tuple[Any, MicroBatch]] = []
        #: micro-batches of this rank in the current step.
        self._per_step = 0
        #: why nothing more is handed out, although nothing failed.
        self._closed: StateError | None = None
        #: whether the engine's position is also the data's.
        self._ready = int(engine.global_steps) == 0

    @abstractmethod
    def _read(self) -> tuple[Any, MicroBatch]:
        """Read the next micro-batch, and what must be known about it."""

    @abstractmethod
    def _open_step(self) -> None:
        """Begin to hand out a step."""

    def _note_step(self, batches: Sequence[MicroBatch]) -> None:
        """Note that a step was done on these, as they were handed out. The witness still knows its forwards."""

    def _count_from(self, step: int, samples: int, *, reads: bool = True) -> None:
        """Set the count: this many steps have trained this many samples. ``reads``: it gets batches."""
        reads = reads and (not self._is_pipeline or facts.reads_batches(self.engine))
        self._count = Count(_WORDS, step, samples, reads=reads, checks_before_weights_change=True)
        self._witness.clear()

    @property
    def samples_trained(self) -> int:
        """Samples trained by optimizer steps since the start of the run, over all ranks."""
        count = self._count
        is_made = int(self.engine.global_steps) == count.step + 1 and (count.is_whole or not count.reads)
        return count.samples + count.size if is_made else count.samples

    @property
    def resume(self) -> Resume | None:
        """The checkpoint that the last ``engine.load_checkpoint`` restored; None: this is a fresh start."""
        return self.session.resumed

    @property
    def attempt(self) -> int | None:
        """The number of this start of the run, from 1; None if no step has begun yet, or no ``save_dir`` is known."""
        return self.session.attempt

    @property
    def meter(self) -> Meter | None:
        """The meter of live figures, for ``data.meter.losses(batch, token_loss)``; None without ``metrics=``."""
        return self.session.meter

    @property
    def _random(self) -> RandomState:
        assert self.session.random is not None  # DeepSpeed keeps none itself
        return self.session.random

    def _begin_again(self) -> None:
        """Called by ``iter(data)``: hand out again what is out and was only looked at."""
        count = self._count
        is_over = count.failure is not None or self._closed is not None
        if not count.is_idle and self.is_untouched and not self._is_pipeline and not is_over:
            count.return_all()
            self._close()
        if count.is_idle:
            self._random.step_begins_again()

    def __next__(self) -> Any:
        """The next micro-batch, see `megaresume.attach`.

        Raises:
            StateError: the engine was loaded from a checkpoint and the data was not, steps and batches do not match, or
                a micro-batch was taken and not trained. The same error is raised from then on.
            StreamExhausted: the stream ends within this global batch; raised at its start, on every rank alike.
            UsageError: this rank has no loader, or the loader no batches.
            CorpusError: a document is damaged. Only raised on the rank that reads it: the process must end, and its
                launcher must end the others.
        """
        is_first = self._random.step_begins()
        batch, what = self._close_on_error(self._read_next)
        count = self._count
        count.take(what, count.samples + count.size * (len(count.out) + 1) // self._per_step)
        self._witness.know(what.key)
        if is_first:
            self._random.first_is_out()
        return batch

    def _read_next(self) -> tuple[Any, MicroBatch]:
        if self._closed is not None:
            raise self._closed
        count = self._count
        if not self._is_pipeline:
            self._check_clock()
            count.check_more(self._witness.untrained(self._out) if count.is_whole else ())
            if not count.size:
                self._open_step()
        elif count.is_whole or not count.size:
            raise UsageError(
                "a pipeline engine's batches are handed out within train_batch only",
                found=f"a batch was asked for after {len(count.out)} of {self._per_step if count.size else 0} "
                "micro-batches",
                expected="engine.train_batch(data_iter=data)",
                action="do not call next(data) yourself, do not evaluate with it, and do not save or restore "
                "engine.train_batch; data.peek() shows the next batch without taking it",
            )
        return self._ahead.pop() if self._ahead else self.session.clocks.wait(self._read)

    def peek(self) -> Any:
        """A copy of the next micro-batch, without taking it: for shapes, warm-ups, graph captures. With a loader that
        saves its own state: only after ``engine.load_checkpoint``, as it cannot go back.
        """
        self._check_open()
        if not self._ahead:
            self._random.step_begins()  # a resume draws again what is drawn to read it
            self._ahead.append(self._read())
        batch, what = self._ahead[0]
        self._witness.know(what.key)
        return copy.deepcopy(batch)

    def _close_on_error(self, function: Callable[[], Any]) -> Any:
        """Call a function; if it raises, nothing more is handed out."""
        self._count.check()
        try:
            return function()
        except MegaresumeError as error:
            if self._closed is None:
                self._fail(error)
            raise
        except BaseException as error:  # a micro-batch may have been read, but not handed out
            if self._closed is None:
                self._fail(_lost(error))
            raise

    def _fail(self, error: MegaresumeError, *, may_save: bool = True) -> None:
        self._count.fail(error, may_save=may_save)
        self._close()

    def _close(self) -> None:
        """Stop reading ahead."""

    @property
    def _out(self) -> list[MicroBatch]:
        return [taken.batch for taken in self._count.out]

    def _as_known(self, batch: Any, name: str) -> MicroBatch:
        """What is known about a micro-batch of any kind."""
        tokens = None if self._is_pipeline else tokens_of(batch)
        if tokens is None:
            return MicroBatch(name)
        return MicroBatch(name, key=int(fingerprint(tokens)), tokens=tokens.numel())

    def _check_open(self) -> None:
        """Raise what ``next(data)`` would raise, before a look at the next micro-batch."""
        self._count.check()
        if self._closed is not None:
            raise self._closed
        self._check_clock()

    def _check_clock(self) -> None:
        """Raise a StateError if steps were done that these batches cannot have caused."""
        if not self._ready:
            state, found, expected = self.state_in_words
            raise StateError(
                f"the engine is past its first step, but {state} was restored",
                found=f"iteration {self.engine.global_steps}, {found}",
                expected=f"{expected} of the checkpoint that the engine was loaded from",
                cause="load_checkpoint was called before megaresume.attach, or not through the engine",
                action="call megaresume.attach right after deepspeed.initialize, before engine.load_checkpoint",
            )
        steps, count = int(self.engine.global_steps), self._count
        if steps == count.step + 1:
            done = count.stepped()
            try:
                if self.meter is not None:
                    self.meter.steps.norm(self.engine.get_global_grad_norm())
                    self.meter.steps.stepped(count.step, count.samples)
                self._note_step(done)
            finally:  # the step is over, even if its line cannot be written
                self._witness.clear()
        count.compare(steps)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of the current step can have been trained, so that it may be handed out again."""
        return not self._count.used and not self._witness.graphs

    # Around the engine's own methods

    def saw(self, inputs: tuple[Any, ...]) -> Forward | None:
        """Note the inputs of the model's forward. Returns None if no backward can follow."""
        return self._witness.look(inputs, self._out, turn=self._count.used)

    def gave(self, forward: Forward | None, inputs: Mapping[str, Any], outputs: Any) -> None:
        """Note the outputs of the model, for inputs by name. If a micro-batch had several forwards, only losses for its
        own tokens count.
        """
        if forward is not None:
            self._witness.watch(forward, outputs)
        losses, count = self.host.losses, self._count
        if losses is None or not count.out or not torch.is_grad_enabled() or not self.engine.module.training:
            return
        batch = count.out[-1].batch
        if batch is not self._with_losses:
            self._with_losses, self._wants_losses = batch, losses.wants()
        if self._wants_losses:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
            losses.look(inputs, loss, outputs, ours=self._witness.knows_last(batch))

    def take_losses(self, losses: torch.Tensor, counts: torch.Tensor) -> None:
        """See `Batches`."""
        assert self.meter is not None
        self.meter.losses(self._count.out[-1].batch.samples, losses, counts)

    def before_step(self) -> None:
        """Before ``engine.step()``.

        Raises:
            StateError: it would train other micro-batches than those of its step. No weight has changed.
        """

        def check() -> None:
            self._check_clock()
            if facts.ends_step(self.engine):
                out = self._out
                self._count.check_step(self._witness.untrained(out))
                if twice := self._witness.trained_twice(out):
                    raise _trained_twice(twice)
            else:
                self._count.use()

        self._close_on_error(check)

    def backward(self, function: Callable[[], Any]) -> Any:
        """Wraps ``engine.backward()``."""
        return self._witness.backward(lambda: self.broken_by_errors_of("engine.backward()", function))

    def after_step(self) -> None:
        """After ``engine.step()``."""
        self._check_clock()

    def broken_by_errors_of(self, call: str, function: Callable[[], Any], *, weights: bool = False) -> Any:
        """Call the engine. If that fails, train nothing more until a load, as a part of it is in the gradients.

        Args:
            call: its name, in words.
            function: the call.
            weights: whether a part of it may also be in the weights, so that nothing more may be saved.
        """
        try:
            return function()
        except BaseException as error:
            if weights and isinstance(error, MegaresumeError):  # from a save or from the data, before weights change
                raise
            failure = _half_done(call, error, weights, reload=weights or facts.zero_stage(self.engine) < 2)
            self._fail(failure, may_save=not weights)
            raise

    def _step_begins(self) -> None:
        """Called before the first micro-batch of a step, on every rank. See `Session.step_begins`."""
        try:
            self.session.step_begins()
        except Stopped:
            self.detach("the run was asked to stop", "let megaresume.Stopped end the program; the next start continues")
            raise

    def before_train_batch(self) -> None:
        """Begin a step of a pipeline engine, on every rank: only its first and last stages ask for batches.

        Raises:
            StateError: the last step did not use up its micro-batches.
        """
        self._random.step_begins()
        self._check_clock()
        if self._count.size:
            raise StateError(
                "the pipeline did not use up the micro-batches of its last step",
                found=f"{len(self._count.out)} of {self._per_step} micro-batches handed out, and no step made",
                expected="a step of all of them",
                cause="train_batch failed in the middle",
                action="to continue, load the last checkpoint",
            )
        self._open_step()

    def after_train_batch(self) -> None:
        """End a step of a pipeline engine.

        Raises:
            StateError: it was trained on other batches. On the ranks that read batches; no checkpoint of it is saved.
        """
        self._close_on_error(self._check_clock)

    def not_restored(self, error: MegaresumeError) -> None:
        """Note that the weights of a checkpoint are loaded without its data: train nothing before another load."""
        self._fail(error, may_save=False)

    def check_save(self) -> None:
        """Raise a StateError if a checkpoint now would not be one after a step."""
        self._check_clock()
        self._count.check_save()

    def close(self) -> None:
        """Stop reading ahead and listening, at the end of a run; nothing more is handed out."""
        self.detach("it was closed", "call megaresume.attach again to train on")
        self.session.close()

    def detach(self, why: str, action: str) -> None:
        """Hand out nothing more; if asked for it, say why, and what to do."""
        self._closed = StateError("this data hands out nothing more", cause=why, action=action)
        self._close()


def _lost(error: BaseException) -> StateError:
    return StateError(
        "an error came between a micro-batch and the loop; no more data is handed out",
        found=f"{type(error).__name__}: {error}",
        expected="each micro-batch handed out, in its order",
        cause="transform=, or the reading of the data, failed, and the loop caught the error and continued: the next "
        "micro-batch would have taken the place of the lost one",
        action="fix what failed, and start again or call engine.load_checkpoint; try again within transform= what "
        "may fail for a moment",
    )


def _trained_twice(batches: Sequence[MicroBatch]) -> StateError:
    return StateError(
        "a micro-batch was trained twice",
        found=f"two forwards of {', '.join(map(str, batches))}, each with a backward of its own, and engine.step() is "
        "called",
        expected="one backward for each micro-batch",
        cause="the loop trains a batch again (a retry, or a variable that still has it); it has several losses, and "
        "calls engine.backward() for each of them; or a batch of its own has the same integers, as one class label",
        action="train what next(data) gives, once; add losses up before engine.backward(), or make them of one forward "
        "(retain_graph=True)",
    )


def _half_done(call: str, error: BaseException, weights: bool, *, reload: bool) -> StateError:
    return StateError(
        f"{call} failed half-way, and no more training is possible",
        found=f"{type(error).__name__}: {error}",
        expected="each micro-batch once in the gradients of its step, and each step once in the weights",
        cause="the loop caught the error and continued: tried again, the micro-batch would be in the gradients twice"
        + (", or the step in the weights" if weights else ""),
        action="fix what failed (a smaller micro-batch, if memory ran out), and start again"
        + (" or call engine.load_checkpoint" if reload else ": after it ZeRO 2 and 3 take no backward in this process")
        + "; a forward that failed may be tried again",
    )
