from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from megaresume.data import catalog
from megaresume.data.catalog import open_sources, register_kind
from megaresume.data.data_config import DataConfig
from megaresume.data.held_out import Extent
from megaresume.data.indexed_documents import IndexedDocuments
from megaresume.data.python_source import PythonSource
from megaresume.data.split import IndexedSource
from megaresume.stream.errors import ConfigError, CorpusError
from tests.corpora import simple_corpus


class Numbers:
    """Document i holds i + start tokens."""

    def __init__(self, documents=5, start=0):
        self.documents, self.start = documents, start

    def __len__(self):
        return self.documents

    def length(self, i):
        return i + self.start

    def get(self, i):
        return np.arange(i + self.start)


@pytest.fixture
def data_yaml(tmp_path):
    (tmp_path / "corpora").mkdir()
    simple_corpus(tmp_path / "corpora" / "web_text_document", range(1, 101))
    simple_corpus(tmp_path / "corpora" / "code_text_document", [3, 4])
    path = tmp_path / "data.yaml"
    path.write_text(
        """
seq_length: 128
sources:
  web:  {path: corpora/web_text_document, weight: 0.6}
  code: {path: corpora/code_text_document.idx, kind: megatron, weight: 0.4}
"""
    )
    return path


def test_from_yaml_to_sources(data_yaml):
    named = DataConfig.of(data_yaml)
    sources = open_sources({s.name: s.options for s in named.stream_config().sources}, base_dir=named.directory)
    assert list(sources) == ["web", "code"]
    assert [len(s) for s in sources.values()] == [100, 2]


def test_split_of_the_flag_and_of_a_source(data_yaml):
    specs = {
        "web": {"path": "corpora/web_text_document"},
        "half": {"path": "corpora/web_text_document", "split": "1,1"},
    }
    sources = open_sources(specs, base_dir=data_yaml.parent, split="80,15,5", part="valid")
    assert [len(s) for s in sources.values()] == [15, 50]
    assert specs["half"]["split"] == "1,1"  # the config is not changed


def test_valid_without_a_split_is_refused(data_yaml):
    with pytest.raises(ConfigError, match="source 'web' has no valid part"):
        open_sources({"web": {"path": "corpora/web_text_document"}}, base_dir=data_yaml.parent, part="valid")


def test_environment_and_absolute_paths(data_yaml, monkeypatch):
    monkeypatch.setenv("CORPORA", str(data_yaml.parent / "corpora"))
    sources = open_sources({"web": {"path": "$CORPORA/web_text_document"}})
    assert isinstance(sources["web"], IndexedSource)


def test_the_home_of_a_user_who_is_not_known(data_yaml):
    specs = {"web": {"path": "~nobody-of-this-name/web_text_document"}}
    with pytest.raises(CorpusError, match="~nobody-of-this-name/web_text_document"):
        open_sources(specs, base_dir=data_yaml.parent)


def test_objects_by_name():
    sources = open_sources({"mine": {}, "split": {"split": "1,1"}}, objects={"mine": Numbers(), "split": Numbers(4)})
    assert isinstance(sources["mine"], PythonSource)
    assert [len(s) for s in sources.values()] == [5, 2]


def test_object_without_an_entry():
    with pytest.raises(ConfigError, match="which the data config does not have") as caught:
        open_sources({"mine": {}}, objects={"mime": Numbers()})
    assert caught.value.cause == "did you mean 'mine'?"


def test_factory(tmp_path, monkeypatch):
    (tmp_path / "my_corpus.py").write_text(
        "class Box:\n    def __init__(self, n): self.n = n\n    def __len__(self): return self.n\n"
        "    def length(self, i): return i\n    def get(self, i): return list(range(i))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_corpus", raising=False)
    sources = open_sources({"mine": {"kind": "python", "factory": "my_corpus:Box", "kwargs": {"n": 3}}})
    assert sources["mine"].lengths(np.arange(3)).tolist() == [0, 1, 2]
    for factory in ("my_corpus:Bix", "no_such_module:Box"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            open_sources({"mine": {"kind": "python", "factory": factory}})
    for factory in (None, "my_corpus", ":Box"):
        with pytest.raises(ConfigError, match="has no factory"):
            open_sources({"mine": {"kind": "python", "factory": factory}})


def test_registered_kind(tmp_path):
    def opener(options, name, base_dir):
        assert (name, base_dir) == ("mine", tmp_path)
        return Numbers(**options)

    register_kind("numbers-for-a-test", opener)
    register_kind("numbers-for-a-test", opener)
    sources = open_sources({"mine": {"kind": "numbers-for-a-test", "documents": 7}}, base_dir=tmp_path)
    assert len(sources["mine"]) == 7
    with pytest.raises(ConfigError, match="exists already"):
        register_kind("numbers-for-a-test", lambda options, name, base_dir: None)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"path": "corpora/web_text_documents"}, CorpusError, "web_text_documents.idx is missing"),
        ({"path": "corpora/web_text_document", "kind": "megatrom"}, ConfigError, "unknown kind of source 'web'"),
        ({"path": "corpora/web_text_document", "kind": ["x"]}, ConfigError, "unknown kind of source 'web'"),
        ({"path": "corpora/web_text_document", "wieght": 3}, ConfigError, "unknown key 'wieght' in source 'web'"),
        ({"path": "corpora/web_text_document", "split": "x"}, ConfigError, "bad split"),
        ({}, ConfigError, "source 'web' has no path"),
        ({"path": 3}, ConfigError, "source 'web' has no path"),
        ({"path": "a.shards.idx"}, ConfigError, "write index: a.shards.idx in place of path, and kind: webdataset"),
        ({"path": "a.shards.idx", "kind": "energon"}, ConfigError, "write index: a.shards.idx in place of path$"),
    ],
)
def test_bad_source(data_yaml, options, error, text):
    with pytest.raises(error, match=text):
        open_sources({"web": options}, base_dir=data_yaml.parent)


