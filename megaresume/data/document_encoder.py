"""`DocumentEncoder`: documents to tokens. It is what `prepare` calls, and what reads a corpus without a .bin."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.data.documents import LeftOut, TextOptions, bad_conversation, left_out
from megaresume.encoding.text.conversation_encoder import ConversationEncoder, ConversationOptions
from megaresume.encoding.text.conversations import BadRow, Conversation
from megaresume.encoding.text.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    pack_tokenizer,
    tokenizer_from_content,
    unpacked_content,
)
from megaresume.encoding.text.turns import Selection

#: whose version may change what the tokens are.
LIBRARIES = ("tokenizers", "jinja2", "pyarrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec:
    """What decides what the tokens of a document are: the content of the tokenizer, not its path, which may change."""

    tokenizer: bytes | None
    tokenizer_name: str
    eod_token: str | None
    append_eod: bool
    #: name of the dtype of the corpus.
    dtype: str
    text: TextOptions

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for `from_json`."""
        tokenizer = pack_tokenizer(self.tokenizer, self.tokenizer_name)
        named = {name: getattr(self, name) for name in ("eod_token", "append_eod", "dtype")}
        return {"tokenizer": tokenizer, **named, "text": asdict(self.text)}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> EncoderSpec:
        """What `to_json` gave."""
        packed, text = said["tokenizer"], dict(said["text"])
        if (chat := text["conversations"]) is not None:
            words = chat["selection"]
            selection = Selection(roles=tuple(words["roles"]), turns=words["turns"], parts=tuple(words["parts"]))
            text["conversations"] = ConversationOptions(**{**chat, "selection": selection})
        return cls(
            tokenizer=unpacked_content(packed["content"]),
            tokenizer_name=packed["name"],
            eod_token=said["eod_token"],
            append_eod=said["append_eod"],
            dtype=said["dtype"],
            text=TextOptions(**text),
        )


def library_versions() -> dict[str, str]:
    """Of those of `LIBRARIES` that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def checksum(tokens: npt.NDArray[Any]) -> int:
    """The lower half of xxh3_64 of the tokens of a document, in the type of the corpus."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).data) & 0xFFFFFFFF


class MadeDocument(NamedTuple):
    """A document."""

    #: its tokens, and the end of document.
    arrays: tuple[npt.NDArray[Any], ...]
    text_bytes: int
    #: None if every token is trained.
    spans: list[tuple[int, int]] | None = None
    shortened: bool = False

    def tokens(self, dtype: str) -> npt.NDArray[Any]:
        """In the type of the corpus."""
        return np.concatenate(self.arrays, dtype=dtype, casting="unsafe")


class DocumentEncoder:
    """A stateless function of documents."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec
        self._tokenizer: Tokenizer = tokenizer_from_content(
            spec.tokenizer, spec.tokenizer_name, eod_token=spec.eod_token
        )
        dtype = np.dtype(spec.dtype)
        self._eod = np.array([self._tokenizer.eod], dtype) if spec.append_eod else np.zeros(0, dtype)
        self._conversations: ConversationEncoder | None = None
        if spec.text.conversations is not None:
            assert isinstance(self._tokenizer, HuggingFaceTokenizer), "a chat template needs special tokens"
            self._conversations = ConversationEncoder(spec.text.conversations, self._tokenizer, self._eod)

    def encode(self, documents: Sequence[str | Conversation | LeftOut]) -> Iterator[MadeDocument | LeftOut | str]:
        """Each document; why it is left out; or the count that it goes to.

        Raises:
            CorpusError: a row is not a conversation, or too long, and no option allows it.
        """
        kept = [document for document in documents if not isinstance(document, LeftOut)]
        made = iter(self._texts(kept) if self._conversations is None else self._chats(kept, self._conversations))
        for document in documents:
            yield document if isinstance(document, LeftOut) else next(made)

    def _texts(self, texts: Sequence[Any]) -> Iterator[MadeDocument | str]:
        for text, tokens in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            size = len(text) if text.isascii() else len(text.encode())
            yield MadeDocument((tokens, self._eod), size) if len(tokens) else "empty"

    def _chats(self, chats: Sequence[Any], encoder: ConversationEncoder) -> Iterator[MadeDocument | LeftOut | str]:
        for chat, found in zip(chats, encoder.encode_batch(chats), strict=True):
            if isinstance(found, BadRow):
                yield left_out(bad_conversation(chat.where, found), self.spec.text)
            elif found is None:
                yield "too_long"
            else:
                yield MadeDocument((found.tokens,), found.text_bytes, found.spans, found.shortened)
