"""A cache of the tests alone, and prepared shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.data.prepare.shards import prepare_shards
from tests.data.kit import encoder, write_shards


@pytest.fixture(autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the cache of whoever runs it."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MEGARESUME_CACHE", str(path))
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The index of three shards with 5, 3 and 7 captioned pictures."""
    write_shards(tmp_path / "shards", [5, 3, 7])
    prepare_shards([tmp_path / "shards/pairs-{000000..000002}.tar"], tmp_path / "pairs", encoder())
    return tmp_path / "pairs.shards.idx"
