"""A model, a tokenizer and conversations, each as small as may be: python tiny.py DIRECTORY ITEMS

model/       a Llama of one layer, with its tokenizer
data.jsonl   item i is a conversation in which only one word, wI, tells which it is
pairs.jsonl  item i is a question with the answers wI, which is chosen, and yes
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: token of the word w0, as in recorder/sitecustomize.py.
FIRST = 16
WORDS = 512
TEMPLATE = "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' + m['content'] + ' </s>' }}{% endfor %}"


def main() -> None:
    directory, items = Path(sys.argv[1]), int(sys.argv[2])
    special = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", "say", "yes"]
    vocabulary = {word: i for i, word in enumerate(special)} | {f"w{i}": FIRST + i for i in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **names)
    tokenizer.save_pretrained(directory / "model")
    config = LlamaConfig(
        vocab_size=FIRST + WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    with (directory / "data.jsonl").open("w") as file:
        for i in range(items):
            turns = [{"role": "user", "content": f"say w{i}"}, {"role": "assistant", "content": "yes"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    with (directory / "pairs.jsonl").open("w") as file:
        for i in range(items):
            answers = {k: {"role": "assistant", "content": v} for k, v in (("chosen", f"w{i}"), ("rejected", "yes"))}
            file.write(json.dumps({"messages": [{"role": "user", "content": "say"}], **answers}) + "\n")


if __name__ == "__main__":
    main()
