"""What jobs did to a directory, operation by operation, as the shim wrote it down.

shim, mode "record"    ->  a log          every process that works in the directory, in the order of the operations
read(log, directory)   ->  a `Recording`  its steps; done again, they lead to what lies in the directory now
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["Entry", "Files", "Node", "Recording", "Step", "Tree", "read"]

_EXCHANGE = 2  # a flag of renameat2

#: path -> content of a file; None: a directory.
Tree = dict[str, bytes | None]


@dataclass(eq=False, slots=True)
class Node:
    """A file or a directory, under whatever names."""

    #: its first name, for people.
    path: str
    is_directory: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A name in a directory stands for this node from now on; None: for nothing."""

    directory: Node
    name: str
    node: Node | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An operation that succeeded. What ``open`` does with a file are two: a name for a new one, or a truncation."""

    kind: Literal["names", "write", "truncate", "close", "sync", "sync all"]
    #: what is written, truncated, closed or forced to the disk.
    node: Node | None = None
    #: names that change; of a rename the new one, then the old one.
    entries: tuple[Entry, ...] = ()
    #: where ``data`` goes, or the new size.
    offset: int = 0
    data: bytes = b""
    #: the new name stood for another file until then.
    replaces: bool = False
    #: who did it.
    process: int
    #: for people.
    words: str


class Files:
    """A directory in memory, empty at first."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.names: dict[Node, dict[str, Node]] = {root: {}}
        self.contents: dict[Node, bytearray] = {}

    def place(self, path: str) -> tuple[Node, str]:
        """The directory that a path lies in, and its name there."""
        *parents, name = path.split("/")
        directory = self.root
        for parent in parents:
            directory = self.names[directory][parent]
        return directory, name

    def find(self, path: str) -> Node | None:
        """What a path stands for; None: nothing."""
        try:
            directory, name = self.place(path)
        except KeyError:
            return None
        return self.names.get(directory, {}).get(name)

    def set(self, entry: Entry) -> None:
        """Change one name."""
        names = self.names.setdefault(entry.directory, {})
        if entry.node is None:
            names.pop(entry.name, None)
            return
        names[entry.name] = entry.node
        if entry.node.is_directory:
            self.names.setdefault(entry.node, {})
        else:
            self.contents.setdefault(entry.node, bytearray())

    def do(self, step: Step) -> None:
        """One operation."""
        for entry in step.entries:
            self.set(entry)
        if step.kind in ("write", "truncate") and step.node is not None:
            change(self.contents[step.node], step)

    def tree(self, path: str = "") -> Tree:
        """All that has a name below a directory; empty if there is none."""
        directory = self.find(path) if path else self.root
        return {} if directory is None or not directory.is_directory else dict(self._walk(directory, ""))

    def _walk(self, directory: Node, prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, node in self.names[directory].items():
            if node.is_directory:
                yield prefix + name, None
                yield from self._walk(node, f"{prefix}{name}/")
            else:
                yield prefix + name, bytes(self.contents[node])


def change(content: bytearray, step: Step) -> None:
    """A write or truncation."""
    if step.kind == "truncate":
        del content[step.offset :]
    content.extend(bytes(max(0, step.offset - len(content))))
    content[step.offset : step.offset + len(step.data)] = step.data


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What happened in a directory that was empty before."""

    root: Node
    steps: tuple[Step, ...] = field(repr=False)


def read(log: Path, directory: Path) -> Recording:
    """Read what the shim wrote.

    Raises:
        RuntimeError: done again, the steps do not lead to what lies in the directory: the shim missed something.
    """
    root = Node("", is_directory=True)
    files = Files(root)
    steps: list[Step] = []
    nodes = {directory.stat().st_ino: root}
    for line in _lines(log.read_bytes(), f"{directory}/"):
        for step in _steps(line, files, nodes):
            files.do(step)
            steps.append(step)
    found = _on_disk(directory)
    if (tree := files.tree()) != found:
        wrong = sorted(path for path in tree.keys() | found.keys() if tree.get(path, 0) != found.get(path, 0))
        raise RuntimeError(f"the recording of {directory} misses something: {wrong[:10]} are not as recorded")
    return Recording(root=root, steps=tuple(steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    kind: str
    process: int
    inode: int
    #: flags of ``open``, offset of a write, new size of a truncation.
    number: int
    path: str
    other: str
    data: bytes


def _lines(log: bytes, prefix: str) -> Iterator[_Line]:
    at = 0
    while at < len(log):
        end = log.index(b"\n", at)
        kind, *numbers = log[at:end].decode().split()
        process, inode, number, _, *sizes = (int(word) for word in numbers)
        parts = []
        at = end + 1
        for size in sizes:
            parts.append(log[at : at + size])
            at += size
        path, other = (os.fsdecode(part) for part in parts[:2])
        if not all(name.startswith(prefix) for name in (path, other) if name):
            raise RuntimeError(f"{kind} {path} {other}: not only below {prefix}: not modelled")
        yield _Line(
            kind=kind,
            process=process,
            inode=inode,
            number=number,
            path=path.removeprefix(prefix),
            other=other.removeprefix(prefix),
            data=parts[2],
        )


def _steps(line: _Line, files: Files, nodes: dict[int, Node]) -> Iterator[Step]:
    words = " ".join(word for word in (line.kind, line.path, line.other) if word)
    step = functools.partial(Step, process=line.process)

    def named(path: str, node: Node | None) -> Entry:
        directory, name = files.place(path)
        return Entry(directory=directory, name=name, node=node)

    match line.kind:
        case "open" | "mkdir":
            if files.find(line.path) is None:
                nodes[line.inode] = Node(line.path, is_directory=line.kind == "mkdir")
                yield step(kind="names", entries=(named(line.path, nodes[line.inode]),), words=words)
            elif line.number & os.O_TRUNC:
                yield step(kind="truncate", node=nodes[line.inode], words=words)
        case "unlink" | "rmdir":
            yield step(kind="names", entries=(named(line.path, None),), words=words)
        case "link":
            yield step(kind="names", entries=(named(line.other, files.find(line.path)),), words=words)
        case "rename" if not line.number & _EXCHANGE:
            entries = (named(line.other, files.find(line.path)), named(line.path, None))
            yield step(kind="names", entries=entries, replaces=files.find(line.other) is not None, words=words)
        case "sync":
            yield step(kind="sync all", words=words)
        case "fsync":
            yield step(kind="sync", node=nodes[line.inode], words=f"fsync {nodes[line.inode].path}")
        case "write" | "truncate" | "close" as kind:
            node = nodes[line.inode]
            yield step(kind=kind, node=node, offset=line.number, data=line.data, words=f"{kind} {node.path}")
        case _:
            raise RuntimeError(f"{words}: not modelled")


def _on_disk(directory: Path) -> Tree:
    found: Tree = {}
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        found[name] = None if path.is_dir() else path.read_bytes()
    return found
