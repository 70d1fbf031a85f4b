"""The options of `megaresume.DataLoader`: checked, and made into the sources and the data config of a stream.

How many tokens each item has is a column, a list, or counted by a function. They are kept, if a directory is given:

    <directory>/<name>.<16 hex digits>.lengths.npy    int64[items], and after the array its checksum, 16 bytes

The digits are a hash of the number of items, of what 32 of them hold, and of the function's name, so that another
dataset has another file and is counted; of a column or a list, a hash of the lengths. A file that is damaged is written
again. Only what is read later shows an item that changed and is none of the 32: the reader refuses an item that is not
as long as it was counted.

A dataset must have items by number; for a streaming one of Hugging Face's `datasets` the refusal says what to write
instead. `datasets` shows the files of a stream, and what was done to their rows, in no public way, so nothing is read
by what is found there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import torch.utils.data
import xxhash

from megaresume.batches.items import (
    Int64Array,
    ItemSource,
    Measure,
    generators_kept,
    items_hash,
    reading_item,
    token_count,
    uncounted,
)
from megaresume.data.sidecar import written_atomically
from megaresume.stream.batches import Balance
from megaresume.stream.config import OnChange
from megaresume.stream.data_yaml import MODES, Append, BlendUnit
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.progress import progress
from megaresume.stream.schema import check_keys

log = logging.getLogger(__name__)

#: items that a worker reads at a time to count their tokens.
CHUNK = 256
#: name of the source, if only one dataset is given.
ONLY = "data"
#: The options of one dataset, as in a data.yaml.
OF_A_DATASET = ("weight", "max_epochs", "on_exhausted", "append", "shuffle", "was")
#: steps within which items are sorted by length, at most.
WINDOW = 50
#: options of torch's ``DataLoader`` that would be another order, and what stands in their place.
_REFUSED = {
    "sampler": "the order is the stream's: leave the sampler out; weigh datasets by {name: (dataset, weight)}",
    "batch_sampler": "the order is the stream's: leave it out, and pass batch_size",
    "generator": "the order follows from seed=",
    "in_order": "batches come in the order of the stream",
}


class ItemOptions(TypedDict, total=False):
    """The options of `megaresume.DataLoader` that decide the samples and their order. A host that makes the loader by
    itself takes them too."""

    append: Append | None
    on_change: OnChange
    seq_length: int | None
    packing: str | Mapping[str, Any]
    lengths: Any
    lengths_dir: str | Path | None
    blend: BlendUnit | None
    stages: Sequence[Mapping[str, Any]]
    skip: Any
    keyed: bool
    balance: Balance | None
    group_by_length: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The settings by which items become samples."""

    #: tokens of a sample; None if an item is a sample.
    seq_length: int | None
    #: ``packing`` of a data.yaml.
    how: str | Mapping[str, Any]
    #: items that are samples come in batches of similar lengths.
    groups: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """``packing`` of a data.yaml, as a mapping; its mode is ``best_fit`` if none is named."""
        return {"mode": "best_fit", **({"mode": self.how} if isinstance(self.how, str) else self.how)}

    @property
    def cuts(self) -> bool:
        """Whether items are cut."""
        mode = self.settings["mode"]  # as it was given: the stream's config refuses one that does not exist
        return self.seq_length is not None and any(traits.cuts for name, traits in MODES.items() if name == mode)


