"""A model of a few thousand weights, its tokenizer, and what a CPU has in the place of FlashAttention 3."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_template

#: prompts, each of which is a token of its own; and words that completions are made of.
PROMPTS, WORDS = 400, 20
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def tiny_model() -> LlamaForCausalLM:
    """The same each time."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2 + PROMPTS + WORDS, num_attention_heads=2, eos_token_id=1, **shape))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word."""
    words = ["<pad>", "<eos>", *(f"p{k}" for k in range(PROMPTS)), *(f"w{k}" for k in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    found.chat_template, found.response_template = TEMPLATE, qwen3_template
    return found


class CpuAttention:
    """Attention of segments, each of whose queries are the last of its keys: what TRL calls, in plain torch."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        *_: Any,
        softmax_scale: float,
        **__: Any,
    ) -> torch.Tensor:
        """[tokens, heads, size] each."""
        parts = []
        for q0, q1, k0, k1 in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True):
            q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v))
        return torch.cat(parts)
