"""What a file system may leave of a directory after the power fails: models of some.

    Storage(recording).after_cut(moment, model, choices)  ->  the directory as the next start finds it

What was forced to the disk in time is there. Everything else is or is not, as the file system likes (`Choices`), within
its promises (`Model`):

    names and sizes   change in the order of a journal; one that is forced brings everything before it. Or, in what
                      POSIX promises: every name by itself, until its directory is forced
    data              reach the disk block by block, in any order, until the file is forced. A size grows with them
                      (ordered), with the last of them (xfs), or by itself: then there are zeros
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tests.reliability.recording import Files, Node, Recording, Step, Tree, change

__all__ = ["MODELS", "STYLES", "Choices", "Model", "Storage", "Style"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The promises of a file system."""

    name: str
    #: whether names and truncations persist in the order in which they were made.
    journal: bool
    #: bytes that persist together.
    block: int
    #: the size of a file that grows: never beyond its data; beyond some; by itself.
    sizes: Literal["with data", "with the last data", "alone"]
    #: a rename over a file, and the close of a file that was truncated, bring its data along.
    replacing_forces: bool = False
    #: every process is on a node of its own, and forces to the disk only what it has written itself.
    nodes: bool = False


MODELS: Final = (
    Model(name="ext4, data=ordered", journal=True, block=4096, sizes="with data", replacing_forces=True),
    Model(name="xfs", journal=True, block=4096, sizes="with the last data"),
    Model(name="ext4, data=writeback", journal=True, block=4096, sizes="alone"),
    Model(name="whatever POSIX allows", journal=False, block=512, sizes="alone"),
    Model(name="whatever POSIX allows, each rank on a node", journal=False, block=512, sizes="alone", nodes=True),
)

#: of what was not forced: nothing; names and sizes only; data only; all; anything.
Style = Literal["nothing", "names", "data", "everything", "anything"]
STYLES: Final[tuple[Style, ...]] = ("nothing", "names", "data", "everything", "anything")


