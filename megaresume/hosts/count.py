"""The count of what was taken and what was trained: the promise of megaresume, under every trainer.

A checkpoint says "these steps have trained these samples", and a resume continues with the next sample. That is true if
each optimizer step trains the micro-batches that were taken for it, each exactly once, and nothing else. `Count`
ensures this. It knows neither trainer nor data nor files. A host reports each event; an event that does not fit is
refused.

                         take()                take()
        IDLE --------------------> TAKEN --------------> WHOLE      FAILED: a refusal is repeated from then on,
         | ^                         |                     | ^              until loaded()
         | |      return_all()       |    return_all(),    | |
         | +-------------------------+----- stepped() -----+ |      trained: the samples before `samples`
         +---------------------------------------------------+      out:     micro-batches from there to `end`
            take() of a step's only micro-batch, or the data's last

    reported                    IDLE                     TAKEN                      WHOLE
    begin()      a step's size  sets the size of the step, once before its first take(): without it, that makes it WHOLE
    take()       handed out     continues                continues                  refused: it would never be trained
    use()        in gradients   refused: trained twice   once for each that is out  once for each that is out
    stepped()    weights change refused: it has trained  refused: not all of the    trained: step + 1, samples = end,
                                something else           step was taken             however many use() has reported
    check_step() before that    refused like stepped(), but before the weights change; also if some are `unseen`
    trained_to() a counter      all samples before this one are trained, and later ones stay out: refused if fewer were
                                taken, or more are out than `ahead` allows
    check_idle() a new ``for``  continues                refused: they would not be trained
    check_save() a checkpoint   continues                refused if some are used: no file has their gradients
    compare()    its own count  refused unless the trainer's count is the same
    return_all() a step undone  continues                IDLE: they are handed out again
    loaded()     a checkpoint   this many steps have trained this many samples; IDLE

Micro-batches that are out when a run ends or is killed are not trained. They come again after a resume.

A rank with ``reads=False`` (a middle stage of a pipeline) takes nothing: its use(), stepped() and check_step() refuse
nothing, and stepped() advances by the size of the step.

What the promise relies on the host for, as it cannot be checked here:

    the model was trained on each micro-batch,  use() and stepped() trust this. check_step() refuses the step if the
    exactly once                                host names some that were not (`unseen`): only DeepSpeed's does, and it
                                                refuses those with two backwards
    each optimizer step is reported             compare() finds one that was not, if the trainer counts steps too
    Megatron's steps                            none is reported, so the host begins one step without an end
                                                (``begin(sys.maxsize)``): the count is never WHOLE, and trained_to()
                                                compares what was taken with Megatron's own counter of samples

`megaresume.hosts.steps` has the count for a trainer that iterates over its micro-batches.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megaresume.stream.errors import MegaresumeError, StateError, listed

T = TypeVar("T")

#: the likely cause of a refusal, and what to do.
Why = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The words for one trainer in errors: its calls, and the usual mistakes with it."""

    trainer: str
    #: the call that does a step, or reports one.
    clock: str
    #: the call for the next micro-batch.
    next: str
    #: causes: a micro-batch was taken and not trained; a step is incomplete; a checkpoint is requested within a step;
    #: the trainer's count of steps differs.
    untrained: Why
    incomplete: Why
    early_save: Why
    other_count: Why


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """A micro-batch that is out."""

    #: ``str()`` of it is its name in errors.
    batch: T
    #: the number of the sample after it.
    end: int


