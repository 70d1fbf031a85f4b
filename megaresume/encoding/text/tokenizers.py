"""Text to token ids: any Hugging Face ``tokenizer.json``, or bytes.

The byte-level tokenizer needs no file: token = byte of the UTF-8 text, 256 = end of document, vocabulary 257.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.stream.errors import CorpusError, UsageError, require

TokenArray = npt.NDArray[Any]

#: Names of the end-of-document token; the first one in the vocabulary is used.
EOD_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|end▁of▁sentence|>",
    "<EOD>",
    "<|eos|>",
    "[EOS]",
    "<eod>",
)


class Tokenizer(Protocol):
    """The interface that `prepare` and `trace --text` need."""

    #: the name for people: a file name, or "bytes".
    name: str
    #: the size of the vocabulary: one above the largest token id.
    vocab_size: int
    #: the end-of-document token; None if the vocabulary has none that we know.
    eod: int | None

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """The tokens of each text, one-dimensional, an unsigned integer dtype; adds and cuts no tokens."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The tokens of one text; ``special``: recognise special tokens in it instead of reading plain text."""

    def token_id(self, token: str) -> int | None:
        """The id of the token with this text; None if there is none."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of tokens; leaves out end-of-document tokens."""

    def fingerprint(self) -> str:
        """32 hex digits: equal if the mapping from text to tokens is."""

    def vocabulary(self) -> str:
        """32 hex digits: equal if each token has the same text; added special tokens do not count."""


class ByteTokenizer:
    """A tokenizer whose tokens are UTF-8 bytes."""

    name = "bytes"
    vocab_size = 257
    eod: int | None = 256

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """The bytes of each text: uint8[bytes of the text]."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Bytes of the text; there are no special tokens."""
        return list(text.encode("utf-8"))

    def token_id(self, token: str) -> int | None:
        """The id of the token with this text; always None here."""
        return None

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of tokens; invalid UTF-8 (a document cut inside a character) becomes U+FFFD.

        Raises:
            CorpusError: a token outside the vocabulary.
        """
        array = _in_vocabulary(ids, self)
        text: str = array[array != self.eod].astype(np.uint8).tobytes().decode("utf-8", "replace")
        return text

    def fingerprint(self) -> str:
        """The fingerprint, a constant."""
        return xxhash.xxh3_128_hexdigest(b"megaresume bytes 1")

    def vocabulary(self) -> str:
        """The fingerprint of the vocabulary, a constant."""
        return vocabulary_of(None)


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, with its truncation, padding and added start or end tokens turned off.

    Args:
        content: of the file.
        name: for people.
        eod_token: text of the end-of-document token; by default the first of `EOD_TOKENS` in the vocabulary.

    Raises:
        SetupError: the library `tokenizers` is missing.
        UsageError: not a tokenizer.json, or it has no token ``eod_token``.
    """

    def __init__(self, content: bytes, *, name: str, eod_token: str | None = None) -> None:
        action = "pip install 'megaresume[text]', or leave out --tokenizer for byte tokens"
        tokenizers = require("tokenizers", "it reads tokenizer.json", action)
        self.name = name
        description = _description(content, name)
        # A tokenizer.json often has the padding and truncation of its last use: Megatron's documents are whole.
        description["truncation"] = description["padding"] = None
        # Not tokenizer.to_str(), which changes with the version of the library.
        canonical = json.dumps(description, sort_keys=True, separators=(",", ":"))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(canonical)
        except Exception as error:  # the library raises no narrower type
            raise _not_a_tokenizer(name, str(error)) from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        known = (token for token in EOD_TOKENS if token in vocabulary)
        self.eod: int | None = vocabulary.get(eod_token if eod_token is not None else next(known, ""))
        if eod_token is not None and self.eod is None:
            raise UsageError(
                f"tokenizer {name} has no token {eod_token!r}",
                found=f"{len(vocabulary)} tokens, among them {', '.join(sorted(vocabulary)[:5])}",
                expected="the text of a token of the vocabulary",
                action="correct --eod-token",
            )
        added = [token for token in description.get("added_tokens") or [] if token.get("special")]
        #: texts of the tokens that ordinary text is not meant to contain.
        self.special_tokens: tuple[str, ...] = tuple(token["content"] for token in added)
        self._fingerprint = xxhash.xxh3_128_hexdigest(f"{canonical}\neod {self.eod}".encode())
        self._content = content

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """The tokens of each text: uint32[n]; a single text is encoded in the calling thread, as in `encode`."""
        if len(texts) == 1:
            encodings = [self._tokenizer.encode(texts[0], add_special_tokens=False)]
        else:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]:
        """The tokens of each text, uint32[n], and their characters in it, int64[n, 2]: first, one after the last."""
        if len(texts) == 1:
            encodings = [self._tokenizer.encode(texts[0], add_special_tokens=False)]
        else:
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.uint32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The tokens of one text, encoded in the calling thread: a forked worker has no thread pool."""
        self._tokenizer.encode_special_tokens = not special
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._tokenizer.encode_special_tokens = False
        return ids

    def token_id(self, token: str) -> int | None:
        """The id of the token with this text."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of tokens; keeps special tokens other than the end of document.

        Raises:
            CorpusError: a token outside the vocabulary.
        """
        array = _in_vocabulary(ids, self)
        kept = array if self.eod is None else array[array != self.eod]
        text: str = self._tokenizer.decode(kept.tolist(), skip_special_tokens=False)
        return text

    def fingerprint(self) -> str:
        """xxh3_128 of the content as canonical JSON, and of the end-of-document token."""
        return self._fingerprint

    def vocabulary(self) -> str:
        """See `vocabulary_of`."""
        return vocabulary_of(self._content)


def load_tokenizer(path: str | Path | None, *, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json`` (or a directory that has one); without a path, the byte tokenizer.

    Raises:
        UsageError: no such file, not a tokenizer, or no such end-of-document token.
        SetupError: the library `tokenizers` is missing.
    """
    return tokenizer_from_content(*read_tokenizer_file(path), eod_token=eod_token)


