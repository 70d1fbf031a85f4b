"""Opens the sources that a data config names: name -> ``{path, kind, split, ...}`` to name -> source.

    kind        options
    megatron    path (prefix, with or without .bin or .idx; relative to the data config); the default. For a corpus
                without a .bin: inputs (directory or URL of its raw files, if it differs from the one in the index)
    python      factory ("package.module:callable"), kwargs (mapping); or an object passed by name
    webdataset  index (``.shards.idx``), path (tar shards, if they are not where the index says), on_fault, too_long,
                max_tokens, augment, encoder: see `megaresume.data.shard_options`
    image_folder  index, path (JSON lines) and image_folder (their images), if they are not where the index says, and
                as webdataset
    energon     path (a directory with .nv-meta), index, split_part, and as webdataset; it has its own split
    items       items (number), contents, lengths (a file), keyed, group_by_length: a dataset that only exists in the
                training program, for trace and verify

Every kind takes ``split`` ("969,30,1"). Further kinds: `register_kind`.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaresume.data.held_out import Extent, own_extent, whole_of
from megaresume.data.indexed_documents import IndexedDocuments
from megaresume.data.inputs import expanded
from megaresume.data.python_source import ItemNumbers, as_source
from megaresume.data.record_index import SUFFIX
from megaresume.data.shard_options import open_energon, open_image_folder, open_webdataset
from megaresume.data.shard_source import ShardSource
from megaresume.data.source import Source
from megaresume.data.split import PARTS, Part, RangeSource, open_corpus, range_of, split_part
from megaresume.encoding.text.tokenizers import packed_vocabulary
from megaresume.files import allow_files
from megaresume.stream.data_yaml import SOURCE_KEYS
from megaresume.stream.errors import ConfigError, near
from megaresume.stream.schema import check_keys

log = logging.getLogger(__name__)

#: options that are paths, of all kinds.
PATHS = ("path", "index", "encoder", "inputs", "image_folder")
#: files that a corpus keeps open: its .idx and its .bin.
HELD_OPEN = 2
#: keys of a source of any kind.
OF_EVERY_KIND = ("kind", "split", *SOURCE_KEYS)
#: options of a source (without kind and split), its name, the directory that paths are relative to -> the source.
Opener = Callable[[Mapping[str, Any], str, Path], object]


def open_sources(
    specs: Mapping[str, Mapping[str, Any]],
    *,
    base_dir: str | Path = ".",
    split: str | None = None,
    part: Part = "train",
    objects: Mapping[str, object] | None = None,
) -> dict[str, Source]:
    """Open every source, in the order of the config.

    Args:
        specs: name -> options; of a `StreamConfig`: ``{s.name: s.options for s in config.sources}``.
        base_dir: the directory of the data.yaml; relative paths start there.
        split: ``--split``, for sources without a split of their own.
        part: train, valid or test. Without any split, train is the whole corpus and the others do not exist.
        objects: sources as Python objects, by name; they need no entry other than the name in the config.

    Raises:
        ConfigError: an unknown kind or option, a missing option, a bad split, an empty part; different tokenizers.
        CorpusError: files missing or damaged.
        SetupError: files that cannot be opened.
    """
    if part not in PARTS:
        raise ConfigError.unknown("part of a split", part, PARTS, action="pass part='train', for example")
    objects = dict(objects or {})
    for name in objects:
        if name not in specs:
            raise ConfigError(
                f"an object was given for source '{name}', which the data config does not have",
                found=repr(name),
                expected=f"one of {', '.join(specs) or 'no source at all'}",
                cause=near(name, specs),
                action="add the source to the data config or correct the name",
            )
    allow_files(HELD_OPEN * len(specs))
    opened = {name: _open(name, dict(options), Path(base_dir), split, part, objects) for name, options in specs.items()}
    _read_as_needed(opened)
    _check_vocabularies(opened)
    if part == "train" and os.environ.get("RANK", "0") == "0":
        _warn_of_shared(opened)
    return opened


def register_kind(kind: str, opener: Opener) -> None:
    """Make ``kind: KIND`` known in data.yaml.

    Args:
        kind: the word in data.yaml.
        opener: called with (options without kind and split, name of the source, base directory); returns a source,
            or an object that `PythonSource` accepts.

    Raises:
        ConfigError: the kind exists with another opener.
    """
    if _KINDS.setdefault(kind, opener) is not opener:
        raise ConfigError(
            f"kind '{kind}' exists already",
            found=f"{_KINDS[kind]!r}",
            expected="an unused name",
            action="register the kind under another name",
        )


def _open(
    name: str, options: dict[str, Any], base_dir: Path, split: str | None, part: Part, objects: Mapping[str, object]
) -> Source:
    own_split = options.pop("split", None)
    if own_split is not None:
        split = str(own_split)
    kind = options.pop("kind", "python" if name in objects else "megatron")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError.unknown(
            f"kind of source '{name}'",
            kind,
            sorted(_KINDS),
            action="correct the kind, or register it: megaresume.data.catalog.register_kind",
        )
    if (path := str(options.get("path", ""))).endswith(SUFFIX):
        raise ConfigError(
            f"source '{name}' names an index as its data",
            found=f"path: {path}",
            expected=f"the data as path, and its {SUFFIX} as index",
            action=f"write index: {path} in place of path"
            + (", and kind: webdataset beside it" if kind == "megatron" else ""),
        )
    thing = objects[name] if name in objects else _KINDS[kind](options, name, base_dir)
    source = as_source(thing, name)
    parts = getattr(source, "parts", None)
    if parts is not None and own_split is None:  # it is split by shards
        return _own_part(source, parts, name, part)
    if split is not None:
        return split_part(source, split, part)
    if part != "train":
        raise ConfigError(
            f"source '{name}' has no {part} part",
            found="no split",
            expected="shares of train, valid and test",
            action="pass --split 969,30,1 or give the source a split in data.yaml",
        )
    if len(source) == 0:
        raise ConfigError(
            f"source '{name}' is empty",
            found="0 documents",
            expected="at least one document",
            action="remove the source, or build its corpus again",
        )
    return source


def _own_part(source: Source, parts: Mapping[str, tuple[int, int]], name: str, part: Part) -> Source:
    first, stop = parts.get(part, (0, 0))
    if first == stop:
        raise ConfigError(
            f"source '{name}' has no {part} part",
            found=f"{', '.join(f'{p} of {b - a} documents' for p, (a, b) in parts.items())}, by its own split",
            expected=f"a {part} part with at least one document",
            action=f"leave '{name}' out of the {part} data, or give it a split of documents: split: 969,30,1",
        )
    return source if (first, stop) == (0, len(source)) else range_of(source, first, stop)


def _open_megatron(options: Mapping[str, Any], name: str, base_dir: Path) -> object:
    check_keys(options, ("path", "inputs"), f"source '{name}'", OF_EVERY_KIND)
    path, inputs = options.get("path"), options.get("inputs")
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ConfigError(
            f"source '{name}' has no path",
            found=repr(path),
            expected="path: the common part of the .bin and the .idx",
            action=f"add path to source '{name}'",
        )
    if inputs is not None and "://" not in str(inputs):
        inputs = base_dir / expanded(str(inputs))
    return open_corpus(base_dir / expanded(path), inputs=None if inputs is None else str(inputs))


def located(options: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Options of a source with absolute paths, so that they work from any directory; URLs are unchanged."""

    def absolute(path: Any) -> Any:
        if isinstance(path, list | tuple):
            return [absolute(one) for one in path]
        if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path):
            return path
        return str((directory / expanded(path)).resolve())

    return {key: absolute(value) if key in PATHS else value for key, value in options.items()}


