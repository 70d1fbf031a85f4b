"""Chat templates of model families, written down from their public formats; and each again as plain Python.

A `Family` has a jinja2 template and `pieces`, which writes the same text as (text, is it trained) pieces. They share no
code with each other, nor with what they test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Pieces = Iterator[tuple[str, bool]]


@dataclass(frozen=True)
class Family:
    template: str
    pieces: Callable[[Messages], Pieces]
    special: tuple[str, ...]
    bos: str = ""
    eos: str = ""
    #: whether it takes system messages.
    system: bool = True


def _chatml(messages: Messages) -> Pieces:
    for m in messages:
        trained = m["role"] == "assistant"
        yield f"<|im_start|>{m['role']}\n", False
        yield m["content"] + "<|im_end|>", trained
        yield "\n", False


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _qwen2(messages: Messages) -> Pieces:
    if messages[0]["role"] != "system":
        yield "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", False
    for i, m in enumerate(messages):
        role = m["role"]
        if role == "tool":
            if messages[i - 1]["role"] != "tool":
                yield "<|im_start|>user", False
            yield f"\n<tool_response>\n{m['content']}\n</tool_response>", False
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                yield "<|im_end|>\n", False
        elif m.get("tool_calls"):
            yield "<|im_start|>assistant", False
            first = True
            if m.get("content"):
                yield "\n", False
                yield m["content"], True
                first = False
            for call in m["tool_calls"]:
                function = call["function"]
                yield "\n", not first
                first = False
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                yield f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>', True
            yield "<|im_end|>", True
            yield "\n", False
        else:
            yield f"<|im_start|>{role}\n", False
            yield m["content"] + "<|im_end|>", role == "assistant"
            yield "\n", False


QWEN2 = """\
{%- if messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "user" or message.role == "system" or (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}
{{- '\\n' + message.content }}
{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' }}
{{- tool_call.name }}
{{- '", "arguments": ' }}
{{- tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' }}
{{- message.content }}
{{- '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _reasoning(message: dict[str, Any]) -> tuple[str, str]:
    """Reasoning, and the rest of the content."""
    content = message.get("content", "")
    if message.get("reasoning_content"):
        return message["reasoning_content"], content
    if "</think>" in content:
        before, after = content.split("</think>")[0], content.split("</think>")[-1]
        return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")
    return "", content


def _qwen3(messages: Messages) -> Pieces:
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages) - 1)
    for i, m in enumerate(messages):
        if m["role"] != "assistant":
            yield f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", False
            continue
        reasoning, content = _reasoning(m)
        yield "<|im_start|>assistant\n", False
        if i > last and (i + 1 == len(messages) or reasoning):
            stripped = reasoning.strip("\n")
            yield f"<think>\n{stripped}\n</think>\n\n" + content.lstrip("\n"), True
        else:
            yield content, True
        yield "<|im_end|>", True
        yield "\n", False


QWEN3 = """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}
{%- set ns.last_query_index = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if message.role == "user" or message.role == "system" %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning_content = message.reasoning_content %}
{%- else %}
{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_query_index %}
{%- if loop.last or (not loop.last and reasoning_content) %}
{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def _llama2(messages: Messages) -> Pieces:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n", messages[1:]
    for i, m in enumerate(messages):
        if m["role"] == "user":
            content = (system if i == 0 else "") + m["content"]
            yield f"<s>[INST] {content.strip()} [/INST]", False
        else:
            yield f" {m['content'].strip()} </s>", True


LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
    "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def _llama3(messages: Messages) -> Pieces:
    yield "<|begin_of_text|>", False
    for m in messages:
        yield f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", False
        yield m["content"].strip() + "<|eot_id|>", m["role"] == "assistant"


LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


def _mistral(messages: Messages) -> Pieces:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    yield "<s>", False
    for i, m in enumerate(messages):
        if m["role"] == "user":
            yield f"[INST] {system if i == last else ''}{m['content']}[/INST]", False
        else:
            yield f" {m['content']}", True
            yield "</s>", True


#: with the system prompt before the last question, as v0.3 has it: what stands before a turn depends on what follows it.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if message["role"] == "user" %}
{%- if loop.index0 == (loop_messages | length) - 1 - ((loop_messages[-1]["role"] == "assistant") | int) and system_message is defined %}
{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
{%- else %}
{{- "[INST] " + message["content"] + "[/INST]" }}
{%- endif %}
{%- elif message["role"] == "assistant" %}
{{- " " + message["content"] + eos_token }}
{%- else %}
{{- raise_exception("Only user and assistant roles are supported, with an optional system message first!") }}
{%- endif %}
{%- endfor %}
"""


def _gemma(messages: Messages) -> Pieces:
    yield "<bos>", False
    for m in messages:
        assistant = m["role"] == "assistant"
        yield f"<start_of_turn>{'model' if assistant else m['role']}\n", False
        yield m["content"].strip() + "<end_of_turn>", assistant
        yield "\n", False


GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)


def _phi3(messages: Messages) -> Pieces:
    for m in messages:
        yield f"<|{m['role']}|>\n", False
        yield m["content"] + "<|end|>", m["role"] == "assistant"
        yield "\n", False
    yield "<|endoftext|>", False


PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + "
    "'<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def _zephyr(messages: Messages) -> Pieces:
    for m in messages:
        yield f"<|{m['role']}|>\n", False
        yield m["content"] + "</s>", m["role"] == "assistant"
        yield "\n", False


#: its role marks are plain text to the tokenizer.
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)


def _deepseek(messages: Messages) -> Pieces:
    yield "<｜begin▁of▁sentence｜>", False
    if messages[0]["role"] == "system":
        yield messages[0]["content"], False
    for m in messages:
        if m["role"] == "user":
            yield "<｜User｜>" + m["content"], False
        elif m["role"] == "assistant":
            yield "<｜Assistant｜>", False
            content = m["content"].split("</think>")[-1] if "</think>" in m["content"] else m["content"]
            yield content + "<｜end▁of▁sentence｜>", True


#: reasoning is left out of every turn; the prompt begins it.
DEEPSEEK = (
    "{% set ns = namespace(system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>' + content + "
    "'<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}"
    "{% endif %}"
)


def _vicuna(messages: Messages) -> Pieces:
    if messages[0]["role"] == "system":
        yield messages[0]["content"] + " ", False
        messages = messages[1:]
    for m in messages:
        if m["role"] == "user":
            yield f"USER: {m['content']} ", False
        else:
            yield "ASSISTANT:", False
            yield f" {m['content']}</s>", True


VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}{% elif message['role'] == 'assistant' "
    "%}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ 'ASSISTANT:' }}{% endif %}"
)


def _alpaca(messages: Messages) -> Pieces:
    for m in messages:
        if m["role"] == "user":
            yield f"### Instruction:\n{m['content']}\n\n", False
        else:
            yield "### Response:\n", False
            yield m["content"].rstrip(), True
            yield m["content"][len(m["content"].rstrip()) :] + "\n\n", False


#: a turn ends with nothing that is special.
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + "
    "'\\n\\n' }}{% else %}{{ '### Response:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FAMILIES = {
    "chatml": Family(CHATML, _chatml, _IM),
    "qwen2.5": Family(QWEN2, _qwen2, _IM),
    "qwen3": Family(QWEN3, _qwen3, _IM),
    "llama2": Family(LLAMA2, _llama2, ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "llama3": Family(
        LLAMA3,
        _llama3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(MISTRAL, _mistral, ("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>", eos="</s>"),
    "gemma": Family(GEMMA, _gemma, ("<bos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", system=False),
    "phi3": Family(
        PHI3, _phi3, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), eos="<|endoftext|>"
    ),
    "zephyr": Family(ZEPHYR, _zephyr, ("<s>", "</s>"), eos="</s>"),
    "deepseek-r1": Family(
        DEEPSEEK,
        _deepseek,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        bos="<｜begin▁of▁sentence｜>",
    ),
    "vicuna": Family(VICUNA, _vicuna, ("<s>", "</s>"), eos="</s>"),
    "alpaca": Family(ALPACA, _alpaca, (), system=False),
}

#: templates that say themselves what the assistant says, as training scripts write them.
GENERATION = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' "
        "%}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
        "{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\\n\\n' }}{% if message['role'] == 'assistant' %}{%- generation -%}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{%- endgeneration -%}{% else %}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + eos_token + '\\n' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + eos_token + '\\n' }}{% endif %}{% endfor %}"
    ),
    "qwen3": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
        "{% generation %}{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + "
        "'\\n</think>\\n\\n' }}{% endif %}{{ message.content }}{% if message.tool_calls %}{% for call in "
        "message.tool_calls %}{{ '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}"
        "{% endif %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ '<|im_start|>' + message.role + '\\n' "
        "+ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    ),
}
