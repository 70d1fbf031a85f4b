"""What is trained of thinking, tool calls, other roles and last turns; and what is refused."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaresume.encoding.text import turns
from megaresume.encoding.text.chat_template import ChatTemplate
from megaresume.encoding.text.conversation_encoder import _overlapping
from megaresume.encoding.text.conversations import BadRow, Conversation
from megaresume.encoding.text.turns import Selection, TurnFinder
from megaresume.stream.errors import UsageError
from tests.encoding.text.families import FAMILIES, GENERATION

EVERYTHING = Selection()
CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": 1, "where": "東京"}}}
TOOL_USE: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "yes"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "a lot"},
    {"role": "assistant", "content": "It pours."},
]
THOUGHTS: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\ntwo"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nadd again\n</think>\n\nfour"},
]


def finder(name: str, selection: Selection = EVERYTHING, *, generation: bool = False) -> TurnFinder:
    family = FAMILIES[name]
    tokens = {"bos_token": family.bos, "eos_token": family.eos}
    return TurnFinder(
        ChatTemplate(GENERATION[name] if generation else family.template, tokens), family.special, selection
    )


def trained(messages: list[dict[str, Any]], of: TurnFinder, **more: Any) -> list[str]:
    text, runs = of.find(Conversation(messages=messages, **more))
    return [text[first:stop] for first, stop in runs]


def joined(pieces: Any) -> list[str]:
    """Texts of the runs of trained pieces."""
    runs, before = [], False
    for text, is_trained in pieces:
        if is_trained:
            runs[-1:] = [runs[-1] + text] if before else [*runs[-1:], text]
        before = is_trained
    return runs


def test_tool_calls():
    assert trained(TOOL_USE, finder("qwen2.5")) == joined(FAMILIES["qwen2.5"].pieces(TOOL_USE))
    call = '<tool_call>\n{"name": "look", "arguments": {"x": 1, "where": "東京"}}\n</tool_call>'
    assert trained(TOOL_USE, finder("qwen2.5")) == [
        f"Let me look.\n{call}\n{call}<|im_end|>",
        f"{call}<|im_end|>",
        "It pours.<|im_end|>",
    ]
    assert trained(TOOL_USE, finder("qwen2.5", Selection(parts=("text",)))) == ["Let me look.", "It pours.<|im_end|>"]
    assert trained(TOOL_USE, finder("qwen2.5", Selection(parts=("tool-calls",)))) == [
        f"\n{call}\n{call}<|im_end|>",
        f"{call}<|im_end|>",
    ]
    tools = trained(TOOL_USE, finder("qwen2.5", Selection(roles=("tool",))))
    assert [run[:3] for run in tools] == ["yes", "a l"]


def test_thinking():
    assert trained(THOUGHTS, finder("qwen3")) == joined(FAMILIES["qwen3"].pieces(THOUGHTS))
    assert trained(THOUGHTS, finder("qwen3")) == ["two<|im_end|>", "<think>\nadd again\n</think>\n\nfour<|im_end|>"]
    assert trained(THOUGHTS, finder("qwen3", Selection(parts=("text",)))) == ["two<|im_end|>", "four<|im_end|>"]
    assert trained(THOUGHTS, finder("qwen3", Selection(parts=("thinking",)))) == ["<think>\nadd again\n</think>\n\n"]
    apart = [{**m, "content": m["content"].split("\n\n")[-1]} for m in THOUGHTS]
    apart[3]["reasoning_content"] = "add again"
    assert trained(apart, finder("qwen3")) == trained(THOUGHTS, finder("qwen3"))
    assert trained(THOUGHTS, finder("deepseek-r1")) == [
        "\n\ntwo<｜end▁of▁sentence｜>",
        "\n\nfour<｜end▁of▁sentence｜>",
    ]
    assert trained(THOUGHTS, finder("chatml", Selection(parts=("thinking",)))) == [
        "<think>\nadd\n</think>\n\n",
        "<think>\nadd again\n</think>\n\n",
    ]


@pytest.mark.parametrize("words", ["</think>", "<think></think>", " <think>\n\n</think>"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_of_nothing_but_tags(name, words):
    """Found by Hypothesis: such a turn was not trained, and nothing said so unless it was the only one."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}] * 2
    if name in ("qwen3", "deepseek-r1"):  # they take </think> apart, and leave the tags out of earlier turns
        with pytest.raises(BadRow, match="cuts"):
            trained(messages, finder(name))
    else:
        assert trained(messages, finder(name)) == joined(FAMILIES[name].pieces(messages))
    call = [messages[0], {**TOOL_USE[1], "content": words}]
    assert trained(call, finder("qwen2.5"))[-1].endswith("</tool_call><|im_end|>")


