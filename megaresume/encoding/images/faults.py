"""What becomes of a record that cannot be encoded, or is not as long as its index says.

    policy     cannot be encoded           longer than indexed     shorter than indexed
    error      CorpusError                 CorpusError             CorpusError
    mask       masked, as long as indexed  masked                  masked
    truncate   masked, as long as indexed  text cut at its end     masked at its end

A damaged image of a page whose template says ``damaged_images`` is no error: its place is masked, with a fault.
A record of another content than the indexed one, but of its length, is as one that cannot be encoded.

The document is as long as the index says in any case, so the stream does not move. What was done depends on the record
and the index alone: a resume, another rank and another worker do the same. Text is cut, an image never:

    tokens   [ t t t I I I I t t E ]     to 5:  [ t t t . . ]    an image that does not fit whole is masked
                                         to 12: [ t t t I I I I t t E . . ]
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from megaresume.encoding.images.document import EncodedDocument, Fault, FaultPolicy, Key, Record
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.errors import CorpusError

log = logging.getLogger(__name__)

#: (source, document) that this process has reported.
_reported: set[tuple[str, int]] = set()


def encode_as_indexed(
    encoder: ImageTextEncoder,
    record_or_error: Record | CorpusError,
    key: Key,
    *,
    tokens: int,
    policy: FaultPolicy,
    changed: CorpusError | None = None,
    part: int = 0,
) -> EncodedDocument:
    """The document, exactly as long as its index says.

    Args:
        encoder: of the source.
        record_or_error: the record, or why it could not be read.
        key: which document it is.
        tokens: its length in the index.
        policy: of the source.
        changed: set where the record has another content than when it was measured.
        part: of a record that is several documents.

    Returns:
        the document; with `fault` where the policy was applied, which is logged once a document and process.

    Raises:
        CorpusError: the policy is ``error``.
    """
    document, error = None, None
    if isinstance(record_or_error, CorpusError):
        error = record_or_error
    else:
        try:
            document = encoder.encode(record_or_error, key, part)
        except CorpusError as raised:
            error = raised
    if document is not None and len(document.tokens) != tokens:
        error = _other_length(record_or_error, len(document.tokens), tokens)
    if error is None and changed is not None:
        document, error = None, changed
    if error is None:
        assert document is not None
        if document.fault is not None:
            _report(key, tokens, document.fault)
        return document
    if policy == "error":
        raise error
    if policy == "mask" or document is None:
        document = masked_document(tokens, encoder.filler)
    else:
        document = fit_document(document, tokens, encoder.filler)
    fault = Fault.of(error, policy)
    _report(key, tokens, fault, error.cause)
    return dataclasses.replace(document, fault=fault)


def fit_document(document: EncodedDocument, tokens: int, filler: int) -> EncodedDocument:
    """The document, exactly ``tokens`` long.

    Args:
        document: of any length.
        tokens: wanted.
        filler: token id where nothing is: after the end, and in place of an image of which only a part would fit.

    Returns:
        the same document when it has the length; otherwise its first tokens, with the images that lie whole in them.
    """
    length = len(document.tokens)
    if length == tokens:
        return document
    kept = min(length, tokens)
    ids = np.full(tokens, filler, np.int64)
    ids[:kept] = document.tokens[:kept]
    trained = np.zeros(tokens, np.bool_)
    trained[:kept] = document.trained[:kept]
    images = tuple(image for image in document.images if document.end(image) <= kept)
    for image in document.images[len(images) :]:
        ids[image.offset : kept] = filler
    return dataclasses.replace(document, tokens=ids, trained=trained, images=images)


def masked_document(tokens: int, filler: int) -> EncodedDocument:
    """Nothing to be learned: ``tokens`` fillers, no image."""
    return EncodedDocument(tokens=np.full(tokens, filler, np.int64), trained=np.zeros(tokens, np.bool_))


def _report(key: Key, tokens: int, fault: Fault, cause: str | None = None) -> None:
    if (key.source, key.document) in _reported:
        return
    _reported.add((key.source, key.document))
    log.warning(
        "source '%s', document %d (%d tokens), policy %s: %s%s",
        key.source,
        key.document,
        tokens,
        fault.policy,
        fault.reason,
        f" ({cause})" if cause else "",
    )


def _other_length(record: object, found: int, expected: int) -> CorpusError:
    name = f"record '{record.key}'" if isinstance(record, Record) else "a record"
    return CorpusError(
        f"{name} is not as long as its index says",
        found=f"{found} tokens",
        expected=f"{expected} tokens",
        cause="a shard that was written again after `megaresume prepare`",
        action="run megaresume prepare again, or on_fault: truncate (or mask)",
    )
