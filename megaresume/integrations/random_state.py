"""The random state of a run: part of every checkpoint, so that dropout goes on as if nothing had happened.

    step begins      the first batch after an optimizer step is asked for: the state is remembered
    save             of each rank: the state with which the next step begins, or has begun. A step that was not
                     finished is done again after a resume, and draws again
    load             each rank's state is put back; and once more when the first step begins, so that what the program
                     draws in between (a warm-up, the seed of a DataLoader) does not matter

The same happens in a run that nobody stops, but for what it draws between a save and the next step. That is the one
thing that a resume cannot know of; it is noticed, and said.

On another layout of ranks, or another type of device, there is no state for each rank. Then the generators are seeded
from a hash of (seed of the stream, step, rank), so that a second resume from the same checkpoint does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from megaresume.checkpoint import beside
from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.layout import rank_file
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.sealed import SealError, seal, text, unseal
from megaresume.checkpoint.topology import Topology
from megaresume.integrations import generators
from megaresume.integrations.generators import Snapshot
from megaresume.integrations.ranks import gather, is_rank_0, on_all_ranks, rank
from megaresume.stream.errors import StateError

__all__ = ["RandomState"]

FORMAT, VERSION = "megaresume.random", 1
_LAYOUT = ("world_size", "dp", "tp", "pp", "cp")


class RandomState:
    """The generators of one rank, and what of them goes into the checkpoints of its session.

    Sessions of one process share the generators. The first that goes on after a load puts them back, for all.

    Args:
        iteration: optimizer steps made.
        device: whose generators are saved, besides those on the CPU.
        replica: ranks for which it says the same compute the same outside their own layers: with the same random
            numbers.
    """

    #: steps that began in this process, of all its sessions.
    _all_begun: ClassVar[int] = 0

    def __init__(self, iteration: Callable[[], int], device: Any, replica: Callable[[], str]) -> None:
        self._iteration, self._device, self._replica = iteration, device, replica
        #: the last step that began: optimizer steps before it, and the state then.
        self._begun: tuple[int, Snapshot] | None = None
        #: loaded at this step, and to be put back when it begins.
        self._due: tuple[int, Snapshot] | None = None
        #: in the last checkpoint, until the next step begins.
        self._saved: Snapshot | None = None
        #: when the first batch of the step that began was handed out.
        self._first_out: Snapshot | None = None
        #: steps of this session that began; and of the others, when this one was saved or loaded.
        self._own_begun, self._others_then = 0, 0
        self._warned = False

    @property
    def _others_begun(self) -> int:
        return RandomState._all_begun - self._own_begun

    def step_begins(self) -> bool:
        """A batch is asked for: whether it is the first after an optimizer step. Otherwise nothing happens."""
        step = self._iteration()
        if self._begun is not None and self._begun[0] == step:
            return False
        now = generators.take(self._device)
        if self._others_begun == self._others_then:  # otherwise what was drawn is theirs
            if self._due is not None and self._due[0] == step:
                generators.put(self._due[1], self._device)
                now |= self._due[1]
            elif self._saved is not None:
                self._compare(self._saved, now, "save_checkpoint and the next step")
        self._own_begun += 1
        RandomState._all_begun += 1
        self._begun, self._saved, self._first_out = (step, now), None, None
        return True

    def first_is_out(self) -> None:
        """The first batch of the step that began is handed out."""
        self._first_out = generators.take(self._device)

    def step_begins_again(self) -> None:
        """The batches of the step that began are taken back: whoever looked at them may have drawn."""
        if self._due is not None and self._due[0] == self._iteration():
            self._begun = None

    def _compare(self, saved: Snapshot, now: Snapshot, between: str) -> None:
        """Say it where generators were drawn from in between: a resume would not do so."""
        before, after = generators.to_plain(saved), generators.to_plain(now)
        drawn = [name for name in after if before.get(name) != after[name]]
        if drawn and not self._warned and is_rank_0():
            self._warned = True
            print(
                f"megaresume: warning: random numbers were drawn between {between} "
                f"({', '.join(drawn)}). A resume begins that step with the generators as they were saved: what the "
                "model draws from these will differ. Evaluate before you save, or with generators of its own",
                flush=True,
            )

    def at_save(self, *, is_untouched: bool = False) -> Snapshot:
        """What the checkpoint of this moment is to hold.

        Args:
            is_untouched: whether nothing of the step that began is trained: then what was drawn since is not its own.
        """
        for known in (self._begun, self._due):
            if known is not None and known[0] == self._iteration():
                if is_untouched and known is self._begun and self._first_out is not None:
                    self._compare(self._first_out, generators.take(self._device), "next(data) and save_checkpoint")
                return known[1]
        self._saved, self._others_then = generators.take(self._device), self._others_begun
        return self._saved

    def write(self, snapshot: Snapshot, root: Path, iteration: int, tag: str) -> FileEntry:
        """Write this rank's file.

        Raises:
            CheckpointError: the disk refuses.
        """
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "rank": rank(),
            "device": self._device.type,
            "generators": generators.to_plain(snapshot),
        }
        path = rank_file(iteration, tag, "random", rank())
        return beside.write(root, path, seal(fields, depth=2))

    def restore(self, choice: Choice, before: Topology | None, now: Topology, *, seed: int) -> str:
        """Put back what a checkpoint holds, or seed anew where it is of another layout. Collective.

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
        here = generators.take(self._device)
        if reason is None:
            device, found = on_all_ranks(lambda: self._read(choice))
            others = {other for other in gather(device) if other != self._device.type}
            reason = f"{', '.join(sorted(others))} -> {self._device.type}" if others else None
        if reason is None:
            unknown = sorted({name for names in gather(sorted(found.keys() ^ here.keys())) for name in names})
            words = "random state restored" + (f" but for {', '.join(unknown)}" if unknown else "")
        else:
            found = self._seeded(here, seed)
            words = f"random state seeded anew ({reason})"
        on_all_ranks(lambda: generators.put(found, self._device))
        self._begun, self._due, self._saved = None, (self._iteration(), found), None
        self._first_out, self._others_then = None, self._others_begun
        return words

    def _read(self, choice: Choice) -> tuple[str, Snapshot]:
        assert choice.manifest is not None
        mine = rank()
        entry = beside.ranks_of(choice.manifest.beside, "random").get(mine)
        if entry is None:
            raise StateError(
                f"the checkpoint has no random state of rank {mine}",
                found=f"{choice.tag}: of {len(beside.ranks_of(choice.manifest.beside, 'random'))} ranks",
                expected="one of every rank",
                cause="it was written by a faulty program: its manifest is whole",
            )
        try:
            fields = unseal(beside.read(choice.load_dir, entry))
            if (fields["format"], fields["version"], fields["rank"]) != (FORMAT, VERSION, mine):
                raise ValueError(f"{fields['format']} {fields['version']} of rank {fields['rank']}")
            return text(fields["device"]), generators.from_plain(fields["generators"])
        except (SealError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the random state of rank {mine} cannot be read",
                found=f"{entry.path}: {type(error).__name__}: {error}",
                expected=f"{FORMAT} {VERSION} of rank {mine}",
                cause="it was written by a faulty or a newer program: its checksum is right",
            ) from error

    def _seeded(self, here: Snapshot, seed: int) -> Snapshot:
        # Those of a replica's own layers come from a tracker's generators.
        step, replica = self._iteration(), self._replica()

        def key(name: str) -> str:
            own = ":" in name and not name.endswith("data-parallel-rng")
            return f"{seed}, step {step}, {f'rank {rank()}' if own else replica}, {name}"

        return generators.seeded(here, self._device, key)


def _other_layout(choice: Choice, before: Topology | None, now: Topology) -> str | None:
    """Why there is no state for each rank; None: there is."""
    if before is None or choice.manifest is None or not beside.ranks_of(choice.manifest.beside, "random"):
        return f"none in {choice.tag}"
    changed = [(name, getattr(before, name), getattr(now, name)) for name in _LAYOUT]
    words = [f"{name.replace('_size', '')} {a}->{b}" for name, a, b in changed if a != b]
    return ", ".join(words) or None
