"""Finished parts to ``.bin`` or ``.places``, ``.idx`` and ``.spans``, in bounded memory.

The .idx appears last, beside its own .bin or .places.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.checkpoint.files import fsync_dir
from megaresume.corpora.layout import IndexHeader, bin_path, idx_path
from megaresume.corpora.places import HEADER_BYTES, places_path, write_header
from megaresume.corpora.prepare.encode import Part, PartFiles
from megaresume.corpora.sidecar import sidecar_path, write_tokenizer
from megaresume.corpora.spans import SpansWriter, spans_path

#: boundaries written at once.
CHUNK = 1 << 20


def merge_parts(
    prefix: Path,
    files: PartFiles,
    parts: Mapping[str, Part],
    dtype: str,
    tokenizer: Mapping[str, Any],
    tick: Callable[[int], Any],
    *,
    raw: Mapping[str, Any] | None = None,
) -> None:
    """Write the corpus and put it in place of an older one, if there is one.

    Args:
        prefix: of the corpus.
        files: where the parts are.
        parts: all of them by their names, in order.
        dtype: of the tokens.
        tokenizer: for the sidecar.
        tick: called with the bytes of tokens, or of places, written.
        raw: the JSON of a .places, of which ``inputs`` lack their documents; None: a .bin is written.

    Raises:
        CorpusError: a part is damaged.
        OSError: the disk is full, or the like.
    """
    documents = sum(part.documents for part in parts.values())
    counts = [part.spans for part in parts.values()]
    spans = None if None in counts else sum(count or 0 for count in counts)
    tokens_path = bin_path(prefix) if raw is None else places_path(prefix)
    paths = tokens_path, idx_path(prefix), spans_path(prefix)
    tokens_new, idx_new, spans_new = (path.with_name(f".{path.name}.new") for path in paths)
    header = IndexHeader(dtype=np.dtype(dtype), sequences=documents, documents=documents)
    # The three arrays of the index are written side by side, while each part is read once.
    with open(tokens_new, "wb") as tokens_file, open(idx_new, "wb") as idx, ExitStack() as more:
        idx.write(header.pack())
        spans_file = None if spans is None else more.enter_context(open(spans_new, "w+b"))
        writer = None if spans_file is None else SpansWriter(spans_file, documents=documents, spans=spans or 0)
        spans_hash: str | None = None
        done = pointer = 0
        if raw is not None:
            tokens_file.seek(HEADER_BYTES)
        for name in parts:
            lengths, trained, tokens = files.read_part(name)
            if writer is not None and trained is not None:
                writer.add(trained.counts, trained.spans)
            tokens_file.write(tokens)
            ends = np.cumsum(lengths, dtype=np.int64) * header.dtype.itemsize
            starts = pointer + ends - lengths.astype(np.int64) * header.dtype.itemsize
            idx.seek(header.lengths_at + 4 * done)
            idx.write(lengths.data)
            idx.seek(header.pointers_at + 8 * done)
            idx.write(starts.astype("<i8").data)
            done += len(lengths)
            pointer = int(starts[-1] + lengths[-1] * header.dtype.itemsize) if len(lengths) else pointer
            tick(len(tokens))
        if raw is not None:
            write_header(tokens_file, documents, {**raw, "inputs": _counted(raw["inputs"], parts)})
        idx.seek(header.boundaries_at)
        for boundaries in _ranges(documents + 1):
            idx.write(boundaries.data)
        if writer is not None:
            spans_hash = writer.finish(pointer // header.dtype.itemsize)
        for file in (tokens_file, idx, spans_file):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
    # An index must never stand beside the tokens of another corpus, nor beside their spans.
    idx_path(prefix).unlink(missing_ok=True)
    sidecar_path(prefix).unlink(missing_ok=True)
    spans_path(prefix).unlink(missing_ok=True)
    (places_path(prefix) if raw is None else bin_path(prefix)).unlink(missing_ok=True)
    os.replace(tokens_new, tokens_path)
    spans_bytes = None if spans is None else spans_new.stat().st_size
    idx_bytes = idx_new.stat().st_size
    bin_bytes = tokens_path.stat().st_size
    write_tokenizer(
        prefix, tokenizer, idx_bytes=idx_bytes, bin_bytes=bin_bytes, spans_bytes=spans_bytes, spans_hash=spans_hash
    )
    if spans is not None:
        os.replace(spans_new, spans_path(prefix))
    os.replace(idx_new, idx_path(prefix))
    fsync_dir(prefix.parent)


def _counted(inputs: Sequence[Mapping[str, Any]], parts: Mapping[str, Part]) -> list[dict[str, Any]]:
    """Inputs with the documents of each."""
    documents = Counter[int]()
    for part in parts.values():
        for file, count in part.places or []:
            documents[file] += count
    return [{**said, "documents": documents[number]} for number, said in enumerate(inputs)]


def _ranges(stop: int) -> Iterator[np.ndarray[Any, Any]]:
    for first in range(0, stop, CHUNK):
        yield np.arange(first, min(first + CHUNK, stop), dtype="<i8")
