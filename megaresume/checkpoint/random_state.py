"""The random state of a run: part of every checkpoint, so that dropout continues as if nothing had happened.

The generators that training may draw from implicitly are those of the process:

    python           random
    numpy            numpy.random, the old global generator
    torch            torch's generator on the CPU
    cuda, xpu, ...   torch's generator of the device that the engine uses
    deepspeed:NAME   those of DeepSpeed's activation checkpointing, where a program has made some
    megatron:NAME    those of Megatron's tensor-parallel layers, likewise
    micro_offset     the count that a DeepSpeed pipeline seeds its layers by, if it does (`SeedCount`)

Generators that a program makes for itself (``torch.Generator()``, ``numpy.random.default_rng()``) cannot be found.

    step begins      the first batch after an optimizer step is asked for: the state is remembered
    save             of each rank: the state with which the next step begins, or has begun. A step that was not
                     finished is done again after a resume, and draws again
    load             each rank's state is put back; and once more when the first step begins, so that what the program
                     draws in between (a warm-up, the seed of a DataLoader) does not matter

The same happens in a run that nobody stops, but for what it draws between a save and the next step. That is the one
thing that a resume cannot know of; it is detected, and reported.

On another layout of ranks, or another type of device, there is no state for each rank. Then the generators are seeded
from a hash of (seed of the stream, step, rank), so that a second resume from the same checkpoint does the same. A count
goes on where rank 0's was, so that no seed is used twice.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash

from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import gather, is_rank_0, on_all_ranks, on_rank_0, rank
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.records.names import rank_file
from megaresume.checkpoint.records.rank_files import ranks_of, read_rank_file, write_rank_file
from megaresume.checkpoint.records.sealed import SealError, seal, text, unseal
from megaresume.checkpoint.system import Topology
from megaresume.stream.errors import StateError

#: by name: ``random.getstate()``, ``numpy.random.get_state(legacy=False)``, uint8 tensors of torch's, or a count.
Snapshot = dict[str, Any]

#: where trackers of generators live, if a program has imported them; all with the same methods.
_TRACKERS = {
    "deepspeed": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron": "megatron.core.tensor_parallel.random",
}


#: what the memory of a generator holds, to compare; None: that cannot be told.
_Content = tuple[object, ...] | None


class _Remembered:
    """The state of a generator, taken apart again only if its memory has changed.

    Taking apart those of Python and numpy costs 40 µs, and 120 µs in a step whose work has filled the caches; most
    programs never draw from them while they train. No layout is assumed: bytes are compared with those before, and
    `follows` has tried whether every draw changes them.

    Args:
        get: the state.
        content: of the memory; None: it cannot be relied on.
    """

    def __init__(self, get: Callable[[], Any], content: Callable[[], _Content] | None) -> None:
        self._get, self._content = get, content
        self._last: tuple[_Content, Any] = None, None

    def take(self) -> Any:
        """The state: the same object as the last time if nothing was drawn."""
        # Before the state: what another thread draws in between is seen the next time.
        content = None if self._content is None else self._content()
        if content is None:
            return self._get()
        if self._last[0] != content:
            self._last = content, self._get()
        return self._last[1]


def follows(content: Callable[[], _Content], *draws: Callable[[], object]) -> bool:
    """Whether the content changes with every one of these draws, and only then."""
    for draw in draws:
        before = content()
        if before is None or content() != before:
            return False
        draw()
        if content() == before:
            return False
    return True


def content_of_python(generator: Any) -> Callable[[], _Content]:
    """The content of a generator of Python's."""
    memory = _memory(generator, random.Random.__base__)
    return lambda: (memory.raw, generator.gauss_next)


def content_of_numpy(generator: Any) -> Callable[[], _Content]:
    """The content of a generator of numpy's old kind. None if its bits were replaced since, or if they
    are no Mersenne Twister's: others keep them elsewhere."""
    bits = generator._bit_generator
    own, of_bits = _memory(generator, np.random.RandomState), _memory(bits, np.random.MT19937)
    is_known = type(bits) is np.random.MT19937
    return lambda: (own.raw, of_bits.raw) if is_known and generator._bit_generator is bits else None


def _memory(thing: object, kind: Any) -> Any:
    """What a C object of this type holds, after the reference count and the type. Only while it exists."""
    head = object.__basicsize__
    return (ctypes.c_char * (kind.__basicsize__ - head)).from_address(id(thing) + head)


@functools.cache
def _of_process() -> tuple[_Remembered, _Remembered]:
    """The global generators of Python and numpy."""
    python, numpy = random.Random(0), np.random.RandomState(0)
    # A second value of a normal distribution is kept beside the bits, which stay when it is drawn.
    draws_of_python = python.random, *[lambda: python.gauss(0, 1)] * 3
    draws_of_numpy = numpy.random_sample, *[numpy.standard_normal] * 3
    return (
        _remembered(random.getstate, content_of_python, python, draws_of_python),
        _remembered(np.random.get_state, content_of_numpy, numpy, draws_of_numpy, legacy=False),
    )


