"""What must change the order is refused by name: what was recorded, what is found, the flag that restores it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaresume.hosts.megatron.guard import record
from megaresume.stream.errors import ConfigError, StateError
from tests.hosts.megatron.guard.conftest import Corpora, Run, write_corpus

WEIGHTS = [0.6, 0.3, 0.1]


@pytest.fixture
def base(build: Run, corpora: Corpora) -> dict[str, Any]:
    """A run that was recorded."""
    return build(paths=corpora.paths, weights=WEIGHTS)


def refused(build: Run, base: dict[str, Any], *words: str, **spec: Any) -> StateError:
    """Resuming like that is refused with all these words; accepting what it names is not."""
    with pytest.raises(StateError) as caught:
        build(**spec, loaded=base["payload"], samples=200)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    stock = build(**spec, guard=False)
    names = text.split("--megaresume-accept ")[1].split(" (")[0].split()
    accepted = build(**spec, loaded=base["payload"], samples=200, accept=names)
    assert accepted["train"] == stock["train"], "accepted: Megatron's own order"
    assert len(accepted["payload"]["accepted"]) >= 1
    again = build(**spec, loaded=accepted["payload"], samples=220)
    assert again["train"] == stock["train"], "and that is what is pinned from then on"
    assert again["payload"]["accepted"] == accepted["payload"]["accepted"]
    return caught.value


def test_a_weight(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    a, b, c = corpora.paths
    refused(
        build, base, "from sample 200 on: data-path", "weights 0.6 0.3 0.1", "weights 0.6 0.31 0.1",
        f"--data-path 0.6 {a} 0.3 {b} 0.1 {c}", paths=corpora.paths, weights=[0.6, 0.31, 0.1],
    )  # fmt: skip


def test_weights_left_out(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    refused(build, base, "weights 0.6 0.3 0.1", "by the lengths of the corpora", paths=corpora.paths)


def test_the_order_of_the_paths(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    a, b, c = corpora.paths
    refused(build, base, f"in the order {a} {b} {c}", f"in the order {b} {a} {c}", paths=[b, a, c], weights=WEIGHTS)


def test_a_corpus_more_and_another_corpus(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    a, b, c = corpora.paths
    corpora.write("d", 40, seed=9)
    refused(build, base, "3 corpora", "4: ", paths=[a, b, c, corpora.path("d")], weights=[*WEIGHTS, 0.1])
    refused(build, base, "data-path", "d with other lengths", paths=[a, b, corpora.path("d")], weights=WEIGHTS)


def test_the_seed(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    refused(
        build,
        base,
        "--seed 1234",
        "--seed 4321",
        "restore: --seed 1234",
        paths=corpora.paths,
        weights=WEIGHTS,
        seed=4321,
    )


def test_the_sequence_length(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    refused(build, base, "--seq-length 32", "--seq-length 64", paths=corpora.paths, weights=WEIGHTS, seq_length=64)


def test_the_split(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    refused(build, base, "--split 80,10,10", "--split 90,5,5", paths=corpora.paths, weights=WEIGHTS, split="90,5,5")


def test_the_split_spelled_differently(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    again = build(paths=corpora.paths, weights=WEIGHTS, split="8,1,1", loaded=base["payload"], samples=200)
    assert again["train"] == base["train"]


def test_paths_per_split(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    blend = (corpora.paths, WEIGHTS)
    refused(
        build, base, "the data was given by --data-path", "it is given by --train-data-path",
        per_split=[blend, blend, blend],
    )  # fmt: skip


def test_a_corpus_rewritten(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    corpora.write("b", 50, seed=77)
    refused(
        build, base, "on: corpus", "b with lengths of hash", "with other lengths",
        f"bring back the files of {corpora.path('b')}.bin/.idx", paths=corpora.paths, weights=WEIGHTS,
    )  # fmt: skip


def test_a_corpus_rewritten_with_the_same_lengths(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    import numpy as np

    lengths = np.fromfile(corpora.path("b") + ".idx", "<i4", 50, offset=34)
    write_corpus(Path(corpora.path("b")), lengths, seed=78)
    refused(build, base, "on: corpus", "with other tokens", paths=corpora.paths, weights=WEIGHTS)


def test_a_corpus_that_lost_documents(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    corpora.write("c", 20)
    refused(build, base, "c with 25 documents", "with 20", paths=corpora.paths, weights=WEIGHTS)


def test_the_tokenizer(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    refused(build, base, "tokenizer eod 0", "tokenizer eod 5", paths=corpora.paths, weights=WEIGHTS, eod=5)


def test_what_is_masked(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    refused(
        build, base, "leave out --eod-mask-loss", paths=corpora.paths, weights=WEIGHTS, config={"eod_mask_loss": True}
    )


def test_generated_data_instead(build: Run, base: dict[str, Any]) -> None:
    refused(
        build, base, "datasets of class GPTDataset", "of class MockGPTDataset", "--mock-data", dataset="MockGPTDataset",
        seq_length=4096, sizes=[20, 2, 2],
    )  # fmt: skip


def test_everything_is_named_at_once(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    refused(
        build,
        base,
        "on: seed, seq-length, data-path",
        paths=corpora.paths,
        weights=[0.5, 0.4, 0.1],
        seed=1,
        seq_length=64,
    )


def test_accepting_one_of_two_is_not_enough(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    with pytest.raises(StateError, match="seq-length"):
        build(
            paths=corpora.paths, weights=WEIGHTS, seed=1, seq_length=64, loaded=base["payload"], samples=200,
            accept=["seed"],
        )  # fmt: skip


def test_what_was_accepted_is_not_accepted_later(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    """The flag may stay in the launch script: it is bound to the position that the refusal named."""
    spec: dict[str, Any] = {"paths": corpora.paths, "weights": WEIGHTS, "accept": ["seed@200"]}
    accepted = build(**spec, seed=1, loaded=base["payload"], samples=200)
    assert build(**spec, seed=1, loaded=accepted["payload"], samples=240)["train"] == accepted["train"]
    with pytest.raises(StateError, match="seed"):
        build(**spec, seed=2, loaded=accepted["payload"], samples=240)


def test_another_validation_set_leaves_the_training_set_pinned(build: Run, corpora: Corpora) -> None:
    a, b, c = corpora.paths
    base = build(per_split=[([a, b], [0.7, 0.3]), ([c], None), None], sizes=[250, 20, 0])
    spec: dict[str, Any] = {"per_split": [([a, b], [0.7, 0.3]), ([b], None), None], "sizes": [400, 20, 0]}
    with pytest.raises(StateError, match="data-path"):
        build(**spec, loaded=base["payload"], samples=200)
    accepted = build(**spec, loaded=base["payload"], samples=200, accept=["data-path"])
    assert accepted["train"][: len(base["train"])] == base["train"]
    assert accepted["valid"] == build(**spec, guard=False)["valid"]
    again = build(**spec, loaded=accepted["payload"], samples=220)
    assert (again["train"], again["valid"]) == (accepted["train"], accepted["valid"])


def test_a_split_without_a_token_would_hang(build: Run, corpora: Corpora) -> None:
    with pytest.raises(ConfigError) as caught:
        build(paths=corpora.paths, weights=WEIGHTS, split="98,1,1")
    text = str(caught.value)
    assert f"the test set of {corpora.path('b')} has no tokens" in text
    assert "documents 50:50 of 50" in text
    assert "--split 0.98,0.01,0 does without a test set" in text
    advised = text.split("next action:")[1].split("--split ")[1].split()[0]
    assert build(paths=corpora.paths, weights=WEIGHTS, split=advised)["test"], "the advice works"


def test_a_cache_from_a_faulty_build(build: Run, base: dict[str, Any], corpora: Corpora, tmp_path: Path) -> None:
    """Neither the cache nor a new build is as recorded: refused with the array that differs."""
    record = base["payload"]
    record["builders"][0]["splits"][0]["components"][1]["built"]["arrays"]["shuffle_index"] = "0" * 16
    with pytest.raises(StateError) as caught:
        build(paths=corpora.paths, weights=WEIGHTS, loaded=record, samples=200)
    assert f"shuffle_index of {corpora.path('b')} (train) has the hash" in str(caught.value)


def test_a_record_that_cannot_be_read(build: Run, base: dict[str, Any], corpora: Corpora) -> None:
    record = dict(base["payload"])
    del record["builders"]
    with pytest.raises(StateError, match="lacks a field"):
        build(paths=corpora.paths, weights=WEIGHTS, loaded=record, samples=200)


def lines_of(path: Path, lines: int, tokens: int) -> list[list[int]]:
    """Write a JSON lines file of as many tokens a line, all lines different, and return the lines."""
    made = [[number, *range(1000, 999 + tokens)] for number in range(100, 100 + lines)]
    write_lines(path, made)
    return made


def write_lines(path: Path, lines: list[list[int]]) -> None:
    """Write a JSON lines file."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize("whole", [True, False])