def _open_python(options: Mapping[str, Any], name: str, base_dir: Path) -> object:
    check_keys(options, ("factory", "kwargs"), f"source '{name}'", OF_EVERY_KIND)
    factory, kwargs = options.get("factory"), options.get("kwargs") or {}
    module, _, attribute = str(factory or "").partition(":")
    if not module or not attribute or not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"source '{name}' has no factory",
            found=f"factory {factory!r}, kwargs {kwargs!r}",
            expected="factory: package.module:callable, and kwargs: a mapping",
            action=f"correct source '{name}', or pass the object itself",
        )
    try:
        function = pkgutil.resolve_name(str(factory))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the factory of source '{name}' cannot be imported",
            found=str(error),
            expected=f"a callable {attribute!r} in module {module!r}",
            cause="a wrong name, or a module that is not on PYTHONPATH",
            action="correct factory, or set PYTHONPATH",
        ) from error
    return function(**kwargs)


def _open_items(options: Mapping[str, Any], name: str, base_dir: Path) -> object:
    check_keys(options, ("items", "contents", "lengths", "keyed", "group_by_length"), f"source '{name}'", OF_EVERY_KIND)
    lengths = options.get("lengths")
    if isinstance(lengths, str):
        lengths = base_dir / expanded(lengths)
    grouped = options.get("group_by_length") is not None
    return ItemNumbers(name, options.get("items"), options.get("contents"), lengths, grouped=grouped)


