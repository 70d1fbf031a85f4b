"""Shards and launches that many tests here share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # kit and energon_task are imported by launched programs too


@pytest.fixture(scope="session")
def energon_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image-caption records, made an Energon dataset by Energon's own ``prepare``."""
    pytest.importorskip("megatron.energon")
    from kit import write_shards

    return write_shards(tmp_path_factory.mktemp("energon") / "pairs")
