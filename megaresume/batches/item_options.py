"""The options of `megaresume.DataLoader`: checked, and turned into the sources and data config of a stream."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from megaresume.batches.item_lengths import lengths_of
from megaresume.batches.items import ItemSource
from megaresume.batches.map_style import check_map_style
from megaresume.stream.batches import Balance
from megaresume.stream.config import OnChange
from megaresume.stream.data_yaml import MODES, Append, BlendUnit
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.schema import check_keys

log = logging.getLogger(__name__)

#: name of the source, if only one dataset is given.
ONLY = "data"
#: The options of one dataset, as in a data.yaml.
OF_A_DATASET = ("weight", "max_epochs", "on_exhausted", "append", "shuffle", "was")
#: the most steps within which items are sorted by length.
WINDOW = 50
#: a hash of items, as an error names it.
_HASH = re.compile("[0-9a-f]{16}")
#: options of torch's ``DataLoader`` that would change the order, and their replacements.
_REFUSED = {
    "sampler": "the order is the stream's: leave the sampler out; weigh datasets by {name: (dataset, weight)}",
    "batch_sampler": "the order is the stream's: leave it out, and pass batch_size",
    "generator": "the order follows from seed=",
    "in_order": "batches come in the order of the stream",
}


class ItemOptions(TypedDict, total=False):
    """The options of `megaresume.DataLoader` that decide the samples and their order. Hosts that make the loader take
    them too."""

    append: Append | None
    on_change: OnChange
    contents: str | Mapping[str, str] | None
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
    """How items become samples."""

    #: tokens of a sample; None if an item is a sample.
    seq_length: int | None
    #: ``packing`` of a data.yaml.
    how: str | Mapping[str, Any]
    #: batches hold items of similar lengths, each a sample.
    groups: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """``packing`` of a data.yaml, as a mapping; its mode is ``best_fit`` if none is named."""
        return {"mode": "best_fit", **({"mode": self.how} if isinstance(self.how, str) else self.how)}

    @property
    def cuts(self) -> bool:
        """Whether items are cut."""
        mode = self.settings["mode"]  # as given: the stream's config refuses an unknown mode
        return self.seq_length is not None and any(traits.cuts for name, traits in MODES.items() if name == mode)


def named(dataset: Any) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Datasets and their options, by name.

    Raises:
        UsageError: no weights, or not map-style.
        ConfigError: an unknown option of a dataset.
    """
    if not isinstance(dataset, Mapping) or _has_items_by_number(dataset):
        check_map_style(dataset, f"dataset '{ONLY}'")
        return {ONLY: (dataset, {"weight": 1})}
    pairs = {name: value for name, value in dataset.items() if isinstance(value, tuple) and len(value) == 2}
    if len(dataset) == 0 or len(pairs) != len(dataset):
        raise UsageError(
            "datasets without weights",
            found=", ".join(f"{name}: {type(value).__name__}" for name, value in dataset.items()) or "no dataset",
            expected="{name: (dataset, weight), ...}",
            action="give each its weight, as in {'web': (web, 3), 'code': (code, 1)}; or pass one dataset alone",
        )
    datasets: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for name, (one, said) in pairs.items():
        check_map_style(one, f"dataset '{name}'")
        options = said if isinstance(said, Mapping) else {"weight": said}
        check_keys(options, OF_A_DATASET, f"dataset '{name}'")
        datasets[name] = one, options
    return datasets


def _has_items_by_number(dataset: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a dataset by itself, as a TensorDict is: it has items by number too."""
    if isinstance(dataset, dict):  # whose keys may be numbers, and a defaultdict would make them
        return False
    try:
        dataset[0]
    except Exception:  # noqa: BLE001 (it is a class of another library)
        return False
    return True


def by_name(given: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """An option of each dataset, if it is given for all of them or by name."""
    return given if isinstance(given, Mapping) else dict.fromkeys(names, given)


def sources_of(
    datasets: Mapping[str, tuple[Any, Mapping[str, Any]]],
    lengths: Mapping[str, Any],
    packing: Packing,
    *,
    directory: Path | None,
    num_workers: int,
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
        sources[name] = ItemSource(one, name, tokens, whole=whole, kept=kept, sizes=sizes)
    return sources


def check_contents(contents: Any, names: Sequence[str]) -> None:
    """Refuse ``contents=`` that is not the hash of a dataset's items, or is for a dataset that is not there."""
    for name, one in by_name(contents, names).items():
        if name not in names:
            raise UsageError.unknown("dataset in contents", name, names, action="name the dataset as the loader does")
        if one is not None and not (isinstance(one, str) and _HASH.fullmatch(one)):
            raise UsageError(
                "contents is not a hash",
                found=f"contents={contents!r:.200}",
                expected="16 hexadecimal digits, or {name: these} for some of the datasets",
                action="leave it out: if items have changed since the state was saved, the error names their hash",
            )


def accept(contents: str | Mapping[str, str] | None, sources: Mapping[str, ItemSource]) -> None:
    """Let the datasets have changed to these contents: see `ItemSource.accepted`."""
    accepted = by_name(contents, sources)
    for source in sources.values():
        source.accepted, source.is_one_of_several = accepted, len(sources) > 1


def windows_of(items: int, step: int) -> dict[str, int]:
    """The `GroupConfig` of a new run: groups items by length as transformers' sampler does.

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
        UsageError: one step needs more.
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
        UsageError: a stage that packs items of unknown lengths.
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
            "max_epochs": by_name(max_epochs, datasets).get(name),
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
    """Refuse lengths that are not used, packing without lengths for each dataset, and unknown packing modes."""
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
    """Refuse to balance items whose tokens are not counted."""
    if balance is not None and packing.seq_length is None:
        raise UsageError(
            "ranks cannot be balanced by items of unknown length",
            found="balance, and no seq_length",
            expected="seq_length, and lengths if items have no input_ids",
            action="pass seq_length; with packing='none' every sample is one item",
        )


def check_packed_before(packing: Packing, before: int) -> None:
    """Refuse a resume that switches packing on or off: the lengths were not known.

    Args:
        packing: the current one.
        before: tokens of a sample in the state; 1: an item is a sample.

    Raises:
        StateError: saying which it was.
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
