"""Finds the characters of a rendered conversation that are trained.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n<think>\\nhm\\n</think>\\n\\nHello<|im_end|>\\n
                                                         xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx   trained

*Trained* is what the model should say when asked: from the end of the prompt that the template makes from the previous
messages, to the special token that ends the turn, or to the last word if there is none. A template with
``{% generation %}`` marks it. For others, **marks** find it: the conversation is rendered a second time with characters
that occur in no text around the contents of its messages.

    text       Hello                       without its marks, the second text must equal the first; otherwise it is
    marked     \\U000f0004Hello\\U000f0005     not used

    prompt     <|im_start|>assistant\\n     added by add_generation_prompt. Nearly always the first mark follows it;
                                           otherwise the previous messages are rendered alone, with and without it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from megaresume.encoding.text.chat_template import PARTS, ChatTemplate, Core, Marks, Part, TemplateRefuses
from megaresume.encoding.text.conversations import BadRow, Conversation, Message
from megaresume.stream.errors import UsageError
from megaresume.stream.skips import Ranges, union

Turns = Literal["all", "last"]
#: a word that occurs in no template.
_ANSWER = "qzjxv"
_CLOSED = re.compile(r"</think>\s*")
_TAGS_BEFORE = re.compile(r"(?:</?think>\s*)+\Z")
_TAGS_AFTER = re.compile(r"(?:\s*</?think>)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The parts of a conversation that are trained."""

    #: the roles whose messages are trained.
    roles: tuple[str, ...] = ("assistant",)
    #: the turns that are trained: all, or those after the user's last message.
    turns: Turns = "all"
    #: the parts of the assistant's messages that are trained; the end of a turn belongs to its last part.
    parts: tuple[Part, ...] = PARTS

    @property
    def as_generated(self) -> bool:
        """Whether it is exactly the content of {% generation %}."""
        return self.roles == ("assistant",) and self.turns == "all" and set(self.parts) == set(PARTS)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message as its author says it, including what ends it: characters first to stop."""

    message: int
    first: int
    stop: int
    cores: tuple[Core, ...]


class TurnFinder:
    """Renders conversations and finds what is trained.

    Args:
        template: of the tokenizer.
        special: texts of its special tokens.
        selection: what to train.
    """

    def __init__(self, template: ChatTemplate, special: Sequence[str], selection: Selection) -> None:
        self._template = template
        self._selection = selection
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        any_special = "|".join(map(re.escape, longest_first))
        self._any = re.compile(any_special) if longest_first else None
        #: white space, then a special token.
        self._end = re.compile(rf"\s*(?:{any_special})") if longest_first else None
        #: the text by which the template asks the assistant to answer, by template options.
        self._prompts: dict[str, str] = {}
        self._ends = self._end_of_answers()

    def find(self, conversation: Conversation) -> tuple[str, Ranges]:
        """The text of a conversation, and its trained characters: runs [first, stop), in order, apart.

        Raises:
            BadRow: the template refuses it, or the trained part cannot be determined.
        """
        if not self.wanted(conversation):
            roles = ", ".join(dict.fromkeys(message["role"] for message in conversation.messages))
            raise BadRow(
                "has no role that is trained", f"messages of {roles}", f"of {' or '.join(self._selection.roles)}"
            )
        try:
            text = self.render(conversation)
            turns = _Rendered(self, conversation, text).turns()
        except TemplateRefuses as error:
            raise BadRow(
                "is refused by the chat template", error, "roles in an order that the template knows"
            ) from error
        trained = union(run for turn in turns for run in self._trained(turn, conversation, text))
        if not trained:
            raise BadRow("has nothing that is trained", f"{len(text)} characters", "text in the turns that are trained")
        return text, trained

    def render(self, conversation: Conversation, **how: Any) -> str:
        """The text of a conversation; for ``how`` see `ChatTemplate.render`."""
        said = conversation
        return self._template.render(said.messages, tools=said.tools, options=said.options, **how)

    def end_of_turn(self, text: str, at: int) -> int | None:
        """The end of the special tokens that end a turn here, after optional white space; None if there are none."""
        found = next((found for end in self._ends if (found := end.match(text, at)) is not None), None)
        return None if found is None else found.end()

    def last_special(self, text: str) -> int | None:
        """The end of the last special token of a text."""
        ends = [found.end() for found in self._end.finditer(text)] if self._end is not None else []
        return ends[-1] if ends else None

    def prompt(self, options: dict[str, Any]) -> str:
        """The text that the template adds after a question, to be continued by the assistant."""
        key = repr(options)
        if key not in self._prompts:
            question = Conversation(messages=[{"role": "user", "content": "?"}], options=options)
            try:
                plain, asked = self.render(question), self.render(question, prompt=True)
                self._prompts[key] = asked[self._whole_tokens(asked, _common(plain, asked)) :]
            except TemplateRefuses:
                self._prompts[key] = ""
        return self._prompts[key]

    def _whole_tokens(self, text: str, at: int) -> int:
        """The position, moved back to the start of a special token if it is inside one."""
        around = (found for found in self._any.finditer(text) if found.start() < at < found.end()) if self._any else ()
        return next((found.start() for found in around), at)

    def _end_of_answers(self) -> list[re.Pattern[str]]:
        """Patterns for the end of the last answer and of one before a question; any special token if unknown."""
        asked = {"role": "user", "content": "?"}
        tails = []
        for after in ([], [asked]):
            messages = [asked, {"role": "assistant", "content": _ANSWER}, *after]
            try:
                tails.append(self.render(Conversation(messages=messages)).partition(_ANSWER)[2])
            except (TemplateRefuses, UsageError):
                tails.append("")
        if self._end is None or self._end.match(tails[0]) is None:
            return []
        common = tails[0][: _common(*tails)]
        always = self.last_special(common)
        return [re.compile(r"\s*" + re.escape(common[:always].lstrip()))] * (always is not None) + [self._end]

    def wanted(self, conversation: Conversation) -> list[int]:
        """Numbers of the messages to train."""
        messages = conversation.messages
        first = 0
        if self._selection.turns == "last":
            first = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1) + 1
        roles = self._selection.roles
        return [
            i
            for i, message in enumerate(messages)
            if i >= first and message["role"] in roles and i not in conversation.untrained
        ]

    def _trained(self, turn: _Turn, conversation: Conversation, text: str) -> Iterator[tuple[int, int]]:
        """The parts of a turn to train."""
        if conversation.messages[turn.message]["role"] != "assistant" or set(self._selection.parts) == set(PARTS):
            yield turn.first, turn.stop
            return
        edges = [turn.first]
        for before, after in zip(turn.cores, turn.cores[1:], strict=False):
            # </think> belongs to the reasoning before it, <tool_call> to the call after it.
            closed = _CLOSED.search(text, before.stop, after.first) if before.part == "thinking" else None
            edges.append(before.stop if closed is None else closed.end())
        for core, first, stop in zip(turn.cores, edges, [*edges[1:], turn.stop], strict=True):
            if core.part in self._selection.parts:
                yield first, stop


class _Rendered:
    """One conversation, rendered by the template."""

    def __init__(self, finder: TurnFinder, conversation: Conversation, text: str) -> None:
        self._finder, self._conversation, self._text = finder, conversation, text
        self._template, self._selection = finder._template, finder._selection
        #: the text before or after turns of a kind, by their own white space there, and how often in a row it was the
        #: same.
        self._habits: dict[tuple[str, str], tuple[str, int]] = {}
        #: whether a text that two turns shared is assumed for others; turns for which it is not.
        self._believes, self._doubted = True, set[int]()

    def turns(self) -> list[_Turn]:
        """The trained characters, by message."""
        wanted = set(self._finder.wanted(self._conversation))
        if self._template.marks_generation and self._selection.roles == ("assistant",):
            return self._generated(wanted)
        last = len(self._conversation.messages) - 1
        self._doubted = {max(wanted), max(wanted - {last}, default=last)}
        turns = self._each(wanted)
        if not self._believes:  # a later turn was different: look at each
            turns = self._each(wanted)
        return turns

    def _each(self, wanted: set[int]) -> list[_Turn]:
        turns, cores_of = [], dict[int, list[Core]]()
        for core in self._cores:
            cores_of.setdefault(core.message, []).append(core)
        for i in sorted(wanted):
            cores = cores_of.get(i, [])
            self._check_all_there(i, cores)
            if not cores:
                raise BadRow(
                    "has a turn without words",
                    f"message {i}, as the chat template writes it",
                    "something to say, or a weight of 0 for that message",
                )
            assistant = self._conversation.messages[i]["role"] == "assistant"
            first = self._begin(i, cores[0]) if assistant else cores[0].first
            turns.append(_Turn(i, first, self._stop(i, cores[-1]), tuple(cores)))
        return turns

    def _generated(self, wanted: set[int]) -> list[_Turn]:
        """The text in {% generation %} blocks."""
        messages = self._conversation.messages
        everything = {i for i, message in enumerate(messages) if message["role"] == "assistant"}
        if self._selection.as_generated and wanted == everything:
            marks = Marks(self._text)
            runs = marks.find(self._marked(marks, messages, around=marks.pair(-1, "text")), self._text)
            message = min(everything, default=-1)
            return [_Turn(message, run.first, run.stop, ()) for run in runs]
        marks = Marks(self._text)
        marked = marks.put(messages, everything)
        around = marks.pair(-1, "text")
        found = marks.find(self._marked(marks, marked, around=around), self._text)
        turns, answers = [], sorted(everything)
        runs = [core for core in found if core.message < 0]
        said = iter(found)
        for k, run in enumerate(runs):
            # A core ends before the run that contains it, and so comes first.
            cores = tuple(c for c in iter(partial(next, said), run) if run.first <= c.first)
            if not cores and len(runs) != len(answers):
                raise BadRow(
                    "has a turn that cannot be told",
                    f"text in {{% generation %}} that no message has: {self._text[run.first : run.stop]!r:.60}",
                    "a template that writes what the messages say",
                )
            message = cores[0].message if cores else answers[k]
            if message in wanted:
                whole = cores or (Core(message, "text", run.first, run.stop),)
                turns.append(_Turn(message, run.first, run.stop, whole))
        return turns

    def _marked(self, marks: Marks, messages: Sequence[Message], **how: Any) -> str:
        return self._finder.render(replace(self._conversation, messages=list(messages)), **how)

    @cached_property
    def _cores(self) -> list[Core]:
        """The contents of the messages to train."""
        marks = Marks(self._text)
        wanted = set(self._finder.wanted(self._conversation))
        return marks.find(self._marked(marks, marks.put(self._conversation.messages, wanted)), self._text)

    def _check_all_there(self, i: int, cores: Sequence[Core]) -> None:
        """Refuse missing parts: a template may omit reasoning from earlier turns, but nothing else."""
        message = self._conversation.messages[i]
        there = {core.part for core in cores}
        said = Marks.parts(message)
        lost = sorted({part for part in said if part != "thinking"} - there)
        if lost:
            raise BadRow(
                "has what the chat template does not write as it is",
                f"message {i}: its {lost[0].replace('-', ' ')}",
                "a template that writes it, or one with {% generation %}: --chat-template FILE",
            )

    def _begin(self, i: int, first: Core) -> int:
        """The end of the prompt that message i answers."""
        usual = self._finder.prompt(self._conversation.options)
        if usual and self._text.endswith(usual, 0, first.first):
            return first.first
        plain, content = first.part == "text", self._content(i)
        kind = "before", content[: len(content) - len(content.lstrip())]
        header = self._habit(kind, i) if plain else None
        if header is not None and self._text.endswith(header, 0, first.first):
            return first.first - len(header)
        begin = self._begins_exactly(i, first, usual)
        if plain:
            self._note(kind, self._text[begin : first.first])
        return begin

    def _habit(self, kind: tuple[str, str], i: int) -> str | None:
        """The usual text at this place in turns of this kind; None: look."""
        text, times = self._habits.get(kind, ("", 0))
        return text if times > 1 and self._believes and i not in self._doubted else None

    def _note(self, kind: tuple[str, str], text: str) -> None:
        before, times = self._habits.get(kind, (text, 0))
        if before != text and times > 1:
            self._believes = False
        self._habits[kind] = text, times + 1 if before == text else 1

    def _begins_exactly(self, i: int, first: Core, usual: str) -> int:
        """The first character of a turn, found by rendering the previous messages alone."""
        asked = self._before(i, prompt=True)
        if asked is not None and self._text.startswith(asked):
            return min(len(asked), first.first)
        before = self._before(i)
        if asked is None or before is None or not self._text.startswith(before):
            if first.part == "text":  # later messages change what comes before: use the word itself
                tags = _TAGS_BEFORE.search(self._text, 0, first.first) if _TAGS_AFTER.match(self._content(i)) else None
                at = first.first if tags is None else tags.start()
                return at if usual else len(self._text[:at].rstrip())
            raise self._unknown(i, first, "beginning")
        # If the prompt begins the answer, as with <think>, use the part of it that occurs here.
        common = _common(asked[len(before) :], self._text[len(before) : first.first]) if asked.startswith(before) else 0
        return len(before) + common if common else first.first

    def _before(self, i: int, *, prompt: bool = False) -> str | None:
        """The text of the messages before message i; None if the template cannot render them alone."""
        alone = replace(self._conversation, messages=self._conversation.messages[:i])
        try:
            return self._finder.render(alone, prompt=prompt)
        except TemplateRefuses:
            return None

    def _stop(self, i: int, last: Core) -> int:
        """The end of a turn, given its last word."""
        said = self._said(i, self._text, last)
        stop = self._finder.end_of_turn(self._text, said) if last.part != "tool-calls" else None
        if stop is not None:
            return stop
        plain, content = last.part == "text" and said == last.stop, self._content(i)
        kind = "after", content[len(content.rstrip()) :]
        usual = self._habit(kind, i) if plain else None
        if usual is not None and self._text.startswith(usual, said):
            after: str | None = usual
        else:
            after = self._after(i, said)
            if plain and after is not None and i + 1 < len(self._conversation.messages):
                self._note(kind, after)
        if after is None:
            if last.part != "tool-calls":
                return said
            raise self._unknown(i, last, "end")
        stop = self._finder.last_special(after)
        return said + (len(after.rstrip()) if stop is None else stop)

    def _said(self, i: int, text: str, last: Core) -> int:
        """The end of message i in a text: after its last word and its own closing tags."""
        has_tags = last.part == "thinking" or _TAGS_BEFORE.search(self._content(i).rstrip())
        tags = _TAGS_AFTER.match(text, last.stop) if has_tags else None
        return last.stop if tags is None else tags.end()

    def _content(self, i: int) -> str:
        content = self._conversation.messages[i].get("content") or ""
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    def _after(self, i: int, said: int) -> str | None:
        """The text between the end of message i and the next one; None if unknown."""
        messages = self._conversation.messages[: i + 1]
        if len(messages) == len(self._conversation.messages):
            return self._text[said:]
        alone = replace(self._conversation, messages=messages)
        try:
            text = self._finder.render(alone)
            marks = Marks(text)
            cores = marks.find(self._finder.render(replace(alone, messages=marks.put(messages, {i}))), text)
        except (TemplateRefuses, BadRow):
            return None
        rest = text[self._said(i, text, cores[-1]) :] if cores else ""
        return rest[: _common(rest, self._text[said:])] if cores else None

    def _unknown(self, i: int, core: Core, what: str) -> BadRow:
        return BadRow(
            f"has a turn whose {what} cannot be told",
            f"message {i}: its {core.part.replace('-', ' ')}",
            "a template with {% generation %}: --chat-template FILE",
        )


def _common(one: str, other: str) -> int:
    """The number of characters that both begin with."""
    length = min(len(one), len(other))
    return next((k for k in range(length) if one[k] != other[k]), length)
