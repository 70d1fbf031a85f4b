"""Tokens and masks of every family: token by token those of transformers, and of `Family.pieces`."""

from __future__ import annotations

import datetime
import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from megaresume.encoding.text.chat_template import read_chat_template
from megaresume.encoding.text.conversation_encoder import (
    ConversationEncoder,
    ConversationOptions,
    EncodedConversation,
)
from megaresume.encoding.text.conversations import BadRow, Conversation
from megaresume.encoding.text.tokenizers import load_tokenizer
from megaresume.encoding.text.turns import Selection
from tests.encoding.text.families import FAMILIES, GENERATION, Messages
from tests.encoding.text.kit import conversations, reference_tokenizer, write_tokenizer

EVERYTHING = Selection()
KINDS = ("bytelevel", "metaspace")
FEW = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, kind, template) -> the directory of a tokenizer; made once."""

    @functools.cache
    def make(name: str, kind: str, generation: bool) -> Path:
        directory = tmp_path_factory.mktemp(name.replace(".", "_"))
        return write_tokenizer(directory, FAMILIES[name], kind, GENERATION[name] if generation else None)

    return make


@functools.cache
def encoder(directory: Path, selection: Selection = EVERYTHING) -> ConversationEncoder:
    template, tokens = read_chat_template(directory, None)
    options = ConversationOptions(template=template, tokens=tokens, selection=selection)
    return ConversationEncoder(options, load_tokenizer(directory), np.zeros(0, np.uint32))  # type: ignore[arg-type]


reference = functools.cache(reference_tokenizer)


def encoded(directory: Path, messages: Messages) -> tuple[list[int], list[int]]:
    found = encoder(directory, EVERYTHING).encode_batch([Conversation(messages=messages)])[0]
    assert not isinstance(found, Exception) and found is not None, found
    return found.tokens.tolist(), found.trained.astype(int).tolist()


def expected(directory: Path, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """By the tokenizers library alone: a token is trained if one of its characters is."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoding = tokenizer.encode("".join(text for text, _ in pieces), add_special_tokens=False)
    characters = [trained for text, trained in pieces for _ in text]
    return encoding.ids, [int(any(characters[a:b])) for a, b in encoding.offsets]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(conversations())
def test_every_family_against_the_reference(made, name, kind, messages):
    family = FAMILIES[name]
    messages = messages if family.system else [m for m in messages if m["role"] != "system"]
    directory = made(name, kind, False)
    pieces = list(family.pieces(messages))
    rendered = reference(directory).apply_chat_template(messages, tokenize=False)
    assert rendered == "".join(text for text, _ in pieces), "the reference writes another text than the template"
    assert encoded(directory, messages) == expected(directory, pieces)
    assert encoded(directory, messages)[0] == reference(directory).apply_chat_template(messages)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GENERATION)
@FEW
@given(conversations())
def test_every_template_with_generation_against_transformers(made, name, kind, messages):
    directory = made(name, kind, True)
    theirs = reference(directory).apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    assert encoded(directory, messages) == (theirs["input_ids"], theirs["assistant_masks"])


def test_where_transformers_loses_trained_tokens(tmp_path):
    """A last character of several tokens; white space at the beginning that the tokenizer counts to no token."""
    inside = GENERATION["chatml"].replace(
        "message['content'] + '<|im_end|>' }}{% endgen", "message['content'] }}{% endgen"
    )
    directory = write_tokenizer(tmp_path / "emoji", FAMILIES["chatml"], template=inside)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello \U0001fabf"}]
    theirs = reference_tokenizer(directory).apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    tokens, mask = encoded(directory, messages)
    assert tokens == theirs["input_ids"] and sum(mask) > sum(theirs["assistant_masks"])
    decoded = load_tokenizer(directory).decode([token for token, one in zip(tokens, mask, strict=True) if one])
    assert decoded == "Hello \U0001fabf"


def test_a_tokenizer_that_leaves_white_space_out(tmp_path):
    import json

    directory = write_tokenizer(tmp_path / "trimmed", FAMILIES["chatml"], template=GENERATION["chatml"])
    path = directory / "tokenizer.json"
    description = json.loads(path.read_text())
    description["post_processor"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    path.write_text(json.dumps(description))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " the fox"}]
    theirs = reference_tokenizer(directory).apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    tokens, mask = encoded(directory, messages)
    assert tokens == theirs["input_ids"] and sum(theirs["assistant_masks"]) == 0
    decoded = load_tokenizer(directory).decode([token for token, one in zip(tokens, mask, strict=True) if one])
    assert decoded.strip() == "the fox<|im_end|>"


CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
TALKS: dict[str, Messages] = {
    "plain": [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "naïve 東京?"},
        {"role": "assistant", "content": "  Two spaces, then\nlines, é 🦊 the fox\n"},
    ],
    "system": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ],
    "thinking": [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "two", "reasoning_content": "add", "thinking": "add"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "four", "reasoning_content": "add again", "thinking": "add again"},
    ],
    "tools": [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "yes", "name": "look"},
        {"role": "assistant", "content": "It rains."},
    ],
}


@pytest.mark.parametrize("talk", TALKS)
def test_every_template_that_trl_trains_with_against_transformers(tmp_path, talk):
    """Some thirty real ones, of as many families; what one refuses, the other does."""
    spec = importlib.util.find_spec("trl")
    templates = [] if spec is None else Path(str(spec.origin)).parent.glob("chat_templates/*_training.jinja")
    directory = write_tokenizer(tmp_path / "llama3", FAMILIES["llama3"])
    theirs, ours, date = reference_tokenizer(directory), load_tokenizer(directory), datetime.date.today().isoformat()
    compared = 0
    for path in sorted(templates):
        theirs.chat_template = path.read_text()
        tokens = {"bos_token": "<|begin_of_text|>", "unk_token": "<unk>"}
        options = ConversationOptions(template=path.read_text(), tokens=tokens, date=date)
        encoder = ConversationEncoder(options, ours, np.zeros(0, np.uint32))  # type: ignore[arg-type]
        (found,) = encoder.encode_batch([Conversation(messages=TALKS[talk])])
        try:
            expected = theirs.apply_chat_template(TALKS[talk], return_assistant_tokens_mask=True, return_dict=True)
        except Exception:  # noqa: BLE001  whatever a template does
            assert isinstance(found, BadRow), path.name
            continue
        assert isinstance(found, EncodedConversation), (path.name, found)
        masks = found.tokens.tolist(), found.trained.astype(int).tolist()
        assert masks == (expected["input_ids"], expected["assistant_masks"]), path.name
        compared += 1
    if not compared:
        pytest.skip("trl is not installed")
    assert compared > 20
