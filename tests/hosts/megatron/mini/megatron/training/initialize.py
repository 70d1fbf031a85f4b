import random

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import get_args, set_global_variables
from megatron.training.mini import without_cuda


def initialize_megatron(extra_args_provider=None, args_defaults={}, parsed=False):
    """Up to 0.17 the arguments are parsed in here; from 0.18 on the script has done it (``parsed``)."""
    if not parsed:
        args = parse_args(extra_args_provider)
        validate_args(args, args_defaults)
        set_global_variables(args)
    args = get_args()
    without_cuda()
    initialize_rerun_state_machine(mode=RerunMode(args.rerun_mode))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", init_method="env://")
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
        )
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
