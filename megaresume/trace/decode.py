"""The text of segments, by the tokenizer that their corpus was made with; token ids where that is not known.

Indexes of image-text documents hold their tokenizer; images stand in the text as ``<image 384x256, 120 tokens>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megaresume.encoding.multimodal.types import Key
from megaresume.encoding.tokenizers import ByteTokenizer, Tokenizer
from megaresume.sources.base import Source, is_document_source
from megaresume.stream.errors import UsageError
from megaresume.trace.documents import of_stage, show
from megaresume.trace.trace import Piece

__all__ = ["Decoder"]


class Decoder:
    """Adds ``text`` (or ``token_ids``) to the segments of samples.

    Args:
        sources: the corpora, by name.
        tokenizer: that of one or more corpora; None: byte tokens need none.
        note: called with a sentence where token ids must do.

    Raises:
        UsageError: the tokenizer is not that of any corpus.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        tokenizer: Tokenizer | None,
        note: Callable[[str], object],
    ) -> None:
        known: dict[str, Tokenizer] = {ByteTokenizer().fingerprint(): ByteTokenizer()}
        with_images = {name: source for name, source in sources.items() if is_document_source(source)}
        texts = {name: source for name, source in sources.items() if name not in with_images}
        fingerprints = {name: _record(source) for name, source in texts.items()}
        if tokenizer is not None:
            known[tokenizer.fingerprint()] = tokenizer
            recorded = {r["fingerprint"]: r for r in fingerprints.values() if r is not None}
            if recorded and tokenizer.fingerprint() not in recorded:
                raise UsageError(
                    f"{tokenizer.name} is not the tokenizer of any corpus",
                    found=f"fingerprint {tokenizer.fingerprint()}",
                    expected=", ".join(f"{f} ({r.get('name')})" for f, r in recorded.items()),
                    action="pass the --tokenizer, and the --eod-token if any, that megaresume prepare was given",
                )
        self._sources = sources
        self._with_images = with_images
        self._tokenizers: dict[str, Tokenizer | None] = {
            # A corpus that another program built does not say: the user knows better.
            name: known.get(record["fingerprint"]) if record is not None else tokenizer
            for name, record in fingerprints.items()
        } | {name: getattr(source.encoder, "tokenizer", None) for name, source in with_images.items()}
        without = [name for name, found in self._tokenizers.items() if found is None]
        if without:
            names = {str((fingerprints.get(name) or {}).get("name", "not recorded")) for name in without}
            note(
                f"token ids for {', '.join(without)}: the tokenizer ({', '.join(sorted(names))}) is not at hand; "
                "--tokenizer tokenizer.json gives it"
            )

    def rows(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """As `Piece.rows`; an image-text document that a policy was applied to has its ``fault``.

        Raises:
            CorpusError: a corpus is damaged, or was made with another tokenizer.
        """
        for row in piece.rows():
            for segment in row["segments"]:
                if segment["source"] in self._with_images:
                    segment.update(self._document(piece, segment))
                    continue
                tokens = self._sources[segment["source"]].read(
                    segment["document"], segment["offset"], segment["length"]
                )
                tokenizer = self._tokenizers[segment["source"]]
                if tokenizer is None:
                    segment["token_ids"] = tokens.tolist()
                else:
                    segment["text"] = tokenizer.decode(tokens)
            yield row

    def _document(self, piece: Piece, segment: Mapping[str, Any]) -> dict[str, Any]:
        """Of an image-text document, which is never cut."""
        name = segment["source"]
        source = of_stage(self._with_images[name], name, piece.config)
        key = Key(seed=piece.config.seed, source=name, document=segment["document"], epoch=segment["epoch"])
        shown = show(source, key)
        tokenizer, fault = self._tokenizers[name], shown.fault()
        found: dict[str, Any] = {} if fault is None else {"fault": fault}
        if tokenizer is None:
            return found | {"token_ids": shown.encoded.tokens.tolist()}
        return found | {"text": shown.text(tokenizer)}


def _record(source: object) -> Mapping[str, Any] | None:
    """What the sidecar of a corpus says of its tokenizer."""
    inner = getattr(source, "source", source)  # a part of a split corpus is a view of it
    found: Mapping[str, Any] | None = getattr(inner, "tokenizer", None)
    return found if isinstance(found, Mapping) else None
