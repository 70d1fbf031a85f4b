"""Splits without a token: Megatron adds up epochs of nothing for ever, and the job hangs at its start."""

from __future__ import annotations

from megaresume.integrations.megatron.guard.corpus import Corpus
from megaresume.integrations.megatron.guard.record import SPLITS
from megaresume.integrations.megatron.guard.request import Request
from megaresume.stream.errors import ConfigError

__all__ = ["refuse_empty_splits"]


def refuse_empty_splits(request: Request) -> None:
    """Raise a ConfigError that names the corpus and its split. Reads the indexes, so: on one rank."""
    if not hasattr(request.cls, "_build_document_sample_shuffle_indices"):
        return
    for split, (name, share, size) in enumerate(zip(SPLITS, request.shares, request.sizes, strict=True)):
        blend = request.blend_of(split)
        if share is None or size is None or blend is None:
            continue
        paths, weights = blend
        if weights is None and len(paths) > 1:
            continue  # one epoch of each: nothing is added up
        for path in paths:
            corpus = Corpus.at(path, request.cls)
            if corpus is not None and corpus.is_empty(corpus.bounds(share)):
                raise _empty(request, corpus, name, split, corpus.bounds(share))


def _empty(request: Request, corpus: Corpus, name: str, split: int, documents: tuple[int, int]) -> ConfigError:
    action = f"leave {corpus.path} out of the {name} set"
    if request.blend_per_split is None:
        wanted = [share is not None for share in request.shares]
        rest = max(corpus.documents - sum(wanted[1:]), 1)
        one_each = ",".join(str(n) for n in (rest, int(wanted[1]), int(wanted[2])))
        shares = [f"{(s[1] - s[0]) if s is not None else 0:g}" for s in request.shares]
        shares[split] = "0"
        action = (
            f"--split {one_each} gives each set of this corpus at least one document; "
            f"--split {','.join(shares)} does without a {name} set"
        )
    return ConfigError(
        f"the {name} set of {corpus.path} has no tokens, and Megatron would loop for ever looking for some",
        found=f"documents {documents[0]}:{documents[1]} of {corpus.documents}",
        expected="at least one token in every set that is sampled",
        cause=f"--split {request.settings.get('split')} of a small corpus"
        if request.blend_per_split is None
        else "an empty corpus",
        action=action,
    )
