"""Compare the record with what is asked for now: what changed, by name, with the flag that restores it.

Also describes the record, for ``megaresume inspect``.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaresume.checkpoint.records.envelope import DataState
from megaresume.hosts.megatron.guard.pinned import extendable
from megaresume.hosts.megatron.guard.record import (
    FLAGS,
    SPLITS,
    Blend,
    BuilderRecord,
    ComponentRecord,
    Corpus,
    OrderRecord,
    Request,
    contents_of,
)
from megaresume.stream.errors import StateError

#: Weights count as equal if they agree this closely after normalization.
_SAME_WEIGHT = 1e-9
#: Flags that name the corpora, per split.
_PATH_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")
#: How many corpora a message names.
_SPELLED = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Something that changes the order or the samples."""

    #: The name for --megaresume-accept.
    name: str
    recorded: str
    found: str
    #: The flag that restores what was recorded.
    restore: str
    #: The only split affected; None: all.
    split: int | None = None


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The result of a comparison. The same on every rank once it has been sent to them."""

    differences: list[Difference] = field(default_factory=list)
    #: Harmless changes, in words.
    notes: list[str] = field(default_factory=list)


def refuse(differences: Sequence[Difference], samples: int) -> StateError:
    """The error for differences that were not accepted."""
    names = list(dict.fromkeys(d.name for d in differences))
    # Bound to the position, so that a flag left in a launch script accepts nothing later.
    accept = " ".join(f"{name}@{samples}" for name in names)
    return StateError(
        f"this would change the order of Megatron's datasets from sample {samples} on: {', '.join(names)}",
        found="; ".join(d.found for d in differences),
        expected="; ".join(d.recorded for d in differences),
        cause="flags or files changed since the checkpoint was saved; without a guard, samples would silently be "
        "repeated and skipped",
        action="restore: "
        + "; ".join(dict.fromkeys(d.restore for d in differences))
        + f". Or, if it is meant: --megaresume-accept {accept} "
        "(Megatron's new order from here on; recorded in the checkpoints permanently)",
    )


def compare(record: BuilderRecord, request: Request) -> Comparison:
    """Compare settings, blends and corpora. Call it on one rank, as it reads the indexes of the corpora.

    Raises:
        CorpusError: an .idx is damaged.
    """
    found = Comparison()
    found.differences += _settings(record, request)
    old_kind, new_kind = _kind(record), _kind(request)
    if old_kind != new_kind:
        found.differences.append(
            Difference(
                name="data-path",
                recorded=f"the data was given by {old_kind}",
                found=f"it is given by {new_kind}",
                restore=_spell(record),
            )
        )
    elif record.blend is not None and request.blend is not None:
        _blend(found, record, request, record.blend, request.blend, None)
    elif record.blend_per_split is not None and request.blend_per_split is not None:
        for split, (old, new) in enumerate(zip(record.blend_per_split, request.blend_per_split, strict=True)):
            if old is not None and new is not None:
                _blend(found, record, request, old, new, split)
            elif old is not None and record.splits[split] is not None:
                found.differences.append(
                    Difference(
                        name="data-path",
                        recorded=f"a {SPLITS[split]} set",
                        found=f"no {SPLITS[split]} set",
                        restore=_spell_blend(_PATH_FLAGS[split], old),
                        split=split,
                    )
                )
    return found


def grown_too_far(record: BuilderRecord, samples: int | None) -> list[Difference]:
    """The difference for a longer training set that nothing can be appended to.

    Args:
        record: what was built.
        samples: training samples asked for now; None: one epoch.
    """
    old, split = record.sizes[0], record.splits[0]
    if split is None or old is None or samples is None or samples <= old or extendable(split):
        return []
    if not any(component.built.arrays for component in split.components):
        return []
    return [
        Difference(
            name="train-samples",
            recorded=f"an order of {old} training samples, which {record.dataset} cannot prolong",
            found=f"{samples} training samples",
            restore=f"--train-iters or --train-samples for {old} samples",
            split=0,
        )
    ]


def _settings(record: BuilderRecord, request: Request) -> Iterator[Difference]:
    if record.dataset != request.dataset:
        yield Difference(
            name="dataset",
            recorded=f"datasets of class {record.dataset}",
            found=f"of class {request.dataset}",
            restore=f"the flags that choose {record.dataset} (--mock-data, --sft, --fim-data, the script itself)",
        )
    for name, old in record.settings.items():
        # A field known to only one version of Megatron has its default in the other.
        if name not in request.settings or request.settings[name] == old:
            continue
        new = request.settings[name]
        if name == "split" and _same_split(old, new):
            continue
        if name.startswith("tokenizer."):
            what, restore, word = f"{name.replace('.', ' ')} {{}}", "the tokenizer flags of that run", "tokenizer"
        else:
            flag = FLAGS.get(name)
            what, word = (f"{flag} {{}}" if flag else f"{name} {{}}"), name.replace("_", "-")
            word = "seed" if name == "random_seed" else "seq-length" if name == "sequence_length" else word
            restore = _flag(flag, old) if flag else f"{name}={old} in the dataset config"
        yield Difference(name=word, recorded=what.format(old), found=what.format(new), restore=restore)


def _flag(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else f"leave out {flag}"
    return f"leave out {flag}" if value is None else f"{flag} {value}"


def _same_split(old: Any, new: Any) -> bool:
    def shares(text: Any) -> list[float]:
        values = [float(v) for v in str(text).split(",")]
        return [v / sum(values) for v in values] + [0.0] * (3 - len(values))

    try:
        return all(math.isclose(a, b, rel_tol=_SAME_WEIGHT) for a, b in zip(shares(old), shares(new), strict=True))
    except (ValueError, ZeroDivisionError):
        return False


def _kind(what: BuilderRecord | Request) -> str:
    if what.blend_per_split is not None:
        return "--train-data-path, --valid-data-path, --test-data-path (or --per-split-data-args-path)"
    return "--data-path (or --data-args-path)" if what.blend is not None else "--mock-data"


def _blend(out: Comparison, record: BuilderRecord, request: Request, old: Blend, new: Blend, split: int | None) -> None:
    flag = "--data-path" if split is None else _PATH_FLAGS[split]
    restore = _spell_blend(flag, old)

    def differ(name: str, recorded: str, found: str, action: str = restore) -> None:
        out.differences.append(Difference(name=name, recorded=recorded, found=found, restore=action, split=split))

    old_paths, new_paths = old[0], new[0]
    if len(old_paths) != len(new_paths):
        differ("data-path", f"{len(old_paths)} corpora: {_some(old_paths)}", f"{len(new_paths)}: {_some(new_paths)}")
        return
    if old_paths != new_paths and sorted(old_paths) == sorted(new_paths):
        differ("data-path", f"the corpora in the order {_some(old_paths)}", f"in the order {_some(new_paths)}")
        return
    for position, (old_path, new_path) in enumerate(zip(old_paths, new_paths, strict=True)):
        components = _recorded(record, position, split)
        problem = _corpus(out, request, components, old_path, new_path)
        if problem is not None:
            same_path = os.path.realpath(old_path) == os.path.realpath(new_path)
            differ(
                "corpus" if same_path else "data-path",
                problem[0],
                problem[1],
                _bring_back(components, old_path) if same_path else restore,
            )
    same, exact = _weights(old, new)
    if not same:
        differ("data-path", f"weights {_numbers(old[1])}", f"weights {_numbers(new[1])}")
    elif not exact:
        out.notes.append(
            f"the weights {_numbers(new[1])} are taken for the recorded {_numbers(old[1])}: the same proportions"
        )


def _recorded(record: BuilderRecord, position: int, split: int | None) -> list[ComponentRecord]:
    splits = record.splits if split is None else [record.splits[split]]
    return [s.components[position] for s in splits if s is not None and position < len(s.components)]


def _corpus(
    out: Comparison, request: Request, components: Sequence[ComponentRecord], old_path: str, new_path: str
) -> tuple[str, str] | None:
    """Whether the corpus has the recorded documents: None, or (recorded, found) in words."""
    corpus = Corpus.at(new_path, request.cls)
    moved = old_path != new_path and os.path.realpath(old_path) != os.path.realpath(new_path)
    for component in components:
        first, end = component.documents
        if component.contents is not None:
            size, digest = component.contents
            now = contents_of(new_path, size)
            if now != component.contents:
                return f"the first {size} bytes of {old_path} with hash {digest}", f"{new_path} {_other(now, size)}"
            continue
        if corpus is None or component.lengths is None:
            if moved:
                return f"{old_path}", f"{new_path}, whose documents cannot be compared"
            continue
        if corpus.documents < end:
            return f"{old_path} with {component.total} documents", f"{new_path} with {corpus.documents}"
        lengths, tokens = corpus.identity(component.documents)
        if lengths != component.lengths:
            return (
                f"documents {first}:{end} of {old_path} with lengths of hash {component.lengths}",
                f"{new_path} with other lengths, of hash {lengths}",
            )
        if component.tokens is not None and tokens != component.tokens:
            return (
                f"documents {first}:{end} of {old_path} with tokens of hash {component.tokens}",
                f"{new_path} with other tokens, of hash {tokens}",
            )
    if corpus is not None and components and corpus.documents > components[0].total:
        out.notes.append(
            f"{new_path} has {corpus.documents - components[0].total} documents more than the recorded "
            f"{components[0].total}: they are NOT used, because they would change the order of all others. "
            "To train on them as well: --megaresume-mode stream"
        )
    if moved and components:
        out.notes.append(f"{new_path} holds the recorded documents of {old_path}")
    return None


def _other(contents: tuple[int, str] | None, size: int) -> str:
    if contents is None:
        return "is not a file without .idx"
    return f"with {contents[0]} bytes" if contents[0] < size else f"with other bytes there, of hash {contents[1]}"


def _bring_back(components: Sequence[ComponentRecord], path: str) -> str:
    if any(component.contents is not None for component in components):
        return f"bring back the lines of {path} as they were; lines may be appended"
    return f"bring back the files of {path}.bin/.idx"


def _weights(old: Blend, new: Blend) -> tuple[bool, bool]:
    """(whether they are equivalent, whether they are the same numbers)."""
    if old[1] == new[1]:
        return True, True
    if len(old[0]) == 1:
        return True, False
    if old[1] is None or new[1] is None:
        return False, False
    a, b = [float.fromhex(w) for w in old[1]], [float.fromhex(w) for w in new[1]]
    pairs = zip(a, b, strict=True)
    return all(math.isclose(x / sum(a), y / sum(b), rel_tol=_SAME_WEIGHT) for x, y in pairs), False


def _numbers(weights: Sequence[str] | None) -> str:
    if weights is None:
        return "by the lengths of the corpora"
    shown = " ".join(f"{float.fromhex(w):g}" for w in weights[:_SPELLED])
    return shown + (" ..." if len(weights) > _SPELLED else "")


def _some(paths: Sequence[str]) -> str:
    return " ".join(paths[:_SPELLED]) + (" ..." if len(paths) > _SPELLED else "")


def _spell(record: BuilderRecord) -> str:
    if record.blend is not None:
        return _spell_blend("--data-path", record.blend)
    if record.blend_per_split is not None:
        blends = zip(_PATH_FLAGS, record.blend_per_split, strict=True)
        return " ".join(_spell_blend(flag, blend) for flag, blend in blends if blend is not None)
    return "--mock-data"


def _spell_blend(flag: str, blend: Blend) -> str:
    """The flag as one could type it; the repr of a float is exact."""
    paths, weights = blend
    if len(paths) > _SPELLED:
        return f"{flag} with the {len(paths)} recorded corpora (megaresume inspect shows them, beside the checkpoints)"
    if weights is None:
        words = [*paths]
    else:
        words = [word for w, p in zip(weights, paths, strict=True) for word in (repr(float.fromhex(w)), p)]
    return " ".join([flag, *(shlex.quote(word) for word in words)])


#: Number of corpora shown per split.
_SHOWN = 8


def describe(state: DataState) -> list[str]:
    """A record in lines for people. Raises StateError if it cannot be read."""
    record = OrderRecord.from_state(state)
    proven = "from the first sample" if record.since == 0 else f"from sample {record.since} on"
    lines = [f"order of Megatron's own datasets, recorded {proven} (megatron-core {record.megatron})"]
    if not record.builders:
        lines.append("  nothing is guarded: the data provider used no builder of megatron-core")
    for builder in record.builders:
        lines += _builder(builder)
    lines += [f"  accepted: {words}" for words in record.accepted]
    return lines


def _builder(builder: BuilderRecord) -> list[str]:
    settings = builder.settings
    lines = [
        f"  {builder.dataset}: seed {settings.get('random_seed')}, "
        f"{settings.get('sequence_length')} tokens a sample, split {settings.get('split') or 'by path'}"
    ]
    for name, size, split in zip(SPLITS, builder.sizes, builder.splits, strict=True):
        if split is None:
            continue
        total = split.blend[-1].samples if split.blend else None
        asked = "one epoch" if size is None else f"{size} samples"
        lines.append(f"    {name}: pinned for {asked}" + (f", blend of {total}" if total is not None else ""))
        for component in split.components[:_SHOWN]:
            first, end = component.documents
            more = f", {len(component.epochs)} further epoch(s)" if component.epochs else ""
            digest = component.built.arrays.get("shuffle_index") or next(iter(component.built.arrays.values()), "-")
            lines.append(
                f"      {component.path or 'generated data'}: documents {first}:{end} of {component.total}, "
                f"{component.built.samples} samples{more}, order {digest}"
            )
        if len(split.components) > _SHOWN:
            lines.append(f"      ... and {len(split.components) - _SHOWN} more")
    return lines
