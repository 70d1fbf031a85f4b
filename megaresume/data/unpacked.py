"""Compressed files, which cannot be read from the middle on: decompressed once on each machine, beside other caches.
JSON lines of a store that name images as well: what they name can be read ahead only by who has the lines.
"""

from __future__ import annotations

import fcntl
import shutil
from contextlib import closing
from pathlib import Path

import xxhash

from megaresume.data.files import cache_directory, written_atomically
from megaresume.data.inputs import Format, InputFile, find_inputs
from megaresume.data.shard_files import ShardFiles
from megaresume.data.streams import InputStream
from megaresume.stream.errors import SetupError
from megaresume.stream.progress import progress

#: bytes written at once.
CHUNK = 1 << 20


def unpacked(path: str, files: ShardFiles, *, format: Format = "jsonl", size: int = 0) -> str:
    """The decompressed content of a file, in the cache directory; made by the first process that asks.

    Args:
        path: local, or a URL.
        files: read it from a store.
        format: of its content.
        size: bytes that it will have, at least.

    Raises:
        CorpusError: it is damaged, or changes meanwhile.
        SetupError: no cache directory, or no room in it.
    """
    file = find_inputs([path], format=format, store=files).files[0]
    size = max(size, file.size)
    base = cache_directory()
    if base is None:
        raise _no_room(file, size, "a user without a home", None)
    directory = base / "unpacked"
    key = xxhash.xxh3_64_hexdigest(repr(sorted(file.to_dict().items())).encode())
    plain = directory / f"{file.path.stem}-{key}"
    try:
        if plain.exists():
            return str(plain)
        directory.mkdir(parents=True, exist_ok=True)
        with open(plain.with_name(f".{plain.name}.lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not plain.exists():
                if (free := shutil.disk_usage(directory).free) < size:
                    raise _no_room(file, size, f"{free} bytes free", directory)
                _unpack(file, plain, size)
    except OSError as error:
        raise _no_room(file, size, error.strerror or str(error), directory) from error
    return str(plain)


def _unpack(file: InputFile, path: Path, size: int) -> None:
    with (
        closing(InputStream(file)) as stream,
        written_atomically(path) as out,
        progress(f"unpacking {file.path.name}", size, "B") as bar,
    ):
        while data := stream.read(CHUNK):
            out.write(data)
            bar.update(len(data))


def _no_room(file: InputFile, size: int, found: str, directory: Path | None) -> SetupError:
    return SetupError(
        f"{file.name} cannot be unpacked",
        found=found,
        expected=f"{size} bytes for it" + ("" if directory is None else f" in {directory}"),
        cause="its rows are read in another order than they are compressed in",
        action="name a directory with room: MEGARESUME_CACHE=DIR; or, of text, prepare a .bin, which is smaller: "
        "megaresume prepare without --index-only",
    )
