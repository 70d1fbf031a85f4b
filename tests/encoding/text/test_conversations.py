"""Rows of every shape to conversations; and rows that are none."""

from __future__ import annotations

from typing import Any

import pytest

from megaresume.encoding.text.conversations import BadRow, check_roles, conversation_of, shapes_of

ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("row", "shape", "messages"),
    [
        ({"messages": ASKED, "id": 3}, "messages", ASKED),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, "sharegpt", ASKED),
        (
            {"conversations": [{"from": "human", "value": "Hi"}], "system": "Be short."},
            "sharegpt",
            [{"role": "system", "content": "Be short."}, ASKED[0]],
        ),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, "alpaca", ASKED),
        (
            {"instruction": "Hi", "input": "there", "output": "Hello", "system": "s", "history": [["a", "b"]]},
            "alpaca",
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "Hi\nthere"},
                {"role": "assistant", "content": "Hello"},
            ],
        ),
        ({"prompt": "Hi", "completion": "Hello"}, "prompt-completion", ASKED),
        ({"prompt": ASKED[:1], "completion": ASKED[1:]}, "prompt-completion", ASKED),
    ],
)
def test_shapes(row: dict[str, Any], shape: Any, messages: list[dict[str, Any]]) -> None:
    assert shapes_of(row) == [shape]
    assert conversation_of(row, shape, "a.jsonl:1").messages == messages


def test_what_a_row_may_have_besides():
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None},
            {"role": "model", "content": None, "tool_calls": [{"name": "f", "arguments": {}}], "weight": 0},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "Hello", "thinking": "hm"},
        ],
        "tools": '[{"name": "f"}]',
        "chat_template_kwargs": {"enable_thinking": False},
    }
    found = conversation_of(row, "messages", "x:1")
    assert found.messages[0] == {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert found.messages[1]["role"] == "assistant" and "content" not in found.messages[1]
    assert found.messages[3] == {"role": "assistant", "content": "Hello", "thinking": "hm", "reasoning_content": "hm"}
    assert (found.tools, found.options, found.untrained) == ([{"name": "f"}], {"enable_thinking": False}, {1})
    prompt = {"prompt": [*ASKED, ASKED[0]], "completion": "Hello"}
    assert conversation_of(prompt, "prompt-completion", "x:1").untrained == {0, 1, 2}
    assert conversation_of({"chat": ASKED}, "messages", "x:1", key="chat").messages == ASKED


@pytest.mark.parametrize(
    ("row", "shape", "what"),
    [
        ({"conversations": []}, "messages", "has no 'messages'"),
        ({"messages": None}, "messages", "has no 'messages'"),
        ({"messages": []}, "messages", "no list of messages"),
        ({"messages": "[]"}, "messages", "no list of messages"),
        ({"messages": ["Hi"]}, "messages", "message 0 is not an object"),
        ({"messages": [{"content": "Hi"}]}, "messages", "message 0 has an unknown role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "message 0 has no text"),
        ({"messages": [ASKED[0], {"role": "assistant"}]}, "messages", "message 1 has no text"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "message 0 has no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "part without text"),
        ({"messages": [{**ASKED[1], "thinking": 3}]}, "messages", "reasoning that is not text"),
        ({"messages": ASKED, "tools": "{"}, "messages", "tools that are not JSON"),
        ({"messages": ASKED, "tools": {}}, "messages", "bad tools"),
        ({"messages": ASKED, "chat_template_kwargs": [1]}, "messages", "bad chat_template_kwargs"),
        ({"conversations": [{"from": "observation", "value": "x"}]}, "sharegpt", "unknown role"),
        ({"instruction": "x", "output": 3}, "alpaca", "no text under 'output'"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "alpaca", "bad 'history'"),
        ({"prompt": "x", "completion": None}, "prompt-completion", "has no 'completion'"),
    ],
)
def test_rows_that_are_no_conversation(row: dict[str, Any], shape: Any, what: str) -> None:
    with pytest.raises(BadRow, match=what):
        conversation_of(row, shape, "a.jsonl:1")


@pytest.mark.parametrize(
    ("roles", "good"),
    [
        ("user assistant", True),
        ("system user assistant tool tool assistant user", True),
        ("assistant user assistant", True),
        ("user assistant system user assistant", False),
        ("user user assistant", False),
        ("user assistant assistant", False),
        ("user tool assistant", False),
        ("tool", False),
    ],
)
def test_the_order_of_roles(roles: str, good: bool) -> None:
    messages = [{"role": role, "content": "x"} for role in roles.split()]
    if good:
        check_roles(messages)
        return
    with pytest.raises(BadRow, match="roles out of order"):
        check_roles(messages)


@pytest.mark.parametrize(
    ("more", "untrained"),
    [({"weight": 1}, set()), ({"weight": 0.0}, {1}), ({"loss": False}, {1}), ({"train": True}, set())],
)
def test_a_message_says_whether_it_is_trained(more: dict[str, Any], untrained: set[int]) -> None:
    row = {"messages": [ASKED[0], {**ASKED[1], **more}]}
    assert conversation_of(row, "messages", "x:1").untrained == untrained


@pytest.mark.parametrize("more", [{"weight": 0.5}, {"weight": "1"}, {"loss_scale": 2.0}, {"training": [0]}])
def test_a_weight_between_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match="message 1 has a weight that is neither 0 nor 1"):
        conversation_of({"messages": [ASKED[0], {**ASKED[1], **more}]}, "messages", "x:1")
    with pytest.raises(BadRow, match="has a weight of the whole row"):
        conversation_of({"messages": ASKED, "weight": 0.5}, "messages", "x:1")
    assert not conversation_of({"messages": ASKED, "weight": None}, "messages", "x:1").untrained
