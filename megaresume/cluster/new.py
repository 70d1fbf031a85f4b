"""``megaresume new TRAINER``: a starting point for a trainer, a short program that runs as it is."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from megaresume.stream.errors import UsageError

DATA = """\
# What is trained on: docs/stream.md describes every setting.
seed: 1
seq_length: 128
packing: best_fit
sources:
  sums: {path: sums}  # sums.bin and sums.idx, made of sums.jsonl: megaresume prepare sums.jsonl --output sums
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One trainer's starting point."""

    #: file in the package `starts`.
    source: str
    #: its name at the user's.
    program: str
    #: how it is started; the same words resume it.
    command: str
    #: of megaresume, which installs what the program imports.
    extra: str
    #: whether it reads a data.yaml.
    has_stream: bool = False


STARTS = {
    "torch": Start(source="torch.py", program="train.py", command="python train.py", extra="torch"),
    "trainer": Start(source="trainer.py", program="train.py", command="python train.py", extra="hugging-face"),
    "accelerate": Start(source="accelerate.py", program="train.py", command="python train.py", extra="hugging-face"),
    "lightning": Start(source="lightning.py", program="train.py", command="python train.py", extra="lightning"),
    "deepspeed": Start(
        source="deepspeed.py",
        program="train.py",
        command="torchrun --nproc-per-node 1 train.py",
        extra="deepspeed",
        has_stream=True,
    ),
    "megatron": Start(
        source="megatron.sh",
        program="train.sh",
        command="MEGATRON=/path/to/Megatron-LM bash train.sh",
        extra="megatron",
        has_stream=True,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("trainer", metavar="TRAINER", choices=tuple(STARTS), help=f"one of {', '.join(STARTS)}")
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", help="where to (default: megaresume-TRAINER)")


def run(args: argparse.Namespace) -> int:
    """Write the files, and say how to start.

    Raises:
        UsageError: a file of that name is there already, or the directory is a file.
    """
    start = STARTS[args.trainer]
    directory = args.dir or Path(f"megaresume-{args.trainer}")
    texts = {start.program: resources.files("megaresume.cluster.starts").joinpath(start.source).read_text("utf-8")}
    if start.has_stream:
        texts |= {"data.yaml": DATA, "sums.jsonl": _sums()}
    if directory.exists() and not directory.is_dir():
        raise UsageError(
            "a starting point needs a directory",
            found=f"{directory}, which is a file",
            expected="a directory, or a name that nothing has yet",
            action=f"megaresume new {args.trainer} ANOTHER_DIRECTORY",
        )
    there = [name for name in texts if (directory / name).exists()]
    if there:
        raise UsageError(
            "a starting point is not written over files that are there",
            found=", ".join(str(directory / name) for name in there),
            expected="a directory without them",
            action=f"megaresume new {args.trainer} ANOTHER_DIRECTORY",
        )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    if start.has_stream:
        from megaresume.data.prepare.corpus import PrepareOptions, prepare

        prepare([str(directory / "sums.jsonl")], str(directory / "sums"), PrepareOptions(workers=1))
    print(f"{directory}: {', '.join(texts)}\n")
    print(f"  pip install 'megaresume[{start.extra}]'")
    print(f"  cd {directory}")
    print(f"  {start.command}\n")
    print("Kill it at any time, even with kill -9, and run the same command again: it continues exactly.")
    return 0


def _sums() -> str:
    """The corpus: a thousand documents of a few additions each, as JSON lines."""
    rows = []
    for number in range(1000):
        sums = [(number + 7 * i, 3 * number + i) for i in range(1 + number % 5)]
        rows.append(json.dumps({"text": "\n".join(f"{a} + {b} = {a + b}" for a, b in sums)}))
    return "\n".join(rows) + "\n"
