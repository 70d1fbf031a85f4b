"""Upstream's source trees, exported from clones into a scratch folder."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VERSIONS", "Tree", "compile_helpers", "export"]

#: releases of Megatron-LM that are tried; the tag is core_v…
VERSIONS = ("0.8.0", "0.10.0", "0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0", "0.18.0", "0.19.0")

#: what a run needs of a tree.
_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".toml", ".txt", ".yaml", ".json", "Makefile")
_FOLDERS = ("megatron/", "examples/", "tools/", "tasks/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """One upstream, as files."""

    #: what it is called in the table.
    name: str
    #: what our detection should say.
    kind: str
    root: Path
    #: commit, 10 hex digits.
    commit: str
    #: files that the clone lacks (a partial clone).
    num_missing: int


def export(clone: Path, ref: str, into: Path, *, name: str, kind: str) -> Tree:
    """Write the tree of ``ref`` below ``into``; objects that the clone lacks are counted and left out.

    Raises:
        RuntimeError: there is no such ref, or Megatron itself is not in it.
    """
    environment = os.environ | {"GIT_NO_LAZY_FETCH": "1"}

    def git(*words: str, data: bytes | None = None) -> bytes:
        done = subprocess.run(["git", "-C", str(clone), *words], input=data, capture_output=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"git {' '.join(words[:3])} in {clone}: {done.stderr.decode().strip()[-300:]}")
        return done.stdout

    commit = git("rev-parse", f"{ref}^{{commit}}").decode().strip()[:10]
    files: list[tuple[str, str]] = []
    for line in git("ls-tree", "-r", "-z", ref).decode().split("\0"):
        facts, _, path = line.partition("\t")
        if (
            facts.split()[1:2] == ["blob"]
            and path.endswith(_SUFFIXES)
            and ("/" not in path or path.startswith(_FOLDERS))
        ):
            files.append((facts.split()[2], path))
    root = into / name
    stream, missing = git("cat-file", "--batch", data="".join(f"{blob}\n" for blob, _ in files).encode()), 0
    position = 0
    for _, path in files:
        end = stream.index(b"\n", position)
        header, position = stream[position:end].split(), end + 1
        if header[1] == b"missing":
            missing += 1
            continue
        size = int(header[2])
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(stream[position : position + size])
        position += size + 1
    if not (root / "pretrain_gpt.py").exists():
        raise RuntimeError(f"{clone} at {ref} has no pretrain_gpt.py")
    return Tree(name=name, kind=kind, root=root, commit=commit, num_missing=missing)


def compile_helpers(tree: Tree, python: Path) -> str | None:
    """Build the index helpers, as Megatron does at its first start; None, or what went wrong."""
    makefile = next((path for path in tree.root.glob("megatron/**/datasets/Makefile")), None) or next(
        (path for path in tree.root.glob("megatron/data/Makefile")), None
    )
    if makefile is None:
        return "no Makefile"
    done = subprocess.run(["make", "-C", str(makefile.parent)], env=environment(python), capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip()[-200:]


def environment(python: Path) -> dict[str, str]:
    """The environment of a run under a certain Python: its tools first, also those of the Python below a venv."""
    below = subprocess.run(
        [str(python), "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    path = [str(python.parent), str(Path(below, "bin")), os.environ.get("PATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