def _read_as_needed(sources: Mapping[str, Source]) -> None:
    """Turn off the kernel's read-ahead for indexes larger than memory: the planner looks lengths up in any order.

    For a small index, read-ahead fills the memory sooner; for a large one, the extra pages are dropped before they are
    used.
    """
    roots = {id(root): root for source in sources.values() if isinstance(root := whole_of(source)[0], IndexedDocuments)}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(root.index_bytes for root in roots.values()) > memory // 2:
        for root in roots.values():
            root.read_page_by_page()


def _check_vocabularies(sources: Mapping[str, Source]) -> None:
    """Refuse to blend tokens of several vocabularies.

    Compares the vocabularies of the tokenizers that `megaresume prepare` recorded. Special tokens added to one of them,
    as to a chat model's, do not count. For corpora of other programs and Python objects, it is unknown.

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


def _warn_of_shared(sources: Mapping[str, Source]) -> None:
    """Warn if two sources share documents of one corpus: it may be intended, or a copied path."""
    seen: dict[object, list[tuple[str, Extent]]] = {}
    for name, source in sources.items():
        extent = own_extent(source)
        # By corpus, as comparing all pairs of ten thousand sources would take longer than opening them.
        others = {other: before for corpus in extent.corpus for other, before in seen.get(corpus, ())}
        for other, before in others.items():
            if extent.shares(before):
                log.warning(
                    "megaresume: sources '%s' and '%s' of the data config are one corpus (%s): its documents are "
                    "trained on by both; if that is not meant, correct the path of one of them",
                    other,
                    name,
                    before.name,
                )
        for corpus in extent.corpus:
            seen.setdefault(corpus, []).append((name, extent))


def _vocabulary(source: Source) -> tuple[str, str] | None:
    """The hash of a source's vocabulary and, for people, its tokenizer; None if unknown."""
    while isinstance(source, RangeSource):
        source = source.source
    if isinstance(source, IndexedDocuments):
        tokenizer = source.tokenizer
        if tokenizer is None or "vocabulary" not in tokenizer:
            return None
        return str(tokenizer["vocabulary"]), f"{tokenizer.get('name')} ({tokenizer.get('vocab_size'):,} tokens)"
    if not isinstance(source, ShardSource):
        return None
    packed = source.index.header["encoder"]["spec"]["tokenizer"]
    return packed_vocabulary(packed["content"]), str(packed["name"])


_KINDS: dict[str, Opener] = {
    "megatron": _open_megatron,
    "python": _open_python,
    "webdataset": open_webdataset,
    "image_folder": open_image_folder,
    "energon": open_energon,
    "items": _open_items,
}