def test_the_lines_of_a_file(build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """JSON lines: the file may grow and move, and nothing else. Files that are too large are compared by a sample."""
    if not whole:
        monkeypatch.setattr(record, "_WHOLE", 1 << 20)
    path, moved = tmp_path / "chat.jsonl", tmp_path / "moved.jsonl"
    lines = lines_of(path, 60, 8000)
    size = path.stat().st_size
    assert size > 2 << 20
    spec: dict[str, Any] = {"paths": [str(path)], "dataset": "OfLines", "split": "90,10,0", "sizes": [100, 5, 0]}
    base = build(**spec)
    assert build(**spec, loaded=base["payload"], samples=200)["train"] == base["train"]
    write_lines(path, [*lines, [1, 2], [3, 4]])
    grown = build(**spec, loaded=base["payload"], samples=200)
    assert grown["train"] == base["train"]
    assert build(**spec, loaded=grown["payload"], samples=220)["train"] == base["train"]
    write_lines(moved, lines)
    there = build(**spec | {"paths": [str(moved)]}, loaded=base["payload"], samples=200)
    assert there["train"] == base["train"]
    assert f"{moved} holds the recorded documents of {path}" in there["output"]

    recorded = f"the first {size} bytes of {path} with hash"
    restore = f"bring back the lines of {path} as they were; lines may be appended"
    write_lines(path, [*lines[30:], *lines[:30]])
    refused(build, base, "from sample 200 on: corpus", recorded, f"{path} with other bytes there", restore, **spec)
    write_lines(path, [*lines[:-2], [*lines[-2], 5], lines[-1]])
    refused(build, base, recorded, f"{path} with other bytes there", restore, **spec)
    if whole:  # one number of half a million, as long as before
        write_lines(path, [*lines[:30], [*lines[30][:40], 9999, *lines[30][41:]], *lines[31:]])
        assert path.stat().st_size == size
        refused(build, base, recorded, f"{path} with other bytes there", restore, **spec)
    write_lines(path, lines[:-1])
    refused(build, base, recorded, f"{path} with {path.stat().st_size} bytes", restore, **spec)
    write_lines(moved, lines[::-1])
    refused(
        build,
        base,
        recorded,
        f"{moved} with other bytes there",
        f"--data-path {path}",
        **spec | {"paths": [str(moved)]},
    )