def named(dataset: Any) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Datasets, and what is said of each, by name.

    Raises:
        UsageError: no weights, or not map-style.
        ConfigError: an option that a dataset does not have.
    """
    if not isinstance(dataset, Mapping):
        check_map_style(dataset, ONLY)
        return {ONLY: (dataset, {"weight": 1})}
    pairs = {name: value for name, value in dataset.items() if isinstance(value, tuple) and len(value) == 2}
    if not dataset or len(pairs) != len(dataset):
        raise UsageError(
            "datasets without weights",
            found=", ".join(f"{name}: {type(value).__name__}" for name, value in dataset.items()) or "no dataset",
            expected="{name: (dataset, weight), ...}",
            action="give each its weight, as in {'web': (web, 3), 'code': (code, 1)}; or pass one dataset alone",
        )
    datasets: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for name, (one, said) in pairs.items():
        check_map_style(one, name)
        options = said if isinstance(said, Mapping) else {"weight": said}
        check_keys(options, OF_A_DATASET, f"dataset '{name}'")
        datasets[name] = one, options
    return datasets


def sources_of(
    datasets: Mapping[str, tuple[Any, Mapping[str, Any]]],
    lengths: Mapping[str, Any],
    packing: Packing,
    *,
    directory: Path | None,
    num_workers: int,
    keyed: bool,
) -> dict[str, ItemSource]:
    """The datasets as sources, with the lengths of their items if they are packed or grouped: see `lengths_of`."""
    sources = {}
    for name, (one, _) in datasets.items():
        known, kept, packed = None, None, packing.seq_length is not None
        if (packed or packing.groups) and len(one):
            known, kept = lengths_of(one, name, lengths[name], directory=directory, num_workers=num_workers)
        if packed and known is not None and (empty := int((known == 0).sum())):
            log.warning("megaresume: %d items of dataset '%s' have no token: they are never trained", empty, name)
        whole = packed and known is not None and not packing.cuts
        tokens, sizes = (known, None) if packed else (None, known)
        sources[name] = ItemSource(one, name, tokens, whole=whole, kept=kept, sizes=sizes, keyed=keyed)
    return sources


def windows_of(items: int, step: int) -> dict[str, int]:
    """The `GroupConfig` of a run that begins: items grouped by length as transformers' sampler does.

    Args:
        items: of the dataset.
        step: samples of a step.
    """
    return {"batch": step, "window": max(min(items // (4 * step), WINDOW), 1)}


def samples_of(
    sources: Mapping[str, ItemSource], packing: Packing, *, batch_size: int, dp_size: int, accumulation: int
) -> int:
    """How many samples one epoch of all datasets makes; about so many if they are packed.

    Args:
        sources: the datasets.
        packing: how their items become samples.
        batch_size, dp_size, accumulation: samples of a micro-batch, ranks, micro-batches of a step.

    Raises:
        UsageError: a step takes more.
    """
    size, what = sum(len(source) for source in sources.values()), "items"
    if packing.seq_length is not None:
        tokens = sum(int(source.tokens.sum()) for source in sources.values() if source.tokens is not None)
        size, what = -(-tokens // packing.seq_length), f"samples of {packing.seq_length} tokens"
    step = batch_size * dp_size * accumulation
    if step > size:
        raise UsageError(
            "a step is larger than the dataset",
            found=f"{step} {what} a step ({batch_size} * {dp_size} ranks * {accumulation} micro-batches), of {size}",
            expected=f"at most {size}",
            action="use a smaller batch_size, fewer ranks or fewer micro-batches a step",
        )
    return size


def config_of(
    datasets: Mapping[str, tuple[Any, Mapping[str, Any]]],
    packing: Packing,
    *,
    seed: int,
    blend: str | None,
    max_epochs: int | Mapping[str, int] | None,
    append: str | None,
    stages: Sequence[Mapping[str, Any]],
    keyed: bool,
    group: Mapping[str, int] | None,
) -> dict[str, Any]:
    """The data config of a stream of these datasets. ``group``: see `windows_of`; None if lengths do not count.

    Raises:
        UsageError: a stage that packs items of which nobody knows the lengths.
    """
    packed = packing.seq_length is not None
    for stage in stages:
        if not packed and {"seq_length", "packing"} & set(stage):
            raise UsageError(
                "a stage packs items that are not packed before",
                found=repr(stage),
                expected="a stage that changes weights alone",
                action="pass seq_length, and packing='none' for the time before the stage",
            )
    sources = {
        name: {
            "max_epochs": max_epochs.get(name) if isinstance(max_epochs, Mapping) else max_epochs,
            "append": append,
            "keyed": keyed,
            "group_by_length": group,
            **options,
        }
        for name, (_, options) in datasets.items()
    }
    return {
        "seed": seed,
        "seq_length": packing.seq_length if packed else 1,
        "packing": packing.settings if packed else "none",
        "blend": {"unit": blend or ("tokens" if packed else "documents")},
        "sources": sources,
        "stages": [dict(stage) for stage in stages],
    }


def count(name: str, value: int) -> int:
    """A whole number, at least 1; else a UsageError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"bad {name}", found=repr(value), expected="a whole number, at least 1", action=f"pass {name}=1, or more"
        )
    return value


