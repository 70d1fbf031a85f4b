"""A data.yaml: read once, whatever is asked of it; and an error for each mistake in the file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megaresume.batches.open import open_stream, open_validation
from megaresume.data.data_config import DataConfig
from megaresume.stream import yaml_text
from megaresume.stream.errors import ConfigError
from tests.corpora import simple_corpus


def test_it_is_read_once(tmp_path, monkeypatch):
    simple_corpus(tmp_path / "web", range(1, 101))
    simple_corpus(tmp_path / "wiki", range(1, 21))
    path = tmp_path / "data.yaml"
    path.write_text("seq_length: 16\nsources: {web: web}\nvalidation: {wiki: {sources: {wiki: wiki}}}\n")
    read = []
    parse = yaml_text.parse_yaml
    monkeypatch.setattr(yaml_text, "parse_yaml", lambda *given: read.append(given) or parse(*given))
    data = DataConfig.of(path)
    training = open_stream(data)
    assert list(open_validation(data, training)) == ["wiki"] and DataConfig.of(data) is data
    assert len(read) == 1


def test_augmentation_is_written_out(tmp_path):
    steps = {"kind": "webdataset", "augment": ["flip", {"crop": [0.5, 1]}]}
    config = {"seq_length": 16, "sources": {"pairs": steps, "mine": {"kind": "mine", "augment": 3}}}
    pairs, mine = DataConfig.of(config).stream_config().sources
    assert pairs.augment == ({"flip": {"p": 0.5}}, {"crop": {"scale": [0.5, 1.0], "p": 1.0}})
    assert mine.augment == () and mine.options == {"kind": "mine", "augment": 3}  # another kind, another meaning
    steps["augment"] = [{"flop": 1}]
    with pytest.raises(ConfigError, match=r"sources\.pairs\.augment\[0\]") as error:
        DataConfig.of(config).stream_config()
    assert error.value.cause == "did you mean 'flip'?"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not a data config"),
        (b"- 1", "is not a data config"),
        (b"{a", "is not YAML"),
        (b"\xff\xfea", "is not YAML"),
    ],
)
def test_bad_yaml(tmp_path, content, text):
    (tmp_path / "data.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        DataConfig.of(tmp_path / "data.yaml")


@pytest.mark.parametrize(
    "content",
    ["sources:\n  web: {path: a}\n  code: {path: b}\n  'web': {path: c}\n", "seed: 1\nseed: 2\n"],
)
def test_a_key_that_stands_there_twice(tmp_path, content):
    path = tmp_path / "data.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        DataConfig.of(path)
    key = "web" if "web" in content else "seed"
    assert f"the key '{key}' occurs twice" in str(error.value.found)


def test_merged_keys_may_be_given_again(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text("sources:\n  a: &a {path: x, weight: 1}\n  b: &b {<<: *a, weight: 2}\n  c: {<<: *b, weight: 3}\n")
    assert DataConfig.of(path).mapping["sources"]["c"] == {"path": "x", "weight": 3}


def test_missing_yaml(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        DataConfig.of(tmp_path / "data.yaml")


def test_a_loader_in_the_place_of_a_config_is_refused():
    """It is iterable, and never ends."""
    with pytest.raises(ConfigError, match=r"not a data config(.|\n)*found: *itertools\.count"):
        open_stream(itertools.count())


def test_a_name_that_json_escapes_in_two_halves(tmp_path: Path) -> None:
    path = tmp_path / "data.yaml"
    path.write_text('{"seed": 1, "seq_length": 8, "sources": {"\\ud83d\\ude00web": {"path": "a\\\\ud83d\\\\ude00"}}}')
    assert "\\ud83d\\ude00web" in path.read_text()
    (source,) = yaml_text.read_mapping(path, "a data config", "sources")["sources"].items()
    assert source == ("\U0001f600web", {"path": r"a\ud83d\ude00"})
