"""`Witness`: which micro-batches an engine's gradients come from, as shown by its forwards and backwards.

A micro-batch is recognised by its tokens when it enters ``engine.forward``, its backward by hooks on the outputs:

    next(data)       fingerprint of the tokens                        int64, 8,192 tokens in about 10 us
    engine.forward   fingerprints of integer inputs with that many tokens, on their device, without waiting for it;
                     hooks on the outputs, which show the backward passes through them
    engine.step      at the end of a step: has each of its micro-batches a forward with a backward, and only one?
                     (One wait for the device, when DeepSpeed waits for the norm of the gradients anyway.)

A loop may change its inputs (mask, cut, repeat, split them) or call the module directly. Then forwards are not
recognised, and only their number counts. An ``engine.backward`` that passes through no output of the engine shows a
loop that bypasses it: then every forward is assumed to be trained. ``torch.autograd.grad`` trains nothing, unless a
step has no other passes: then the loop computes its gradients by it.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from megaresume.checkpoint.records.rank_log import Noted

T = TypeVar("T")


@functools.lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, int64[count]: determined by their position, the same on every device."""
    generator = torch.Generator().manual_seed(count)
    return (torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) * 2 + 1).to(device)


def fingerprint(tokens: torch.Tensor) -> torch.Tensor:
    """The weighted sum of all tokens modulo 2^64: int64[], on their device. Positions matter, the shape does not."""
    flat = tokens.reshape(-1).to(torch.int64)
    weights = _weights(flat.numel(), flat.device)
    return torch.dot(flat, weights) if flat.is_cpu else (flat * weights).sum()  # the first has no CUDA kernel for int64


