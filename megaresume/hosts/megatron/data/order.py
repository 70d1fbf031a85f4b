"""`StreamOrder`: the training stream as the thing that a checkpoint saves.

The clock is Megatron's ``args.consumed_train_samples``: a state is taken for exactly that many samples, however many
were read ahead, and a resume begins at exactly that many, whatever the checkpoint was saved with.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import DataState, stream_of
from megaresume.checkpoint.session.host import Data, change_lines
from megaresume.hosts.megatron.data.streams import Streams
from megaresume.hosts.megatron.load_rules import without_state
from megaresume.stream.batches import Balance, BatchSchedule
from megaresume.stream.errors import MegaresumeError, StateError
from megaresume.stream.skips import NO_SKIP, SkipConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

#: Seconds between two looks at the counter.
FOLLOW_EVERY = 0.5

log = logging.getLogger(__name__)


class StreamOrder(Data):
    """The order of the training samples. No method is a collective: every rank plans all of the stream.

    Args:
        streams: opened, the training stream at its start.
        saved: the stream's state in the checkpoint that was loaded; None if none was.
        position: samples trained: ``args.consumed_train_samples``.
        iteration: steps done: ``args.iteration``.
        schedule: planned global batch sizes.
        skip: what flags want left out.
        end: samples that the run will train by a schedule, if that is known.
        balance: how the samples of a step are dealt to the ranks; None: in the order of the stream.

    Raises:
        StateError: training continues somewhere and there is no state to resume from; or one of another config or other
            corpora, naming the fields that differ; or ranks are balanced, and this is inside a step.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        saved: StreamState | None,
        position: int,
        iteration: int,
        schedule: BatchSchedule,
        skip: SkipConfig = NO_SKIP,
        end: Callable[[BatchSchedule], int] | None = None,
        balance: Balance | None = None,
    ) -> None:
        self.streams = streams
        self.position = position
        self.balance = balance
        self._followed: Any = None
        #: what was restored, if anything.
        self.state = saved
        self._restore(iteration)
        history = () if self.state is None else self.state.batches
        self.schedule = self.stream.schedule = schedule.resumed(history, position)
        if balance is not None:
            self.schedule.steps_before(position)  # a deal is of whole steps
        if skip or self.stream.config.skip:
            self.stream.skip(skip, end=None if end is None else end(self.schedule))

    def _restore(self, iteration: int) -> None:
        stream, state = self.stream, self.state
        if state is None:
            if iteration or self.position:
                raise without_state(iteration, self.position)
            return
        if self.position >= state.samples:
            stream.restore(state)
        else:  # (--override-ckpt-iteration): planned from the start, and proved on the way
            stream.check(state)
        digest = stream.digest_at(state.samples)
        if digest != state.digest:
            raise StateError(
                "the restored stream is not at the sample where it was saved",
                found=f"digest {digest} at sample {state.samples}",
                expected=f"digest {state.digest}",
                cause="the state was edited, or a corpus has other lengths than its fingerprint says",
                action="megaresume verify DIR; or load an older checkpoint",
            )

    @property
    def stream(self) -> Stream:
        """The training stream."""
        return self.streams.train

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """A data config that opens the same training data again, for the records beside the checkpoint."""
        return self.stream.origin

    def snapshot(self, samples: int) -> StreamState:
        """The state for ``samples`` trained samples. Cheap near the front of the stream, which `follow` keeps near.

        Raises:
            StateError: ranks are balanced, and these are not whole steps of the schedule: others were trained.
        """
        if self.balance is not None:
            self.schedule.steps_before(samples)
        return self.stream.state_at(samples, batches=self.schedule.until(samples))

    def read_back(self, state: DataState) -> None:
        """See `Data`."""
        self.stream.read_back(stream_of(state))

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`: it was opened at this state.

        Raises:
            StateError: at another.
        """
        if state != self.state:
            raise StateError(
                "the stream was opened with a different state from the one that was loaded",
                found=f"sample {self.position}",
                expected=f"sample {state.samples}, digest {state.digest}",
                cause="a second checkpoint was loaded after the data was built",
            )

    def describe(self) -> list[str]:
        """See `Data`."""
        return change_lines(self.stream, self.schedule.size_at(self.position))

    def follow(self, args: Any) -> None:
        """Plan along with the training in a thread of its own, so that a save has little left to plan.

        With worker processes, and on ranks that read no data, nobody else plans in this process: a save after
        thousands of steps would have to catch up on all of them at once. The thread ends with this order, which an
        in-process restart replaces, or where the stream ends.
        """
        self._followed = args
        threading.Thread(target=_follow, args=(weakref.ref(self),), name="megaresume-follow", daemon=True).start()


def _follow(reference: weakref.ref[StreamOrder]) -> None:
    pause = threading.Event()
    while True:
        order = reference()
        if order is None:
            return
        position, stream = int(order._followed.consumed_train_samples), order.stream
        del order
        try:
            if position > stream.start:
                stream.plan(position - 1, position)
        except MegaresumeError as error:
            log.debug("megaresume: planning ahead ends: %s", error)  # whoever needs these samples will raise it
            return
        del stream
        pause.wait(FOLLOW_EVERY)
