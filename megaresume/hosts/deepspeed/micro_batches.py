"""Each step trains the micro-batches that were taken for it, or the run stops.

`Witness`: which micro-batches the model was given, as its own forward saw them.

Counting shows how many micro-batches were taken and how many trained; it cannot show that two were taken, one was
evaluated and the other trained twice. So a micro-batch is recognised by its tokens when it enters ``engine.forward``:

    next(data)       fingerprint of the tokens                        int64, 8,192 tokens in about 10 us
    engine.forward   fingerprints of integer inputs of that many tokens, on their own device, without waiting for it
    engine.step      at the end of a step: were all of its micro-batches among them? (One wait for the device, where
                     DeepSpeed waits for the norm of the gradients anyway.)

A loop may change its inputs (mask, cut, repeat, split them) or call the module past the engine. Then forwards are not
recognised and the witness says nothing: it speaks only if it recognised every forward of the step that builds a graph.

`Taken`: the micro-batches of one rank that were handed out, and that no optimizer step has trained yet.

The engine's own calls are the clock. A step trains `per_step` micro-batches, so on every rank

    next(data)            is refused while all micro-batches of a step are out: one of them would never be trained
    engine.step()         within an accumulation: needs a micro-batch more than there were calls before it
                          at its end: all micro-batches of the step are out, and the model was given each of them
                          (`Witness`); refused before a weight has changed
    engine.global_steps   went up by one: what was out is trained

Whatever a loop does with the iterator, a step trains exactly its samples, or the run stops and names the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from megaresume.checkpoint.session.rank_log import Noted
from megaresume.hosts.deepspeed import engine as facts
from megaresume.stream.errors import MegaresumeError, StateError


@lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, int64[count]: keyed by place, the same on every device."""
    generator = torch.Generator().manual_seed(count)
    return (torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) * 2 + 1).to(device)


def fingerprint(tokens: torch.Tensor) -> torch.Tensor:
    """The weighted sum of all tokens modulo 2^64: int64[], on their device. Places count, the shape does not."""
    flat = tokens.detach().reshape(-1).to(torch.int64)
    return (flat * _weights(flat.numel(), flat.device)).sum()


def tokens_of(batch: Any) -> torch.Tensor | None:
    """What a batch of any kind is recognised by: its largest tensor of integers on the CPU, the first of them."""
    found = [t for t in _tensors(batch) if _is_integer(t) and t.device.type == "cpu" and t.numel()]
    return max(found, key=torch.Tensor.numel, default=None)


class Witness:
    """What one engine's forward was given since the last optimizer step."""

    def __init__(self) -> None:
        self._forwards: list[list[torch.Tensor]] = []

    @property
    def graphs(self) -> int:
        """Forwards that built a graph: those that a backward can follow."""
        return len(self._forwards)

    def clear(self) -> None:
        """A step is over."""
        self._forwards.clear()

    def look(self, inputs: Sequence[Any], sizes: frozenset[int]) -> None:
        """Note what a forward is given.

        Args:
            inputs: its arguments, nested as they like.
            sizes: numbers of tokens of the micro-batches that are out.
        """
        if not torch.is_grad_enabled():
            return
        found = [t for t in _tensors(inputs) if t.numel() in sizes and _is_integer(t)]
        if any(t.is_cuda for t in found) and torch.cuda.is_current_stream_capturing():
            found = []  # what is captured is only run later
        self._forwards.append([fingerprint(t) for t in found])

    def seen(self, keys: Sequence[int], others: Container[int] = ()) -> list[int] | None:
        """Which of these fingerprints the model was given, as indexes in the order of its forwards; each once.

        Those of ``others``, micro-batches of other steps and engines, are recognised as well, and count for nothing.
        None: a forward was given something else as well, or there was none.
        """
        if not self._forwards or not all(self._forwards):
            return None
        values = torch.stack([one for forward in self._forwards for one in forward]).tolist()
        found: dict[int, None] = {}
        for forward in self._forwards:
            mine = {values.pop(0) for _ in forward}
            known = [index for index, key in enumerate(keys) if key in mine]
            if not known and not any(one in others for one in mine):
                return None
            found |= dict.fromkeys(known)
        return list(found)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


