"""Whether a dataset has items by number; and what to write instead of a streaming one of Hugging Face's `datasets`.

`datasets` shows the files of a stream, and what was done to their rows, in no public way, so nothing is read by what is
found here: it only makes the refusal say which call to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils.data

from megaresume.stream.errors import UsageError

#: names of files that are shown.
_SHOWN = 3
#: names under which builders of `datasets` keep the files of a stream, the better one first.
_FILES = ("files", "original_files", "base_files")
#: builders whose files `megaresume prepare --index-only` leaves where they are.
_ROWS = ("parquet", "json", "arrow", "text")
#: what was done to rows, by the class that does it.
_METHODS = {"MappedExamplesIterable": "map", "FilteredExamplesIterable": "filter"}


def check_map_style(dataset: Any, name: str) -> None:
    """Refuse what has no items by number.

    Raises:
        UsageError: an IterableDataset, or an object without ``len(dataset)`` and ``dataset[i]``.
    """
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_iterable and all(hasattr(type(dataset), member) for member in ("__len__", "__getitem__")):
        return
    of_files, instead = calls_instead(dataset) if is_streaming(dataset) else ("", "the map-style form of the same data")
    raise UsageError(
        f"dataset '{name}' has no items by number",
        found=f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        + (", an IterableDataset" if is_iterable or hasattr(type(dataset), "__iter__") else "")
        + of_files,
        expected="a map-style dataset: len(dataset), and dataset[i] for each i below it",
        cause="an IterableDataset can only be read from its beginning, so no position of it can be returned to",
        action=f"use {instead}; or, under DeepSpeed, give its own loader, with state_dict and load_state_dict, to "
        "megaresume.attach(engine, loader)",
    )


def is_streaming(dataset: object) -> bool:
    """Whether it is an `IterableDataset` of `datasets`."""
    return any(f"{kind.__module__}.{kind.__name__}" == _NAME for kind in type(dataset).__mro__)


_NAME = "datasets.iterable_dataset.IterableDataset"


def calls_instead(dataset: Any) -> tuple[str, str]:
    """What a stream is of, and the calls that train on the same rows.

    Args:
        dataset: see `is_streaming`.
    """
    chain = list(_chain(dataset))
    files = next((found for one in reversed(chain) if (found := _files(getattr(one, "kwargs", None)))), [])
    builder = getattr(getattr(dataset, "info", None), "builder_name", None)
    if not files or not builder:
        return "", "datasets.load_dataset without streaming=True; of a generator, datasets.Dataset.from_generator"
    names = [repr(name) for name in files[:_SHOWN]] + ["..."] * (len(files) > _SHOWN)
    split = f", split={str(dataset.split)!r}" if getattr(dataset, "split", None) else ""
    call = f"datasets.load_dataset({builder!r}, data_files=[{', '.join(names)}]{split}), without streaming=True"
    methods = [_METHODS[name] for one in reversed(chain) if (name := type(one).__name__) in _METHODS]
    if methods:
        call += f", and after it the same {' and '.join(f'.{name}()' for name in dict.fromkeys(methods))}"
    call += ": its rows are on the disk, and not in memory"
    if builder in _ROWS:
        call += "; or, of text, leave the files where they are: megaresume prepare FILES --tokenizer MODEL --output "
        call += "corpora/train --index-only, and open_stream of a data.yaml with path: corpora/train"
    if builder == "webdataset":
        call += "; or read the shards in place: a source of kind webdataset in data.yaml (docs/shards.md)"
    return f" of {len(files)} {builder} file{'s' * (len(files) > 1)}", call


def _chain(dataset: Any) -> Iterator[object]:
    """What makes its rows, the last one first."""
    one = getattr(dataset, "_ex_iterable", None)
    while one is not None:
        yield one
        one = getattr(one, "ex_iterable", None)


def _files(words: object) -> list[str]:
    if not isinstance(words, Mapping):
        return []
    for name in _FILES:
        found = words.get(name)
        if isinstance(found, list | tuple) and found and all(isinstance(one, str) for one in found):
            return list(found)
    return []