class Count(Generic[T]):
    """The micro-batches of one rank. All positions count samples of all ranks together, since the start of the run.

    Args:
        words: of the trainer.
        step: optimizer steps done.
        samples: samples trained by them.
        reads: whether this rank gets micro-batches. A middle stage of a pipeline does not: it only counts.
        checks_before_weights_change: whether the host calls `check_step` before each step. Then a refusal comes before
            the weights change, so that they may still be saved.
    """

    def __init__(
        self,
        words: Words,
        step: int = 0,
        samples: int = 0,
        *,
        reads: bool = True,
        checks_before_weights_change: bool = False,
    ) -> None:
        self.words, self.reads = words, reads
        self._checks_before_weights_change = checks_before_weights_change
        self.loaded(step, samples)

    def loaded(self, step: int, samples: int) -> None:
        """Set the count after a load, or at the start of the run: this many steps have trained this many samples."""
        self.step, self.samples, self.end = step, samples, samples
        self.out: list[Taken[T]] = []
        #: samples of the current step; 0: it has not begun.
        self.size = 0
        #: whether all of them are out.
        self.is_whole = False
        #: whether the last micro-batch handed out is the last one of its step; stays set after `stepped`.
        self.ends_step = False
        #: how many of the micro-batches that are out may be in the gradients.
        self.used = 0
        #: the error that ended the training; whether the weights are still those of `step`, so that they may be saved.
        self.failure: MegaresumeError | None = None
        self._may_save = True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is out."""
        return not self.out

    # What happens

    def begin(self, size: int) -> None:
        """Set the number of samples in the step, before its first `take`; a later call applies from the next `take`."""
        self.size = size

    def take(self, batch: T, end: int, *, is_last: bool = False) -> None:
        """Note that a micro-batch is handed out.

        Args:
            batch: see `Taken`.
            end: the sample after it, and after those of the other ranks that are handed out at the same time.
            is_last: the data ends with it, before the step has all samples set by `begin`.
        """
        self.check_more()
        self.out.append(Taken(batch, end))
        self.end = end
        self.is_whole = self.ends_step = is_last or end - self.samples >= self.size

    def use(self) -> None:
        """Note that one more micro-batch that is out goes into the gradients."""
        if self.reads and len(self.out) <= self.used:
            raise self._refuse(self._incomplete(f"{self.words.clock} was called again", is_none=True))
        self.used += self.reads

    def return_all(self) -> None:
        """Note that the gradients contain no micro-batch that is out: all are handed out again."""
        self.out, self.end, self.is_whole, self.used = [], self.samples, False, 0

    def stepped(self) -> Sequence[T]:
        """Note that an optimizer step was done; returns what it has trained. Raises as `check_step`."""
        self.check()
        if (error := self._not_all("a step was made")) is not None:
            raise self.fail(error)
        done = [taken.batch for taken in self.out]
        self.step += 1
        self.samples = self.end if self.reads else self.samples + self.size
        self.size = 0
        self.return_all()
        return done

    def trained_to(self, samples: int, *, ahead: Container[int] | None = (0,)) -> None:
        """Note that all samples before this one are trained, for a trainer that counts samples and reports no steps.

        Args:
            samples: their number.
            ahead: how many further samples may be out; None: any number.

        Raises:
            StateError: fewer were taken, so others were trained; or more were taken.
        """
        self.check()
        if samples > self.end:
            raise self.fail(self._incomplete())
        self.samples, self.out = samples, [taken for taken in self.out if taken.end > samples]
        if ahead is not None and self.end - samples not in ahead:
            raise self.fail(self.untrained(f"{self.words.trainer} has counted {samples} samples"))

    def fail(self, error: MegaresumeError, *, may_save: bool = False) -> MegaresumeError:
        """Stop training from now on, and saving unless the weights are certainly those of `step` (``may_save``)."""
        self.failure, self._may_save = error, self._may_save and may_save
        return error

    # What is refused

    def check(self) -> None:
        """Raise the earlier refusal or failure again, if there was one."""
        if self.failure is not None:
            raise self.failure

    def check_more(self, unseen: Iterable[T] = ()) -> None:
        """Raise a StateError if another micro-batch is asked for while all of the step's are out.

        Args:
            unseen: micro-batches that are out, but not in the gradients, as far as the host knows.
        """
        self.check()
        if self.is_whole:
            raise self._refuse(self.untrained(self.words.next, unseen))

    def check_idle(self) -> None:
        """Raise a StateError if a micro-batch is out when a new ``for`` begins: it would not be trained."""
        self.check()
        if self.out:
            raise self._refuse(self.untrained("a new `for` begins"))

    def check_step(self, unseen: Iterable[T] = ()) -> None:
        """Raise a StateError unless the whole step is out; before the weights change, if the trainer allows that.

        Args:
            unseen: see `check_more`.
        """
        self.check()
        if (error := self._not_all("a step is to be made", unseen)) is not None:
            raise self._refuse(error)

    def check_save(self) -> None:
        """Raise a StateError if a checkpoint now would not be exactly the state after the last step."""
        if self.failure is not None and not self._may_save:
            raise self.failure
        if self.used:
            headline = "a checkpoint was asked for in the middle of a step"
            expected = f"a save right after the {self.words.clock} that ends a step"
            raise self._refuse(_error(headline, self._taken(), expected, self.words.early_save))

    def compare(self, step: int, samples: int | None = None) -> None:
        """Raise a StateError if the trainer's count of steps, or of samples, differs (None: it counts no samples)."""
        if step == self.step and samples in (None, self.samples):
            return
        found, expected = f"step {step}", f"step {self.step}"
        if samples is not None:
            found, expected = f"{found}, {samples} samples", f"{expected}, {self.samples} samples"
        headline = f"{self.words.trainer} and the data count different steps"
        found = f"{found}; {self._taken()}" if self.out else found
        raise self.fail(_error(headline, found, f"{expected}, as the data was read", self.words.other_count))

    def untrained(self, when: str, unseen: Iterable[T] = (), *, why: Why | None = None) -> StateError:
        """The error for a micro-batch that was taken and not trained.

        Args:
            when: the event that shows it.
            unseen: see `check_more`.
            why: overrides `Words` if more is known.
        """
        names = ", ".join(str(batch) for batch in unseen)
        return _error(
            "a micro-batch was taken and not trained",
            f"{self._taken()}, and {when}" + (f"; the model was not trained on {names}" if names else ""),
            f"{self.words.clock} for them before that",
            why or self.words.untrained,
        )

    def _not_all(self, made: str, unseen: Iterable[T] = ()) -> StateError | None:
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
        return self.fail(error, may_save=self._checks_before_weights_change)

    def _taken(self) -> str:
        names = listed([taken.batch for taken in self.out], 8) or "no micro-batch"
        used = f", {self.used} of them in its gradients" if 0 < self.used < len(self.out) else ""
        return f"{names} taken since step {self.step}{used}"


def _error(headline: str, found: str, expected: str, why: Why) -> StateError:
    return StateError(headline, found=found, expected=expected, cause=why[0], action=why[1])