def tokens_of(batch: Any) -> torch.Tensor | None:
    """The tensor by which a batch of any kind is recognised: the first of its largest integer ones on the CPU."""
    found = [t for t in _tensors(batch) if _is_integer(t) and t.is_cpu and t.numel()]
    return max(found, key=torch.Tensor.numel, default=None)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What is known about a micro-batch that was handed out."""

    #: its samples, in words.
    name: str
    #: fingerprint of its tokens, and their number; None if it cannot be recognised.
    key: int | None = None
    tokens: int = 0
    #: its sample numbers in the stream, if losses are taken.
    samples: tuple[int, ...] = ()
    #: its entry for the log of samples.
    noted: Noted | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(eq=False, slots=True)
class Forward:
    """A forward that builds a graph."""

    #: fingerprints of its inputs that may be tokens: int64[] each, on their device.
    inputs: list[torch.Tensor]
    #: number of calls of ``engine.step`` before it, since the last optimizer step.
    turn: int
    #: the backward passes through it, by torch's number.
    passes: set[int] = field(default_factory=set)
    #: whether `passes` can be relied on: there was an output to watch.
    is_watched: bool = True
    #: the values of `inputs`, once the device was waited for.
    keys: frozenset[int] | None = None


class Witness:
    """The micro-batches in one engine's forwards since the last optimizer step."""

    #: fingerprints of micro-batches recently handed out, or only looked at, for all engines of this process.
    _known: ClassVar[deque[int]] = deque(maxlen=1024)

    def __init__(self) -> None:
        self._forwards: list[Forward] = []
        #: backward passes through any output, counted once for each output.
        self._reached = 0
        #: those in this step that add to gradients, by torch's number.
        self._training: set[int] = set()
        #: whether ``engine.backward`` is running.
        self._in_backward = False
        #: whether an ``engine.backward`` in this step went through no output.
        self._trains_past = False
        #: whether an earlier step was trained through ``engine.forward``.
        self._trains_here = False

    def know(self, key: int | None) -> None:
        """Note that a micro-batch with this fingerprint is handed out, or shown."""
        if key is not None:
            self._known.append(key)

    @property
    def graphs(self) -> int:
        """The number of forwards that built a graph, so that a backward can follow."""
        return len(self._forwards)

    def clear(self) -> None:
        """Forget a finished step."""
        self._trains_here = any(forward.passes for forward in self._forwards) and not self._trains_past
        self._forwards.clear()
        self._training.clear()
        self._in_backward = self._trains_past = False

    def look(self, inputs: Sequence[Any], out: Sequence[MicroBatch], turn: int) -> Forward | None:
        """Note the inputs of a forward; returns None if it builds no graph.

        Args:
            inputs: its arguments, with any nesting.
            out: the micro-batches that are out.
            turn: see `Forward`.
        """
        if not torch.is_grad_enabled():
            return None
        sizes = {batch.tokens for batch in out if batch.key is not None}
        found = [t for t in _tensors(inputs) if t.numel() in sizes and _is_integer(t)]
        if any(t.is_cuda for t in found) and torch.cuda.is_current_stream_capturing():
            found = []  # a captured graph only runs later
        forward = Forward([fingerprint(t) for t in found], turn)
        self._forwards.append(forward)
        return forward

    def watch(self, forward: Forward, outputs: Any) -> None:
        """Watch for backward passes through a forward's outputs. A leaf among them is a parameter."""
        found = [t for t in _tensors(outputs) if t.grad_fn is not None]
        forward.is_watched = bool(found)
        for tensor in found:
            tensor.register_hook(functools.partial(self._reach, forward))  # type: ignore[no-untyped-call]

    def _reach(self, forward: Forward, _gradient: torch.Tensor) -> None:
        self._reached += 1
        number = torch._C._current_graph_task_id()
        forward.passes.add(number)
        if self._in_backward or number in self._training or _adds_to_gradients():
            self._training.add(number)

    def backward(self, function: Callable[[], T]) -> T:
        """Run a backward of the engine."""
        before, self._in_backward = self._reached, True
        result = function()
        self._in_backward = False
        self._trains_past |= self._reached == before
        return result

    def knows_last(self, batch: MicroBatch) -> torch.Tensor | None:
        """Whether the last forward was given this micro-batch: bool[], on its device, without waiting. None: unknown,
        as the loop has changed its inputs.
        """
        found = self._forwards[-1].inputs if self._forwards else []
        return (torch.stack(found) == batch.key).any() if found and batch.key is not None else None

    def seen(self, out: Sequence[MicroBatch]) -> list[MicroBatch] | None:
        """The micro-batches that are out and had a backward, in the order of the forwards; each once.

        Those of other steps and engines are also recognised, and ignored. None if a forward was also given something
        else, or there was none.
        """
        forwards, keys = self._trained(), [batch.key for batch in out if batch.key is not None]
        if len(keys) < len(out) or not forwards or not all(forward.inputs for forward in forwards):
            return None
        found: dict[int, None] = {}
        for mine in self._keys(forwards):
            known = [index for index, key in enumerate(keys) if key in mine]
            if not known and not any(one in self._known for one in mine):
                return None
            found |= dict.fromkeys(known)
        return [out[index] for index in found]

    def untrained(self, out: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches that are out and had no backward, as far as known."""
        trained = self._trained()
        if not trained:
            nothing = bool(self._forwards) or self._trains_here
            return list(out) if nothing and not self._trains_past else []
        seen = self.seen(out)
        if seen is not None:
            return [batch for batch in out if not any(batch is one for one in seen)]
        if len(trained) >= len(out):
            return []
        lacking = {forward.turn for forward in self._forwards} - {forward.turn for forward in trained}
        return [batch for turn, batch in enumerate(out) if turn in lacking]

    def trained_twice(self, out: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches that are out and had two forwards, each with its own backward. Several forwards in one
        backward form one loss; several backwards of one forward need ``retain_graph``, so they are intended.
        """
        forwards = [forward for forward in self._forwards if self._passes(forward)]
        if len({number for forward in forwards for number in self._passes(forward)}) <= len(out):
            return []  # one backward for each, or fewer
        forwards = [forward for forward in forwards if forward.inputs]
        alike = Counter(batch.key for batch in out)
        passes: dict[int | None, list[set[int]]] = {key: [] for key in alike}
        for forward, mine in zip(forwards, self._keys(forwards), strict=True):
            # The labels of one may be the tokens of another one.
            if len(known := [key for key in mine if key in passes]) == 1:
                passes[known[0]].append(self._passes(forward))
        twice = {
            key for key, each in passes.items() if each and len(set().union(*each)) >= max(map(len, each)) + alike[key]
        }
        return [batch for batch in out if batch.key in twice]

    def _passes(self, forward: Forward) -> set[int]:
        """The passes through a forward that train."""
        return forward.passes & self._training if self._training else forward.passes

    def _trained(self) -> list[Forward]:
        """The forwards that had a backward, or may have had one."""
        return [one for one in self._forwards if self._passes(one) or not one.is_watched or self._trains_past]

    def _keys(self, forwards: Sequence[Forward]) -> list[frozenset[int]]:
        """The values of these forwards' fingerprints: waits for the device once, for all new ones."""
        new = [forward for forward in forwards if forward.keys is None]
        if new:
            values = iter(torch.stack([one for forward in new for one in forward.inputs]).tolist())
            for forward in new:
                forward.keys = frozenset(next(values) for _ in forward.inputs)
        return [forward.keys or frozenset() for forward in forwards]


def _adds_to_gradients() -> bool:
    """Whether the current backward pass adds to the gradients of a leaf, as no pass of ``torch.autograd.grad`` does.
    For hooks.
    """
    nodes = [torch._C._current_autograd_node()]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        inner = {one for one, _ in node.next_functions if one is not None}
        try:
            if not inner and torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # a leaf whose gradient torch.autograd.grad will return
            continue
        nodes += inner - seen
        seen |= inner
    return False


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for inner in value for tensor in _tensors(inner)]
