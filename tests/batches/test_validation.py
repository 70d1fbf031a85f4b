"""Validation sets: the same documents and samples whatever becomes of the training, and none that is trained on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megaresume.batches.open import open_stream, open_validation
from megaresume.data.held_out import extent_of
from megaresume.stream.errors import ConfigError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from tests.cluster.training.conftest import write_corpus

BEGIN: dict[str, Any] = {
    "seed": 5,
    "seq_length": 64,
    "packing": "best_fit",
    "sources": {"web": {"path": "web", "weight": 0.7}, "code": {"path": "code", "weight": 0.3}},
    "validation": {
        "held_out": {"part": "valid"},
        "test": {"part": "test"},
        "wiki": {"sources": {"wiki": "wiki"}},
        "both": {"sources": {"wiki": "wiki", "web": {"path": "web", "split": "8,1,1", "weight": 3}}, "packing": "none"},
    },
}
SPLIT = "8,1,1"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for seed, (name, documents) in enumerate({"web": 403, "code": 201, "wiki": 90}.items()):
        write_corpus(tmp_path / name, documents=documents, seed=seed)
    return tmp_path


def write(directory: Path, config: dict[str, Any], **changes: Any) -> Path:
    path = directory / "data.yaml"
    path.write_text(yaml.safe_dump(config | changes, sort_keys=False))
    return path


def digests(sets: dict[str, Stream]) -> dict[str, str]:
    return {name: stream.digest_at(50) for name, stream in sets.items()}


def documents(stream: Stream, samples: int) -> dict[object, set[int]]:
    """The documents of these samples, by corpus, by their number in the whole corpus."""
    table = stream.plan(0, samples).table
    found: dict[object, set[int]] = {}
    for i, source in enumerate(stream.sources):
        extent = extent_of(source)
        ids = set((table[table[:, 0] == i, 2] + extent.start).tolist())
        found.setdefault(extent.corpus, set()).update(ids)
    return found


@pytest.mark.parametrize("split", ["969,30,1", "8,1,1", "98,1,1", "60,20,20"])
def test_held_out_documents_are_never_trained_on(directory: Path, split: str) -> None:
    config = BEGIN | {
        "sources": {n: s | {"split": split} for n, s in BEGIN["sources"].items()},
        "validation": {"held_out": {"part": "valid"}, "own": {"sources": {"web": {"path": "web", "split": split}}}},
        "stages": [
            {"from_samples": 60, "weights": {"web": 1, "code": 9}, "packing": "split"},
            {"from_samples": 150, "weights": {"web": 9, "code": 1}, "seq_length": 256},
        ],
    }
    path = write(directory, config)
    training = open_stream(path)
    trained = documents(training, 600)
    # Every document that may be trained on was, or the comparison would prove little.
    for source in training.sources:
        extent = extent_of(source)
        assert trained[extent.corpus] == set(range(extent.start, extent.stop))
    for name, stream in open_validation(path, training).items():
        held_out = documents(stream, 60)
        for corpus, ids in held_out.items():
            assert ids and not ids & trained[corpus], name
    test = open_stream(path, part="test") if split != "969,30,1" else None  # a thousandth of these has no document
    for corpus, ids in documents(test, 60).items() if test else ():
        assert ids and not ids & trained[corpus]


def test_they_stay_put(directory: Path) -> None:
    """Over a change of everything that may change at a resume."""
    path = write(directory, BEGIN)
    training = open_stream(path, split=SPLIT)
    before = open_validation(path, training, split=SPLIT)
    assert list(before) == ["held_out", "test", "wiki", "both"]
    assert [s.config.packing.mode for s in before.values()] == ["best_fit", "best_fit", "best_fit", "none"]
    expected = digests(before)
    assert len(set(expected.values())) == 4
    state = training.state_at(40, batches=[(0, 8)])
    sources = {"code": {"path": "code", "weight": 5}, "wiki2": {"path": "code", "weight": 0}} | {
        "web": {"path": "web", "weight": 1, "max_epochs": 3}
    }
    changes = {"sources": sources, "seq_length": 128, "packing": "split", "blend": {"unit": "documents"}}
    path = write(
        directory, BEGIN, **changes, stages=[{"from_samples": 50, "weights": {"web": 1, "code": 0, "wiki2": 1}}]
    )
    changed = open_stream(path, split=SPLIT, state=state, on_change="stage")
    assert changed.config_at(45).seq_length == 128
    assert digests(open_validation(path, changed, split=SPLIT)) == expected
    # The samples, not only their names.
    again = open_validation(path, changed, split=SPLIT)["held_out"]
    assert np.array_equal(again.plan(0, 50).table[:, 2:], before["held_out"].plan(0, 50).table[:, 2:])
    # Without the state, which says how the run began, they would have moved.
    fresh = digests(open_validation(path, open_stream(path, split=SPLIT), split=SPLIT))
    assert fresh["held_out"] != expected["held_out"] and fresh["wiki"] != expected["wiki"]


def test_without_sets_there_is_one(directory: Path) -> None:
    config = {key: value for key, value in BEGIN.items() if key != "validation"}
    path = write(directory, config)
    training = open_stream(path, split=SPLIT)
    (name, stream), *more = open_validation(path, training, split=SPLIT).items()
    assert name == "valid" and not more
    assert stream.digest_at(50) == open_stream(path, split=SPLIT, part="valid").digest_at(50)
    words = ["0.7", str(directory / "web"), "0.3", str(directory / "code")]
    training = open_stream(words, split=SPLIT, seq_length=64)
    assert list(open_validation(words, training, split=SPLIT, seq_length=64)) == ["valid"]


def test_the_sets_are_no_part_of_the_training(directory: Path) -> None:
    path = write(directory, BEGIN)
    config = {key: value for key, value in BEGIN.items() if key != "validation"}
    with_sets = open_stream(path, split=SPLIT)
    without = open_stream(config, base_dir=directory, split=SPLIT)
    assert with_sets.state_at(30).to_dict() == without.state_at(30).to_dict()
    assert open_stream(BEGIN, base_dir=directory, split=SPLIT).digest_at(30) == without.digest_at(30)


@pytest.mark.parametrize("link", [False, True])
def test_an_overlap_is_refused_with_both_ranges(directory: Path, link: bool) -> None:
    name = "web"
    if link:
        name = "linked"
        for suffix in (".bin", ".idx"):
            os.symlink(directory / f"web{suffix}", directory / f"linked{suffix}")
    sets = {"late": {"sources": {"late": {"path": name, "split": "7,3"}}}}
    path = write(directory, BEGIN, validation=sets)
    training = open_stream(path, split="8,2")
    with pytest.raises(ConfigError, match="validation set 'late' holds documents that are trained on") as error:
        open_validation(path, training, split="8,2")
    assert f"documents 282 to 402 of {directory / name}" in str(error.value.found)
    assert f"source 'web' of the training: documents 0 to 321 of {directory / 'web'}" in str(error.value.found)
    sets["late"]["overlap"] = "allow"
    assert list(open_validation(write(directory, BEGIN, validation=sets), training, split="8,2")) == ["late"]
    # Right behind what is trained on.
    sets = {"late": {"sources": {"late": {"path": name, "split": "8,2"}}}}
    assert list(open_validation(write(directory, BEGIN, validation=sets), training, split="8,2")) == ["late"]


HELD_OUT = {
    "the same documents": {"sources": {"late": {"path": "code", "split": "8,2"}}, "part": "train"},
    "of a copy": {"sources": {"late": {"path": "elsewhere", "split": "8,2"}}, "part": "train"},
    "by another split": {"sources": {"late": {"path": "code", "split": "7,3"}}},
    "the whole corpus": {"sources": {"late": {"path": "code"}}},
    "a copy's valid part": {"sources": {"late": {"path": "elsewhere", "split": "1,199"}}},
}


@pytest.mark.parametrize("how", HELD_OUT)
@pytest.mark.parametrize("restored", [True, False])
def test_a_source_that_was_removed_was_trained_on_all_the_same(directory: Path, how: str, restored: bool) -> None:
    _copy(directory, "code")
    common = {"seed": 5, "seq_length": 64, "packing": "none"}
    path = write(directory, common, sources=BEGIN["sources"])
    state = open_stream(path, split="8,2").state_at(40, batches=[(0, 8)])
    never = write(directory, common, sources=BEGIN["sources"] | {"code": {"path": "code", "weight": 0}})
    never_drawn = open_stream(never, split="8,2").state_at(40, batches=[(0, 8)])

    def opened(held_out: dict[str, Any], state: StreamState) -> list[str]:
        path = write(directory, common, sources={"web": {"path": "web"}}, validation={"late": held_out})
        training = open_stream(path, split="8,2", state=state if restored else None, on_change="stage")
        return list(open_validation(path, training, split="8,2", state=state))

    with pytest.raises(ConfigError, match="validation set 'late' holds documents that were trained on") as error:
        opened(HELD_OUT[how], state)
    assert "those of source 'code' of the training, by their contents" in str(error.value.found)
    assert opened(HELD_OUT[how] | {"overlap": "allow"}, state) == opened(HELD_OUT[how], never_drawn) == ["late"]
    # The other documents of the corpus.
    assert opened({"sources": {"late": {"path": "code", "split": "8,2"}}}, state) == ["late"]


def _copy(directory: Path, name: str) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(directory / f"{name}{suffix}", directory / f"elsewhere{suffix}")


def test_a_copy_of_what_is_trained_on_is_refused(directory: Path) -> None:
    _copy(directory, "web")
    sets = {"late": {"sources": {"late": {"path": "elsewhere", "split": "1,9"}}}}
    path = write(directory, BEGIN, validation=sets)
    training = open_stream(path, split=SPLIT)
    with pytest.raises(ConfigError, match="validation set 'late' holds documents that were trained on"):
        open_validation(path, training, split=SPLIT)
    sets["late"]["overlap"] = "allow"
    assert list(open_validation(write(directory, BEGIN, validation=sets), training, split=SPLIT)) == ["late"]


def test_one_corpus_twice_in_the_training_leaks_into_its_valid_part(directory: Path) -> None:
    sources = {"web": {"path": "web", "split": "8,2"}, "again": {"path": "web", "split": "9,1"}}
    path = write(directory, {key: BEGIN[key] for key in ("seq_length", "packing")}, sources=sources)
    with pytest.raises(ConfigError, match="'valid' holds documents that are trained on"):
        open_validation(path, open_stream(path))


def test_a_source_that_is_measured_may_not_go(directory: Path) -> None:
    path = write(directory, BEGIN, validation={"held_out": {"part": "valid"}})
    state = open_stream(path, split=SPLIT).state_at(0, batches=[(0, 8)])
    path = write(directory, BEGIN, validation={"held_out": {"part": "valid"}}, sources={"web": {"path": "web"}})
    changed = open_stream(path, split=SPLIT, state=state, on_change="stage")
    with pytest.raises(ConfigError, match="lacks sources that validation measures"):
        open_validation(path, changed, split=SPLIT)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({}, "not a mapping of sets"),
        (["wiki"], "not a mapping of sets"),
        ({"a|b": {"part": "valid"}}, "bad name"),
        ({"a": {"weight": 3}}, "unknown key 'weight' in validation.a"),
        ({"a": {"part": "valid", "wieght": 3}}, "unknown key 'wieght'"),
        ({"a": {"part": "valid", "overlap": "maybe"}}, "bad value of validation.a.overlap"),
        ({"a": {}}, "validation.a does not say what it holds"),
        ({"a": {"part": "train"}}, "no such part"),
        ({"a": {"sources": {}}}, "no source"),
    ],
)
def test_bad_sets(directory: Path, sets: Any, words: str) -> None:
    path = write(directory, BEGIN, validation=sets)
    with pytest.raises(ConfigError) as error:
        open_validation(path, open_stream(path, split=SPLIT), split=SPLIT)
    assert words in str(error.value)