def read_tokenizer_file(path: str | Path | None) -> tuple[bytes | None, str]:
    """The content of the file and a name for people: enough for a worker process to build the same tokenizer."""
    if path is None:
        return None, ByteTokenizer.name
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"tokenizer {file} cannot be read",
            found=error.strerror,
            expected="a tokenizer.json as Hugging Face tokenizers write it, or a directory that holds one",
            cause="a model with only tokenizer.model (SentencePiece) or vocab.json and merges.txt"
            if path.is_dir()
            else None,
            action="check --tokenizer; transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes one",
        ) from error
    return content, f"{path.name}/tokenizer.json" if path.is_dir() else path.name


def tokenizer_from_content(content: bytes | None, name: str, *, eod_token: str | None = None) -> Tokenizer:
    """Build the tokenizer of `load_tokenizer` from the result of `read_tokenizer_file`."""
    if content is not None:
        return HuggingFaceTokenizer(content, name=name, eod_token=eod_token)
    if eod_token is not None:
        raise UsageError(
            "the byte-level tokenizer has its own end-of-document token",
            found=f"--eod-token {eod_token}",
            expected="--eod-token together with --tokenizer",
            action="remove --eod-token",
        )
    return ByteTokenizer()


def vocabulary_of(content: bytes | None) -> str:
    """xxh3_128 of the vocabulary of a ``tokenizer.json``'s model, without added tokens; None: the byte vocabulary."""
    if content is None:
        return xxhash.xxh3_128_hexdigest(b"megaresume bytes vocabulary 1")
    vocabulary = _description(content, "tokenizer.json")["model"].get("vocab")
    return xxhash.xxh3_128_hexdigest(json.dumps(vocabulary, sort_keys=True, separators=(",", ":")).encode())


def pack_tokenizer(content: bytes | None, name: str) -> dict[str, Any]:
    """The result of `read_tokenizer_file` as plain JSON."""
    packed = None if content is None else base64.b64encode(zlib.compress(content, 6)).decode("ascii")
    return {"name": name, "content": packed}


def unpack_tokenizer(packed: Mapping[str, Any], eod_token: str | None) -> Tokenizer:
    """The tokenizer in the result of `pack_tokenizer`."""
    return tokenizer_from_content(unpacked_content(packed["content"]), packed["name"], eod_token=eod_token)


@functools.lru_cache(maxsize=4)  # the sources of a blend usually share one
def packed_vocabulary(content: str | None) -> str:
    """`vocabulary_of` the ``content`` in a result of `pack_tokenizer`, without building the tokenizer."""
    return vocabulary_of(unpacked_content(content))


def unpacked_content(content: str | None) -> bytes | None:
    """The argument of `tokenizer_from_content`, from the ``content`` in a result of `pack_tokenizer`."""
    return None if content is None else zlib.decompress(base64.b64decode(content))


def _description(content: bytes, name: str) -> dict[str, Any]:
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _not_a_tokenizer(name, f"no JSON ({error})") from error
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise _not_a_tokenizer(name, "JSON without a 'model'")
    return description


def _not_a_tokenizer(name: str, found: str) -> UsageError:
    return UsageError(
        f"{name} is not a tokenizer that the library 'tokenizers' can read",
        found=found,
        expected="a tokenizer.json as Hugging Face tokenizers write it",
        cause="another file of the model (config.json, tokenizer_config.json, vocab.json), or a newer format",
        action="pass the model's tokenizer.json, or: pip install --upgrade tokenizers",
    )


def _in_vocabulary(ids: npt.ArrayLike, tokenizer: Tokenizer) -> TokenArray:
    array = np.asarray(ids)
    if array.size and (array.min() < 0 or array.max() >= tokenizer.vocab_size):
        raise CorpusError(
            f"a token outside the vocabulary of tokenizer {tokenizer.name}",
            found=f"tokens {array.min()} to {array.max()}",
            expected=f"0 to {tokenizer.vocab_size - 1}",
            cause="the corpus was made with another tokenizer",
            action="decode with the tokenizer that the corpus was prepared with",
        )
    return array
