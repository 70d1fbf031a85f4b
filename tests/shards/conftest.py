"""Prepared shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.shards.prepare import prepare_shards
from tests.shards.kit import encoder, write_shards


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The index of three shards with 5, 3 and 7 captioned pictures."""
    write_shards(tmp_path / "shards", [5, 3, 7])
    prepare_shards([tmp_path / "shards/pairs-{000000..000002}.tar"], tmp_path / "pairs", encoder())
    return tmp_path / "pairs.shards.idx"
