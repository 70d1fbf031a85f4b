"""`ConversationEncoder`: conversations to tokens, and to the spans of them that are trained.

    conversation  --template-->  text, trained characters  --tokenizer-->  tokens, trained tokens

A token of which a trained character is a part is trained. (As in transformers; but a character that takes several
tokens, as an emoji does, is trained whole, and white space that a tokenizer counts to no token ends no span.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from megaresume.encoding.text.chat_template import ChatTemplate, TemplateRefuses, without_reasoning
from megaresume.encoding.text.conversations import BadRow, Conversation, RowShape
from megaresume.encoding.text.tokenizers import HuggingFaceTokenizer
from megaresume.encoding.text.turns import Selection, TurnFinder
from megaresume.stream.errors import CorpusError

#: What becomes of a conversation of too many tokens: refused; ended after an answer; cut in the middle; left out.
TooLong = Literal["error", "turn", "cut", "skip"]
TOO_LONG = cast(tuple[TooLong, ...], get_args(TooLong))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationOptions:
    """The settings by which rows become documents."""

    #: text of the chat template, and its variables for special tokens.
    template: str
    tokens: dict[str, str] = field(default_factory=dict)
    #: the date that the template takes for today, ISO.
    date: str | None = None
    #: the shape of all rows.
    shape: RowShape = "messages"
    #: the key of the list of messages, if it has an unusual name.
    key: str | None = None
    selection: Selection = field(default_factory=Selection)
    #: whether roles may come in any order that the template takes.
    any_order: bool = False
    #: the most tokens of a document; None: any number.
    max_tokens: int | None = None
    too_long: TooLong = "error"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedConversation:
    """A conversation encoded as a document."""

    #: the tokens, uint32[n].
    tokens: npt.NDArray[np.uint32]
    #: whether each token is trained on, bool[n].
    trained: npt.NDArray[np.bool_]
    #: bytes of the whole text, in UTF-8.
    text_bytes: int
    #: the token at which the rejected conversation of a preference pair begins; None if it is no pair.
    rejected_at: int | None = None
    #: whether it was too long, and an end of it is missing.
    shortened: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Runs of trained tokens, and, empty, the place where the rejected conversation of a pair begins."""
        at = self.rejected_at
        if at is None:
            return runs_of(self.trained)
        return [*runs_of(self.trained[:at]), (at, at), *((at + i, at + k) for i, k in runs_of(self.trained[at:]))]


