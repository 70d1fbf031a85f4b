"""A Megatron-LM script whose checkpoints are copied: which of the two places it loads from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megaresume.hosts.driver import Driver, Job, items, lines, losses, trained
from tests.checkpoint.store.recorder import Bucket
from tests.checkpoint.store.server import Server
from tests.hosts.contract import test_megatron as contract
from tests.hosts.contract.conftest import server, store_url  # noqa: F401  fixtures
from tests.hosts.contract.forking import ForkingDriver

pytestmark = pytest.mark.process


@pytest.fixture
def driver() -> Driver:
    return ForkingDriver(contract.__file__, contract.train, in_process=False, launcher="megaresume.run")


def run(driver: Driver, directory: Path, **options: Any) -> str:
    """A run of 8 steps that saves every 3, to its end."""
    ran = driver.run(Job(directory=directory, save_every=3, **{"steps": 8} | options))
    assert ran.status == 0, ran.said[-4000:]
    return ran.said


def first_step(directory: Path, attempt: int) -> int:
    return next(line["step"] for line in lines(directory) if line["attempt"] == attempt)


def test_copies_in_a_directory(driver: Driver, tmp_path: Path) -> None:
    """The disk is lost: what is loaded lies among the copies, and the next save goes to the disk."""
    (tmp_path / "copies").mkdir()
    whole = tmp_path / "whole" / "run"
    whole.parent.mkdir()
    run(driver, whole)
    directory, copies = tmp_path / "cut" / "run", str(tmp_path / "copies")
    directory.parent.mkdir()
    run(driver, directory, steps=6, stage_to=copies)
    shutil.rmtree(directory)
    run(driver, directory, attempt=2, stage_to=copies)
    assert first_step(directory, 2) == 7
    assert items(trained(directory)) == items(trained(whole)) and losses(directory) == losses(whole)
    assert sorted(path.name for path in directory.glob("iter_*")) == ["iter_0000008"]
    assert sorted(path.name for path in (tmp_path / "copies").glob("iter_*"))[-1] == "iter_0000008"


def test_the_newest_copy_is_damaged(driver: Driver, server: Server, store_url: str, tmp_path: Path) -> None:  # noqa: F811
    """The one before it is brought to an empty machine, and Megatron loads it: it reads the tracker, which names no
    other."""
    directory = tmp_path / "run"
    run(driver, directory, stage_to=store_url)
    whole = losses(directory)
    bucket = Bucket(server.client(), store_url.rpartition("/")[2])
    name = next(name for name in sorted(bucket.keys()) if name.startswith("iter_0000008/"))
    content = bucket.get(name)
    assert content is not None
    server.client().put_object(Bucket="runs", Key=f"{store_url.rpartition('/')[2]}/{name}", Body=bytes(len(content)))
    shutil.rmtree(directory)
    said = run(driver, directory, attempt=2, stage_to=store_url)
    assert "iter_0000006 is brought from" in said and "resuming from iter_0000006" in said, said[-4000:]
    assert first_step(directory, 2) == 7 and losses(directory) == whole
