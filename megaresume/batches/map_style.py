"""`check_map_style`: a dataset must have items by number; for one without, says what to use instead.

For a streaming dataset of Hugging Face's `datasets`, the error includes the calls to write. `datasets` has no public
way to see the files of a stream and what was done to their rows, so our findings are only shown, never used to read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils.data

from megaresume.stream.errors import UsageError

#: the class of its streaming datasets.
_NAME = "datasets.iterable_dataset.IterableDataset"
#: how many names of files are shown.
_SHOWN = 3
#: names under which builders of `datasets` keep the files of a stream, best first.
_FILES = ("files", "original_files", "base_files")
#: builders whose files `megaresume prepare --index-only` leaves where they are.
_ROWS = ("parquet", "json", "arrow", "text")
#: class of an iterable -> the method that returns it, by which rows were changed.
_METHODS = {"MappedExamplesIterable": "map", "FilteredExamplesIterable": "filter"}


def check_map_style(dataset: Any, what: str, *, takes_others: bool = True) -> None:
    """Refuse a dataset whose items cannot be read by number.

    Args:
        dataset: what was given.
        what: it, for people: ``dataset 'web'``.
        takes_others: whether to name the calls that take a stream, or a loader with a state: not if the user's trainer
            takes neither.

    Raises:
        UsageError: a path, a loader, an IterableDataset, or an object without ``len(dataset)`` and ``dataset[i]``.
    """
    expected = "a map-style dataset: len(dataset), and dataset[i] for each i below it"
    if isinstance(dataset, str | bytes | os.PathLike):  # text has characters by number
        path = repr(os.fspath(dataset))
        streams = (
            f"megaresume.StreamLoader(megaresume.open_stream({path}), ...), or under DeepSpeed "
            f"megaresume.attach(engine, {path}), for a data.yaml; for other files, "
        )
        raise UsageError(
            f"{what} is a path",
            found=f"{path}, a path",
            expected=expected,
            action=f"{streams if takes_others else ''}the dataset that reads {'them' if takes_others else 'it'}",
        )
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_iterable and all(hasattr(type(dataset), member) for member in ("__len__", "__getitem__")):
        return
    of_files, instead = "", "use the map-style form of the same data"
    if is_streaming(dataset):
        of_files, calls = calls_instead(dataset, takes_streams=takes_others)
        instead = f"use {calls}"
    elif isinstance(dataset, torch.utils.data.DataLoader):
        instead = "pass its dataset: loader.dataset"
        if takes_others:
            instead = "pass its dataset: megaresume.DataLoader(loader.dataset, batch_size=...)"
    if takes_others:
        instead += "; or, under DeepSpeed, give its own loader, with state_dict and load_state_dict, to "
        instead += "megaresume.attach(engine, loader)"
    raise UsageError(
        f"{what} has no items by number",
        found=f"{type(dataset).__module__}.{type(dataset).__qualname__}{_form(dataset)}{of_files}",
        expected=expected,
        cause="what can only be read from its beginning has no position that a resume could return to",
        action=instead,
    )


def _form(dataset: object) -> str:
    """The kind of a dataset that can only be read in its own order."""
    if isinstance(dataset, torch.utils.data.DataLoader):
        return ", a loader"
    if isinstance(dataset, Iterator):
        return ", an iterator"
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset) or hasattr(type(dataset), "__iter__")
    return ", an IterableDataset" if is_iterable else ""


def is_streaming(dataset: object) -> bool:
    """Whether it is an `IterableDataset` of `datasets`."""
    return any(f"{kind.__module__}.{kind.__name__}" == _NAME for kind in type(dataset).__mro__)


def calls_instead(dataset: Any, *, takes_streams: bool) -> tuple[str, str]:
    """The files of a streaming dataset, and the calls that train on the same rows without streaming.

    Args:
        dataset: see `is_streaming`.
        takes_streams: whether to name streams of a data.yaml too.
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
    if builder in _ROWS and takes_streams:
        call += "; or, of text, leave the files where they are: megaresume prepare FILES --tokenizer MODEL --output "
        call += "corpora/train --index-only, and open_stream of a data.yaml with path: corpora/train"
    if builder == "webdataset" and takes_streams:
        call += "; or read the shards in place: a source of kind webdataset in data.yaml (docs/shards.md)"
    return f" of {len(files)} {builder} file{'s' * (len(files) > 1)}", call


def _chain(dataset: Any) -> Iterator[object]:
    """The chain of iterables that makes its rows, the last one first."""
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
