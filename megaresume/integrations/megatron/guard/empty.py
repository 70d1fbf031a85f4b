"""Splits without a token: Megatron adds up epochs of nothing for ever, and the job hangs at its start."""

from __future__ import annotations

from collections.abc import Sequence

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
        corpora = [corpus for path in paths if (corpus := Corpus.at(path, request.cls)) is not None]
        for corpus in corpora:
            if corpus.is_empty(corpus.bounds(share)):
                raise _empty(request, corpora, corpus, name, split, corpus.bounds(share))


def _empty(
    request: Request, corpora: Sequence[Corpus], corpus: Corpus, name: str, split: int, documents: tuple[int, int]
) -> ConfigError:
    cause, actions = "an empty corpus", [f"leave {corpus.path} out of the {name} set"]
    if request.blend_per_split is None:
        cause = f"--split {request.settings.get('split')} of a small corpus"
        wanted = [share is not None for share in request.shares]
        enough = _enough(corpora, wanted)
        if enough is not None:
            actions.insert(0, f"--split {enough} gives every set of every corpus some documents")
        if split > 0:
            shares = [f"{share[1] - share[0]:g}" if share is not None else "0" for share in request.shares]
            shares[split] = "0"
            actions.insert(-1, f"--split {','.join(shares)} does without a {name} set")
    return ConfigError(
        f"the {name} set of {corpus.path} has no tokens, and Megatron would loop for ever looking for some",
        found=f"documents {documents[0]}:{documents[1]} of {corpus.documents}",
        expected="at least one token in every set that is sampled",
        cause=cause,
        action="; or ".join(actions),
    )


def _enough(corpora: Sequence[Corpus], wanted: Sequence[bool]) -> str | None:
    """The value of --split with the smallest sets beside the first that leaves no set empty; None: there is none."""
    fewest = min(corpus.documents for corpus in corpora)
    for documents in range(1, min(fewest, 64)):
        parts = [fewest - documents * sum(wanted[1:]), documents * wanted[1], documents * wanted[2]]
        if parts[0] <= 0:
            return None
        ends = [sum(parts[: i + 1]) / fewest for i in range(3)]
        shares = [(end - part / fewest, end) for part, end in zip(parts, ends, strict=True) if part]
        if not any(corpus.is_empty(corpus.bounds(share)) for corpus in corpora for share in shares):
            return ",".join(map(str, parts))
    return None
