"""Shards of small captioned pictures for the tests beside, and what reads them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.encoding.images.document import Key
from megaresume.encoding.images.encoder import ImageTextEncoder
from tests.encoding.images.kit import file, picture

#: patches of 8 pixels in a picture of 16 x 16: 4 tokens an image.
OPTIONS = {"processor": {"kind": "patches", "size": 16, "patch_size": 8}}


def encoder(**options: object) -> ImageTextEncoder:
    """Bytes as tokens: a caption of n characters is a document of 4 + n + 1 tokens."""
    return ImageTextEncoder.from_options({**OPTIONS, **options})


def key(document: int, epoch: int = 0) -> Key:
    return Key(seed=1, source="pairs", document=document, epoch=epoch)


def captions(count: int, first: int = 0) -> list[tuple[str, dict[str, bytes]]]:
    """Records of an image and a text of their own."""
    records = []
    for i in range(first, first + count):
        text = f"picture {i} " + "x" * (i * 7 % 23)
        members = {"png": file(picture(20 + i % 5, 16, seed=i)), "txt": text.encode()}
        records.append((f"data/{i:06d}", members))
    return records


def write_shard(path: Path, records: Iterable[tuple[str, Mapping[str, bytes]]], **options: object) -> Path:
    """A tar of the members of each record, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for name, members in records:
            for extension, content in members.items():
                add(archive, f"{name}.{extension}", content)
    return path


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(content) if info.isreg() else None)


def write_shards(directory: Path, counts: Iterable[int]) -> list[Path]:
    """``pairs-000000.tar`` and so on, with so many records each; numbers go on from shard to shard."""
    first, paths = 0, []
    for k, count in enumerate(counts):
        paths.append(write_shard(directory / f"pairs-{k:06d}.tar", captions(count, first)))
        first += count
    return paths


def same(a: object, b: object) -> bool:
    """Encoded documents, bit for bit: tokens, what is trained on, pixels, places."""
    return (
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.trained, b.trained)
        and len(a.images) == len(b.images)
        and all(
            x.offset == y.offset and x.grid == y.grid and np.array_equal(x.pixels, y.pixels)
            for x, y in zip(a.images, b.images, strict=True)
        )
        and a.fault == b.fault
    )


#: as sitecustomize.py: kills all processes of a `prepare` when two parts are there and a third one is about to be.
KILLER = """
import os, pathlib, signal, sys

def watch(event, args):
    if event == "os.rename":
        part = pathlib.Path(os.fsdecode(args[1]))
        if part.name.startswith("shard-") and len(list(part.parent.glob("shard-*"))) >= 2:
            os.killpg(0, signal.SIGKILL)

sys.addaudithook(watch)
"""


def killed_and_run_again(command: Callable[..., list[str]], index: Path) -> dict[str, Any]:
    """The summary of a `prepare` that goes on after a SIGKILL, which falls when two parts are there.

    Args:
        command: its words, with more flags at the end.
        index: what it writes.
    """
    killer = index.parent / "killer"
    killer.mkdir()
    (killer / "sitecustomize.py").write_text(KILLER)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(killer), *filter(None, [os.environ.get("PYTHONPATH")])])}
    process = subprocess.Popen(command("--workers", "2"), start_new_session=True, env=env)
    assert process.wait() == -signal.SIGKILL
    assert not index.exists()
    result = subprocess.run(command("--json"), capture_output=True, text=True, check=True)
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary
