"""What the scripts share: a tiny model, the batch of a rank, a forward step. As a user's own module would be."""

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.global_vars import get_args
from megatron.training.mini import sample_hashes
from megatron.training.utils import get_blend_and_blend_per_split

__all__ = ["ModelType", "forward_step", "gpt_config", "is_dataset_built_on_rank", "model_provider"]


class Tokenizer:
    """Tokens are numbers already."""

    def __init__(self, vocab_size):
        self.vocab_size, self.eod, self.pad = vocab_size, vocab_size - 1, -1
        self.unique_identifiers = {"class": "mini", "vocab_size": vocab_size}


class TinyModel(torch.nn.Module):
    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, width)
        self.out = torch.nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.out(self.embedding(tokens))


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    generator = torch.Generator().manual_seed(1)
    model = TinyModel(get_args().vocab_size)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def is_dataset_built_on_rank(vp_stage=None):
    ends = mpu.is_pipeline_first_stage(ignore_virtual=True) or mpu.is_pipeline_last_stage(ignore_virtual=True)
    return ends and mpu.get_tensor_model_parallel_rank() == 0


def get_batch(data_iterator):
    """None on stages between; tensor-parallel rank 0 reads and tells the others."""
    if not (mpu.is_pipeline_first_stage(ignore_virtual=True) or mpu.is_pipeline_last_stage(ignore_virtual=True)):
        return None
    batch = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    if mpu.get_tensor_model_parallel_world_size() > 1:
        box = [batch]
        torch.distributed.broadcast_object_list(
            box, mpu.get_tensor_model_parallel_src_rank(), group=mpu.get_tensor_model_parallel_group()
        )
        batch = box[0]
    return batch


def forward_step(data_iterator, model):
    batch = get_batch(data_iterator)
    if batch is None:
        return sum(weight.sum() for weight in model.parameters()) * 0, []
    logits = model(batch["tokens"].clamp(min=0))
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].clamp(min=0).flatten(), reduction="none"
    )
    mask = batch["loss_mask"].float().flatten()
    return (losses * mask).sum() / mask.sum().clamp(min=1), sample_hashes(batch)


def gpt_config():
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=Tokenizer(args.vocab_size),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