def _remembered(
    get: Any, content_of: Callable[[Any], Callable[[], _Content]], trial: object, draws: Sequence[Any], **options: Any
) -> _Remembered:
    own = get.__self__  # a method of the generator
    is_followed = type(own) is type(trial) and follows(content_of(trial), *draws)
    return _Remembered(functools.partial(get, **options), content_of(own) if is_followed else None)


def take(device: torch.device) -> Snapshot:
    """The state of every generator of this process. Draws nothing; 3 µs, or 45 if all were drawn from.

    Args:
        device: that the engine uses.
    """
    python, numpy = _of_process()
    snapshot: Snapshot = {
        "python": python.take(),
        "numpy": numpy.take(),
        "torch": torch.default_generator.get_state(),
    }
    if (accelerator := _accelerator(device)) is not None:
        kind, module = accelerator
        snapshot[kind] = module.get_rng_state(device)
    for name, tracker in _trackers():
        for label, state in tracker.get_states().items():
            snapshot[f"{name}:{label}"] = state.get_state() if isinstance(state, torch.Generator) else state.clone()
    return snapshot


@functools.cache
def _accelerator(device: torch.device) -> tuple[str, Any] | None:
    """The type of a device and torch's module for it; None: the CPU. Kept, as torch spells a type anew each time: 15 µs
    in a step whose work has filled the caches."""
    return None if device.type == "cpu" else (device.type, torch.get_device_module(device))