def check_torch_options(options: Mapping[str, Any], *, shuffle: bool) -> None:
    """Refuse options of torch's ``DataLoader`` that would change the order."""
    for name, instead in _REFUSED.items():
        if options.get(name) is not None and not (name == "in_order" and options[name]):
            raise UsageError(
                f"{name} cannot be used with an exact stream",
                found=f"{name}={options[name]!r:.60}",
                expected=f"no {name}",
                action=instead,
            )
    if not shuffle:
        raise UsageError(
            "the stream is always shuffled",
            found="shuffle=False",
            expected="shuffle=True, the default",
            action="use torch.utils.data.DataLoader for data that is read once from front to back, as in validation",
        )


def check_packing(packing: Packing, lengths: Any, names: Sequence[str]) -> None:
    """Refuse lengths that nothing asks for, packing without lengths for each dataset, and unknown packing modes."""
    if packing.groups:
        _check_groups(packing, names)
    if packing.seq_length is None and ((lengths is not None and not packing.groups) or packing.how != "best_fit"):
        raise UsageError(
            "packing without the tokens of a sample",
            found=f"packing={packing.how!r}, lengths={lengths!r:.60}, seq_length=None",
            expected="seq_length=4096, for example",
            action="pass seq_length, or group_by_length=True for batches of similar lengths; or neither packing nor "
            "lengths",
        )
    if isinstance(lengths, Mapping) and set(lengths) != set(names):
        raise UsageError(
            "lengths are not those of the datasets",
            found=", ".join(map(str, lengths)) or "nothing",
            expected=", ".join(names),
            action="give lengths for every dataset, by its name; or one function or column for all",
        )


def _check_groups(packing: Packing, names: Sequence[str]) -> None:
    """Refuse to group items that need no padding, or of several datasets."""
    if packing.seq_length is not None:
        raise UsageError(
            "group_by_length cannot be used with seq_length",
            found=f"group_by_length, and seq_length={packing.seq_length}",
            expected="one of the two",
            cause="packed items come in rows without padding, whatever their lengths",
            action="leave group_by_length out (under a Trainer, train_sampling_strategy)",
        )
    if len(names) > 1:
        raise UsageError(
            "group_by_length cannot be used with several datasets",
            found=", ".join(names),
            expected="one dataset",
            cause="the items of each come in their own order, and are mixed item by item",
            action="torch.utils.data.ConcatDataset, or datasets.concatenate_datasets; or pack them: seq_length=4096",
        )


def check_balance(balance: Balance | None, packing: Packing) -> None:
    """Refuse to balance items of which the tokens are not known."""
    if balance is not None and packing.seq_length is None:
        raise UsageError(
            "ranks cannot be balanced by items of unknown length",
            found="balance, and no seq_length",
            expected="seq_length, and lengths if items have no input_ids",
            action="pass seq_length; with packing='none' every sample is one item",
        )


