"""The random state of a run: part of every checkpoint, so that dropout continues as if nothing had happened.

It consists of each rank's generators (`megaresume.checkpoint.generators`), and of the count from which a DeepSpeed
pipeline seeds its layers, if it does (`SeedCount`).

    step begins      the first batch after an optimizer step is requested: the state is remembered
    save             for each rank: the state at which the next step begins, or began. An unfinished step is repeated
                     after a resume, and draws again
                     and what draws while files are written (a hook that makes a model in order to write it) draws
                     nothing from the training
    load             each rank's state is restored; and once more when the first step begins, so that draws of the
                     program in between (a warm-up, the seed of a DataLoader) do not matter

The same happens in an uninterrupted run, except for its draws between a save and the next step. A resume cannot know of
these; they are detected, and reported.

With another layout of ranks, or another type of device, there is no state for each rank. Then the generators are seeded
from a hash of (seed of the stream, step, rank), so that a second resume from the same checkpoint does the same. A count
continues from rank 0's, so that no seed is used twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megaresume.checkpoint.generators import Snapshot, drawn_between, from_plain, put, seeded, take, to_plain
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import gather, is_rank_0, on_all_ranks, on_rank_0, rank
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.records.names import rank_file
from megaresume.checkpoint.records.rank_files import ranks_of, read_rank_file, write_rank_file
from megaresume.checkpoint.records.sealed import SealError, seal, text, unseal
from megaresume.checkpoint.system import Topology
from megaresume.stream.errors import StateError

FORMAT, VERSION = "megaresume.random", 1
_LAYOUT = ("world_size", "dp", "tp", "pp", "cp")


@dataclass(frozen=True, slots=True)
class SeedCount:
    """An attribute of a model that counts its forwards, and from which the model seeds the generators in each."""

    owner: Any
    name: str

    def take(self) -> Snapshot:
        """The current count, as a snapshot."""
        return {self.name: getattr(self.owner, self.name)}

    def put(self, snapshot: Snapshot) -> None:
        """Set it from a snapshot, if that has one."""
        if self.name in snapshot:
            setattr(self.owner, self.name, snapshot[self.name])


class RandomState:
    """The generators of one rank, and their state in the checkpoints of its session.

    Sessions of one process share the generators. The first one that continues after a load restores them for all.

    Args:
        iteration: returns optimizer steps done.
        device: whose generators are saved, besides those on the CPU.
        replica: returns a number that is equal for ranks which, outside their own layers, need the same random
            numbers.
        count: from which the model seeds them; None: it does not. The same in all ranks.
    """

    #: steps that began in this process, in all of its sessions.
    _all_begun: ClassVar[int] = 0

    def __init__(
        self, iteration: Callable[[], int], device: Any, replica: Callable[[], str], *, count: SeedCount | None = None
    ) -> None:
        self._iteration, self._device, self._replica, self._count = iteration, device, replica, count
        #: the last step that began: optimizer steps before it, and the state then.
        self._begun: tuple[int, Snapshot] | None = None
        #: loaded for this step, and to be restored when it begins.
        self._due: tuple[int, Snapshot] | None = None
        #: the state in the last checkpoint, until the next step begins.
        self._saved: Snapshot | None = None
        #: the content for the checkpoint of the save that began last.
        self._to_write: Snapshot = {}
        #: the state when the first batch of the step was handed out; None: as when the step began.
        self._first_out: Snapshot | None = None
        #: whether reading a batch draws, as shown by the first one; None: none was handed out.
        self._reading_draws: bool | None = None
        #: steps that began in this session; and in the others, when this one was saved or loaded.
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
        """Note that a batch is requested; returns whether it is a step's first. Otherwise does nothing."""
        step = self._iteration()
        if self._begun is not None and self._begun[0] == step:
            return False
        now = self._take()
        if self._others_begun == self._others_then:  # otherwise the draws are theirs
            if self._due is not None and self._due[0] == step:
                self._put(self._due[1])
                now |= self._due[1]
            elif self._saved is not None:
                self._compare(self._saved, now, "a save and the next step")
        self._own_begun += 1
        RandomState._all_begun += 1
        self._begun, self._saved, self._first_out = (step, now), None, None
        return True

    def first_is_out(self) -> None:
        """Note that the first batch of the step was handed out."""
        if self._reading_draws is False or self._begun is None:
            return
        self._first_out = self._take()
        if self._reading_draws is None:
            self._reading_draws = bool(drawn_between(self._begun[1], self._first_out))

    def step_begins_again(self) -> None:
        """Note that the step's batches are taken back: code that looked at them may have drawn."""
        if self._due is not None and self._due[0] == self._iteration():
            self._begun = None

    def _compare(self, saved: Snapshot, now: Snapshot, between: str) -> None:
        """Warn if generators were used in between: a resume would not do so."""
        drawn = drawn_between(saved, now)
        if drawn and not self._warned and is_rank_0():
            self._warned = True
            print(
                f"megaresume: warning: random numbers were drawn between {between} "
                f"({', '.join(drawn)}). A resume begins that step with the generators as they were saved: what the "
                "model draws from these will differ. Evaluate before you save, or with separate generators; a torch "
                "DataLoader draws one number at each `for`, unless it has a generator=",
                flush=True,
            )

    @contextlib.contextmanager
    def saving(self, *, is_untouched: bool = False) -> Iterator[None]:
        """A context for a save: `at_save`, and after it the generators are as they were before."""
        self.at_save(is_untouched=is_untouched)
        before = self._take()
        try:
            yield
        finally:
            if drawn_between(before, self._take()):
                self._put(before)

    def at_save(self, *, is_untouched: bool = False) -> None:
        """Decide at the beginning of a save on the content of its checkpoint, for `write`.

        Args:
            is_untouched: whether nothing of the step that began is trained: then draws since do not belong to it.
        """
        for known in (self._begun, self._due):
            if known is not None and known[0] == self._iteration():
                if is_untouched and known is self._begun and self._reading_draws is not None:
                    self._compare(self._first_out or known[1], self._take(), "taking a batch and the save")
                self._to_write = known[1]
                return
        self._saved, self._others_then = self._take(), self._others_begun
        self._to_write = self._saved

    def write(self, root: Path, iteration: int, tag: str) -> FileEntry:
        """Write this rank's file for the save that began last.

        Raises:
            CheckpointError: it cannot be written.
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
        """Restore the state in a checkpoint, or seed anew for another layout. Collective.

        Args:
            choice: what was loaded.
            before, now: the layout of the run when it saved, and now.
            seed: of the stream.

        Returns:
            which of the two was done, in words for the resume line.

        Raises, on every rank:
            StateError: the state of a rank is missing or damaged, or a library does not accept it.
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
        """The count of rank 0, if the model has one; empty if the checkpoint has none."""
        count, manifest = self._count, choice.manifest
        if count is None or manifest is None or not ranks_of(manifest.beside, "random"):
            return {}

        def read() -> Snapshot:
            _, found = self._read(choice, 0)
            return {name: state for name, state in found.items() if name == count.name}

        return on_rank_0(read)

    def _seeded(self, seed: int) -> Snapshot:
        # A replica's own layers use a tracker's generators.
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
