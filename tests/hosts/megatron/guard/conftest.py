"""Three corpora whose documents all differ, and runs over them with the real megatron-core."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests import corpora as corpora_kit

pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")

_spec = importlib.util.spec_from_file_location("guard_orders", Path(__file__).with_name("orders.py"))
assert _spec is not None and _spec.loader is not None
orders = importlib.util.module_from_spec(_spec)
sys.modules["guard_orders"] = orders
_spec.loader.exec_module(orders)

Spec = orders.Spec
ROOT = Path(__file__).parents[4]
Run = Callable[..., dict[str, Any]]


def write_corpus(prefix: Path, lengths: np.ndarray, seed: int) -> None:
    """Documents of random int32 tokens: the first n documents do not depend on how many follow."""
    tokens = [np.random.default_rng((seed, i)).integers(1, 1000, n, dtype="<i4") for i, n in enumerate(lengths)]
    corpora_kit.write_corpus(prefix, [[document] for document in tokens])


def lengths_of(seed: int, documents: int) -> np.ndarray:
    """Lengths in tokens, the same for the first documents whatever their number."""
    return np.array([int(np.random.default_rng((seed, i, 1)).integers(5, 100)) for i in range(documents)])


class Corpora:
    """Corpora a, b, c in a directory of their own: about 100, 65 and 33 samples of 32 tokens in the train split."""

    documents: ClassVar = {"a": 80, "b": 50, "c": 25}

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for seed, (name, documents) in enumerate(self.documents.items()):
            self.write(name, documents, seed)

    def write(self, name: str, documents: int, seed: int | None = None) -> None:
        """(Re)write one: more documents with the same seed append to it."""
        seed = list(self.documents).index(name) if seed is None else seed
        write_corpus(self.directory / name, lengths_of(seed, documents), seed)

    def path(self, name: str) -> str:
        """Prefix of one."""
        return str(self.directory / name)

    @property
    def paths(self) -> list[str]:
        """Prefixes of all."""
        return [self.path(name) for name in self.documents]


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    """Corpora of this test."""
    directory = tmp_path / "corpora"
    directory.mkdir()
    return Corpora(directory)


@pytest.fixture
def build(tmp_path: Path) -> Run:
    """``build(paths=..., ...)``: one start, with an index cache of its own unless ``cache`` names one."""
    count = 0

    def start(**spec: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        spec.setdefault("cache", str(tmp_path / f"cache{count}"))
        return orders.run(Spec(**spec))

    return start


def run_program(
    tmp_path: Path, specs: list[dict[str, Any]], *, ranks: int = 1, core: str | Path | None = None, hosts: bool = False
) -> list[list[dict[str, Any]]]:
    """Run orders.py in processes of its own. Returns the results per rank.

    Args:
        tmp_path: a directory for its files.
        specs: one start after the other.
        ranks: processes, over gloo.
        core: directory of another megatron-core; None: the installed one.
        hosts: every rank takes itself for a host of its own.
    """
    directory = Path(tempfile.mkdtemp(dir=tmp_path))
    (directory / "specs.json").write_text(json.dumps(specs))
    environment = dict(os.environ, STORE=str(directory / "store"), WORLD_SIZE=str(ranks))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(core) if core else "", str(ROOT)]))
    if hosts:
        environment["HOST"] = "1"
    processes = [
        subprocess.Popen(
            [sys.executable, orders.__file__, str(directory / "specs.json"), str(directory / "result")],
            env=environment | {"RANK": str(rank)},
            stdout=(directory / f"output{rank}").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        statuses = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert statuses == [0] * ranks, (directory / "output0").read_text()[-4000:]
    return [json.loads((directory / f"result{rank}").read_text()) for rank in range(ranks)]


def common_prefix(a: list[str], b: list[str]) -> int:
    """Samples from the start that are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
