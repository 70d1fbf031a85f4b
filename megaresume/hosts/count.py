"""The count of what was taken and what was trained: the promise of megaresume, under every trainer.

A checkpoint says "these steps have trained these samples", and a resume continues with the next one. That is true if
each optimizer step trains the micro-batches that were taken for it, each of them once, and nothing else. `Count` sees
to it. It knows no trainer, no data and no file. A host tells it what happens; what does not fit is refused.

               take()                take()
        IDLE ---------> TAKEN -----------------> WHOLE              FAILED: what was refused is refused from then on,
         ^                |                        |                        until loaded()
         |  return_all()  |        stepped()       |
         +----------------+------------------------+                trained: the samples before `samples`
                            step + 1, samples = end                 out:     those from there to `end`

    told                        IDLE                     TAKEN                      WHOLE
    take()       handed out     continues                continues                  refused: it would never be trained
    use()        in gradients   refused: trained twice   once for each that is out  once for each that is out
    stepped()    weights change refused: it has trained  refused: it has not        trained, unless the model was not
                                something else           trained all of the step    given some of them
    check_save() a checkpoint   continues                refused if some are used: no file has their gradients
    compare()    the trainer's own count: refused unless it is the same
    loaded()     from a checkpoint: so many steps have trained so many samples; IDLE

What is out when a run ends, or is killed, is not trained. It comes again after a resume.

`Steps` is the count of a trainer that takes its micro-batches from a `Feed` by a ``for``, so that each call says which
of the above it is:

    for batch in steps     take() and use(): whatever was handed out may be in the gradients
    steps.stepped()        an optimizer step was made
    steps.changed()        an optimizer has changed the weights, where a loop says only later that it made a step
    a save                 between two steps; what a ``for`` that has ended has left over may be out
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megaresume.stream.errors import MegaresumeError, StateError, UsageError

if TYPE_CHECKING:  # both need torch, which a launcher may be without
    from megaresume.checkpoint.session import Session
    from megaresume.hosts.feeds import Feed

T = TypeVar("T")

#: the likely cause of a refusal, and the way out.
Why = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """What a trainer calls its things, and what people do wrong with it: for errors."""

    trainer: str
    #: the call that makes a step, or says that one was made.
    clock: str
    #: whether each step is asked for (`check_step`) before the weights change: then what is refused has changed none.
    is_before: bool = False
    #: the next micro-batch is asked for.
    next: str
    #: a micro-batch was taken and not trained; a step has not all of its own; a checkpoint is asked for within a step;
    #: the trainer counts other steps.
    untrained: Why
    incomplete: Why
    early_save: Why
    other_count: Why


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """A micro-batch that is out."""

    #: ``str()`` names it, for errors.
    batch: T
    #: the sample after it.
    end: int


class Count(Generic[T]):
    """The micro-batches of one rank. All positions are in samples of all ranks together, since the start of the run.

    Args:
        words: of the trainer.
        step: optimizer steps made.
        samples: that they trained.
        reads: whether this rank is given micro-batches. A stage in the middle of a pipeline is not: it only counts.
    """

    def __init__(self, words: Words, step: int = 0, samples: int = 0, *, reads: bool = True) -> None:
        self.words, self.reads = words, reads
        self.loaded(step, samples)

    def loaded(self, step: int, samples: int) -> None:
        """A checkpoint was loaded, or the run begins: so many steps have trained so many samples."""
        self.step, self.samples, self.end = step, samples, samples
        self.out: list[Taken[T]] = []
        #: samples of the step that is handed out; 0: it has not begun.
        self.size = 0
        #: whether all of them are out.
        self.is_whole = False
        #: how many micro-batches that are out may be in the gradients.
        self.used = 0
        #: what was refused, or failed; and whether the weights are still those of `step`, so that they may be saved.
        self.failure: MegaresumeError | None = None
        self._may_save = True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is out."""
        return not self.out

    # What happens

    def begin(self, size: int) -> None:
        """Set the number of samples of the next step."""
        self.size = size

    def take(self, batch: T, end: int, *, is_last: bool = False) -> None:
        """A micro-batch is handed out.

        Args:
            batch: see `Taken`.
            end: the sample after it, and after those of the other ranks that are handed out at the same time.
            is_last: the data ends with it, before the step has all samples of `begin`.
        """
        self.check_more()
        self.out.append(Taken(batch, end))
        self.end = end
        self.is_whole = is_last or end - self.samples >= self.size

    def use(self) -> None:
        """One more of those that are out goes into the gradients."""
        if self.reads and len(self.out) <= self.used:
            raise self._refuse(self._incomplete(f"{self.words.clock} was called again", is_none=True))
        self.used += self.reads

    def return_all(self) -> None:
        """What is out is in no gradient, and is handed out once more."""
        self.out, self.end, self.is_whole, self.used = [], self.samples, False, 0

    def stepped(self, unseen: Iterable[T] = ()) -> Sequence[T]:
        """An optimizer step was made; returns what it has trained. Raises as `check_step`."""
        self.check()
        if (error := self._not_all(unseen, "a step was made")) is not None:
            raise self.fail(error)
        done = [taken.batch for taken in self.out]
        self.step += 1
        self.samples = self.end if self.reads else self.samples + self.size
        self.size = 0
        self.return_all()
        return done

    def trained_to(self, samples: int, *, ahead: Container[int] | None = (0,)) -> None:
        """What was taken before this sample is trained, as a trainer says that does not tell of its steps.

        Args:
            samples: trained.
            ahead: how many more may be out; None: any number.

        Raises:
            StateError: fewer were taken, so others were trained; or more were.
        """
        self.check()
        if samples > self.end:
            raise self.fail(self._incomplete())
        self.samples, self.out = samples, [taken for taken in self.out if taken.end > samples]
        if ahead is not None and self.end - samples not in ahead:
            raise self.fail(self.untrained(f"{self.words.trainer} has counted {samples} samples"))

    def fail(self, error: MegaresumeError, *, weights: bool = True) -> MegaresumeError:
        """From now on train nothing; and save nothing, if the ``weights`` may be others than those of `step`."""
        self.failure, self._may_save = error, self._may_save and not weights
        return error

    # What is refused

    def check(self) -> None:
        """Raise what was refused before."""
        if self.failure is not None:
            raise self.failure

    def check_more(self, unseen: Iterable[T] = ()) -> None:
        """Raise a StateError if one more is asked for, and all of a step are out.

        Args:
            unseen: those that the model was not given, as far as that is known.
        """
        self.check()
        if self.is_whole:
            raise self._refuse(self.untrained(self.words.next, unseen))

    def check_idle(self, when: str) -> None:
        """Raise a StateError if any is out, and something happens after which it will not be trained."""
        self.check()
        if self.out:
            raise self._refuse(self.untrained(when))

    def check_step(self, unseen: Iterable[T] = ()) -> None:
        """Before the weights change, where a trainer can be asked: raise a StateError unless all of a step are out.

        Args:
            unseen: see `check_more`.
        """
        self.check()
        if (error := self._not_all(unseen, "a step is to be made")) is not None:
            raise self._refuse(error)

    def check_save(self) -> None:
        """Raise a StateError if a checkpoint would not be one of the last step, and of all that it has trained."""
        if self.failure is not None and not self._may_save:
            raise self.failure
        if self.used:
            headline = "a checkpoint was asked for in the middle of a step"
            expected = f"a save right after the {self.words.clock} that ends a step"
            raise self._refuse(_error(headline, self._taken(), expected, self.words.early_save))

    def compare(self, step: int, samples: int | None = None) -> None:
        """Raise a StateError if the trainer counts other steps, or other samples (None if it counts none)."""
        if step == self.step and samples in (None, self.samples):
            return
        found, expected = f"step {step}", f"step {self.step}"
        if samples is not None:
            found, expected = f"{found}, {samples} samples", f"{expected}, {self.samples} samples"
        headline = f"{self.words.trainer} and the data count different steps"
        found = f"{found}; {self._taken()}" if self.out else found
        raise self.fail(_error(headline, found, f"{expected}, as the data was read", self.words.other_count))

    def untrained(self, when: str, unseen: Iterable[T] = (), *, why: Why | None = None) -> StateError:
        """A micro-batch was taken and not trained.

        Args:
            when: what shows it.
            unseen: see `check_more`.
            why: if more is known than `Words` says.
        """
        names = ", ".join(str(batch) for batch in unseen)
        return _error(
            "a micro-batch was taken and not trained",
            f"{self._taken()}, and {when}" + (f"; the model was not given {names}" if names else ""),
            f"{self.words.clock} for them before that",
            why or self.words.untrained,
        )

    def _not_all(self, unseen: Iterable[T], made: str) -> StateError | None:
        if not self.reads:
            return None
        if not self.is_whole:
            return self._incomplete(made, is_none=not self.out)
        return self.untrained(f"{self.words.clock} is called", unseen) if (unseen := list(unseen)) else None

    def _incomplete(self, made: str = "a step was made", *, is_none: bool = False) -> StateError:
        return _error(
            f"{made}, and no micro-batch was taken for it" if is_none else f"{made} without all of its micro-batches",
            f"{self.words.clock} for step {self.step + 1}, with {self._taken()}",
            f"all {f'{self.size} ' if self.size else ''}samples of the step, of all ranks together",
            self.words.incomplete,
        )

    def _refuse(self, error: StateError) -> MegaresumeError:
        return self.fail(error, weights=not self.words.is_before)

    def _taken(self) -> str:
        names = [str(taken.batch) for taken in self.out]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        used = f", {self.used} of them in its gradients" if 0 < self.used < len(names) else ""
        return f"{', '.join(names[:8]) or 'no micro-batch'}{more} taken since step {self.step}{used}"


