"""The call shape of pretrain up to 0.17; every step is told to the test that forked this process."""

import pretrain_until_0_17 as script
from megatron.training import pretrain, training
from megatron.training.global_vars import get_args
from mini_model import ModelType, forward_step, model_provider
from tests.reliability.megatron_job import CURRENT


def reporting_forward_step(data_iterator, model):
    CURRENT[0].begins(get_args(), model)
    return forward_step(data_iterator, model)


if __name__ == "__main__":
    del __file__  # or the process that megatron-core spawns for a queue would import all this again, for ten seconds
    training.log_step = CURRENT[0].has_trained
    pretrain(
        script.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        reporting_forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