@pytest.mark.parametrize("generation", [False, True])
def test_last_turn_weights_and_parts(generation):
    of = finder("chatml", Selection(turns="last"), generation=generation)
    assert trained(THOUGHTS, of) == ["<think>\nadd again\n</think>\n\nfour<|im_end|>"]
    everything = finder("chatml", generation=generation)
    assert trained(THOUGHTS, everything, untrained=frozenset({3})) == ["<think>\nadd\n</think>\n\ntwo<|im_end|>"]
    answers = finder("chatml", Selection(parts=("text",)), generation=generation)
    assert trained(THOUGHTS, answers) == ["two<|im_end|>", "four<|im_end|>"]
    with pytest.raises(BadRow, match="no role that is trained"):
        trained(THOUGHTS, everything, untrained=frozenset({1, 3}))


def test_generation_that_tells_tool_calls_and_thinking():
    messages = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" else m for m in TOOL_USE]
    whole = trained(messages, finder("qwen3", generation=True))
    assert len(whole) == 3 and all(
        run.startswith("<think>\nhm\n</think>") and run.endswith("<|im_end|>") for run in whole
    )
    calls = trained(messages, finder("qwen3", Selection(parts=("tool-calls",)), generation=True))
    assert len(calls) == 2 and all(
        run.lstrip().startswith("<tool_call>") and run.endswith("<|im_end|>") for run in calls
    )


def test_other_roles():
    messages = [{"role": "system", "content": "Be short."}, *THOUGHTS]
    assert trained(messages, finder("llama3", Selection(roles=("user",)))) == ["1+1?<|eot_id|>", "2+2?<|eot_id|>"]
    both = trained(messages, finder("llama3", Selection(roles=("user", "assistant"))))
    assert len(both) == 4 and both[1].endswith("two<|eot_id|>")


def each(said: str) -> str:
    return f"{{% for m in messages %}}{said}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ messages[3].content | upper }}<|im_end|>", "cannot be told"),
        ("{{ messages[1].content[:13] }}<|im_end|>", "followed|cuts"),
        (each("{{ m.content }}{{ m.content }}"), "twice"),
        (each("{% if m.role == 'user' %}{{ m.content }}{% endif %}"), "does not write"),
        (each("{{ m.content | length }}:{{ m.content }}"), "followed"),
        ("{{ raise_exception('no system') }}", "refused by the chat template"),
        ("{{ messages[0].content + none }}", "refused by the chat template"),
    ],
)
def test_templates_that_cannot_be_marked_are_refused(template: str, what: str) -> None:
    of = TurnFinder(ChatTemplate(template, {}), ["<|im_end|>"], EVERYTHING)
    with pytest.raises(BadRow, match=what):
        of.find(Conversation(messages=THOUGHTS, untrained=frozenset({1}) if "[3]" in template else frozenset()))


