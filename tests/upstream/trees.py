"""Which upstreams are tried, at which commits; their trees, exported from clones into a scratch folder.

python -m tests.upstream.trees CLONES [WORD ...]    says which clones and commits are missing
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LM, NVIDIA = "megatron-lm", "NVIDIA/Megatron-LM"
#: Written before torch 2.6, which loads nothing but weights unless it is told otherwise.
_LOADS_PICKLES = (("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstream:
    """One project at one commit."""

    #: for `--only`.
    name: str
    title: str
    #: OWNER/NAME on GitHub.
    repository: str
    #: a tag or a commit.
    ref: str
    #: what our detection should say; unsupported: launcher and patcher must refuse it.
    kind: str = LM
    python: str = "3.11"
    #: OWNER/NAME and commit of the Megatron-LM that it brings as a submodule, or asks for beside it.
    beneath: tuple[str, str] | None = None
    #: a folder of its own patches to that Megatron-LM.
    patches: str | None = None
    script: str = "pretrain_gpt.py"
    #: other scripts, for the patcher.
    also: tuple[str, ...] = ("pretrain_vlm.py",)
    #: what its runs need besides; {folder} is the run's own.
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def _release(version: str) -> Upstream:
    python = "3.12" if tuple(map(int, version.split(".")[:2])) >= (0, 17) else "3.11"
    title, ref = f"Megatron-LM {version}", f"core_v{version}"
    return Upstream(name=version, title=title, repository=NVIDIA, ref=ref, python=python)


UPSTREAMS = (
    *(_release(f"0.{minor}.0") for minor in (8, 10, 12, 13, 14, 15, 16, 17, 18, 19)),
    Upstream(
        name="main",
        title="Megatron-LM main (0.20)",
        repository=NVIDIA,
        ref="d98e8a64ddf34856e74b24714e3bedb2f5a39553",
        python="3.12",
    ),
    Upstream(
        name="dev",
        title="Megatron-LM dev",
        repository=NVIDIA,
        ref="d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1",
        python="3.12",
    ),
    Upstream(
        name="swiss-ai",
        title="swiss-ai Megatron-LM",
        repository="swiss-ai/Megatron-LM",
        ref="81d44dbe25c22190989fa8a12284bdb8d1303b40",
        # Its default is a file in /dev/null, which it makes at the end of every run.
        flags=("--trigger-path", "{folder}"),
        variables=_LOADS_PICKLES,
    ),
    Upstream(
        name="rocm",
        title="ROCm Megatron-LM",
        repository="ROCm/Megatron-LM",
        ref="2b855bafe238ab0949d49609131d2da87fb09000",
        variables=_LOADS_PICKLES,
    ),
    Upstream(
        name="mindspeed-llm",
        title="MindSpeed-LLM",
        repository="Ascend/MindSpeed-LLM",
        ref="c77308a14bfcb1aa7ca61da9c1aa24a893cb1b91",
        beneath=(NVIDIA, "core_v0.12.1"),
        also=(),
    ),
    Upstream(
        name="flagscale",
        title="FlagScale",
        repository="FlagOpen/FlagScale",
        ref="da4935ec60193e735bc70b81e259ed04eefd0132",
        beneath=(NVIDIA, "8479eb35fbca9631acb846c3ad5d868e02214227"),
        patches="flagscale/backends/Megatron-LM",
        script="flagscale/train/train_gpt.py",
        also=(),
    ),
    Upstream(
        name="deepspeedai",
        title="Megatron-DeepSpeed (deepspeedai)",
        repository="deepspeedai/Megatron-DeepSpeed",
        ref="4efb479d5317ce9b86096b9d8e3e8030b0b5263b",
        kind="megatron-deepspeed",
        also=(),
    ),
    Upstream(
        name="bigscience",
        title="Megatron-DeepSpeed (bigscience)",
        repository="bigscience-workshop/Megatron-DeepSpeed",
        ref="8387ae17c4704f6579f88a84500b535d19d7fbbf",
        kind="bigscience",
        also=(),
    ),
    Upstream(name="0.5.0", title="Megatron-LM 0.5.0", repository=NVIDIA, ref="core_v0.5.0", kind="unsupported"),
    Upstream(
        name="bigcode",
        title="bigcode Megatron-LM",
        repository="bigcode-project/Megatron-LM",
        ref="7c325cd34a109880a3fc03432e8b3e4576b22701",
        kind="unsupported",
    ),
    Upstream(
        name="yuan",
        title="Yuan-2.0",
        repository="IEIT-Yuan/Yuan-2.0",
        ref="2f59b3f5ba118c4c483e82f827fdc3a1803e5e54",
        kind="unsupported",
    ),
)

#: what a run needs of a tree.
_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".toml", ".txt", ".yaml", ".json", ".patch", "Makefile")
_FOLDERS = ("megatron/", "examples/", "tools/", "tasks/", "flagscale/", "mindspeed_llm/", "configs/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """An upstream, as files."""

    upstream: Upstream
    root: Path
    #: 10 hex digits; of both, if there is a Megatron-LM beneath.
    commit: str
    #: the Megatron-LM that it brings; the root itself for the others.
    megatron: Path

    @property
    def name(self) -> str:
        """Of the upstream."""
        return self.upstream.name

    @property
    def kind(self) -> str:
        """Of the upstream."""
        return self.upstream.kind

    @property
    def script(self) -> Path:
        """The script that is run."""
        return self.root / self.upstream.script

    @property
    def path(self) -> list[str]:
        """For PYTHONPATH."""
        return list(dict.fromkeys([str(self.root), str(self.megatron)]))


def find_clone(clones: Path, repository: str) -> Path | None:
    """The clone of a repository in a folder of clones: CLONES/OWNER/NAME; bare or with a work tree."""
    return next((path for path in (clones / repository, clones / f"{repository}.git") if path.exists()), None)


def chosen(words: Collection[str]) -> list[Upstream]:
    """The upstreams that are named among some words; all if none is."""
    return [one for one in UPSTREAMS if one.name in words] or list(UPSTREAMS)


def missing(clones: Path, wanted: Iterable[Upstream]) -> str | None:
    """What is not there, with the commands that fetch it; None if nothing is missing."""
    lines = []
    refs: dict[str, list[str]] = {}
    for one in wanted:
        for repository, ref in ((one.repository, one.ref), *([one.beneath] if one.beneath else [])):
            refs.setdefault(repository, []).append(ref)
    for repository, names in refs.items():
        clone = find_clone(clones, repository)
        absent = names if clone is None else [name for name in names if not _has(clone, name)]
        if clone is None:
            lines.append(f"  git clone https://github.com/{repository} {clones / repository}")
            lines.append(f"      for {', '.join(name[:12] for name in names)}")
        elif absent:
            lines.append(f"  git -C {clone} fetch --tags origin {' '.join(absent)}")
    return "\n".join(["upstreams that are missing:", *lines]) if lines else None


def _git(clone: Path, *words: str, data: bytes | None = None) -> bytes:
    done = subprocess.run(
        ["git", "-C", str(clone), *words],
        input=data,
        capture_output=True,
        env=os.environ | {"GIT_NO_LAZY_FETCH": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words[:3])} in {clone}: {done.stderr.decode().strip()[-300:]}")
    return done.stdout


def _has(clone: Path, ref: str) -> bool:
    try:
        _git(clone, "rev-parse", "--verify", f"{ref}^{{commit}}")
    except RuntimeError:
        return False
    return True


def export(clones: Path, upstream: Upstream, into: Path) -> Tree:
    """Write the tree of an upstream below ``into``, and that of the Megatron-LM beneath it.

    Raises:
        RuntimeError: there is no such commit, its script is not in it, or a patch of it does not apply.
    """
    root = megatron = into / upstream.name
    commit = _export(clones, upstream.repository, upstream.ref, root)
    if upstream.beneath is not None:
        megatron = into / f"{upstream.name}-megatron"
        commit += " on " + _export(clones, *upstream.beneath, megatron)
    if upstream.patches is not None:
        for patch in sorted((root / upstream.patches).rglob("*.patch")):
            if "/tests/" not in str(patch):
                command = ["patch", "-p1", "--batch", "--silent", "-i", str(patch)]
                done = subprocess.run(command, cwd=megatron, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{patch.name}: {done.stdout.strip()[-300:]}")
    if not (root / upstream.script).exists():
        raise RuntimeError(f"{upstream.repository} at {upstream.ref} has no {upstream.script}")
    return Tree(upstream=upstream, root=root, commit=commit, megatron=megatron)


def _export(clones: Path, repository: str, ref: str, root: Path) -> str:
    """Write files; objects that the clone lacks (a partial clone) are left out. Returns the commit, 10 hex digits."""
    clone = find_clone(clones, repository)
    if clone is None:
        raise RuntimeError(f"no clone of {repository} in {clones}")
    files: list[tuple[str, str]] = []
    for line in _git(clone, "ls-tree", "-r", "-z", ref).decode().split("\0"):
        facts, _, path = line.partition("\t")
        is_wanted = path.endswith(_SUFFIXES) and ("/" not in path or path.startswith(_FOLDERS))
        if facts.split()[1:2] == ["blob"] and is_wanted:
            files.append((facts.split()[2], path))
    stream = _git(clone, "cat-file", "--batch", data="".join(f"{blob}\n" for blob, _ in files).encode())
    position = 0
    for _, path in files:
        end = stream.index(b"\n", position)
        header, position = stream[position:end].split(), end + 1
        if header[1] == b"missing":
            continue
        target, size = root / path, int(header[2])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(stream[position : position + size])
        position += size + 1
    return _git(clone, "rev-parse", f"{ref}^{{commit}}").decode().strip()[:10]


def compile_helpers(tree: Tree, python: Path) -> str | None:
    """Build the index helpers, as Megatron does at its first start; None, or what went wrong."""
    makefile = next((path for path in tree.megatron.glob("megatron/**/datasets/Makefile")), None) or next(
        (path for path in tree.megatron.glob("megatron/data/Makefile")), None
    )
    if makefile is None:
        return "no Makefile"
    done = subprocess.run(["make", "-C", str(makefile.parent)], env=environment(python), capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip()[-200:]


@cache
def _base_prefix(python: Path) -> str:
    command = [str(python), "-c", "import sys; print(sys.base_prefix)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def environment(python: Path) -> dict[str, str]:
    """The environment of a run under a certain Python: its tools first, also those of the Python below a venv."""
    path = [str(python.parent), str(Path(_base_prefix(python), "bin")), os.environ.get("PATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


if __name__ == "__main__":
    if absent := missing(Path(sys.argv[1]).absolute(), chosen(sys.argv[2:])):
        print(absent, file=sys.stderr)
        sys.exit(2)