def test_bad_part(data_yaml):
    with pytest.raises(ConfigError, match="unknown part"):
        open_sources({}, part="validation")


def test_empty_corpus_is_refused(tmp_path):
    simple_corpus(tmp_path / "empty", [])
    with pytest.raises(ConfigError, match="source 'web' is empty"):
        open_sources({"web": {"path": "empty"}}, base_dir=tmp_path)


def test_one_corpus_under_two_names_is_named(data_yaml, caplog):
    corpora = data_yaml.parent / "corpora"
    (corpora / "link_document.idx").symlink_to("web_text_document.idx")
    (corpora / "link_document.bin").symlink_to("web_text_document.bin")
    web = {"path": "corpora/web_text_document"}
    for other in (web, {"path": "corpora/../corpora/web_text_document.bin"}, {"path": "corpora/link_document"}):
        caplog.clear()
        open_sources({"web": web, "again": other}, base_dir=data_yaml.parent)
        assert "sources 'web' and 'again' of the data config are one corpus" in caplog.text
    caplog.clear()
    open_sources({"web": web, "code": {"path": "corpora/code_text_document"}}, base_dir=data_yaml.parent)
    assert not caplog.text


def test_ten_thousand_sources_are_compared_by_their_corpora(caplog):
    """Each with those of the same corpus alone: all pairs of them took longer than to open them."""
    compared = 0

    class Counted(Extent):
        __slots__ = ()

        def shares(self, other):
            nonlocal compared
            compared += 1
            return super().shares(other)

    def extent(i):
        corpus = frozenset([("corpus", i % 5000)])
        return Counted(corpus=corpus, name=f"corpus {i % 5000}", start=0, stop=10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "own_extent", extent)
        catalog._warn_of_shared({f"s{i}": i for i in range(10_000)})
    assert compared == 5000
    said = [record.message for record in caplog.records if record.name == catalog.log.name]
    assert len(said) == 5000
    assert "sources 's0' and 's5000' of the data config are one corpus (corpus 0)" in said[0]


OPENS = """
import resource, sys
from megaresume.data.catalog import open_sources
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
opened = open_sources({f"s{i}": {"path": sys.argv[1], "split": None} for i in range(100)})
for source in opened.values():
    source.token_view
"""


@pytest.mark.process
def test_more_files_than_the_limit_that_may_be_raised(data_yaml):
    corpus = str(data_yaml.parent / "corpora" / "web_text_document")
    opens = [sys.executable, "-c", OPENS, corpus]
    subprocess.run([*opens, "2000"], check=True)
    forbidden = subprocess.run([*opens, "64"], stderr=subprocess.PIPE, text=True)
    assert forbidden.returncode != 0 and "raise the limit, as root" in forbidden.stderr


def test_an_index_that_memory_does_not_hold_is_read_page_by_page(data_yaml, monkeypatch):
    corpus = {"web": {"path": "corpora/web_text_document"}}
    advised = []
    monkeypatch.setattr(IndexedDocuments, "_advise", lambda self, how: advised.append(how))
    open_sources(corpus, base_dir=data_yaml.parent)
    assert advised == []
    known = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 0 if name == "SC_PHYS_PAGES" else known(name))
    web = open_sources(corpus, base_dir=data_yaml.parent)["web"]
    assert advised == ["MADV_RANDOM"]
    web.fingerprint(recompute=True)
    assert advised == ["MADV_RANDOM", "MADV_NORMAL", "MADV_RANDOM"]
