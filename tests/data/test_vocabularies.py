"""A blend of corpora whose tokens mean different texts is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.data.catalog import open_sources
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.stream.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers")

Corpus = Callable[[str, Path | None], None]
WORDS = {"[UNK]": 0, "one": 1, "two": 2, "<eos>": 3}


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """``corpus("web", tokenizer)`` prepares a corpus of that name; None: bytes."""
    texts = ["one two", "two", "one one", "two one"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(name: str, tokenizer: Path | None) -> None:
        prepare([tmp_path / "texts.jsonl"], tmp_path / name, PrepareOptions(tokenizer=tokenizer))

    return make


def tokenizer(path: Path, words: dict[str, int], *added: str) -> Path:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<eos>", *added])
    inner.save(str(path))
    return path


def opened(directory: Path, *names: str, split: str | None = None) -> list[str]:
    return list(open_sources({name: {"path": name} for name in names}, base_dir=directory, split=split))


def test_tokens_of_two_vocabularies(tmp_path: Path, corpus: Corpus) -> None:
    corpus("web", None)
    corpus("books", None)
    corpus("chat", tokenizer(tmp_path / "chat.json", WORDS))
    assert opened(tmp_path, "web", "books") == ["web", "books"]
    for split in (None, "50,50"):
        with pytest.raises(ConfigError, match="'web' and 'chat' were prepared with different tokenizers") as error:
            opened(tmp_path, "web", "books", "chat", split=split)
    assert error.value.found == "'web': bytes (257 tokens); 'chat': chat.json (4 tokens)"


def test_the_same_size_is_not_the_same_vocabulary(tmp_path: Path, corpus: Corpus) -> None:
    corpus("web", tokenizer(tmp_path / "web.json", WORDS))
    corpus("chat", tokenizer(tmp_path / "chat.json", WORDS | {"one": 2, "two": 1}))
    with pytest.raises(ConfigError, match="different tokenizers"):
        opened(tmp_path, "web", "chat")


def test_special_tokens_that_were_added_do_not_count(tmp_path: Path, corpus: Corpus) -> None:
    corpus("web", tokenizer(tmp_path / "web.json", WORDS))
    corpus("chat", tokenizer(tmp_path / "chat.json", WORDS, "<user>", "<assistant>"))
    assert opened(tmp_path, "web", "chat") == ["web", "chat"]


def test_a_corpus_that_does_not_say_is_not_compared(tmp_path: Path, corpus: Corpus) -> None:
    corpus("web", None)
    corpus("chat", tokenizer(tmp_path / "chat.json", WORDS))
    note = tmp_path / "chat.megaresume.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"tokenizer": None}))
    assert opened(tmp_path, "web", "chat") == ["web", "chat"]


def test_shards_and_text(tmp_path: Path, corpus: Corpus, pairs: Path) -> None:
    corpus("web", None)
    corpus("chat", tokenizer(tmp_path / "chat.json", WORDS))
    shards = {"kind": "webdataset", "index": str(pairs)}  # bytes, as web
    assert list(open_sources({"pairs": shards, "web": {"path": "web"}}, base_dir=tmp_path)) == ["pairs", "web"]
    with pytest.raises(ConfigError, match="'pairs' and 'chat' were prepared with different tokenizers"):
        open_sources({"pairs": shards, "chat": {"path": "chat"}}, base_dir=tmp_path)
