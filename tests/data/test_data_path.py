from __future__ import annotations

import itertools

import pytest

from megaresume.data.data_path import source_names, sources_from_data_path
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, CorpusError
from tests.corpora import simple_corpus


def test_weights_and_paths():
    sources = sources_from_data_path(["0.6", "corpora/web_text_document", "0.4", " corpora/code.bin "])
    assert sources == {
        "web_text_document": {"path": "corpora/web_text_document", "weight": "0.6"},
        "code": {"path": "corpora/code", "weight": "0.4"},
    }
    config = StreamConfig.from_dict({"seq_length": 8, "sources": sources})
    assert [s.weight for s in config.sources] == [3, 2]


def test_same_reading_as_megatron():
    utils = pytest.importorskip("megatron.core.datasets.utils")
    for words in (["a"], ["a", "b", "c"], ["a", "b"], ["30", "x/a", "70", "x/b"], ["0.5", "a"]):
        paths, weights = utils.get_blend_from_list(words)
        if weights is not None:
            sources = sources_from_data_path(words).values()
            assert [s["path"] for s in sources] == paths
            assert [float(s["weight"]) for s in sources] == weights
        elif len(paths) == 1:
            assert sources_from_data_path(words) == {"a": {"path": "a", "weight": 1}}
        else:
            with pytest.raises(CorpusError):  # taken as paths, whose sizes are needed
                sources_from_data_path(words)


def test_paths_only_are_weighted_by_size(tmp_path):
    simple_corpus(tmp_path / "a", [10] * 10)
    simple_corpus(tmp_path / "b", [1] * 9 + [100])
    sources = sources_from_data_path(["a", "b"], base_dir=tmp_path)
    assert {name: s["weight"] for name, s in sources.items()} == {"a": 100, "b": 109}
    sources = sources_from_data_path(["a", "b"], base_dir=tmp_path, split="90,10", part="train")
    assert {name: (s["weight"], s["split"]) for name, s in sources.items()} == {"a": (90, "90,10"), "b": (9, "90,10")}


@pytest.mark.parametrize(
    "words", [[], ["0.6"], ["0.6", "a", "0.4"], ["a", "0.6"], ["0.6", "a", "b"], ["1", "2"], ["0.6", "a", "b", "c"]]
)
def test_bad_words(words):
    with pytest.raises(ConfigError, match="--data-path cannot be read"):
        sources_from_data_path(words)


def test_names_do_not_depend_on_the_order():
    paths = ["/c/en/text", "/c/de/text", "/d/de/text", "/c/code", "code"]
    expected = {"/c/en/text": "en/text", "/c/de/text": "c/de/text", "/d/de/text": "d/de/text", "/c/code": "c/code"}
    for order in itertools.permutations(paths):
        names = dict(zip(order, source_names(order), strict=True))
        assert names == {**expected, "code": "code"}


def test_a_path_given_twice():
    assert source_names(["a", "b", "a"]) == ["a", "b", "a#2"]