def test_a_turn_that_ends_with_two_tokens():
    """As Cohere's; the header of the next turn follows at once, and is of no turn."""
    turns = each("<|T|>{{ m.role }}<|M|>{{ m.content }}<|R|><|E|>")
    template = turns + "{% if add_generation_prompt %}<|T|>assistant<|M|>{% endif %}"
    of = TurnFinder(ChatTemplate(template, {}), ["<|T|>", "<|M|>", "<|R|>", "<|E|>"], EVERYTHING)
    messages = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Yes!"}] * 2
    assert trained(messages, of) == ["Yes!<|R|><|E|>", "Yes!<|R|><|E|>"]
    # Without a prompt the model has to write the header itself.
    of = TurnFinder(ChatTemplate(turns, {}), ["<|T|>", "<|M|>", "<|R|>", "<|E|>"], EVERYTHING)
    assert trained(messages[:2], of) == ["<|T|>assistant<|M|>Yes!<|R|><|E|>"]


def test_a_tool_that_is_named_again_when_it_answers():
    """As in gpt-oss; and the last turn ends with another token than the others."""
    template = (
        "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.tool_calls %}{% set ns.name = "
        "m.tool_calls[0].function.name %}<|start|>assistant to={{ ns.name }}<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif m.role == 'tool' %}<|start|>{{ ns.name }}"
        "<|message|>{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    special = ["<|start|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>"]
    messages = [TOOL_USE[0], TOOL_USE[3], TOOL_USE[4], TOOL_USE[5], TOOL_USE[0], TOOL_USE[5]]
    assert trained(messages, TurnFinder(ChatTemplate(template, {}), special, EVERYTHING)) == [
        ' to=look<|message|>{"x": 1, "where": "東京"}<|call|>',
        "<|message|>It pours.<|end|>",
        "<|message|>It pours.<|return|>",
    ]


def test_a_template_that_drops_tool_calls_is_refused():
    with pytest.raises(BadRow, match="does not write"):
        trained(TOOL_USE[:2], finder("chatml"))


def test_no_assistant():
    with pytest.raises(BadRow, match="no role that is trained"):
        trained([{"role": "user", "content": "Hi"}], finder("chatml"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_without_words_is_not_passed_over(name):
    empty = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " "}]
    with pytest.raises(BadRow, match="turn without words"):
        trained([*empty, {"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes"}], finder(name))


WORDS = ["<think>", "</think>", "<think></think>", "<think>\n\n</think>\n\n", "<think>x</think>", "hm", "\n\n", "."]


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["plain", "special"])
@pytest.mark.parametrize("name", FAMILIES)
def test_thinking_tags_anywhere(name, special):
    """What is trained is what the family's reference says, or the row is refused by name."""
    family, draw, compared = FAMILIES[name], random.Random(name), 0
    of = TurnFinder(
        ChatTemplate(family.template, {"bos_token": family.bos, "eos_token": family.eos}),
        (*family.special, *special),
        EVERYTHING,
    )
    for _ in range(150):
        messages = [{"role": "system", "content": "S"}] * (family.system and draw.random() < 0.4)
        for _ in range(draw.randint(1, 3)):
            said = "".join(draw.choices(WORDS, k=draw.randint(1, 4)))
            asked = draw.choice(["q", "</think>", "<think>a</think>b"])
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        with contextlib.suppress(BadRow):
            assert trained(messages, of) == joined(family.pieces(messages)), messages
            compared += 1
    assert compared > 20


def test_a_template_that_writes_the_date():
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UsageError, match="today's date"):
        TurnFinder(ChatTemplate(template, {}), ["<|im_end|>"], EVERYTHING).find(Conversation(messages=THOUGHTS))
    text, _ = TurnFinder(ChatTemplate(template, {}, "2026-01-31"), ["<|im_end|>"], EVERYTHING).find(
        Conversation(messages=THOUGHTS)
    )
    assert text.startswith("31 Jan 2026")