class Choices:
    """What the file system likes."""

    def __init__(self, style: Style, rng: random.Random) -> None:
        self.style, self.rng = style, rng
        self._names = style in ("names", "everything")
        self._data = style in ("data", "everything")

    def journal(self, low: int, high: int) -> int:
        """How much of it has been written: from ``low``, which is forced, to ``high``."""
        if self.style != "anything":
            return high if self._names else low
        return self.rng.choice((low, high, self.rng.randint(low, high), self.rng.randint(low, high)))

    def name(self) -> bool:
        """Whether one name or truncation persists."""
        return self._names if self.style != "anything" else self.rng.random() < 0.5

    def size(self, low: int, high: int, block: int, *, with_data: bool) -> int:
        """How far a file has grown, with its data or by itself."""
        if self.style != "anything":
            return high if (self._data if with_data else self._names) else low
        blocks = range(low // block + 1, -(-high // block))
        return self.rng.choice((low, high, self.rng.choice(blocks) * block if blocks else high))

    def writes(self, number: int) -> int:
        """How many of the writes into a file had been made when its blocks went to the disk."""
        if self.style != "anything" or self.rng.random() < 0.6:
            return number
        return self.rng.randint(0, number)

    def blocks(self, number: int) -> list[bool]:
        """Which of the changed blocks of a file persist."""
        if self.style != "anything":
            return [self._data] * number
        kind = self.rng.randrange(3)
        return [kind == 1 or (kind == 2 and self.rng.random() < 0.5) for _ in range(number)]


class Storage:
    """A recording, and what may be left of it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._contents: dict[tuple[Node, int], bytes] = {}

    def after_cut(self, moment: int, model: Model, choices: Choices) -> Tree:
        """The directory after the power failed.

        Args:
            moment: how many steps of the recording were done by then.
            model: the file system.
            choices: what it likes.
        """
        steps = self.recording.steps[:moment]
        names, directories, data = _forced(steps, model)
        journal = choices.journal(names, moment) if model.journal else 0
        changes: dict[Node, list[tuple[int, Step]]] = {}
        truncated: set[Node] = set()
        files = Files(self.recording.root)
        for i, step in enumerate(steps):
            node = step.node
            if step.kind == "names":
                _name(files, step, i < journal if model.journal else None, i, directories, choices)
                if step.replaces and model.replacing_forces and i < journal:
                    _raise(data, step.entries[0].node, i)
            elif node is None or step.kind == "sync":
                continue
            elif step.kind == "close":
                if node in truncated and model.replacing_forces and i < journal:
                    _raise(data, node, i)
                truncated.discard(node)
            else:
                changes.setdefault(node, []).append((i, step))
                if step.kind == "truncate":
                    truncated.add(node)
        for node in set(_reachable(files)) & changes.keys():
            files.contents[node] = self._content(node, changes[node], data.get(node, 0), journal, model, choices)
        return files.tree()

    def _content(
        self, node: Node, changes: list[tuple[int, Step]], forced: int, journal: int, model: Model, choices: Choices
    ) -> bytearray:
        first = sum(i < forced for i, _ in changes)
        last = len(changes)
        for n in range(first, last):
            i, step = changes[n]
            if step.kind == "truncate":
                if not (i < journal if model.journal else choices.name()):
                    last = n  # what was written afterwards went into blocks that nothing leads to
                    break
                first = n + 1
        base = self._exactly(node, changes, first)
        full = self._exactly(node, changes, first + choices.writes(last - first))
        return bytearray(base) if base == full else _mixed(base, full, model, choices)

    def _exactly(self, node: Node, changes: list[tuple[int, Step]], number: int) -> bytes:
        """After so many changes."""
        key = node, number
        if key not in self._contents:
            content = bytearray()
            for _, step in changes[:number]:
                change(content, step)
            self._contents[key] = bytes(content)
        return self._contents[key]


def _forced(steps: Sequence[Step], model: Model) -> tuple[int, dict[Node, int], dict[Node, int]]:
    """Up to which step the journal, the names in every directory, and the data of every file are on the disk."""
    names = 0
    directories: dict[Node, int] = {}
    data: dict[Node, int] = {}
    touched: dict[Node, int] = {}
    writers: dict[Node, int] = {}
    for i, step in enumerate(steps):
        if step.kind == "sync" and step.node is not None:
            if model.nodes and writers.get(step.node, step.process) != step.process:
                continue
            # A journal is written as far as this file or directory was changed: what came later may be on its way.
            names = max(names, touched.get(step.node, 0))
            (directories if step.node.is_directory else data)[step.node] = i
        elif step.kind == "sync all":
            names = i
            directories.update(dict.fromkeys(touched, i))
            data.update(dict.fromkeys(touched, i))
        elif step.kind != "close":
            if step.kind in ("write", "truncate") and step.node is not None:
                writers[step.node] = step.process
            nodes = [step.node] + [node for entry in step.entries for node in (entry.directory, entry.node)]
            touched.update((node, i + 1) for node in nodes if node is not None)
    return names, directories, data


def _raise(data: dict[Node, int], node: Node | None, to: int) -> None:
    if node is not None:
        data[node] = max(data.get(node, 0), to)


def _name(
    files: Files, step: Step, in_journal: bool | None, i: int, directories: dict[Node, int], choices: Choices
) -> None:
    """What persists of a step that changes names. Of a rename both, nothing, or the new name while the old one is still
    there; never is the old one gone and the new one not there.
    """
    new, *old = step.entries
    if in_journal is None:
        is_forced = any(i < directories.get(entry.directory, 0) for entry in step.entries)
        persists = is_forced or choices.name()
    else:
        persists = in_journal
    if not persists:
        return
    files.set(new)
    for entry in old:
        is_whole = in_journal or (new.node is not None and new.node.is_directory)
        if is_whole or i < directories.get(entry.directory, 0) or choices.name():
            files.set(entry)


def _reachable(files: Files) -> Iterator[Node]:
    waiting = [files.root]
    while waiting:
        for node in files.names[waiting.pop()].values():
            if node.is_directory:
                waiting.append(node)
            else:
                yield node


def _mixed(base: bytes, full: bytes, model: Model, choices: Choices) -> bytearray:
    """Some blocks as they were, others as they are."""
    starts = range(0, len(full), model.block)
    changed = [at for at in starts if base[at : at + model.block] != full[at : at + model.block]]
    persist = dict(zip(changed, choices.blocks(len(changed)), strict=True))
    written = [at for at in changed if persist[at]]
    if model.sizes == "with the last data":
        size = max([len(base), *(min(at + model.block, len(full)) for at in written)])
    else:
        size = choices.size(len(base), len(full), model.block, with_data=model.sizes == "with data")
        if model.sizes == "with data" and size > len(base):
            written = [at for at in changed if persist[at] or at + model.block > len(base)]
    content = bytearray(base.ljust(size, b"\0"))
    for at in written:
        if at < size:
            content[at : at + model.block] = full[at : min(at + model.block, size)]
    return content
