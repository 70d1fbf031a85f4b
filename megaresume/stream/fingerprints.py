"""What the sources are: fingerprints, and what differs between two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from megaresume.stream.errors import CorpusError, StateError
from megaresume.stream.source import LengthSource
from megaresume.stream.state import Fingerprint

__all__ = ["check_fingerprint", "differences", "fingerprint_of", "hash_lengths", "listing"]

#: Documents hashed at a time.
CHUNK = 1 << 20


def hash_lengths(source: LengthSource) -> Fingerprint:
    """Read all lengths of a source: the slow way, for sources that do not know their fingerprint."""
    hasher, tokens = xxhash.xxh3_128(), 0
    for first in range(0, len(source), CHUNK):
        ids = np.arange(first, min(first + CHUNK, len(source)), dtype=np.int64)
        lengths = np.ascontiguousarray(source.lengths(ids), dtype="<i8")
        hasher.update(lengths.data)
        tokens += int(lengths.sum())
    return Fingerprint(documents=len(source), tokens=tokens, lengths=hasher.hexdigest())


def fingerprint_of(source: LengthSource, name: str) -> Fingerprint:
    """The fingerprint that a source gives, checked against its length.

    Raises:
        CorpusError: it is of a corpus with another number of documents.
    """
    given = source.fingerprint()
    fingerprint = given if isinstance(given, Fingerprint) else Fingerprint(**given)
    if fingerprint.documents != len(source):
        raise CorpusError(
            f"source '{name}' contradicts its fingerprint",
            found=f"{len(source)} documents",
            expected=f"{fingerprint.documents} documents, as its fingerprint says",
            cause="the corpus changed while it was read, or its sidecar file belongs to another corpus",
            action="remove the sidecar file (PREFIX.megaresume.json) and start again",
        )
    return fingerprint


def differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(field, found, expected) for every leaf in which two mappings differ."""
    for key in dict.fromkeys([*expected, *found]):
        a, b = found.get(key), expected.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}", a, b


def check_fingerprint(name: str, before: Fingerprint | None, now: Fingerprint) -> None:
    """Raise unless a source is the corpus that it was.

    Raises:
        StateError: naming each field that differs.
    """
    if before == now:
        return
    fields = ("documents", "tokens", "lengths", "tokenizer")
    differ = [f for f in fields if before is None or getattr(before, f) != getattr(now, f)]
    cause, action = _likely_change(name, before, now)
    raise StateError(
        f"source '{name}' is not the corpus that the state was made with",
        found=listing((f"{name}.{f}", getattr(now, f)) for f in differ),
        expected=listing((f"{name}.{f}", getattr(before, f, None)) for f in differ),
        cause=cause,
        action=action,
    )


def listing(items: Iterator[tuple[str, Any]]) -> str:
    """Fields and their values in one line, for an error."""
    return ", ".join(f"{field} {json.dumps(value)}" for field, value in items)


def _likely_change(name: str, before: Fingerprint | None, now: Fingerprint) -> tuple[str, str]:
    """The likely cause, and the next action."""
    action = f"give '{name}' the path of the corpus as it was, or add the new data as a source of its own"
    if before is None:
        return "the source is new", action
    if now.documents > before.documents:
        return (
            f"the corpus, or the part of it that --split (or split in the data config) takes, has grown by "
            f"{now.documents - before.documents} documents",
            f"give back the split, if it was changed; or {action}",
        )
    if now.documents < before.documents:
        return (
            f"the corpus, or the part of it that --split (or split in the data config) takes, has lost "
            f"{before.documents - now.documents} documents",
            f"give back the split, if it was changed; or {action}",
        )
    if now.lengths != before.lengths:
        return "the corpus was prepared again, or its index is damaged", action
    if now.tokenizer is None:
        return (
            "the lengths are the same, but which tokenizer made the corpus is not known any more: "
            "PREFIX.megaresume.json was deleted, or not copied with the .bin and the .idx",
            f"put the PREFIX.megaresume.json of '{name}' back, or prepare the corpus again in the same way",
        )
    if before.tokenizer is None:
        return "the tokenizer was not known when the state was made: the corpus was prepared again since", action
    if now.tokenizer.partition(" of ")[0] == before.tokenizer.partition(" of ")[0]:
        return (
            "records have other contents of the same lengths: the shards were edited and their index made again",
            action,
        )
    return "the corpus was made with another tokenizer or image processor", action
