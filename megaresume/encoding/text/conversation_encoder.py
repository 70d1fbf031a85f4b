"""`ConversationEncoder`: conversations to tokens, and the spans of them that are trained.

    conversation  --template-->  text, trained characters  --tokenizer-->  tokens, trained tokens

A token is trained if any of its characters is. (As in transformers; but a character of several tokens, such as an
emoji, is trained whole, and white space that belongs to no token does not end a span.)
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
from megaresume.stream.skips import Ranges

#: What happens to a conversation that is too long: refused; ended after an answer; cut in the middle; left out.
TooLong = Literal["error", "turn", "cut", "skip"]
TOO_LONG = cast(tuple[TooLong, ...], get_args(TooLong))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationOptions:
    """The settings by which rows become documents."""

    #: text of the chat template, and its variables for special tokens.
    template: str
    tokens: dict[str, str] = field(default_factory=dict)
    #: today's date for the template, ISO.
    date: str | None = None
    #: the shape of all rows.
    shape: RowShape = "messages"
    #: the key of the list of messages, if it has an unusual name.
    key: str | None = None
    selection: Selection = field(default_factory=Selection)
    #: whether roles may come in any order that the template accepts.
    any_order: bool = False
    #: limit on the tokens of a document; None: no limit.
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
    #: index of the token where the rejected conversation of a preference pair begins; None if it is not a pair.
    rejected_at: int | None = None
    #: whether it was too long, so that its end is missing.
    shortened: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Runs of trained tokens; for a pair also an empty one, where the rejected conversation begins."""
        at = self.rejected_at
        if at is None:
            return runs_of(self.trained)
        return [*runs_of(self.trained[:at]), (at, at), *((at + i, at + k) for i, k in runs_of(self.trained[at:]))]


def runs_of(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The runs of True values: first index, and one after the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class ConversationEncoder:
    """A stateless function of conversations.

    Args:
        options: see `ConversationOptions`.
        tokenizer: that of the template.
        eod: tokens to append to a conversation: one or none. It is trained if the token before it is.

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
        """Encode conversations, each as a document; or give the reason why not; or None if left out as too long.

        Raises:
            CorpusError: a conversation is too long, and no policy was set.
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
        rendered: list[tuple[str, Ranges] | BadRow] = []
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
        """The longest prefix of messages that ends with a trained one and fits; None if none fits."""
        for short in self._shortened(conversation):
            encoded = self._encode([short])[0]
            if isinstance(encoded, EncodedConversation) and not self._is_too_long(encoded):
                return replace(encoded, shortened=True)
        return None

    def _shortened(self, conversation: Conversation) -> Iterator[Conversation]:
        """Prefixes of a conversation that end early, longest first.

        Each further turn makes the text longer, unless the template omits the reasoning of earlier turns. Then more
        turns may be fewer tokens; but with all reasoning removed, more turns are always longer, and a prefix that is
        too long even without its reasoning cannot fit.
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
        """Whether the template omits reasoning of a conversation, given the conversation without it."""
        thought = without_reasoning(whole.messages)[1]
        if not thought:
            return False
        try:
            return len(self._finder.render(whole)) - len(self._finder.render(bare)) < thought
        except TemplateRefuses:
            return True

    def _fits(self, conversation: Conversation) -> bool:
        """Whether it is within the limit; also true for one that the template refuses."""
        try:
            text = self._finder.render(conversation)
        except TemplateRefuses:
            return True
        limit = self._options.max_tokens
        return limit is None or len(self._tokenizer.encode_batch([text])[0]) + len(self._eod) <= limit

    def _answers(self, conversation: Conversation) -> list[int]:
        """The messages that a conversation may end with, except the last."""
        roles, messages = self._options.selection.roles, conversation.messages[:-1]
        return [i for i, m in enumerate(messages) if m["role"] in roles and i not in conversation.untrained]


def _overlapping(runs: Sequence[tuple[int, int]], offsets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The tokens, first to stop, that overlap each run of characters; runs without tokens are left out."""
    # Tokens without characters belong to those around them.
    own = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
    begins, ends = offsets[own, 0], offsets[own, 1]
    chars = np.array(runs, np.int64).reshape(-1, 2)
    # Nearly always sorted; if not, the bounds are a little wide.
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
