"""From arguments to streams: every way to name data, every conflict."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.hosts.megatron.streams import Streams, open_streams
from megaresume.stream.errors import ConfigError, MegaresumeError, UsageError
from megaresume.stream.stream import Stream


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("web", "code", "held_out")):
        kit.write_corpus(directory / name, kit.documents(seed, 2000))
    return directory


@pytest.fixture(autouse=True)
def in_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)  # relative paths are relative to where training was started


def text(stream: Stream | None, num: int = 30) -> list[tuple[int, ...]]:
    """(source, document, offset, length) of the first samples, flat."""
    assert stream is not None
    table = stream.plan(0, num).table
    return [tuple(row) for row in table[:, [0, 2, 3, 4]].tolist()]


def documents(stream: Stream | None) -> list[int]:
    assert stream is not None
    return [len(source) for source in stream.sources]


def opened(data_file: str | None = None, **changes: Any) -> Streams:
    return open_streams(kit.arguments(**changes), data_file)


def write_yaml(path: Path, **changes: Any) -> str:
    data = {
        "packing": "best_fit",
        "sources": {"web": {"path": "web", "weight": 0.7}, "code": {"path": "code", "weight": 0.3}},
    }
    path.write_text(yaml.safe_dump(data | changes, sort_keys=False))
    return str(path)


BLEND = ["0.7", "web", "0.3", "code"]


def test_every_way_to_give_the_blend_is_the_same(root: Path) -> None:
    (root / "args.txt").write_text("0.7 web\n0.3 code\n")
    given = [opened(data_path=BLEND), opened(data_args_path="args.txt"), opened(data_path=[" ".join(BLEND)])]
    given += [opened(data_path=["7", "web.bin", "3", "code.idx"])]
    same = write_yaml(root / "same.yaml", packing="split")
    given += [opened(same), opened(str((root / "same.yaml").resolve()))]
    for part in ("train", "valid", "test"):
        first, *others = [getattr(streams, part) for streams in given]
        assert first.config.packing.mode == "split" and first.config.seed == 1234 and first.config.seq_length == 64
        for other in others:
            assert text(other) == text(first) and documents(other) == documents(first)
    # 96.9 %, 3 %, 0.1 %: Megatron's default.
    assert [documents(getattr(given[0], part)) for part in ("train", "valid", "test")] == [
        [1938] * 2,
        [60] * 2,
        [2] * 2,
    ]


def test_split_is_megatrons(root: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    for split in ("969, 30, 1", "80,10,10", "98,1,1", "50,50"):
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        streams = opened(data_path=BLEND, split=None if split == "969, 30, 1" else split, eval_iters=2)
        for bounds, stream in zip(matrix, (streams.train, streams.valid, streams.test), strict=True):
            if bounds is None:
                assert stream is None
                continue
            assert stream is not None
            begin, end = (round(bound * 2000.0) for bound in bounds)
            assert documents(stream) == [end - begin] * 2
            assert [source.start for source in stream.sources] == [begin] * 2  # type: ignore[attr-defined]


def test_parts_of_their_own(root: Path) -> None:
    (root / "parts.json").write_text(json.dumps({"train": BLEND, "valid": "held_out", "test": None}))
    for streams in (
        opened(train_data_path=BLEND, valid_data_path=["held_out"]),
        opened(per_split_data_args_path="parts.json"),
        opened(
            train_data_path=BLEND, valid_data_path=["held_out"], split="969, 30, 1"
        ),  # the default of another parser
    ):
        assert documents(streams.train) == [2000, 2000] and documents(streams.valid) == [2000] and streams.test is None


def test_nothing_is_opened_that_is_not_evaluated(root: Path) -> None:
    streams = opened(data_path=["web"], split="99,1,0", eval_iters=0)
    assert streams.valid is None and streams.test is None
    streams = opened(data_path=["web"], split="99,1,0")
    assert streams.valid is not None and streams.test is None


def test_evaluation_never_ends_and_takes_the_sources_that_have_a_part(root: Path) -> None:
    sources = {
        "web": {"path": "web", "weight": 0.5, "split": "100,0,0"},
        "code": {"path": "code", "weight": 0.5, "max_epochs": 1, "on_exhausted": "stop"},
    }
    streams = opened(write_yaml(root / "own.yaml", sources=sources), split="90,10,0")
    assert [s.name for s in streams.train.config.sources] == ["web", "code"]
    assert documents(streams.train) == [2000, 1800] and documents(streams.valid) == [200] and streams.test is None
    assert streams.valid is not None and streams.valid.plan(9000, 9001)


def test_paths_in_a_data_config_start_at_it(root: Path, tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "far.yaml", sources={"web": os.path.relpath(root / "web", tmp_path)})
    assert documents(opened(file).train) == [1938]


CONFLICTS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("named twice", "ok", {"data_path": ["web"]}),
    ("named twice", "ok", {"data_args_path": "args.txt"}),
    ("more than one way", None, {"data_path": ["web"], "data_args_path": "args.txt"}),
    ("more than one way", None, {"data_path": ["web"], "valid_data_path": ["code"]}),
    ("more than one way", None, {"train_data_path": ["web"], "per_split_data_args_path": "parts.json"}),
    ("--split has no meaning", None, {"train_data_path": ["web"], "valid_data_path": ["code"], "split": "90,5,5"}),
    ("two seeds", "ok", {"seed": 1}),
    ("two sequence lengths", "ok", {"seq_length": 128}),
    ("no training data", None, {}),
    ("no training data", None, {"valid_data_path": ["web"]}),
    ("no validation data", None, {"data_path": ["web"], "split": "100,0,0"}),
    ("--sft with --data-path", None, {"sft": True, "data_path": ["web"]}),
    ("cannot be read", None, {"data_path": ["0.5", "web", "code"]}),
    ("cannot be read", None, {"data_args_path": "nowhere.txt"}),
    ("cannot be read", None, {"per_split_data_args_path": "args.txt"}),
    ("bad split", None, {"data_path": ["web"], "split": "abc"}),
]


@pytest.mark.parametrize(("headline", "data_file", "changes"), CONFLICTS, ids=lambda value: str(value)[:40])
def test_conflicts_are_errors(root: Path, headline: str, data_file: str | None, changes: dict[str, Any]) -> None:
    (root / "args.txt").write_text("0.7 web 0.3 code")
    (root / "parts.json").write_text(json.dumps({"train": "web"}))
    file = None if data_file is None else write_yaml(root / "ok.yaml", seed=1234, seq_length=64)
    with pytest.raises(MegaresumeError, match=headline) as error:
        opened(file, **changes)
    assert isinstance(error.value, UsageError | ConfigError)
    assert error.value.action


def test_what_is_said_twice_alike_is_fine(root: Path) -> None:
    file = write_yaml(root / "alike.yaml", seed=1234, seq_length=64)
    assert opened(file).train.config.seed == 1234


def test_an_older_megatron_evaluates_nothing(root: Path) -> None:
    """Before --multiple-validation-sets it skips evaluation where there is no data: so do we."""
    args = kit.arguments(data_path=["web"], split="100,0,0")
    del args.multiple_validation_sets
    assert open_streams(args, None).valid is None


def test_the_origin_opens_the_same_stream(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the data.yaml beside a checkpoint."""
    from megaresume.batches.open import open_stream

    train = opened(data_path=BLEND, split="80,10,10").train
    assert train.origin is not None
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(open_stream(train.origin).plan(0, 50).hashes, train.plan(0, 50).hashes)


def test_stages_change_the_training_alone(root: Path) -> None:
    """A declared change of the blend reaches training; validation and test stay what they were."""
    stages = [{"from_samples": 5, "weights": {"web": 0, "code": 1}}]
    plain, staged = opened(write_yaml(root / "plain.yaml")), opened(write_yaml(root / "staged.yaml", stages=stages))
    assert text(plain.train, 5) == text(staged.train, 5) and text(plain.train) != text(staged.train)
    assert text(plain.valid) == text(staged.valid) and text(plain.test) == text(staged.test)


@pytest.mark.parametrize("change", [{"seq_length": 4096}, {"packing": "split"}])
def test_a_declared_stage_of_another_shape_is_refused(root: Path, change: dict[str, Any]) -> None:
    stages = [{"from_samples": 5, "name": "long"} | change]
    with pytest.raises(UsageError, match="stage 'long' changes the shape of samples") as error:
        opened(write_yaml(root / "shape.yaml", stages=stages))
    assert "--megaresume-on-change stage" in str(error.value.action)
