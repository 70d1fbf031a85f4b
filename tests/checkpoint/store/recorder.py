"""What is in a bucket, read with boto3 (or as files), judged by the documented layout alone, not by megaresume's code.

megaresume/heads/NNNNNNNNNN.json        the newest one holds: "saves", "latest", "tracker", "epoch", "owner"
megaresume/<save>/step_*.manifest.json  the files of a save, with sizes and xxh3_128
<tag>/<save>/<path>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash


class Lost(AssertionError):
    """What the protocol promises does not hold."""


class Bucket:
    """A root in a bucket.

    Args:
        client: boto3's, of the server itself.
        prefix: of the root.
    """

    def __init__(self, client: Any, prefix: str) -> None:
        self.client, self.prefix = client, prefix

    def keys(self) -> dict[str, int]:
        """Bytes of every object, by name."""
        found: dict[str, int] = {}
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="runs", Prefix=f"{self.prefix}/")
        for page in pages:
            found |= {one["Key"].removeprefix(f"{self.prefix}/"): one["Size"] for one in page.get("Contents", ())}
        return found

    def get(self, name: str) -> bytes:
        data: bytes = self.client.get_object(Bucket="runs", Key=f"{self.prefix}/{name}")["Body"].read()
        return data

    def heads(self) -> list[dict[str, Any]]:
        """All heads that are there, the oldest first."""
        return [json.loads(self.get(name)) for name in sorted(self.keys()) if name.startswith("megaresume/heads/")]

    def whole(self, content: Callable[[str], Mapping[str, bytes]]) -> dict[str, Any] | None:
        """Hold everything that the newest head names against what was saved; that head, or None without one.

        Args:
            content: of a state's digest, what each file of its tag directory held.

        Raises:
            Lost: a checkpoint is named that is not whole, or a pointer names none that is.
        """
        keys = self.keys()
        newest = max((name for name in keys if name.startswith("megaresume/heads/")), default=None)
        if newest is None:
            return None
        head: dict[str, Any] = json.loads(self.get(newest))
        for saved in head["saves"]:
            step, tag, save = saved["iteration"], saved["tag"], saved["save_id"]
            place = f"megaresume/{save}/step_{step:07d}"
            for name in (f"{place}.json", f"{place}.manifest.json"):
                if name not in keys:
                    raise Lost(f"{tag} counts, and {name} is not there")
            manifest = json.loads(self.get(f"{place}.manifest.json"))
            if manifest["save_id"] != save or not manifest["durable"]:
                raise Lost(f"{tag} counts, and its manifest is of another save, or not durable")
            files = {path: (size, checksum) for path, size, checksum in manifest["files"]}
            known = content(manifest["digest"])
            if set(files) != set(known):
                raise Lost(f"{tag} counts with {sorted(files)}; {sorted(known)} were saved")
            for path, (size, checksum) in files.items():
                name = f"{tag}/{save}/{path}"
                if keys.get(name) != size:
                    raise Lost(f"{tag} counts, and {name} has {keys.get(name)} of {size} bytes")
                data = self.get(name)
                if data != known[path] or xxhash.xxh3_128_hexdigest(data) != checksum:
                    raise Lost(f"{tag} counts, and {name} holds other bytes than were saved")
        tags = {saved["tag"] for saved in head["saves"]}
        steps = {saved["iteration"] for saved in head["saves"]}
        if head["latest"] not in {None, *tags} or head["tracker"] not in {None, *steps}:
            raise Lost(f"a pointer names what is not there: {head['latest']}, {head['tracker']}; there are {tags}")
        return head


class Folder(Bucket):
    """A root in a directory, which fsspec's ``local://`` serves as a store: read as files.

    Args:
        directory: of the root.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keys(self) -> dict[str, int]:
        files = (path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.stat().st_size for path in files}

    def get(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()
