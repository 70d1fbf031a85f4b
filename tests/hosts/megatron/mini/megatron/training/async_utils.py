"""Scheduled saves. The request is the real one of megatron.core; its queue needs CUDA, so that this one is ours."""

import multiprocessing

import torch

_calls = []


def schedule_async_save(async_request):
    """Write in a forked process; the finalizers run later, on all ranks, when all are done."""
    async_request = async_request.freeze()
    if async_request.preload_fn is not None:
        arguments = list(async_request.async_fn_args)
        arguments[1] = async_request.preload_fn()
        async_request = async_request._replace(async_fn_args=tuple(arguments))
    process = None
    if async_request.async_fn is not None:
        process = multiprocessing.get_context("fork").Process(
            target=async_request.async_fn, args=async_request.async_fn_args, kwargs=async_request.async_fn_kwargs
        )
        process.start()
    _calls.append((process, async_request))


def is_empty_async_queue():
    return not _calls


def maybe_finalize_async_save(blocking=False, terminate=False):
    while _calls:
        process, request = _calls[0]
        if blocking and process is not None:
            process.join()
        running = torch.tensor([int(process is not None and process.is_alive())])
        torch.distributed.all_reduce(running)
        if running.item():
            return
        _calls.pop(0)
        assert process is None or process.exitcode == 0, process.exitcode
        for finalize in request.finalize_fns:
            finalize()
