"""The process that converts: DeepSpeed's ds_to_universal, and an end when the process that asked for it is gone.

    python -m megaresume.hosts.deepspeed.elastic.worker TAG_DIR OUTPUT WORKERS PARENT

A process of its own: whatever it loads leaves the memory with it, and it forks workers, which a rank with a GPU must
not.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def main(argv: list[str]) -> None:
    """Convert, as the command line says."""
    source, output, workers, parent = argv
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    import torch  # deferred: seconds, in which the parent may go
    from deepspeed.checkpoint import ds_to_universal

    torch.load = _tensors_only(torch.load)
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=source,
            output_folder=output,
            num_extract_workers=int(workers),
            num_merge_workers=max(1, int(workers) // 2),
            keep_temp_folder=False,
            strict=True,
            # Programs other than Megatron-DeepSpeed put no description of their layout into a checkpoint.
            inject_missing_state=True,
        )
    )


def _tensors_only(load: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.load``, of a module's state without what is not a tensor: megatron-core's layers put None there as their
    extra state, and ds_to_universal (0.19) takes all of it for tensors. The files themselves are copied as they are."""

    @functools.wraps(load)
    def load_tensors(*args: Any, **kwargs: Any) -> Any:
        state = load(*args, **kwargs)
        if isinstance(state, dict) and isinstance(state.get("module"), dict):
            state["module"] = {name: x for name, x in state["module"].items() if hasattr(x, "float")}
        return state

    return load_tensors


def _end_with(parent: int) -> None:
    """End this process and its workers, one process group, when the parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
