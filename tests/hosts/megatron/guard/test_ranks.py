"""Several ranks over gloo: all hold the same record, all get the same order, and one that fails fails them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hosts.megatron.guard.conftest import Corpora, Run, run_program
from tests.release import release

pytestmark = pytest.mark.process

WEIGHTS = [0.6, 0.3, 0.1]


@pytest.fixture
def spec(corpora: Corpora, tmp_path: Path) -> dict[str, Any]:
    """A blend with a shared index cache."""
    return {"paths": corpora.paths, "weights": WEIGHTS, "cache": str(tmp_path / "cache")}


def test_every_rank_rebuilds_prolongs_and_refuses(spec: dict[str, Any], tmp_path: Path) -> None:
    starts = [
        spec,
        spec | {"resume": True, "samples": 200, "sizes": [700, 20, 20], "weights": [6, 3, 1]},
        spec | {"resume": True, "samples": 300, "sizes": [900, 20, 20], "cache": str(tmp_path / "cold")},
        spec | {"resume": True, "samples": 300, "seed": 7},
        spec | {"resume": True, "samples": 300, "split": "98,1,1"},
    ]
    one, two = run_program(tmp_path, starts, ranks=2)
    for mine, theirs in zip(one[:3], two[:3], strict=True):
        assert "error" not in mine, mine
        assert (mine["train"], mine["valid"], mine["payload"]) == (theirs["train"], theirs["valid"], theirs["payload"])
    first, second, third = (start["train"] for start in one[:3])
    assert second[: len(first)] == first and third[: len(second)] == second
    assert len(third) >= 900
    assert one[1]["output"] and not two[1]["output"], "only one rank prints"
    assert [rank[3]["type"] for rank in (one, two)] == ["StateError"] * 2
    assert [rank[4]["type"] for rank in (one, two)] == ["ConfigError"] * 2
    assert one[3]["error"] == two[3]["error"] and one[4]["error"] == two[4]["error"]


def test_ranks_without_data_hold_the_record_too(spec: dict[str, Any], tmp_path: Path) -> None:
    """A pipeline stage in the middle builds nothing; the chunks of a virtual pipeline build here and there."""
    spec = spec | {"chunks": 2, "builds_on": [[0, 2], [1]]}
    starts = [spec, spec | {"resume": True, "samples": 200, "sizes": [700, 20, 20]}]
    ranks = run_program(tmp_path, starts, ranks=3)
    assert all("error" not in start for rank in ranks for start in rank), ranks
    for start in (0, 1):
        assert ranks[0][start]["payload"] == ranks[1][start]["payload"] == ranks[2][start]["payload"]
        first, second = ranks[0][start]["chunks"][0], ranks[1][start]["chunks"][1]
        assert first == second == ranks[2][start]["chunks"][0]
        assert ranks[1][start]["chunks"][0] is None and ranks[0][start]["chunks"][1] is None
    assert ranks[0][1]["train"][:303] == ranks[0][0]["train"]


@release(
    "two ranks, three times",
    "`::test_every_rank_rebuilds_prolongs_and_refuses`",
)
def test_nodes_with_other_caches(spec: dict[str, Any], corpora: Corpora, build: Run, tmp_path: Path) -> None:
    """Rank 1's own disk has an index from before the corpus grew. Stock Megatron would train on both."""
    plain = {"paths": spec["paths"], "weights": WEIGHTS}
    old = build(**plain, cache=str(tmp_path / "cache1"))
    corpora.write("a", 95)
    build(**plain, cache=str(tmp_path / "cache0"), guard=False)
    own = spec | {"cache_per_rank": True}
    ranks = run_program(
        tmp_path,
        [own, own | {"guard": False}, own | {"loaded": old["payload"], "samples": 100}],
        ranks=2,
        hosts=True,
    )
    assert [rank[0]["type"] for rank in ranks] == ["StateError"] * 2
    assert "the nodes have built different orders" in ranks[0][0]["error"]
    assert ranks[0][1]["train"] != ranks[1][1]["train"], "and so it would have trained"
    assert [rank[2].get("error") for rank in ranks] == [None, None], "with a record: rebuilt where both can read"
    assert ranks[0][2]["train"] == ranks[1][2]["train"] == old["train"]