def put(snapshot: Snapshot, device: torch.device) -> None:
    """Set every generator that a snapshot and this process both have.

    Raises:
        StateError: a library does not take the state back.
    """
    setters: dict[str, Callable[[Any], object]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
    }
    if (accelerator := _accelerator(device)) is not None:
        kind, module = accelerator
        setters[kind] = lambda state: module.set_rng_state(state, device)
    for name, tracker in _trackers():
        setters |= {f"{name}:{label}": _setter(tracker, label) for label in tracker.get_states()}
    for name in setters.keys() & snapshot.keys():
        try:
            setters[name](snapshot[name])
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise StateError(
                f"the random state of {name} cannot be restored",
                found=f"{type(error).__name__}: {error}",
                expected="the library that saved it",
                cause="another version of it, which holds its state in another form",
                action="use the version that saved the checkpoint",
            ) from error


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What is drawn within it, on the CPU, was never drawn."""
    before = take(torch.device("cpu"))
    try:
        yield
    finally:
        put(before, torch.device("cpu"))


def _setter(tracker: Any, label: str) -> Callable[[torch.Tensor], None]:
    def set_state(state: torch.Tensor) -> None:
        states = tracker.get_states()
        if isinstance(states[label], torch.Generator):
            states[label].set_state(state)
        else:
            tracker.set_states({**states, label: state.clone()})

    return set_state


def _trackers() -> Iterator[tuple[str, Any]]:
    for name, module in _TRACKERS.items():
        # Megatron's own function would make one, of a kind that the program may not want.
        tracker = getattr(sys.modules.get(module), "_CUDA_RNG_STATE_TRACKER", None)
        if tracker is not None and hasattr(tracker, "get_states"):
            yield name, tracker


def seeded(now: Snapshot, device: torch.device, key: Callable[[str], str]) -> Snapshot:
    """New states for the generators of a snapshot, from a hash of ``key(name)``."""
    snapshot: Snapshot = {}
    for name in now:
        number = xxhash.xxh3_128_intdigest(key(name).encode())
        if name == "python":
            snapshot[name] = random.Random(number).getstate()
        elif name == "numpy":
            words = [number >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]
            snapshot[name] = np.random.RandomState(words).get_state(legacy=False)
        else:
            generator = torch.Generator("cpu" if name == "torch" else device)
            snapshot[name] = generator.manual_seed(number >> 65).get_state()
    return snapshot


def to_plain(snapshot: Snapshot) -> dict[str, Any]:
    """Plain JSON; arrays as base64 of their bytes."""
    return {name: _plain(state) for name, state in snapshot.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": _base64(value.cpu().numpy())}
    if isinstance(value, np.ndarray):
        return {"array": _base64(value), "dtype": str(value.dtype)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        if len(value) > 100:  # of Python's generator: its words, and where it stands among them
            return {"words": _base64(np.array(value, np.uint32))}
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def from_plain(plain: dict[str, Any]) -> Snapshot:
    """Read what `to_plain` made.

    Raises:
        ValueError, KeyError, TypeError: something else did.
    """
    return {name: _restored(value) for name, value in plain.items()}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.frombuffer(bytearray(base64.b64decode(value["tensor"])), dtype=torch.uint8)
    if "words" in value:
        return tuple(np.frombuffer(base64.b64decode(value["words"]), np.uint32).tolist())
    if "array" in value:
        return np.frombuffer(base64.b64decode(value["array"]), value["dtype"]).copy()
    return {name: _restored(item) for name, item in value.items()}


def _drawn(before: Snapshot, after: Snapshot) -> list[str]:
    """The generators that were drawn from in between."""
    old, new = to_plain(before), to_plain(after)
    return [name for name in new if old.get(name) != new[name]]


FORMAT, VERSION = "megaresume.random", 1
_LAYOUT = ("world_size", "dp", "tp", "pp", "cp")


@dataclass(frozen=True, slots=True)
class SeedCount:
    """An attribute of a model that counts its forwards, and that the model seeds the generators by in each."""

    owner: Any
    name: str

    def take(self) -> Snapshot:
        """As it is now."""
        return {self.name: getattr(self.owner, self.name)}

    def put(self, snapshot: Snapshot) -> None:
        """As a snapshot has it, if it does."""
        if self.name in snapshot:
            setattr(self.owner, self.name, snapshot[self.name])


class RandomState:
    """The generators of one rank, and what of them goes into the checkpoints of its session.

    Sessions of one process share the generators. The first that continues after a load puts them back, for all.

    Args:
        iteration: optimizer steps made.
        device: whose generators are saved, besides those on the CPU.
        replica: ranks for which it says the same compute the same outside their own layers: with the same random
            numbers.
        count: that the model seeds them by; None: it does not. The same in all ranks.
    """

    #: steps that began in this process, of all its sessions.
    _all_begun: ClassVar[int] = 0

    def __init__(
        self, iteration: Callable[[], int], device: Any, replica: Callable[[], str], *, count: SeedCount | None = None
    ) -> None:
        self._iteration, self._device, self._replica, self._count = iteration, device, replica, count
        #: the last step that began: optimizer steps before it, and the state then.
        self._begun: tuple[int, Snapshot] | None = None
        #: loaded at this step, and to be put back when it begins.
        self._due: tuple[int, Snapshot] | None = None
        #: in the last checkpoint, until the next step begins.
        self._saved: Snapshot | None = None
        #: what the checkpoint of the save that began last holds.
        self._to_write: Snapshot = {}
        #: when the first batch of the step that began was handed out; None: as when it began.
        self._first_out: Snapshot | None = None
        #: whether reading a batch draws, as far as the first one has shown; None: none was handed out.
        self._reading_draws: bool | None = None
        #: steps of this session that began; and of the others, when this one was saved or loaded.
        self._own_begun, self._others_then = 0, 0
        self._warned = False

    @property
    def _others_begun(self) -> int:
        return RandomState._all_begun - self._own_begun

    def _take(self) -> Snapshot:
        snapshot = take(self._device)
        return snapshot if self._count is None else snapshot | self._count.take()

    def _put(self, snapshot: Snapshot) -> None:
        put(snapshot, self._device)
        if self._count is not None:
            self._count.put(snapshot)

    def step_begins(self) -> bool:
        """A batch is asked for: whether it is the first after an optimizer step. Otherwise nothing happens."""
        step = self._iteration()
        if self._begun is not None and self._begun[0] == step:
            return False
        now = self._take()
        if self._others_begun == self._others_then:  # otherwise what was drawn is theirs
            if self._due is not None and self._due[0] == step:
                self._put(self._due[1])
                now |= self._due[1]
            elif self._saved is not None:
                self._compare(self._saved, now, "save_checkpoint and the next step")
        self._own_begun += 1
        RandomState._all_begun += 1
        self._begun, self._saved, self._first_out = (step, now), None, None
        return True

    def first_is_out(self) -> None:
        """The first batch of the step that began is handed out."""
        if self._reading_draws is False or self._begun is None:
            return
        self._first_out = self._take()
        if self._reading_draws is None:
            self._reading_draws = bool(_drawn(self._begun[1], self._first_out))

    def step_begins_again(self) -> None:
        """The batches of the step that began are taken back: whoever looked at them may have drawn."""
        if self._due is not None and self._due[0] == self._iteration():
            self._begun = None

    def _compare(self, saved: Snapshot, now: Snapshot, between: str) -> None:
        """Say it where generators were drawn from in between: a resume would not do so."""
        drawn = _drawn(saved, now)
        if drawn and not self._warned and is_rank_0():
            self._warned = True
            print(
                f"megaresume: warning: random numbers were drawn between {between} "
                f"({', '.join(drawn)}). A resume begins that step with the generators as they were saved: what the "
                "model draws from these will differ. Evaluate before you save, or with generators of its own",
                flush=True,
            )

    def at_save(self, *, is_untouched: bool = False) -> None:
        """A save begins: decide what its checkpoint is to hold, for `write`.

        Args:
            is_untouched: whether nothing of the step that began is trained: then what was drawn since is not its own.
        """
        for known in (self._begun, self._due):
            if known is not None and known[0] == self._iteration():
                if is_untouched and known is self._begun and self._reading_draws is not None:
                    self._compare(self._first_out or known[1], self._take(), "next(data) and save_checkpoint")
                self._to_write = known[1]
                return
        self._saved, self._others_then = self._take(), self._others_begun
        self._to_write = self._saved

    def write(self, root: Path, iteration: int, tag: str) -> FileEntry:
        """Write this rank's file, of the save that began last.

        Raises:
            CheckpointError: the disk refuses.
        """
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "rank": rank(),
            "device": self._device.type,
            "generators": to_plain(self._to_write),
        }
        path = rank_file(iteration, tag, "random", rank())
        return write_rank_file(root, path, seal(fields, depth=2))

    def restore(self, choice: Choice, before: Topology | None, now: Topology, *, seed: int) -> str:
        """Put back what a checkpoint holds, or seed again where it is of another layout. Collective.

        Args:
            choice: what was loaded.
            before, now: how the run was laid out when it saved, and is now.
            seed: of the stream.

        Returns:
            which of the two was done, in words for the line of the resume.

        Raises, on every rank:
            StateError: the state of a rank is missing or damaged, or a library does not take it back.
        """
        reason = _other_layout(choice, before, now)
        here = self._take()
        if reason is None:
            device, found = on_all_ranks(lambda: self._read(choice, rank()))
            others = {other for other in gather(device) if other != self._device.type}
            reason = f"{', '.join(sorted(others))} -> {self._device.type}" if others else None
        if reason is None:
            unknown = sorted({name for names in gather(sorted(found.keys() ^ here.keys())) for name in names})
            words = "random state restored" + (f" but for {', '.join(unknown)}" if unknown else "")
        else:
            found = self._seeded(seed) | self._count_of(choice)
            words = f"random state reseeded ({reason})"
        on_all_ranks(lambda: self._put(found))
        self._begun, self._due, self._saved = None, (self._iteration(), found), None
        self._first_out, self._others_then = None, self._others_begun
        return words

    def _read(self, choice: Choice, mine: int) -> tuple[str, Snapshot]:
        assert choice.manifest is not None
        entry = ranks_of(choice.manifest.beside, "random").get(mine)
        if entry is None:
            raise StateError(
                f"the checkpoint has no random state of rank {mine}",
                found=f"{choice.tag}: of {len(ranks_of(choice.manifest.beside, 'random'))} ranks",
                expected="one of every rank",
                cause="it was written by a faulty program: its manifest is whole",
                action="load another checkpoint",
            )
        try:
            fields = unseal(read_rank_file(choice.load_dir, entry))
            if (fields["format"], fields["version"], fields["rank"]) != (FORMAT, VERSION, mine):
                raise ValueError(f"{fields['format']} {fields['version']} of rank {fields['rank']}")
            return text(fields["device"]), from_plain(fields["generators"])
        except (SealError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the random state of rank {mine} cannot be read",
                found=f"{entry.path}: {type(error).__name__}: {error}",
                expected=f"{FORMAT} {VERSION} of rank {mine}",
                cause="it was written by a faulty or a newer program: its checksum is right",
                action="upgrade megaresume, or load another checkpoint",
            ) from error

    def _count_of(self, choice: Choice) -> Snapshot:
        """The count of rank 0, if the model has one; of a checkpoint that has none, nothing."""
        count, manifest = self._count, choice.manifest
        if count is None or manifest is None or not ranks_of(manifest.beside, "random"):
            return {}

        def read() -> Snapshot:
            _, found = self._read(choice, 0)
            return {name: state for name, state in found.items() if name == count.name}

        return on_rank_0(read)

    def _seeded(self, seed: int) -> Snapshot:
        # Those of a replica's own layers come from a tracker's generators.
        step, replica = self._iteration(), self._replica()

        def key(name: str) -> str:
            own = ":" in name and not name.endswith("data-parallel-rng")
            return f"{seed}, step {step}, {f'rank {rank()}' if own else replica}, {name}"

        return seeded(take(self._device), self._device, key)


def _other_layout(choice: Choice, before: Topology | None, now: Topology) -> str | None:
    """Why there is no state for each rank; None if there is."""
    if before is None or choice.manifest is None or not ranks_of(choice.manifest.beside, "random"):
        return f"none in {choice.tag}"
    changed = [(name, getattr(before, name), getattr(now, name)) for name in _LAYOUT]
    words = [f"{name.replace('_size', '')} {a}->{b}" for name, a, b in changed if a != b]
    return ", ".join(words) or None
