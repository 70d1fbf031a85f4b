"""Tokenizers built on the spot, as directories of models, and conversations to try them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.encoding.text.families import Family

WORDS = (
    "the quick brown fox jumps over the lazy dog . Hello ! How are you ? USER: ASSISTANT: system user assistant model "
    "### Instruction: Response: naïve café 東京 🦊 {} [] <tool_call> </tool_call> <think> </think> name arguments "
)


def write_tokenizer(directory: Path, family: Family, kind: str = "bytelevel", template: str | None = None) -> Path:
    """A tokenizer.json with the family's special tokens, its tokenizer_config.json and chat_template.jinja."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    special = [*dict.fromkeys(["<unk>", *family.special])]
    if kind == "bytelevel":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:  # as SentencePiece's: a word begins with ▁, unknown characters are bytes
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="never"), decoders.ByteFallback()])
        alphabet = [chr(c) for c in range(32, 127)] + ["▁", "\n"]
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if kind != "bytelevel":  # bytes are tokens of the vocabulary, and not special
        path = directory / "tokenizer.json"
        description = json.loads(path.read_text())
        description["added_tokens"] = [t for t in description["added_tokens"] if not t["content"].startswith("<0x")]
        path.write_text(json.dumps(description))
    tokens = {"bos_token": family.bos, "eos_token": {"content": family.eos}, "unk_token": "<unk>"}
    tokens = {name: token for name, token in tokens.items() if token and token != {"content": ""}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    (directory / "chat_template.jinja").write_text(family.template if template is None else template)
    return directory


def reference_tokenizer(directory: Path) -> Any:
    """transformers' own, of the same files."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads((directory / "tokenizer_config.json").read_text())
    names = {name: token["content"] if isinstance(token, dict) else token for name, token in config.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **names)
    tokenizer.chat_template = (directory / "chat_template.jinja").read_text()
    return tokenizer


#: texts with every kind of edge; never what a template takes apart.
TEXTS = st.one_of(
    st.sampled_from(
        ["Hello!", "How are you?\n", "  the fox", "naïve café", "東京 🦊", "a\n\nb", "{}", "</s", "x " * 9]
    ),
    st.text(st.characters(exclude_categories=["Cs", "Co", "Cn"], exclude_characters="\r"), min_size=1, max_size=12),
).filter(lambda text: text.strip() and "think>" not in text)


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant, sometimes with a system message."""
    messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        messages.append({"role": "assistant", "content": draw(TEXTS)})
    return messages
