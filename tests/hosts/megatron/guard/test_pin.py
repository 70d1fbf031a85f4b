"""What silently changes the order of stock Megatron, and does not under guard: compared sample by sample.

Every test shows the change without guard first: a test whose stock order does not change would prove nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.megatron.guard.conftest import Corpora, Run, common_prefix

WEIGHTS = [0.6, 0.3, 0.1]
BLEND: dict[str, Any] = {"weights": WEIGHTS}


def resumed(build: Run, base: dict[str, Any], at: int = 200, **spec: Any) -> dict[str, Any]:
    """The next start of that run."""
    return build(**spec, loaded=base["payload"], samples=at)


@pytest.mark.parametrize("size", [299, 301, 330, 350, 600])
@pytest.mark.parametrize("blended", [False, True], ids=["single", "blend"])
def test_another_number_of_samples(build: Run, corpora: Corpora, size: int, blended: bool) -> None:
    spec: dict[str, Any] = {"paths": corpora.paths, **BLEND} if blended else {"paths": corpora.paths[:1]}
    # a alone has some 103 samples: 95 is one epoch, more are two and so on.
    begin = 300 if blended else 95
    size = size if blended else size - 205
    base = build(**spec, sizes=[begin, 20, 20])
    longer = resumed(build, base, at=50, **spec, sizes=[size, 40, 40])
    assert len(longer["train"]) >= max(size, begin)
    for split in ("train", "valid", "test"):
        assert common_prefix(base[split], longer[split]) == len(base[split]), split


def test_stock_megatron_reshuffles_everything(build: Run, corpora: Corpora) -> None:
    """The premise of the tests above: an epoch more, and the 80 % rule alone."""
    one = build(paths=corpora.paths[:1], sizes=[95, 20, 20], guard=False)
    two = build(paths=corpora.paths[:1], sizes=[145, 20, 20], guard=False)
    assert common_prefix(one["train"], two["train"]) < 10
    base = build(paths=corpora.paths, **BLEND, guard=False)
    assert (
        common_prefix(base["train"], build(paths=corpora.paths, **BLEND, sizes=[330, 20, 20], guard=False)["train"])
        < 10
    )


def test_adopting_changes_no_sample(build: Run, corpora: Corpora) -> None:
    stock = build(paths=corpora.paths, **BLEND, guard=False)
    adopted = build(paths=corpora.paths, **BLEND, samples=120)
    assert [adopted[s] for s in ("train", "valid", "test")] == [stock[s] for s in ("train", "valid", "test")]
    assert adopted["payload"]["since"] == 120
    assert adopted["output"].count("order before sample 120 is not proven") == 1
    assert "not proven" not in build(paths=corpora.paths, **BLEND)["output"]


def test_nothing_changed(build: Run, corpora: Corpora, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    base = build(paths=corpora.paths, **BLEND, cache=cache)
    again = resumed(build, base, paths=corpora.paths, **BLEND, cache=cache)
    assert (again["train"], again["valid"], again["payload"]) == (base["train"], base["valid"], base["payload"])


def test_prolonging_in_steps_is_prolonging_at_once(build: Run, corpora: Corpora) -> None:
    base = build(paths=corpora.paths, **BLEND)
    at_once = resumed(build, base, paths=corpora.paths, **BLEND, sizes=[900, 20, 20])
    step = base
    for size in (330, 500, 400, 900):
        step = resumed(build, step, paths=corpora.paths, **BLEND, sizes=[size, 20, 20])
        assert step["train"] == at_once["train"][: len(step["train"])]
    assert step["train"] == at_once["train"]


def test_a_further_epoch_repeats_nothing_before_the_epoch_is_over(build: Run, corpora: Corpora) -> None:
    base = build(paths=corpora.paths[:1], sizes=[95, 20, 20])
    longer = resumed(build, base, paths=corpora.paths[:1], sizes=[400, 20, 20])["train"]
    epoch = len(base["train"])
    assert len(set(longer[epoch : 2 * epoch])) == epoch
    assert longer[epoch : 2 * epoch] != longer[2 * epoch : 3 * epoch], "each epoch is shuffled by itself"


@pytest.mark.parametrize("weights", [[6, 3, 1], [60.0, 30.0, 10.0], [0.06, 0.03, 0.01]])
def test_weights_spelled_differently(build: Run, corpora: Corpora, weights: list[float]) -> None:
    base = build(paths=corpora.paths, **BLEND, sizes=[3000, 20, 20])
    again = resumed(build, base, paths=corpora.paths, weights=weights, sizes=[3000, 20, 20])
    assert again["train"] == base["train"]
    assert "the same proportions" in again["output"]


def test_stock_megatron_takes_other_weights_for_another_spelling(build: Run, corpora: Corpora) -> None:
    base = build(paths=corpora.paths, **BLEND, sizes=[3000, 20, 20], guard=False)
    other = build(paths=corpora.paths, weights=[6, 3, 1], sizes=[3000, 20, 20], guard=False)
    assert common_prefix(base["train"], other["train"]) < 10


def test_one_corpus_with_and_without_a_weight(build: Run, corpora: Corpora) -> None:
    base = build(paths=corpora.paths[:1], sizes=[95, 20, 20])
    again = resumed(build, base, paths=corpora.paths[:1], weights=[1.0], sizes=[95, 20, 20])
    assert again["train"] == base["train"]


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_a_corpus_was_appended_to(build: Run, corpora: Corpora, tmp_path: Path, cache: str) -> None:
    warm = str(tmp_path / "warm")
    base = build(paths=corpora.paths, **BLEND, cache=warm)
    corpora.write("a", 95)
    where = {"cache": warm} if cache == "warm" else {}
    stock = build(paths=corpora.paths, **BLEND, guard=False)
    assert common_prefix(base["train"], stock["train"]) < 10
    again = resumed(build, base, paths=corpora.paths, **BLEND, **where)
    assert (again["train"], again["valid"], again["test"]) == (base["train"], base["valid"], base["test"])
    assert f"{corpora.path('a')} has 15 documents more than the recorded 80: they are NOT used" in again["output"]


def test_a_cache_that_was_rebuilt_after_appending(build: Run, corpora: Corpora, tmp_path: Path) -> None:
    """Same name of the cache entry, other content: it is left alone, and the recorded order is built elsewhere."""
    cache = tmp_path / "cache"
    base = build(paths=corpora.paths, **BLEND, cache=str(cache))
    corpora.write("a", 95)
    shutil.rmtree(cache)
    build(paths=corpora.paths, **BLEND, cache=str(cache), guard=False)
    files = {p.name: p.read_bytes() for p in cache.glob("*")}
    again = resumed(build, base, paths=corpora.paths, **BLEND, cache=str(cache))
    assert again["train"] == base["train"]
    assert "the cached index is not the recorded one" in again["output"]
    assert {p.name: p.read_bytes() for p in cache.glob("*") if p.is_file()} == files, "nothing of the user's changed"
    third = resumed(build, again, paths=corpora.paths, **BLEND, cache=str(cache), sizes=[700, 20, 20])
    assert third["train"][: len(base["train"])] == base["train"]


def test_adopting_a_stale_warm_cache_records_what_trains(build: Run, corpora: Corpora, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    stock = build(paths=corpora.paths, **BLEND, cache=cache, guard=False)
    corpora.write("a", 95)
    adopted = build(paths=corpora.paths, **BLEND, cache=cache, samples=100)
    assert adopted["train"] == stock["train"]
    again = resumed(build, adopted, paths=corpora.paths, **BLEND)
    assert again["train"] == stock["train"], "rebuilt cold, from the documents that the warm cache had"


def test_the_surplus(build: Run, corpora: Corpora) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

    if not hasattr(BlendedMegatronDatasetConfig, "mid_level_dataset_surplus"):
        pytest.skip("this megatron-core has no mid_level_dataset_surplus")
    base = build(paths=corpora.paths, **BLEND)
    more = {"config": {"mid_level_dataset_surplus": 0.5}}
    assert common_prefix(base["train"], build(paths=corpora.paths, **BLEND, **more, guard=False)["train"]) < 10
    assert resumed(build, base, paths=corpora.paths, **BLEND, **more)["train"] == base["train"]


def test_corpora_that_moved(build: Run, corpora: Corpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = build(paths=corpora.paths, **BLEND)
    shutil.copytree(corpora.directory, tmp_path / "elsewhere")
    again = resumed(build, base, paths=[str(tmp_path / "elsewhere" / n) for n in "abc"], **BLEND)
    assert again["train"] == base["train"]
    monkeypatch.chdir(corpora.directory)
    assert resumed(build, base, paths=["a", "./b", "c"], **BLEND)["train"] == base["train"]


def test_the_same_corpus_twice(build: Run, corpora: Corpora) -> None:
    paths = [corpora.path("a"), corpora.path("b"), corpora.path("a")]
    base = build(paths=paths, **BLEND)
    again = resumed(build, base, paths=paths, **BLEND, sizes=[330, 20, 20])
    assert again["train"][: len(base["train"])] == base["train"]


def test_weights_by_length(build: Run, corpora: Corpora) -> None:
    base = build(paths=corpora.paths, sizes=[150, 5, 5])
    longer = resumed(build, base, paths=corpora.paths, sizes=[180, 5, 5])
    assert longer["train"][: len(base["train"])] == base["train"]
    assert len(longer["train"]) >= 180
    capped = resumed(build, base, paths=corpora.paths, sizes=[5000, 5, 5])
    stock = build(paths=corpora.paths, sizes=[5000, 5, 5], guard=False)
    assert capped["train"] == stock["train"], "stock has one epoch, whatever is asked for"


def test_a_blend_for_each_split(build: Run, corpora: Corpora) -> None:
    a, b, c = corpora.paths
    spec: dict[str, Any] = {"per_split": [([a, b], [0.7, 0.3]), ([c], None), None]}
    base = build(**spec, sizes=[250, 20, 0])
    stock = build(**spec, sizes=[400, 20, 0], guard=False)
    assert common_prefix(base["train"], stock["train"]) < 10
    spec = {"per_split": [([a, b], [7, 3]), ([c], None), None]}
    longer = resumed(build, base, **spec, sizes=[400, 90, 0])
    for split in ("train", "valid"):
        assert longer[split][: len(base[split])] == base[split]
    assert longer["test"] is None


def test_generated_data(build: Run) -> None:
    spec: dict[str, Any] = {"dataset": "MockGPTDataset", "seq_length": 2048, "sizes": [90, 10, 10]}
    base = build(**spec)
    longer = resumed(build, base, **spec | {"sizes": [400, 10, 10]})
    assert longer["train"][: len(base["train"])] == base["train"]
    assert len(longer["train"]) >= 400


def test_virtual_pipeline_chunks_get_the_same(build: Run, corpora: Corpora) -> None:
    base = build(paths=corpora.paths, **BLEND, chunks=2)
    again = resumed(build, base, paths=corpora.paths, **BLEND, chunks=2, sizes=[700, 20, 20])
    assert again["chunks"][0] == again["chunks"][1]
    assert again["train"][: len(base["train"])] == base["train"]


def test_several_validation_sets(build: Run, corpora: Corpora) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

    if not hasattr(BlendedMegatronDatasetConfig, "multiple_validation_sets"):
        pytest.skip("this megatron-core has no multiple_validation_sets")
    a, b, c = corpora.paths
    spec: dict[str, Any] = {
        "per_split": [([a], None), ([b, c], None), None],
        "config": {"multiple_validation_sets": True},
    }
    base = build(**spec, sizes=[95, 20, 0])
    longer = resumed(build, base, **spec, sizes=[95, 200, 0])
    for before, after in zip(base["valid"], longer["valid"], strict=True):
        assert after[: len(before)] == before
        assert len(after) >= 200


def test_full_validation(build: Run, corpora: Corpora) -> None:
    a, b, _ = corpora.paths
    spec: dict[str, Any] = {"per_split": [([a], None), ([b], None), None], "config": {"full_validation": True}}
    base = build(**spec, sizes=[95, None, 0])
    again = resumed(build, base, **spec, sizes=[145, None, 0])
    assert again["valid"] == base["valid"]
    now_sized = resumed(build, base, **spec, sizes=[145, 30, 0])
    assert "the valid set is not pinned" in now_sized["output"]


def test_phases_pass_through(build: Run, corpora: Corpora) -> None:
    phases = {"args": {"phase_transition_iterations": [10]}}
    built = build(paths=corpora.paths, **BLEND, **phases)
    assert built["train"] == build(paths=corpora.paths, **BLEND, guard=False)["train"]
    assert built["payload"]["builders"] == []
    assert "NOT guarded" in built["output"]