def check_packed_before(packing: Packing, before: int) -> None:
    """Refuse to pack items at a resume that were not packed, or the other way round: their lengths were not known.

    Args:
        packing: of today.
        before: tokens of a sample in the state; 1: an item is a sample.

    Raises:
        StateError: with what it was.
    """
    now, then = (length if length is not None and length > 1 else None for length in (packing.seq_length, before))
    if (now is None) != (then is None):
        raise StateError(
            "items were packed before" if now is None else "items were not packed before",
            found=f"seq_length={now}",
            expected=f"seq_length={then}",
            cause="seq_length was added or left out between save and resume",
            action=f"pass seq_length={then}" if then else "leave seq_length out; or start a new run",
        )


def lengths_of(
    dataset: Any, name: str, lengths: Any, *, directory: Path | None, num_workers: int
) -> tuple[Int64Array, Path | None]:
    """Measure the tokens of each item of a dataset: int64[items], and the file that keeps them, or None.

    Args:
        dataset: map-style.
        name: for errors and the file.
        lengths: name of a column, ``dataset[lengths]``; a list or array; a function of an item; None: `token_count`.
        directory: where they are kept; None: nowhere.
        num_workers: processes that read the items to be counted; 0: this one.

    Raises:
        UsageError: no such column, or not one whole number for each item.
        CorpusError: an item of which the tokens cannot be counted.
    """
    path: Path | None = None
    if isinstance(lengths, str):
        lengths = _column(dataset, name, lengths)
    elif lengths is None or callable(lengths):
        lengths, path = _counted(dataset, name, lengths or token_count, directory, num_workers)
    found = np.asarray(lengths)
    if found.shape != (len(dataset),) or found.dtype.kind not in "iu" or found.min() < 0:
        raise UsageError(
            f"these are not the lengths of dataset '{name}'",
            found=f"{found.dtype}{list(found.shape)}" + (f", the least {found.min()}" if found.size else ""),
            expected=f"{len(dataset)} whole numbers, one for each item, at least 0",
            action="correct lengths=",
        )
    found = np.ascontiguousarray(found, np.int64)
    if directory is not None and path is None:
        path = _kept_path(directory, name, found.tobytes())
        path = path if _read_kept(path, len(found)) is not None else _keep(path, name, found)
    return found, path


def _column(dataset: Any, name: str, column: str) -> Any:
    try:
        return list(dataset[column])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UsageError(
            f"dataset '{name}' has no column of lengths",
            found=f"dataset[{column!r}]: {type(error).__name__}: {error}",
            expected="one number for each item",
            action="lengths=<name of a column, a list, or a function of an item>",
        ) from error


def _counted(
    dataset: Any, name: str, measure: Measure, directory: Path | None, num_workers: int
) -> tuple[Int64Array, Path | None]:
    path = None if directory is None else _kept_path(directory, name, _kept_key(dataset, name, measure))
    if path is not None and (known := _read_kept(path, len(dataset))) is not None:
        return known, path
    counted = _count(dataset, name, measure, num_workers)
    if path is None:
        log.info("megaresume: lengths of '%s' were counted; with lengths_dir= they would be kept", name)
        return counted, None
    return counted, _keep(path, name, counted)


def _keep(path: Path, name: str, lengths: Int64Array) -> Path | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(path) as file:
            np.save(file, lengths)
            file.write(xxhash.xxh3_128_digest(lengths.data))
    except OSError as error:
        log.warning("megaresume: lengths of '%s' could not be kept: %s", name, error)
        return None
    return path


def _kept_path(directory: Path, name: str, key: bytes) -> Path:
    return directory / f"{name}.{xxhash.xxh3_64_hexdigest(key)}.lengths.npy"


def _kept_key(dataset: Any, name: str, measure: Measure) -> bytes:
    function = f"{getattr(measure, '__module__', '')}.{getattr(measure, '__qualname__', type(measure).__qualname__)}"
    return f"{len(dataset)} {items_hash(dataset, name, len(dataset))} {function}".encode()


