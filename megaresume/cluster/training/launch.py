"""From processes to ranks, and the end of a process."""

from __future__ import annotations

import datetime
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from megaresume.cluster.local import free_port
from megaresume.cluster.training.arguments import Arguments
from megaresume.stream.errors import SetupError

if TYPE_CHECKING:
    import torch


def rank_and_size() -> tuple[int, int]:
    """This process and how many there are, as torchrun, deepspeed or a Slurm script say; (0, 1) without a launcher."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def announce(text: str) -> None:
    """Print on rank 0."""
    if rank_and_size()[0] == 0:
        print(text, flush=True)


def launch(args: Arguments) -> torch.device:
    """Join the process group and the parallel groups.

    Returns:
        the device of this rank.

    Raises:
        SetupError: there are fewer GPUs than ranks on this machine.
    """
    import torch  # deferred, so that what is missing is said in a sentence

    device = _device(args)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # megatron-core compiles its fused functions as soon as they are called, on a CPU with a compiler for C++; a
        # third of its import is the way to that.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # One thread a rank: sums are then always taken in the same order.
        torch.set_num_threads(1)
    warning = restart_warning(os.environ)
    if warning is not None:
        announce(warning)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if args.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # megatron-core says at import, on every rank, which optional packages it does without.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    import deepspeed  # deferred: it decides about accelerators when imported

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        # Otherwise DeepSpeed compiles a shared-memory collective at start, and a kill meanwhile leaves a lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo" if device.type == "cpu" else "nccl",
        timeout=datetime.timedelta(minutes=10),
        verbose=False,
    )
    from megatron.core import parallel_state  # deferred: seconds to import

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_model_parallel_size)
    seed_everything(args.seed, device)
    return device


def restart_warning(env: Mapping[str, str]) -> str | None:
    """What to say where torchrun would restart ranks in place and they could not meet; None: nothing.

    The agents keep one store for all restarts (pytorch issue 135712): ranks that come again find the addresses of those
    before them in it, and end in "Connection refused".
    """
    restarts = int(env.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and int(env.get("WORLD_SIZE", "1")) > 1
    if not restarts or not shared:
        return None
    return (
        f"megaresume: torchrun --max-restarts {restarts} will not work here: ranks that are restarted in place would "
        "find the addresses of those before them. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and "
        "--rdzv-backend c10d or --standalone: docs/stopping.md"
    )


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed torch and megatron-core's generators."""
    import torch
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    # The tracker for inference is the official one that keeps no state, and so needs no GPU.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=device.type == "cpu")


def shut_down() -> None:
    """Leave the groups: without it a process may end in ``terminate called without an active exception``."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def stop_at_once(status: int) -> NoReturn:
    """End the process without waiting for anybody: the launcher then ends the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _device(args: Arguments) -> torch.device:
    import torch

    if not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", max(args.local_rank, 0)))
    if local_rank >= torch.cuda.device_count():
        raise SetupError(
            "there are fewer GPUs than ranks on this machine",
            found=f"{torch.cuda.device_count()} GPUs, local rank {local_rank}",
            expected="one GPU for each rank",
            action=f"start {torch.cuda.device_count()} ranks here, or set DS_ACCELERATOR=cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