def _error(headline: str, found: str, expected: str, why: Why) -> StateError:
    return StateError(headline, found=found, expected=expected, cause=why[0], action=why[1])


def words_of(*, trainer: str = "the loop", name: str = "loop", clock: str = "loop.stepped()", **other: Any) -> Words:
    """Those of a loop that takes micro-batches by a ``for``.

    Args:
        trainer: what it is called.
        name: of what it iterates over.
        clock: how it says that a step was made.
        other: what this trainer says in another way.
    """
    last = f"if {name}.ends_step" if clock == f"{name}.stepped()" else "with its last micro-batch"
    words = Words(
        trainer=trainer,
        clock=clock,
        next="the next batch is asked for",
        untrained=(
            "a batch was used for something else (its shape, a warm-up, an evaluation) or passed over with `continue`; "
            f"a `for` was left in the middle of a step; {clock} is missing; or the loop accumulates more "
            "micro-batches than the loader was told (accumulation=)",
            "look at collate_fn([dataset[0]]) instead, evaluate on a separate loader, and remove items that are not "
            "to be trained from the dataset",
        ),
        incomplete=(
            "a batch was trained twice, or it came from another loader; or the loop accumulates fewer micro-batches "
            "than the loader was told",
            f"take each batch from `for batch in {name}`, and end a step {last}; nothing of this step was saved",
        ),
        early_save=(
            "the loop saves before the optimizer step, or after every micro-batch of an accumulation"
            + (f"; or a `for` was left between that step and {clock}" if clock == f"{name}.stepped()" else ""),
            f"save after {clock}, and end a step {last}",
        ),
        other_count=(
            "the trainer's count of steps was changed by hand, or loaded from elsewhere",
            "let the trainer load its checkpoints, and nothing else",
        ),
    )
    return replace(words, **other)


