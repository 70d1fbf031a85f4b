"""``megaresume new TRAINER``: writes a starting point for a trainer, a short program that runs as it is."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import struct
import tarfile
import zlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from megaresume.files import make_dir, write_atomic
from megaresume.stream.errors import UsageError

DATA = """\
# What is trained on: docs/stream.md describes every setting.
seed: 1
seq_length: 128
packing: best_fit
sources:
  sums: {path: sums}  # sums.bin and sums.idx, made of sums.jsonl: megaresume prepare sums.jsonl --output sums
"""


PICTURES = """\
# What is trained on: docs/shards.md describes every setting.
seed: 1
seq_length: 128
packing: best_fit
sources:
  # made of colours-0.tar and colours-1.tar: megaresume prepare 'colours-*.tar' --output colours --processor native
  colours: {kind: webdataset, index: colours.shards.idx}
"""
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (240, 220, 40)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The starting point of one trainer."""

    #: file in the package `starts`.
    source: str
    #: the name of the program in the user's directory.
    program: str
    #: the command that starts it, and also resumes it.
    command: str
    #: the extra of megaresume that installs what the program imports.
    extra: str
    #: the data in its data.yaml; None: it has none.
    data: Literal["sums", "colours"] | None = None


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
        data="sums",
    ),
    "vlm": Start(source="vlm.py", program="train.py", command="python train.py", extra="torch,vlm", data="colours"),
    "megatron": Start(
        source="megatron.sh",
        program="train.sh",
        command="MEGATRON=/path/to/Megatron-LM bash train.sh",
        extra="megatron",
        data="sums",
    ),
}


#: other names of a starting point.
ALSO = {"hugging-face": "trainer", "hf": "trainer"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    names = ", ".join("trainer (or hugging-face)" if name == "trainer" else name for name in STARTS)
    parser.add_argument(
        "trainer",
        metavar="TRAINER",
        type=lambda word: ALSO.get(word, word),
        choices=tuple(STARTS),
        help=f"one of {names}",
    )
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", help="where to (default: megaresume-TRAINER)")


def run(args: argparse.Namespace) -> int:
    """Write the files, and print how to start.

    Raises:
        UsageError: a file with one of the names exists, or the directory is a file.
    """
    start = STARTS[args.trainer]
    directory = args.dir or Path(f"megaresume-{args.trainer}")
    texts = {start.program: resources.files("megaresume.cluster.starts").joinpath(start.source).read_bytes()}
    if start.data == "sums":
        texts |= {"data.yaml": DATA.encode(), "sums.jsonl": _sums().encode()}
    if start.data == "colours":
        texts |= {"data.yaml": PICTURES.encode(), **{f"colours-{part}.tar": _shard(part) for part in range(2)}}
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
    is_new = not directory.exists()
    make_dir(directory)
    with contextlib.ExitStack() as undo:  # what is left half-written would be in the way of the next attempt
        if is_new:
            undo.callback(_remove_empty, directory)
        for name, text in texts.items():
            write_atomic(directory / name, text)
            undo.callback((directory / name).unlink, missing_ok=True)
        if start.data is not None:
            _prepare(start.data, directory)
        undo.pop_all()
    print(f"{directory}: {', '.join(texts)}\n")
    print(f"  pip install 'megaresume[{start.extra}]'")
    print(f"  cd {directory}")
    print(f"  {start.command}\n")
    print("Kill it at any time, even with kill -9, and run the same command again: it continues exactly.")
    return 0


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _prepare(data: str, directory: Path) -> None:
    if data == "sums":
        from megaresume.data.prepare.corpus import PrepareOptions, prepare

        prepare([str(directory / "sums.jsonl")], str(directory / "sums"), PrepareOptions(workers=1))
    else:
        from megaresume.data.prepare import command

        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        words = ["--output", str(directory / "colours"), "--processor", "native", "--workers", "1"]
        with contextlib.redirect_stdout(io.StringIO()):
            command.run(parser.parse_args([str(directory / "colours-*.tar"), *words]))


def _shard(part: int) -> bytes:
    """Half of 240 records: a picture of one colour, and its name."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number in range(120 * part, 120 * (part + 1)):
            name, colour = list(COLOURS.items())[number * number % 7 % len(COLOURS)]
            shade = tuple(min(value + number % 16, 255) for value in colour)
            for kind, data in (("png", _png(shade, 28 * (2 + number % 3))), ("txt", name.encode())):
                member = tarfile.TarInfo(f"{number:03}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def _png(colour: tuple[int, ...], side: int) -> bytes:
    """A square of one colour, with ``side`` pixels per edge; https://www.w3.org/TR/png-3/."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(colour) * side) * side)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _sums() -> str:
    """The corpus: a thousand documents with a few additions each, as JSON lines."""
    rows = []
    for number in range(1000):
        sums = [(number + 7 * i, 3 * number + i) for i in range(1 + number % 5)]
        rows.append(json.dumps({"text": "\n".join(f"{a} + {b} = {a + b}" for a, b in sums)}))
    return "\n".join(rows) + "\n"
