from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)

from .dist_signal_handler import DistributedSignalHandler

_GLOBAL_ARGS = None
_GLOBAL_SIGNAL_HANDLER = None


def get_signal_handler():
    assert _GLOBAL_SIGNAL_HANDLER is not None, "signal handler is not initialized."
    return _GLOBAL_SIGNAL_HANDLER


def get_args():
    assert _GLOBAL_ARGS is not None, "args is not initialized."
    return _GLOBAL_ARGS


def set_args(args):
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args


def destroy_global_vars():
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = None
    unset_num_microbatches_calculator()


def set_global_variables(args, build_tokenizer=True):
    global _GLOBAL_SIGNAL_HANDLER
    set_args(args)
    if args.exit_signal_handler:
        _GLOBAL_SIGNAL_HANDLER = DistributedSignalHandler().__enter__()
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        args.decrease_batch_size_if_needed,
    )
