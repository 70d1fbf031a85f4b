"""The call shape of pretrain in 0.18: the script parses the arguments, the configuration comes first."""

import os

os.environ["MINI_SHAPE"] = "0.18"

from functools import partial

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import pretrain, print_rank_0
from megatron.training.arguments import parse_and_validate_args
from mini_model import ModelType, forward_step, gpt_config, is_dataset_built_on_rank, model_provider


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    """Build the train, validation and test datasets."""
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    return BlendedMegatronDatasetBuilder(
        GPTDataset, train_val_test_num_samples, partial(is_dataset_built_on_rank, vp_stage=vp_stage), gpt_config()
    ).build()


if __name__ == "__main__":
    del __file__  # or the process that megatron-core spawns for a queue would import all this again
    # Temporary for transition to core datasets
    setattr(train_valid_test_datasets_provider, "is_distributed", True)

    args = parse_and_validate_args(
        extra_args_provider=None,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    full_config = args
    pretrain(
        full_config,
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
