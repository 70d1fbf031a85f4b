"""Whether the sources of a blend were made with one vocabulary: a token has to mean the same text in all of them."""

from __future__ import annotations

from collections.abc import Mapping

from megaresume.corpora.base import Source
from megaresume.corpora.index import IndexedDocuments
from megaresume.corpora.split import RangeSource
from megaresume.stream.errors import ConfigError


def check_vocabularies(sources: Mapping[str, Source]) -> None:
    """Refuse a blend of tokens of several vocabularies.

    Compared are the vocabularies of the tokenizers that `megaresume prepare` recorded. Special tokens that were added
    to one of them, as to a chat model's, do not count. Corpora of other programs and Python objects do not say.

    Args:
        sources: by name, as `open_sources` returns them.

    Raises:
        ConfigError: two vocabularies differ.
    """
    if len(sources) < 2:
        return
    known = {name: found for name, source in sources.items() if (found := _vocabulary(source)) is not None}
    first = next(iter(known), "")
    for name, (vocabulary, tokenizer) in known.items():
        if vocabulary != known[first][0]:
            raise ConfigError(
                f"sources '{first}' and '{name}' were prepared with different tokenizers",
                found=f"'{first}': {known[first][1]}; '{name}': {tokenizer}",
                expected="one vocabulary: in a blend the same token means the same text everywhere",
                cause="megaresume prepare ran without --tokenizer, or with another model's, for one of them",
                action=f"prepare '{name}' or '{first}' again, with the tokenizer of the other",
            )


def _vocabulary(source: Source) -> tuple[str, str] | None:
    """The hash of a source's vocabulary and, for people, its tokenizer; None: nobody knows."""
    while isinstance(source, RangeSource):
        source = source.source
    if isinstance(source, IndexedDocuments):
        tokenizer = source.tokenizer
        if tokenizer is None or "vocabulary" not in tokenizer:
            return None
        return str(tokenizer["vocabulary"]), f"{tokenizer.get('name')} ({tokenizer.get('vocab_size'):,} tokens)"
    return _of_shards(source)


def _of_shards(source: Source) -> tuple[str, str] | None:
    from megaresume.corpora.prepare.tokenizers import packed_vocabulary
    from megaresume.shards.source import ShardSource

    if not isinstance(source, ShardSource):
        return None
    packed = source.index.header["encoder"]["spec"]["tokenizer"]
    return packed_vocabulary(packed["content"]), str(packed["name"])
