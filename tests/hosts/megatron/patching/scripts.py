"""Scripts of our own in every shape of `pretrain`; none of them is upstream's."""

from __future__ import annotations

import textwrap

HEAD = '''\
# A comment that comes first.
"""Trains something."""

from __future__ import annotations

import os
{imports}

def model_provider(pre_process=True, post_process=True):
    return None


def datasets_provider(train_val_test_num_samples):
    return None, None, None


def forward_step(data_iterator, model):
    return None


def add_args(parser):
    return parser


if __name__ == "__main__":
    datasets_provider.is_distributed = True
'''

LM = "from megatron.core.enums import ModelType\nfrom megatron.training import get_args, inprocess_restart, pretrain\n"
NEW = LM + "from megatron.training.arguments import parse_and_validate_args\n"


def with_call(imports: str, call: str) -> str:
    """A script with these imports and these statements at its end."""
    return HEAD.format(imports=imports) + textwrap.indent(textwrap.dedent(call).strip("\n") + "\n", "    ")


UP_TO_0_17 = with_call(
    LM,
    """
    # Restarts inside the process, where it is asked for.
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)

    pretrain(
        datasets_provider,  # ours
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={'tokenizer_type': 'GPT2BPETokenizer'},
        extra_args_provider=add_args if os.environ.get("X") else None,
        store=store,
    )
    """,
)
V0_18 = with_call(
    NEW,
    """
    args = parse_and_validate_args(
        extra_args_provider=add_args, args_defaults={}
    )
    full_config = make(args)
    pretrain(full_config, datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
    """,
)
V0_19 = with_call(
    NEW,
    """
    args = parse_and_validate_args(args_defaults={})
    full_config = make(args)
    pretrain(
        full_config,
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
    """,
)
DEEPSPEED = with_call(
    "import deepspeed\nfrom megatron import get_args, print_rank_0\nfrom megatron.core.enums import ModelType\n"
    "from megatron.training import pretrain\n",
    """
    pretrain(datasets_provider,
             model_provider,
             ModelType.encoder_or_decoder,
             forward_step,
             args_defaults={'tokenizer_type': 'GPT2BPETokenizer'},
             data_post_process=None)
    """,
)
BIGSCIENCE = with_call(
    "from megatron import get_args, print_rank_0\nfrom megatron.training import pretrain\nimport deepspeed\n",
    """
    pretrain(datasets_provider, model_provider, forward_step,
             args_defaults={'tokenizer_type': 'GPT2BPETokenizer'})
    """,
)
MINDSPEED = with_call(
    "import torch\nfrom mindspeed_llm import megatron_adaptor\nfrom megatron.core.enums import ModelType\n"
    "from mindspeed_llm.training.training import pretrain\n",
    "pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)",
)
PAI = with_call(
    "from megatron.core.enums import ModelType\nfrom megatron.training import get_args, pretrain\n"
    "from megatron_patch.arguments import get_patch_args\n"
    "from megatron_patch.data import train_valid_test_datasets_provider\n",
    """
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=get_patch_args,
    )
    """,
)

#: recipe -> (script, lines that the patched script holds)
SHAPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "megatron-lm-0.17": (
        UP_TO_0_17,
        (
            "        megaresume.provider(datasets_provider),  # ours",
            '        extra_args_provider=megaresume.extra_args_provider(add_args if os.environ.get("X") else None),',
        ),
    ),
    "megatron-lm-0.18": (
        V0_18,
        (
            "        extra_args_provider=megaresume.extra_args_provider(add_args), args_defaults={}",
            "    pretrain(full_config, megaresume.provider(datasets_provider), model_provider, "
            "ModelType.encoder_or_decoder, forward_step)",
        ),
    ),
    "megatron-lm-0.19": (
        V0_19,
        (
            "    args = parse_and_validate_args(args_defaults={}, "
            "extra_args_provider=megaresume.extra_args_provider())",
            "        megaresume.provider(datasets_provider),",
        ),
    ),
    "megatron-deepspeed": (
        DEEPSPEED,
        (
            "    pretrain(megaresume.provider(datasets_provider),",
            "             data_post_process=None,",
            "             extra_args_provider=megaresume.extra_args_provider())",
        ),
    ),
    "megatron-deepspeed-bigscience": (
        BIGSCIENCE,
        (
            "    pretrain(megaresume.provider(datasets_provider), model_provider, forward_step,",
            "             args_defaults={'tokenizer_type': 'GPT2BPETokenizer'},",
            "             extra_args_provider=megaresume.extra_args_provider())",
        ),
    ),
    "mindspeed-llm": (
        MINDSPEED,
        (
            "    pretrain(megaresume.provider(datasets_provider), model_provider, ModelType.encoder_or_decoder, "
            "forward_step, extra_args_provider=megaresume.extra_args_provider())",
        ),
    ),
    "pai-megatron-patch": (
        PAI,
        (
            "        megaresume.provider(train_valid_test_datasets_provider),",
            "        extra_args_provider=megaresume.extra_args_provider(get_patch_args),",
        ),
    ),
}
