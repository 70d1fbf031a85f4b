"""`Steps`: the count of a trainer that iterates over the micro-batches of a `Feed`.

Each call is one or two events of `Count`:

    for batch in steps     take() and use(): anything handed out may be in the gradients
    steps.stepped()        an optimizer step was done
    steps.changed()        an optimizer has changed the weights, if a loop only later says that it did a step
    steps.steps_by(...)    likewise, by name: an optimizer steps once for what was taken
    a save                 between two steps; micro-batches left over by a ``for`` that ended may be out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megaresume.hosts.count import Count, Why, Words
from megaresume.stream.errors import MegaresumeError, StateError, UsageError

if TYPE_CHECKING:  # both need torch, which a launcher may lack
    from megaresume.checkpoint.session import Session
    from megaresume.hosts.feeds import Feed


def loop_words(*, trainer: str = "the loop", name: str = "loop", clock: str = "loop.stepped()", **other: Any) -> Words:
    """The words for a loop that takes micro-batches by a ``for``.

    Args:
        trainer: its name.
        name: of the object that it iterates over.
        clock: the call by which it reports a step.
        other: fields of `Words` that differ for this trainer.
    """
    last = f"if {name}.ends_step" if clock == f"{name}.stepped()" else "with its last micro-batch"
    words = Words(
        trainer=trainer,
        clock=clock,
        next="the next batch is asked for",
        untrained=(
            "a batch was used for something else (its shape, a warm-up, an evaluation) or passed over with `continue`; "
            f"a `for` was left in the middle of a step; {clock} is missing; a prefetcher takes one batch more; or the "
            "loop accumulates more micro-batches than the loader was told (accumulation=)",
            "look at collate_fn([dataset[0]]) instead, evaluate on a separate loader, remove items that are not to be "
            "trained from the dataset, and let workers read ahead (num_workers=)",
        ),
        incomplete=(
            "a batch was trained twice, or it came from another loader; or the loop accumulates fewer micro-batches "
            "than the loader was told",
            f"take each batch from `for batch in {name}`, and end a step {last}; nothing of this step was saved",
        ),
        early_save=(
            (f"{clock} was not called after the optimizer step; or " if clock == f"{name}.stepped()" else "")
            + "the loop saves before the optimizer step, or after every micro-batch of an accumulation"
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

    #: notified of every step that begins.
    session: Session
    #: number of steps done before the last load.
    loaded_step: int
    #: called for every step done, with its number, and the samples trained up to its end.
    on_step: Callable[[int, int], object] | None = None
    #: called once, when the next step begins.
    on_next_step: Callable[[], object] | None = None

    def __init__(self, feed: Feed, words: Words | None = None) -> None:
        self.feed = feed
        #: the current ``for``: only the last one may run.
        self._turn: object = None
        self._is_changed = False
        #: the optimizers that have stepped since a micro-batch was handed out.
        self.stepped_by: set[object] = set()
        #: [first, stop) samples, of all ranks, of the micro-batch that was handed out last.
        self.last = (0, 0)
        #: the same for every micro-batch of the current step, by its ``id``.
        self._ranges: dict[int, tuple[int, int]] = {}
        #: those that the step has trained, if a trainer reports it; kept alive, so that no ``id`` is reused.
        self._trained: dict[int, Any] = {}
        super().__init__(words or loop_words())

    def loaded(self, step: int, samples: int) -> None:
        """See `Count`. Ends a running ``for``."""
        super().loaded(step, samples)
        self.loaded_step = step
        self._turn, self._is_changed = None, False
        self.stepped_by.clear()

    @property
    def is_resumed(self) -> bool:
        """Whether a checkpoint was loaded, and no step was done since."""
        return self.step == self.loaded_step > 0

    def untrained(self, when: str, unseen: Iterable[str] = (), *, why: Why | None = None) -> StateError:
        """See `Count`."""
        if why is None and self.is_whole and self.end - self.samples < self.size:
            why = (
                f"the data ends within this step, after {self.end - self.samples} of its {self.size} samples, and the "
                "loop waits for as many micro-batches as in the others",
                "make that step with its last micro-batch (`if loop.ends_step`), or leave it out: "
                "DataLoader(drop_last=True)",
            )
        elif why is None and self.is_resumed:
            cause, action = self.words.untrained
            why = (
                f"the loop passes over what it trained before the resume, as other loaders need it; or {cause}",
                f"take that out, since the first batch is the one after step {self.step}; otherwise {action}",
            )
        return super().untrained(when, unseen, why=why)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wraps a load: if it fails, the weights may be loaded without the data, so nothing more is trained."""
        try:
            yield
        except MegaresumeError as error:
            self.fail(error)
            raise

    def stepped(self) -> Sequence[str]:
        """See `Count`."""
        done = super().stepped()
        self._is_changed = False
        self.feed.trained(self.samples)
        if self.on_step is not None:
            self.on_step(self.step, self.samples)
        return done

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of this rank, to the end of the epoch or of the data.

        Raises:
            StateError: one was taken and not trained, or two ``for`` run at a time. The same error is raised from then
                on.
            Stopped: the run was asked to stop, and has saved.
        """
        self.check_idle()
        turn = self._turn = object()
        batches: Any = None
        # Not by their names below: a program may end within the ``for``, and they are gone by then.
        refusals = (StateError, UsageError)
        try:
            batches, end = self.feed.read(self.samples), self.feed.pass_end(self.samples)
            while True:
                self._check_turn(turn)
                self.check_more()
                if self.is_idle:
                    if end is not None and self.end >= end:
                        return
                    if not self.feed.has(self.end):
                        next(batches, _END)  # warns about what is left out
                        return
                    self._ranges.clear()
                    self._trained.clear()
                    self.session.step_begins()
                    if self.on_next_step is not None:
                        on_next_step, self.on_next_step = self.on_next_step, None
                        on_next_step()
                    self.begin(self.feed.size_at(self.samples))
                batch = self.session.clocks.wait(next, batches, _END)
                if batch is _END:
                    return
                self._hand_out(batch)
                yield batch
        except refusals as error:
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
        """Note that an optimizer has changed the weights: the micro-batches that are out are in them, and no save may
        follow before `stepped`.
        """
        if self.out:
            self._is_changed, self.used = True, len(self.out)

    def steps_by(self, optimizer: object) -> None:
        """Note that an optimizer has stepped, which it does once for the micro-batches that are out.

        Raises:
            StateError: it had stepped before, and no micro-batch was taken since. The weights have changed.
        """
        if not self.out:
            return
        if optimizer in self.stepped_by:
            raise self.fail(
                StateError(
                    "an optimizer made a second step, and no micro-batch was taken for it",
                    found=f"another step of {type(optimizer).__name__}, with {self._taken()}",
                    expected=f"one step of each optimizer, and {self.words.clock}",
                    cause="a batch was trained twice, or several steps are made for each batch",
                    action="train each batch once, and make an accumulation's step with its last micro-batch; nothing "
                    "of this step was saved",
                )
            )
        self.stepped_by.add(optimizer)

    def leave(self) -> None:
        """Note that the ``for`` has ended: its micro-batches of an unfinished step are in no gradient that counts. A
        save may follow, unless the weights were `changed`.
        """
        self._turn = None
        if not self._is_changed:
            self.used = 0

    def _hand_out(self, batch: Any) -> None:
        self.stepped_by.clear()
        begin, end = self.end, self.feed.after(batch, self.end)
        self.last = self._ranges[id(batch)] = begin, end
        is_last = end - self.samples < self.size and not self.feed.whole_steps and not self.feed.has(end)
        self.take(f"samples {begin} to {end - 1}", end, is_last=is_last)
        self.use()

    def trains(self, batch: Any) -> None:
        """Note that this micro-batch is being trained. It is not the last one handed out if a trainer reads a whole
        step ahead.

        Raises:
            StateError: it was already trained in this step. The weights have not changed.
        """
        if id(batch) in self._trained:
            cause, action = self.words.incomplete
            raise self.fail(
                StateError(
                    "a micro-batch is to be trained twice in one step",
                    found=f"the same batch again, with {self._taken()}",
                    expected="each of them once",
                    cause=cause,
                    action=action,
                )
            )
        self._trained[id(batch)] = batch
        self.last = self._ranges.get(id(batch), self.last)

    def numbers(self) -> Sequence[int]:
        """The samples of this rank in the micro-batch that was handed out last, or set by `trains`."""
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
