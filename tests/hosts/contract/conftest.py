"""An S3 server, for hosts that copy their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.store.server import Server, serving

server = pytest.fixture(scope="session")(serving)


@pytest.fixture
def store_url(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """See `HostContract`. The environment alone says where the server is."""
    s3fs = pytest.importorskip("s3fs")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield f"s3://runs/{tmp_path.name}"
    s3fs.S3FileSystem.clear_instance_cache()
