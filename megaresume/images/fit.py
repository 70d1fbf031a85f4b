"""A document made as long as it has to be: text is cut, an image never.

tokens   [ t t t I I I I t t E ]     to 5:  [ t t t . . ]    an image that does not fit whole is masked
                                     to 12: [ t t t I I I I t t E . . ]
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megaresume.corpora.base import EncodedDocument


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
