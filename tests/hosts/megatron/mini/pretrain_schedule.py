"""The call shape of pretrain up to 0.17, whose steps are made by the schedules of the real megatron-core, as those of
Megatron-LM are: a forward step gives the loss of each token, and a loss function that the loss mask is bound to.

The weights never change (--lr 0). Every rank that has losses writes down what it trained, token by token.
"""

import os
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.transformer import TransformerConfig
from megatron.training import pretrain
from megatron.training.global_vars import get_args
from megatron.training.mini import log_step
from mini_model import ModelType, get_batch, gpt_config, is_dataset_built_on_rank

from tests.upstream import cpu_shim

os.environ["MINI_SCHEDULE"] = "1"
WIDTH = 8


def weights(vocab_size):
    """Of the embedding and of the output: the same wherever they are made."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(vocab_size, WIDTH, generator=generator), torch.randn(vocab_size, WIDTH, generator=generator)


class Stage(torch.nn.Module):
    """A model of an embedding and an output; or one of them, on the first and the last stage of a pipeline."""

    def __init__(self, vocab_size):
        super().__init__()
        self.is_first, self.is_last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        self.embedding, self.out = (torch.nn.Parameter(part.clone()) for part in weights(vocab_size))
        self.config = TransformerConfig(
            num_layers=mpu.get_pipeline_model_parallel_world_size(),
            hidden_size=WIDTH,
            num_attention_heads=1,
            pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
            pipeline_dtype=torch.float32,
        )
        self.model_type = ModelType.encoder_or_decoder
        self.given = None

    def set_input_tensor(self, given):
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, tokens, labels):
        hidden = self.embedding[tokens].transpose(0, 1).contiguous() if self.is_first else self.given
        if not self.is_last:
            return hidden  # [S, m, WIDTH]
        logits = (hidden.transpose(0, 1) @ self.out.T).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)


def loss_func(loss_mask, output_tensor, model=None):
    """As that of Megatron-LM: the sum, the number of tokens, and both for the log."""
    losses, mask = output_tensor.view(-1).float(), loss_mask.view(-1).float()
    total, tokens = torch.sum(losses * mask), mask.sum().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.view(1)])}


def mean_loss_func(loss_mask, output_tensor):
    """As until core 0.11: the mean."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask) / mask.sum()
    return loss, {"lm loss": loss.detach()}


def other_loss_func(loss_mask, output_tensor):
    """Of something else than the tokens' losses."""
    total, tokens, named = loss_func(loss_mask, output_tensor)
    return 2 * total + 1, tokens, named


LOSSES = {"sum": loss_func, "mean": mean_loss_func, "other": other_loss_func}


def forward_step(data_iterator, model):
    batch = get_batch(data_iterator)
    if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
        rows = [batch[key].tolist() for key in ("tokens", "labels", "loss_mask")]
        log_step(get_args().mini_log, rows=rows, is_evaluation=not torch.is_grad_enabled())
    return model(batch["tokens"], batch["labels"]), partial(
        LOSSES[os.environ.get("MINI_LOSS", "sum")], batch["loss_mask"]
    )


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    """Build the train, validation and test datasets."""
    return BlendedMegatronDatasetBuilder(
        GPTDataset, train_val_test_num_samples, partial(is_dataset_built_on_rank, vp_stage=vp_stage), gpt_config()
    ).build()


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    return Stage(get_args().vocab_size)


if __name__ == "__main__":
    del __file__  # or the process that megatron-core spawns for a queue would import all this again
    cpu_shim.install()
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