_END = object()


class Steps(Count[str]):
    """The micro-batches of this rank, and the count of the steps that trained them.

    Args:
        feed: the micro-batches.
        words: of the trainer; None: those of a custom loop.
    """

    #: told of every step that begins.
    session: Session

    def __init__(self, feed: Feed, words: Words | None = None) -> None:
        self.feed = feed
        #: the ``for`` that runs: only the last one may.
        self._turn: object = None
        self._is_changed = False
        #: [first, stop) samples, of all ranks, of the micro-batch that was handed out last.
        self.last = (0, 0)
        super().__init__(words or words_of())

    def loaded(self, step: int, samples: int) -> None:
        """See `Count`. A ``for`` that runs is over."""
        super().loaded(step, samples)
        self._turn, self._is_changed = None, False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around a load: if it fails, the weights may be loaded and the data is not, so nothing more is trained."""
        try:
            yield
        except MegaresumeError as error:
            self.fail(error)
            raise

    def stepped(self, unseen: Any = ()) -> Sequence[str]:
        """See `Count`."""
        done = super().stepped(unseen)
        self._is_changed = False
        self.feed.trained(self.samples)
        return done

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank: to the end of the epoch, or of the data.

        Raises:
            StateError: one was taken and not trained, or two ``for`` run at a time. From then on always the same.
            Stopped: the run was asked to stop, and has saved.
        """
        self.check_idle("a new `for` begins")
        turn = self._turn = object()
        batches: Any = None
        try:
            batches, end = self.feed.read(self.samples), self.feed.pass_end(self.samples)
            while True:
                self._check_turn(turn)
                self.check_more()
                if self.is_idle:
                    if end is not None and self.end >= end:
                        return
                    if not self.feed.has(self.end):
                        next(batches, _END)  # there it is said what is left out
                        return
                    self.session.step_begins()
                    self.begin(self.feed.size_at(self.samples))
                batch = self.session.clocks.wait(next, batches, _END)
                if batch is _END:
                    return
                self._hand_out(batch)
                yield batch
        except (StateError, UsageError) as error:
            raise self.fail(error) from error.__cause__
        finally:
            if self._turn is turn:
                self.leave()
            if hasattr(batches, "close"):
                batches.close()  # stop reading ahead

    def to_the_end(self) -> Iterator[Any]:
        """The micro-batches of this rank, epoch after epoch."""
        while self.feed.has(self.samples):
            yield from self

    def changed(self) -> None:
        """An optimizer has changed the weights: what is out is in them, and no save may follow before `stepped`."""
        if self.out:
            self._is_changed, self.used = True, len(self.out)

    def leave(self) -> None:
        """The ``for`` has ended: what it has left over of a step is in no gradient that counts. A save may follow,
        unless the weights were `changed`."""
        self._turn = None
        if not self._is_changed:
            self.used = 0

    def _hand_out(self, batch: Any) -> None:
        begin, end = self.end, self.feed.after(batch, self.end)
        self.last = begin, end
        is_last = end - self.samples < self.size and not self.feed.whole_steps and not self.feed.has(end)
        self.take(f"samples {begin} to {end - 1}", end, is_last=is_last)
        self.use()

    def numbers(self) -> Sequence[int]:
        """The samples of this rank in the micro-batch that was handed out last."""
        return self.feed.numbers(*self.last, step=self.samples)

    def _check_turn(self, turn: object) -> None:
        self.check()
        if self._turn is not turn:
            raise StateError(
                "the data was moved while it was being read",
                found="another `for` over the same data, or a load, between two batches",
                expected="one `for` at a time",
                action="evaluate on a separate loader",
            )
