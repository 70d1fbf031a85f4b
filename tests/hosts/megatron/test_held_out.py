"""Validation and test data of a Megatron run: as the run began, and nothing that is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megaresume.hosts.megatron.streams import open_streams
from megaresume.stream.errors import ConfigError, UsageError
from tests.hosts.megatron.stream_kit import arguments, documents, write_corpus

SOURCES = {"web": {"path": "web", "weight": 7}, "code": {"path": "code", "weight": 3}, "small": {"path": "small"}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for seed, (name, number) in enumerate({"web": 300, "code": 200, "small": 50, "wiki": 80}.items()):
        write_corpus(tmp_path / name, documents(seed, number))
    return tmp_path


def write(directory: Path, sources: dict[str, dict[str, object]], **more: object) -> str:
    path = directory / "data.yaml"
    path.write_text(yaml.safe_dump({"sources": sources, **more}, sort_keys=False))
    return str(path)


def test_a_changed_blend_moves_neither_valid_nor_test(directory: Path) -> None:
    """Also where a source has no valid part, and another one counts its epochs."""
    sources = SOURCES | {"small": {"path": "small", "split": "1,0,0"}, "web": SOURCES["web"] | {"max_epochs": 1}}
    args = arguments(split="8,1,1")
    began = open_streams(args, write(directory, sources))
    state = began.train.state_at(16, batches=[(0, 8)])
    changed = sources | {"code": {"path": "code", "weight": 90}, "wiki": {"path": "wiki"}}
    file = write(directory, changed, packing="best_fit")
    went_on = open_streams(args, file, "stage", state)
    fresh = open_streams(args, file)
    for part in ("valid", "test"):
        before, after, moved = (getattr(streams, part).digest_at(200) for streams in (began, went_on, fresh))
        assert before == after != moved


def test_weights_that_stand_before_paths_are_as_the_run_began(directory: Path) -> None:
    words = ["0.7", str(directory / "web"), "0.3", str(directory / "code")]
    args = arguments(split="8,1,1", data_path=words)
    began = open_streams(args, None)
    state = began.train.state_at(16, batches=[(0, 8)])
    args.data_path = ["0.1", words[1], "0.9", words[3]]
    assert open_streams(args, None, "stage", state).valid.digest_at(50) == began.valid.digest_at(50)
    # Without weights, the documents of the part weigh: the same with a state and without.
    args.data_path = [words[1], words[3]]
    began = open_streams(args, None)
    state = began.train.state_at(16, batches=[(0, 8)])
    assert open_streams(args, None, "refuse", state).valid.digest_at(50) == began.valid.digest_at(50)


def test_one_declared_set(directory: Path) -> None:
    args = arguments(split="8,1,1")
    sets = {"wiki": {"sources": {"wiki": {"path": "wiki"}}}}
    streams = open_streams(args, write(directory, SOURCES, validation=sets))
    assert [source.name for source in streams.valid.config.sources] == ["wiki"] and streams.test is None
    assert [source.name for source in streams.train.config.sources] == ["web", "code", "small"]
    with pytest.raises(UsageError, match="Megatron evaluates one validation set"):
        open_streams(args, write(directory, SOURCES, validation=sets | {"held_out": {"part": "valid"}}))


def test_a_leak_is_refused(directory: Path) -> None:
    leaks = {"wiki": {"sources": {"all": {"path": "web"}}}}
    with pytest.raises(ConfigError, match="holds documents that are trained on"):
        open_streams(arguments(split="8,1,1"), write(directory, SOURCES, validation=leaks))
    twice = SOURCES | {"again": {"path": "web", "split": "1"}}
    with pytest.raises(ConfigError, match="'valid' holds documents that are trained on"):
        open_streams(arguments(split="8,1,1"), write(directory, twice))
    args = arguments(train_data_path=[str(directory / "web")], valid_data_path=[str(directory / "web")])
    assert open_streams(args, None).valid is not None  # named as such by its own flag