def _read_kept(path: Path, items: int) -> Int64Array | None:
    try:
        with open(path, "rb") as file:
            known = np.load(file, allow_pickle=False)
            checksum = file.read()
    except (OSError, ValueError, EOFError):
        return None
    # A length that is damaged would be believed: an item of 0 tokens is never trained, and never read to be compared.
    is_whole = known.shape == (items,) and known.dtype == np.int64
    return known if is_whole and checksum == xxhash.xxh3_128_digest(known.data) else None


def _count(dataset: Any, name: str, measure: Measure, num_workers: int) -> Int64Array:
    reader = torch.utils.data.DataLoader(
        _Measured(dataset, name, measure),
        batch_size=CHUNK,
        num_workers=num_workers,
        collate_fn=list,
        generator=torch.Generator(),
    )
    counts: list[int] = []
    with generators_kept(), progress(f"lengths of {name}", len(dataset), "items") as bar:
        for some in reader:
            counts += some
            bar.update(len(some))
    return np.array(counts, np.int64)


class _Measured(torch.utils.data.Dataset[int]):
    """The lengths of a dataset's items."""

    def __init__(self, dataset: Any, name: str, measure: Measure) -> None:
        self._dataset, self._name, self._measure = dataset, name, measure

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> int:
        with reading_item(self._name, i):
            item = self._dataset[i]
        try:
            return int(self._measure(item))
        except (TypeError, KeyError) as error:
            raise uncounted(self._name, i, item, error) from error


#: names of files that are shown.
_SHOWN = 3
#: names under which builders of `datasets` keep the files of a stream, the better one first.
_FILES = ("files", "original_files", "base_files")
#: builders whose files `megaresume prepare --index-only` leaves where they are.
_ROWS = ("parquet", "json", "arrow", "text")
#: The method that made rows what they are, by the class that it returns.
_METHODS = {"MappedExamplesIterable": "map", "FilteredExamplesIterable": "filter"}


def check_map_style(dataset: Any, name: str) -> None:
    """Refuse a dataset whose items cannot be read by number.

    Raises:
        UsageError: a path, a loader, an IterableDataset, or an object without ``len(dataset)`` and ``dataset[i]``.
    """
    expected = "a map-style dataset: len(dataset), and dataset[i] for each i below it"
    if isinstance(dataset, str | bytes | os.PathLike):  # text has items by number: its characters
        path = repr(os.fspath(dataset))
        raise UsageError(
            f"dataset '{name}' is a path",
            found=f"{path}, a path",
            expected=expected,
            action=f"megaresume.StreamLoader(megaresume.open_stream({path}), ...), or under DeepSpeed "
            f"megaresume.attach(engine, {path}), for a data.yaml; for other files, the dataset that reads them",
        )
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_iterable and all(hasattr(type(dataset), member) for member in ("__len__", "__getitem__")):
        return
    of_files, instead = "", "use the map-style form of the same data"
    if is_streaming(dataset):
        of_files, calls = calls_instead(dataset)
        instead = f"use {calls}"
    elif isinstance(dataset, torch.utils.data.DataLoader):
        instead = "pass its dataset: megaresume.DataLoader(loader.dataset, batch_size=...)"
    raise UsageError(
        f"dataset '{name}' has no items by number",
        found=f"{type(dataset).__module__}.{type(dataset).__qualname__}{_form(dataset)}{of_files}",
        expected=expected,
        cause="what can only be read from its beginning has no position that a resume could return to",
        action=f"{instead}; or, under DeepSpeed, give its own loader, with state_dict and load_state_dict, to "
        "megaresume.attach(engine, loader)",
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


_NAME = "datasets.iterable_dataset.IterableDataset"


def calls_instead(dataset: Any) -> tuple[str, str]:
    """The files of a streaming dataset, and the calls that train on the same rows without streaming.

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
    """The iterables that make its rows, the last one first."""
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
