"""Datasets that are not ``GPTDataset``, and indexes that are opened lazily: pinned as far as can be, said where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaresume.stream.errors import StateError
from tests.hosts.megatron.guard.conftest import Corpora, Run, common_prefix

WEIGHTS = [0.6, 0.3, 0.1]


def test_masked_words(build: Run, corpora: Corpora) -> None:
    """BERT: one index that depends on the number of samples as a whole; it can be pinned, not prolonged."""
    spec: dict[str, Any] = {"dataset": "BERT", "paths": corpora.paths, "weights": WEIGHTS, "sizes": [200, 10, 10]}
    base = build(**spec)
    fewer = spec | {"sizes": [40, 10, 10]}
    assert common_prefix(base["train"], build(**fewer, guard=False)["train"]) < 10
    assert build(**fewer, loaded=base["payload"], samples=50)["train"] == base["train"]
    with pytest.raises(StateError, match="cannot prolong") as caught:
        build(**spec | {"sizes": [900, 10, 10]}, loaded=base["payload"], samples=50)
    assert "--train-iters or --train-samples for 200 samples" in str(caught.value)
    more_validation = build(**spec | {"sizes": [200, 90, 10]}, loaded=base["payload"], samples=50)
    assert more_validation["train"] == base["train"]
    assert "the valid set is not pinned" in more_validation["output"]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_without_an_index(build: Run, corpora: Corpora, weights: list[float] | None) -> None:
    """Supervised fine-tuning: the documents of the file, over and over."""
    paths = corpora.paths if weights else corpora.paths[:1]
    spec: dict[str, Any] = {"dataset": "WithoutIndex", "paths": paths, "weights": weights}
    base = build(**spec)
    assert "builds no index" in base["output"]
    corpora.write("a", 95)
    stock = build(**spec, guard=False)
    assert common_prefix(base["train"], stock["train"]) < 200
    again = build(**spec | {"sizes": [700, 20, 20]}, loaded=base["payload"], samples=100)
    assert again["train"][: len(base["train"])] == base["train"]
    assert len(again["train"]) >= 700


def test_random_items_are_named(build: Run, corpora: Corpora) -> None:
    built = build(dataset="WithRandomItems", paths=corpora.paths, weights=WEIGHTS)
    assert "draws random numbers from one generator per process" in built["output"]


def test_indexes_that_are_opened_lazily(build: Run, corpora: Corpora, tmp_path: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

    if not hasattr(BlendedMegatronDatasetConfig, "defer_npy_index_mmap"):
        pytest.skip("this megatron-core has no lazy index")
    a, b, c = corpora.paths
    spec: dict[str, Any] = {
        "per_split": [([a, b], [0.7, 0.3]), ([c], None), None],
        "sizes": [250, 10, 0],
        "cache": str(tmp_path / "cache"),
    }
    lazy = {"config": {"fast_cache_load": True, "defer_npy_index_mmap": True}}
    stock = build(**spec, guard=False)
    base = build(**spec, **lazy)
    assert base["train"] == stock["train"]
    longer = build(**spec | lazy | {"sizes": [600, 10, 0]}, loaded=base["payload"], samples=100)
    assert longer["train"][: len(base["train"])] == base["train"]
    assert len(longer["train"]) >= 600
    eager = build(**spec | {"cache": str(tmp_path / "cold")}, loaded=longer["payload"], samples=100)
    assert eager["train"] == base["train"]


def test_documents_of_several_sequences(build: Run, corpora: Corpora) -> None:
    """The record counts documents as the dataset class does: sequences here, documents there."""
    base = build(dataset="BERT", paths=corpora.paths[:1], sizes=[40, 4, 4])
    corpora.write("a", 95)
    again = build(dataset="BERT", paths=corpora.paths[:1], sizes=[40, 4, 4], loaded=base["payload"], samples=10)
    assert again["train"] == base["train"]
    assert "15 documents more" in again["output"]
