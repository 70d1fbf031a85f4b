"""Batches as the keyword arguments of other people's models.

    text           megatron-core GPTModel     for_mcore_gpt      rows joined, bounds of documents as PackedSeqParams
    image-text     megatron-core LLaVAModel   for_mcore_llava    one image token an image, as that model wants it
    both           Hugging Face transformers  for_hf             causal language models, LLaVA to Qwen3-VL

mcore.py has those of megatron-core, huggingface.py the others.

All keep documents apart: what a model computes for one does not depend on what lies beside it in a sample. They work on
whatever device the batch is on.
"""

from megaresume.batches.models.huggingface import for_hf
from megaresume.batches.models.mcore import for_mcore_gpt, for_mcore_llava, packed_seq_params

__all__ = ["for_hf", "for_mcore_gpt", "for_mcore_llava", "packed_seq_params"]