def test_private_use_characters_are_texts():
    icon = "\U000f0001 \U000f0000"
    messages = [{"role": "user", "content": icon}, {"role": "assistant", "content": icon + " ok"}]
    assert trained(messages, finder("chatml")) == [f"{icon} ok<|im_end|>"]
    messages[0]["content"] += "\U00100001"
    with pytest.raises(BadRow, match="private-use"):
        trained(messages, finder("chatml"))


def test_the_text_is_transformers(tmp_path):
    """Variables, filters and functions of a template."""
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{{ bos_token }}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% for m in messages %}{% if loop.first %}"
        "{% continue %}{% endif %}{{ m | tojson }}{{ dict(a=1) }}{% set ns = namespace(x=m.content | trim) %}{{ ns.x }}"
        "{% endfor %}{{ documents is none }}{{ extra }}\n    {% if add_generation_prompt %}!{% endif %}\n"
    )
    tools = [{"type": "function", "function": {"name": "<é>", "parameters": {}}}]
    plain = [{"role": m["role"], "content": m["content"]} for m in THOUGHTS]
    for prompt in (False, True):
        theirs = render_jinja_template(
            [plain], tools=tools, chat_template=template, add_generation_prompt=prompt, bos_token="<s>", extra="x"
        )
        ours = ChatTemplate(template, {"bos_token": "<s>"}).render(
            plain, tools=tools, options={"extra": "x"}, prompt=prompt
        )
        assert ours == theirs[0][0]
    assert json.loads(json.dumps(tools)) == tools


_MANY = {
    "tokens, no prompt": "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "words alone": "{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}",
    "another header at the end": "{{ ('### ' if loop.last else '## ') + m.role + ':\n' + m.content + '\n\n' }}",
    "another header in between": "{{ ('# ' if loop.index == 8 else '## ') + m.role + ':\n' + m.content + '\n\n' }}",
    "nothing around": "{{ m.content + '\n' }}",
    "trimmed": "{{ '### ' + m.role + ':\n' + m.content|trim + '\n\n' }}",
}


@pytest.mark.parametrize("padding", ["", "\n", " \n", "both"])
@pytest.mark.parametrize("name", _MANY)
def test_many_turns_are_rendered_a_few_times(name, padding, monkeypatch):
    template = ChatTemplate("{% for m in messages %}" + _MANY[name] + "{% endfor %}", {})
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"word {i}"} for i in range(160)]
    for i, message in enumerate(messages):
        message["content"] += {"": "", "both": " " if i % 4 == 1 else "\n"}.get(padding, padding)
    for i in (11, 51):
        messages[i]["content"] = "  padded \n"
    conversation, renders = Conversation(messages=messages), []
    real = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *a, **k: renders.append(1) or real(*a, **k))
    found = TurnFinder(template, ["<|im_start|>", "<|im_end|>"], Selection()).find(conversation)
    assert len(renders) < 60 or "header" in name
    monkeypatch.setattr(turns._Rendered, "_habit", lambda *_: None)
    assert found == TurnFinder(template, ["<|im_start|>", "<|im_end|>"], Selection()).find(conversation)
    assert len(found[1]) == 80


@given(st.data())
def test_tokens_of_trained_characters(data):
    """The same as of each token asked by itself, in whatever order a tokenizer lists them, some without characters."""
    places = st.tuples(st.integers(0, 40), st.integers(0, 4)).map(lambda found: (found[0], sum(found)))
    offsets = data.draw(st.lists(places, max_size=20))
    if data.draw(st.booleans()):
        offsets.sort()
    edges = sorted(data.draw(st.sets(st.integers(0, 45), max_size=10)))
    runs = list(zip(edges[::2], edges[1::2], strict=False))
    expected = []
    for first, stop in runs:
        own = [i for i, (a, b) in enumerate(offsets) if a < b and a < stop and b > first]
        expected += [(own[0], own[-1] + 1)] if own else []
    assert list(_overlapping(runs, np.array(offsets, np.int64).reshape(-1, 2))) == expected