_ACTION = (
    "data.peek() shows the next batch without taking it, Loader(prefetch=N) reads ahead, DataOptions(skip=...) leaves "
    "samples out; docs/loops.md lists each of these loops with its fix"
)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One that is out."""

    #: in words: its samples.
    name: str
    #: fingerprint of its tokens, and their number; None: it cannot be recognised.
    key: int | None = None
    tokens: int = 0
    #: for the log of samples.
    noted: Noted | None = None


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """An optimizer step that was made."""

    number: int
    #: in the order of the model's forwards where they were recognised, else as they were handed out.
    batches: tuple[MicroBatch, ...]
    #: whether the model's forwards were recognised.
    seen: bool


class Taken:
    """The micro-batches that are out.

    Args:
        engine: whose steps train them.
        step: optimizer steps that it has made.
        reads: whether this rank is given batches at all; other stages of a pipeline are not.
        maker: of the batches, in words.
    """

    #: fingerprints of the micro-batches of all engines of this process that were handed out lately, or only looked at.
    _known: ClassVar[deque[int]] = deque(maxlen=1024)

    def __init__(self, engine: Any, step: int, *, reads: bool = True, maker: str = "megaresume.attach") -> None:
        self.engine = engine
        self.witness = Witness()
        #: of the step that is being handed out: 0 before its first micro-batch.
        self.per_step = 0
        #: calls of ``engine.step()`` since the last optimizer step.
        self.micro_steps = 0
        #: why the weights may not be those of this step and this data; None: they are.
        self.broken: MegaresumeError | None = None
        self._step = step
        self._reads = reads
        self._maker = maker
        self._out: list[MicroBatch] = []

    def __len__(self) -> int:
        return len(self._out)

    @property
    def is_full(self) -> bool:
        """Whether all micro-batches of the step are out."""
        return 0 < self.per_step == len(self._out)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of the step can have been trained: what is out may be handed out again."""
        return not self.micro_steps and not self.witness.graphs

    def open(self, per_step: int) -> None:
        """Begin to hand out a step."""
        self.per_step = per_step

    def add(self, batch: MicroBatch) -> None:
        """It is handed out."""
        self._out.append(batch)
        if batch.key is not None:
            self._known.append(batch.key)

    def looked_at(self, key: int) -> None:
        """A micro-batch with this fingerprint is shown, and not taken."""
        self._known.append(key)

    def take_back(self) -> None:
        """Whatever is out is handed out once more."""
        self._out.clear()

    def saw(self, inputs: Sequence[Any]) -> None:
        """The model is given these inputs."""
        self.witness.look(inputs, frozenset(batch.tokens for batch in self._out if batch.key is not None))

    # What is refused

    def check_more(self) -> None:
        """Raise a StateError if a step's micro-batches are all out, and one more is asked for."""
        if not self.is_full:
            return
        raise StateError(
            "a micro-batch was taken and not trained",
            found=f"{self._names()} taken, {self._calls()}, and next(data) asks for more{self._unseen()}",
            expected=f"engine.step() for each of the {self.per_step} micro-batches of step {self._step + 1} first",
            cause="one was used for something else (its shape, a warm-up, an evaluation), was passed over with "
            "`continue`, or a wrapper reads ahead",
            action=_ACTION,
        )

    def check_step(self) -> None:
        """Before ``engine.step()``, on every rank: raise a StateError if it would train other micro-batches."""
        if not self._reads:
            return
        if not facts.ends_step(self.engine):
            if len(self._out) > self.micro_steps:
                return
            raise self._lacks("engine.step() was called again, and no micro-batch was taken for it")
        if not self.is_full:
            raise self._lacks("the optimizer step would not train all of its micro-batches")
        if missing := self._unseen():
            raise StateError(
                "a micro-batch was taken and not trained",
                found=f"{self._names()} taken for step {self._step + 1}{missing}",
                expected="each of them in a forward of the engine, with gradients",
                cause="one was evaluated or dropped, and another trained in its place",
                action=_ACTION,
            )

    def check_save(self) -> None:
        """Raise a StateError if micro-batches of a step are trained whose gradients no checkpoint holds, or if a step
        or a load failed half-way."""
        if self.broken is not None:
            raise self.broken
        if not self.micro_steps:
            return
        raise StateError(
            "a checkpoint was asked for in the middle of an accumulation",
            found=f"{self._calls()} since step {self._step}, of {self.per_step}",
            expected="a save right after the engine.step() that ends a step",
            cause="the loop asks after every micro-step, or asks is_gradient_accumulation_boundary() after "
            "engine.step(), which then speaks of the next micro-step",
            action="ask before engine.step(): last = engine.is_gradient_accumulation_boundary(); save if last",
        )

    def _lacks(self, headline: str) -> StateError:
        return StateError(
            headline,
            found=f"{self._names() if self._out else 'no micro-batch'} taken, {self._calls()}",
            expected=f"{self.per_step or 'all'} micro-batches for step {self._step + 1}, one for each engine.step() or "
            "all before it",
            cause="a micro-batch was trained twice, or one that is not of this data; iter(data) was called while "
            "one was out, which is then handed out again; or the batch size was changed in the middle of a step",
            action=f"train what next(data) gives, once; for a ramp-up pass schedule= to {self._maker}; see "
            "docs/loops.md",
        )

    def _calls(self) -> str:
        return f"engine.step() called {self.micro_steps} time{'s' * (self.micro_steps != 1)}"

    def _names(self) -> str:
        names = [batch.name for batch in self._out]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def _unseen(self) -> str:
        """Which micro-batches the model was not given, if that is known."""
        seen = self._seen()
        missing = [] if seen is None else [b.name for k, b in enumerate(self._out) if k not in seen]
        return f"; the model was not given {', '.join(missing)}" if missing else ""

    def _seen(self) -> list[int] | None:
        keys = [batch.key for batch in self._out if batch.key is not None]
        return self.witness.seen(keys, self._known) if len(keys) == len(self._out) else None

    # What is trained

    def settle(self) -> TrainedStep | None:
        """Take note of an optimizer step that was made since the last call.

        Raises:
            StateError: steps were made that these micro-batches cannot have led to.
        """
        steps = int(self.engine.global_steps)
        if steps == self._step:
            return None
        if self._reads and (steps != self._step + 1 or not self.is_full):
            raise StateError(
                "the optimizer steps and the batches that were handed out do not fit",
                found=f"iteration {steps}; batches were handed out up to iteration {self._step}"
                + (f", and {len(self._out)} of {self.per_step} of the next" if self._out else ""),
                expected="all micro-batches of a step before engine.step() ends it",
                cause="the engine trained on other batches, or was loaded without its load_checkpoint method",
                action="feed the engine from this data alone; for a ramp-up of the batch size pass schedule= to "
                f"{self._maker}",
            )
        seen = self._seen() if self._out else None
        batches = self._out if seen is None else [self._out[index] for index in seen]
        done = TrainedStep(steps, tuple(batches), seen is not None)
        self._step, self.per_step, self.micro_steps, self._out = steps, 0, 0, []
        self.witness.clear()
        return done