def runs_of(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The runs of True: first, and one after the last, of each."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class ConversationEncoder:
    """A stateless function of conversations.

    Args:
        options: see there.
        tokenizer: of the template.
        eod: tokens to put after a conversation: one or none. It is trained if the token before it is.

    Raises:
        UsageError, SetupError: see `ChatTemplate`.
    """

    def __init__(self, options: ConversationOptions, tokenizer: HuggingFaceTokenizer, eod: npt.NDArray[Any]) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._eod = eod.astype(np.uint32)
        template = ChatTemplate(options.template, options.tokens, options.date)
        self._finder = TurnFinder(template, tokenizer.special_tokens, options.selection)

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[EncodedConversation | BadRow | None]:
        """Encode conversations, each as a document; or the reason why it is none; or None if it is too long and left
        out.

        Raises:
            CorpusError: one is too long, and nothing was said of such.
        """
        found: list[EncodedConversation | BadRow | None] = []
        for conversation, encoded in zip(conversations, self._encode(conversations), strict=True):
            if isinstance(encoded, EncodedConversation) and self._is_too_long(encoded):
                found.append(self._shorter(conversation, encoded))
            else:
                found.append(encoded)
        return found

    def _is_too_long(self, encoded: EncodedConversation) -> bool:
        return self._options.max_tokens is not None and len(encoded.tokens) > self._options.max_tokens

    def _encode(self, conversations: Sequence[Conversation]) -> list[EncodedConversation | BadRow]:
        chosen = self._encode_each(conversations)
        rejected = iter(self._encode_each([one.rejected for one in conversations if one.rejected is not None]))
        return [
            first if conversation.rejected is None else _joined(first, next(rejected))
            for conversation, first in zip(conversations, chosen, strict=True)
        ]

    def _encode_each(self, conversations: Sequence[Conversation]) -> list[EncodedConversation | BadRow]:
        rendered: list[tuple[str, list[tuple[int, int]]] | BadRow] = []
        for conversation in conversations:
            try:
                rendered.append(self._finder.find(conversation))
            except BadRow as error:
                rendered.append(error)
        texts = [one[0] for one in rendered if not isinstance(one, BadRow)]
        encodings = iter(self._tokenizer.encode_with_offsets(texts))
        return [one if isinstance(one, BadRow) else self._document(*one, *next(encodings)) for one in rendered]

    def _document(
        self,
        text: str,
        runs: Sequence[tuple[int, int]],
        tokens: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
    ) -> EncodedConversation | BadRow:
        trained = np.zeros(len(tokens) + len(self._eod), np.bool_)
        for first, stop in _overlapping(runs, offsets):
            trained[first:stop] = True
        if len(tokens):
            trained[len(tokens) :] = trained[len(tokens) - 1]
        if not trained.any():
            return BadRow(
                "has nothing that is trained", f"{len(tokens)} tokens", "tokens in the turns that are trained"
            )
        tokens = np.concatenate([tokens, self._eod])
        return EncodedConversation(tokens=tokens, trained=trained, text_bytes=len(text.encode()))

    def _shorter(self, conversation: Conversation, encoded: EncodedConversation) -> EncodedConversation | BadRow | None:
        limit, how = self._options.max_tokens, self._options.too_long
        assert limit is not None
        if how == "error":
            raise CorpusError(
                f"{conversation.where} is too long",
                found=f"{len(encoded.tokens)} tokens",
                expected=f"at most {limit}, by --max-tokens",
                action="say what to do with them: --too-long turn (ended after an answer that fits), cut or skip",
            )
        if how == "cut" and encoded.trained[:limit].any():
            return replace(encoded, tokens=encoded.tokens[:limit], trained=encoded.trained[:limit], shortened=True)
        return self._ended_early(conversation) if how == "turn" else None

    def _ended_early(self, conversation: Conversation) -> EncodedConversation | None:
        """The most messages up to a trained one that fit; None: not even the first."""
        for short in self._shortened(conversation):
            encoded = self._encode([short])[0]
            if isinstance(encoded, EncodedConversation) and not self._is_too_long(encoded):
                return replace(encoded, shortened=True)
        return None

    def _shortened(self, conversation: Conversation) -> Iterator[Conversation]:
        """A conversation ended early, the longest that fits first.

        With each turn it grows, unless the template leaves the reasoning of earlier turns out. Then more turns may be
        fewer tokens; but without any reasoning it grows, and none that is too long without it fits.
        """
        ends = self._answers(conversation)

        def ended(k: int) -> Conversation:
            return replace(conversation, messages=conversation.messages[: ends[k] + 1])

        def bare(k: int) -> Conversation:
            return replace(conversation, messages=without_reasoning(ended(k).messages)[0])

        most = bisect_left(range(len(ends)), True, key=lambda k: not self._fits(bare(k)))
        if most and not self._leaves_out(ended(most - 1), bare(most - 1)):
            most = bisect_left(range(most), True, key=lambda k: not self._fits(ended(k)))
        yield from filter(self._fits, map(ended, reversed(range(most))))

    def _leaves_out(self, whole: Conversation, bare: Conversation) -> bool:
        """Whether the template leaves out reasoning of a conversation, of which this is the rest."""
        thought = without_reasoning(whole.messages)[1]
        if not thought:
            return False
        try:
            return len(self._finder.render(whole)) - len(self._finder.render(bare)) < thought
        except TemplateRefuses:
            return True

    def _fits(self, conversation: Conversation) -> bool:
        """Whether it has no more tokens than it may have; also of one that the template refuses."""
        try:
            text = self._finder.render(conversation)
        except TemplateRefuses:
            return True
        limit = self._options.max_tokens
        return limit is None or len(self._tokenizer.encode_batch([text])[0]) + len(self._eod) <= limit

    def _answers(self, conversation: Conversation) -> list[int]:
        """Messages that a conversation may end with, the last aside."""
        roles, messages = self._options.selection.roles, conversation.messages[:-1]
        return [i for i, m in enumerate(messages) if m["role"] in roles and i not in conversation.untrained]


def _overlapping(runs: Sequence[tuple[int, int]], offsets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The tokens, first to stop, of which characters are in each run; runs of no token are left out."""
    # Tokens without characters of their own are with those around them.
    own = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
    begins, ends = offsets[own, 0], offsets[own, 1]
    chars = np.array(runs, np.int64).reshape(-1, 2)
    # Nearly always in order; if they are not, the bounds are a little wide.
    firsts = np.searchsorted(np.maximum.accumulate(ends), chars[:, 0], "right")
    stops = np.searchsorted(np.minimum.accumulate(begins[::-1])[::-1], chars[:, 1], "left")
    for (first, stop), i, k in zip(runs, firsts, stops, strict=True):
        places = own[i:k][(begins[i:k] < stop) & (ends[i:k] > first)]
        if len(places):
            yield int(places[0]), int(places[-1]) + 1


def _joined(
    chosen: EncodedConversation | BadRow, rejected: EncodedConversation | BadRow
) -> EncodedConversation | BadRow:
    """A preference pair as one document: the chosen conversation, then the rejected one."""
    bad = next((half for half in (chosen, rejected) if isinstance(half, BadRow)), None)
    if bad is not None:
        return bad
    assert isinstance(chosen, EncodedConversation) and isinstance(rejected, EncodedConversation)
    return EncodedConversation(
        tokens=np.concatenate([chosen.tokens, rejected.tokens]),
        trained=np.concatenate([chosen.trained, rejected.trained]),
        text_bytes=chosen.text_bytes + rejected.text_bytes,
        rejected_at=len(chosen.tokens),
    )
