"""Each step trains the micro-batches that were taken for it, in order, or the run stops.

    for batch in steps     refused while all micro-batches of a step are out: one of them would never be trained
    steps.stepped()        an optimizer step was made: all of its micro-batches are out, and now they are trained
    a save                 between two steps

What is out when the run ends, or is killed, is not trained: it comes again after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megaresume.checkpoint.session.session import Session
from megaresume.hosts.torch.feeds import Feed
from megaresume.stream.errors import MegaresumeError, StateError, UsageError

_END = object()


class Steps:
    """The micro-batches of this rank, and the count of the steps that trained them.

    Args:
        feed: the micro-batches.
        name: of what the loop iterates over, for errors.
        clock: how the loop says that a step was made, for errors.
    """

    #: told of every step that begins.
    session: Session

    def __init__(self, feed: Feed, *, name: str = "loop", clock: str = "loop.stepped()") -> None:
        self.feed = feed
        self._name, self._clock = name, clock
        self._last = f"if {name}.ends_step" if clock == f"{name}.stepped()" else "with its last micro-batch"
        #: optimizer steps made, and samples that they trained.
        self.step, self.trained = 0, 0
        #: micro-batches that were handed out since the last step, and the sample after them.
        self._out, self._end = 0, 0
        #: why nothing is trained or saved any more.
        self._failure: MegaresumeError | None = None
        #: the ``for`` that runs: only the last one may.
        self._turn: object = None

    def go_on(self, step: int, samples: int) -> None:
        """From a checkpoint: so many steps have trained so many samples."""
        self.step, self.trained = step, samples
        self._out, self._end = 0, samples
        self._turn, self._failure = None, None

    def fail(self, error: MegaresumeError) -> MegaresumeError:
        """Train and save nothing any more; returns the error."""
        self._failure = error
        return error

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around a load: if it fails, the weights may be loaded and the data is not, so nothing is trained any more."""
        try:
            yield
        except MegaresumeError as error:
            self.fail(error)
            raise

    @property
    def is_untouched(self) -> bool:
        """Whether no micro-batch was handed out since the last step."""
        return not self._out

    @property
    def is_whole(self) -> bool:
        """Whether all micro-batches of the step are out; the last step of the data may have fewer."""
        if not self._out:
            return False
        if self._end - self.trained >= self.feed.size_at(self.trained):
            return True
        return not self.feed.whole_steps and not self.feed.has(self._end)

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank: to the end of the epoch, or of the data.

        Raises:
            StateError: one was taken and not trained, or two ``for`` run at a time. From then on always the same.
            Stopped: the run was asked to stop, and has saved.
        """
        self._check_nothing_out()
        turn = self._turn = object()
        batches: Any = None
        try:
            batches, end = self.feed.read(self.trained), self.feed.pass_end(self.trained)
            while True:
                self._check_more(turn)
                if not self._out:
                    if end is not None and self._end >= end:
                        return
                    if not self.feed.has(self._end):
                        next(batches, _END)  # there it is said what is left out
                        return
                    self.session.step_begins()
                batch = next(batches, _END)
                if batch is _END:
                    return
                self._end = self.feed.after(batch, self._end)
                self._out += 1
                yield batch
        except (StateError, UsageError) as error:
            raise self.fail(error) from error.__cause__
        finally:
            if self._turn is turn:
                self._turn = None
            if hasattr(batches, "close"):
                batches.close()  # stop reading ahead

    def to_the_end(self) -> Iterator[Any]:
        """The micro-batches of this rank, epoch after epoch."""
        while self.feed.has(self.trained):
            yield from self

    def stepped(self) -> None:
        """An optimizer step was made, of the micro-batches handed out since the one before.

        Raises:
            StateError: they are not all of a step's.
        """
        if self._failure is not None:
            raise self._failure
        if not self.is_whole:
            raise self.fail(
                StateError(
                    "a step was made without all of its micro-batches"
                    if self._out
                    else "a step was made, and no micro-batch was taken for it",
                    found=f"{self._clock} for step {self.step + 1}, with {self._words()} taken",
                    expected=f"all {self.feed.size_at(self.trained)} samples of the step, of all ranks together",
                    cause="a batch was trained twice, or it came from another loader; or the loop accumulates fewer "
                    "micro-batches than the loader was told",
                    action=f"take each batch from `for batch in {self._name}`, and end a step {self._last}; "
                    "nothing of this step was saved",
                )
            )
        self.step, self.trained, self._out = self.step + 1, self._end, 0
        self.feed.trained(self.trained)

    def check_save(self) -> None:
        """Raise a StateError unless what is out was left over by a ``for`` that has ended."""
        if self._failure is not None:
            raise self._failure
        if self._out and self._turn is not None:
            raise self.fail(
                StateError(
                    "a checkpoint was asked for in the middle of a step",
                    found=f"{self._words()} taken since step {self.step}, and the `for` goes on",
                    expected=f"a save right after {self._clock}",
                    cause="the loop saves before the optimizer step, or after every micro-batch of an accumulation",
                    action=f"save after {self._clock}, and end a step {self._last}",
                )
            )

    def _check_nothing_out(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._out:
            raise self.fail(self._not_trained("a new `for` begins"))

    def _check_more(self, turn: object) -> None:
        if self._failure is not None:
            raise self._failure
        if self._turn is not turn:
            raise self.fail(
                StateError(
                    "the data was moved while it was being read",
                    found=f"another `for` over {self._name}, or a load, between two batches",
                    expected="one `for` at a time",
                    action="evaluate on a loader of its own",
                )
            )
        if self.is_whole:
            raise self.fail(self._not_trained("the next batch is asked for"))

    def _not_trained(self, when: str) -> StateError:
        return StateError(
            "a micro-batch was taken and not trained",
            found=f"{self._words()} taken since step {self.step}, and {when}",
            expected=f"{self._clock} for them before that",
            cause="a batch was used for something else (its shape, a warm-up, an evaluation) or passed over with "
            f"`continue`; a `for` was left in the middle of a step; {self._clock} is missing; or the loop "
            "accumulates more micro-batches than the loader was told (accumulation=)",
            action="look at collate_fn([dataset[0]]) instead, evaluate on a loader of its own, and remove items that "
            "are not to be trained from the dataset",
        )

    def _words(self) -> str:
        return f"samples {self.trained} to {self._end - 1}" if self._out else "no samples"
