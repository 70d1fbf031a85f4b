"""A launch of the small trainer: its flags; from processes to ranks; ending a process.

Flags that Megatron-LM has too have its names; ours have a prefix.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from megaresume.checkpoint.flags import flag, group, parse_flags
from megaresume.checkpoint.settings import Checkpoints, DataOptions, LaunchOptions, LoaderOptions
from megaresume.checkpoint.stopping import SIGNALS, StopConditions
from megaresume.cluster.processes import free_port
from megaresume.stream.batches import BatchSchedule, check_sizes
from megaresume.stream.errors import SetupError, UsageError

if TYPE_CHECKING:
    import torch


DecayStyle = Literal["constant", "linear", "cosine"]
_DECAY_STYLES = get_args(DecayStyle)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line."""

    # model
    num_layers: int = flag(None, "transformer layers", required=True)
    hidden_size: int = flag(None, "width of the model", required=True)
    num_attention_heads: int = flag(None, "attention heads", required=True)
    untie_embeddings_and_output_weights: bool = flag(False, "separate output weights")
    vocab_size: int | None = flag(None, "token ids; default: what the corpora's tokenizer says")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    tensor_model_parallel_size: int = flag(1, "ranks that share a layer")

    # vision encoder, before the language model where the data has images
    vision_num_layers: int | None = flag(None, "transformer layers; with it the model sees images")
    vision_hidden_size: int | None = flag(None, "width; a multiple of 4 and of the heads")
    vision_num_attention_heads: int | None = flag(None, "attention heads")
    vision_patch_size: int = flag(14, "pixels; for processors that give tiles, not patches")

    # sizes of the run
    seq_length: int | None = flag(None, "tokens a sample; default: what the data config says")
    micro_batch_size: int = flag(None, "samples of a rank in one forward pass", required=True)
    global_batch_size: int | None = flag(None, "samples a step; default: micro-batch-size times data-parallel size")
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "start, increment, samples of the ramp-up", nargs=3, metavar=("START", "INCREMENT", "SAMPLES")
    )
    train_iters: int | None = flag(None, "steps of the run")
    train_samples: int | None = flag(None, "samples of the run, in place of train-iters")
    exit_interval: int | None = flag(None, "exit after a step that this divides")
    exit_duration_in_mins: float | None = flag(None, "save and exit after so many minutes")
    exit_signal_handler: bool = flag(False, "save and exit on SIGTERM, SIGUSR1 and SIGUSR2")

    # optimizer
    lr: float = flag(None, "highest learning rate", required=True)
    min_lr: float = flag(0.0, "lowest learning rate")
    lr_decay_style: DecayStyle = flag("linear", "shape", choices=_DECAY_STYLES)
    lr_warmup_iters: int = flag(0, "steps of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, "fraction of the decay used for warm-up")
    adam_beta2: float = flag(0.999, "AdamW")
    bf16: bool = flag(False, "train in bfloat16")
    zero_stage: int = flag(0, "DeepSpeed's ZeRO", choices=[0, 1, 2, 3])
    seed: int = flag(1234, "seed of weights and data")
    deterministic_mode: bool = flag(False, "only deterministic GPU kernels: the same loss bit for bit")

    # data
    split: str | None = flag(None, "weights of train, valid, test")
    num_workers: int = flag(0, "worker processes that read; 0: a thread, which is faster for tokens")

    # checkpoints
    save: str | None = flag(None, "directory of checkpoints")
    load: str | None = flag(None, "directory to resume from; an empty one is a fresh start")
    save_interval: int | None = flag(None, "steps between checkpoints; the end is saved too")
    ckpt_step: int | None = flag(None, "load exactly this iteration")

    # validation and logs
    eval_interval: int = flag(1000, "steps between validations")
    eval_iters: int = flag(0, "global batches per validation, the same every time; 0: no validation")
    skip_train: bool = flag(False, "validate only")
    megaresume_held_out: str | None = flag(
        None, "a data.yaml; every validation measures the share of its trained tokens that the model predicts"
    )
    megaresume_held_out_iters: int = flag(4, "global batches of the held-out data, the same every time")
    log_interval: int = flag(1, "steps between log lines")
    megaresume_log_samples: str | None = flag(
        None, "file of JSON lines, one per step: sample range, digests, loss in decimal and hexadecimal, layout"
    )

    megaresume_min_step_seconds: float = flag(
        0.0, "shortest step: for launch tests, in which a tiny model is faster than the scheduler"
    )

    # shared with other hosts
    launch: LaunchOptions = group(LaunchOptions)
    data_options: DataOptions = group(DataOptions)
    loader_options: LoaderOptions = group(LoaderOptions)
    checkpoints: Checkpoints = group(Checkpoints)
    stop: StopConditions = group(StopConditions)

    # launching
    local_rank: int = flag(-1, "set by the deepspeed launcher")

    @property
    def length(self) -> dict[str, int | None]:
        """The length of the run, for `is_over` and `end_of_run`."""
        return {"train_iters": self.train_iters, "train_samples": self.train_samples}


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the flags, and check what does not depend on the number of ranks.

    Raises:
        UsageError: an unknown flag, a bad value, or contradictory flags.
    """
    args = parse_flags(
        Arguments,
        argv,
        prog="megaresume.cluster.training",
        description="Pretrain a GPT of megatron-core under DeepSpeed, with exact data resume.",
    )
    _check_run(args)
    _check_vision(args)
    stop_conditions(args)
    return args


def _check_run(args: Arguments) -> None:
    if (args.train_iters is None) == (args.train_samples is None):
        raise UsageError(
            "the length of the run must be given once",
            found=f"--train-iters {args.train_iters}, --train-samples {args.train_samples}",
            expected="one of the two",
            action="add or remove one of the flags",
        )
    if args.zero_stage == 3 and not args.untie_embeddings_and_output_weights:
        raise UsageError(
            "ZeRO 3 cannot share the embedding with the output layer of megatron-core",
            found="--zero-stage 3 without --untie-embeddings-and-output-weights",
            expected="separate output weights, or ZeRO 2 at most",
            action="--untie-embeddings-and-output-weights or --zero-stage 2",
        )
    if args.save_interval is not None and args.save is None:
        raise UsageError(
            "there is nowhere to save to",
            found=f"--save-interval {args.save_interval} without --save",
            action="--save DIRECTORY, or remove --save-interval",
        )
    if args.ckpt_step is not None and args.load is None:
        raise UsageError("--ckpt-step needs --load", action="--load DIRECTORY, or remove --ckpt-step")
    if args.launch.data is None:
        raise UsageError("the data is missing", found="no --megaresume-data", action="--megaresume-data data.yaml")


def _check_vision(args: Arguments) -> None:
    given = {
        "--vision-num-layers": args.vision_num_layers,
        "--vision-hidden-size": args.vision_hidden_size,
        "--vision-num-attention-heads": args.vision_num_attention_heads,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        raise UsageError(
            "a vision encoder needs all of its sizes",
            found=f"no {' and no '.join(missing)}",
            expected=", ".join(given),
            action="add the flag, or remove the others to train without images",
        )
    layers, width, heads = (int(value) for value in given.values() if value is not None)
    if min(layers, width, heads, args.vision_patch_size) < 1 or width % 4 or width % heads:
        unit = math.lcm(4, max(heads, 1))
        raise UsageError(
            "the vision encoder cannot have these sizes",
            found=f"{layers} layers of width {width} with {heads} heads, patches of {args.vision_patch_size} pixels",
            expected=f"positive numbers, and a width such as {max(1, -(-width // unit)) * unit}, "
            f"which is a multiple of 4 and of the heads",
            action="change --vision-hidden-size or --vision-num-attention-heads",
        )


def stop_conditions(args: Arguments) -> StopConditions | None:
    """The conditions for saving and exiting; None if no flag sets any.

    Raises:
        UsageError: invalid times, or an unknown end of the job.
    """
    signals = SIGNALS if args.exit_signal_handler else ()
    conditions = dataclasses.replace(args.stop, signals=signals, after_minutes=args.exit_duration_in_mins)
    return conditions if conditions else None


def check_layout(args: Arguments, world_size: int) -> tuple[int, BatchSchedule]:
    """Check what depends on the number of ranks.

    Returns:
        data-parallel size, and the global batch size by sample.

    Raises:
        UsageError: ranks or batches that do not divide; names numbers that would.
    """
    tp = args.tensor_model_parallel_size
    if tp < 1 or world_size % tp:
        raise UsageError(
            "the ranks do not divide over tensor parallelism",
            found=f"{world_size} ranks, --tensor-model-parallel-size {tp}",
            expected=f"a multiple of {tp} ranks",
            action=f"start {max(world_size // max(tp, 1), 1) * max(tp, 1)} ranks or change the flag",
        )
    if args.num_attention_heads % tp:
        raise UsageError(
            "the attention heads do not divide over tensor parallelism",
            found=f"--num-attention-heads {args.num_attention_heads}, --tensor-model-parallel-size {tp}",
            expected=f"a multiple of {tp} heads",
            action=f"--num-attention-heads {-(-args.num_attention_heads // tp) * tp}, or change the other flag",
        )
    if args.hidden_size % args.num_attention_heads:
        low = args.hidden_size // args.num_attention_heads * args.num_attention_heads
        raise UsageError(
            "the hidden size does not divide over the attention heads",
            found=f"--hidden-size {args.hidden_size}, --num-attention-heads {args.num_attention_heads}",
            expected=f"a multiple of {args.num_attention_heads}",
            action=f"--hidden-size {low or args.num_attention_heads} or {low + args.num_attention_heads}",
        )
    dp = world_size // tp
    if args.micro_batch_size < 1:
        raise UsageError(
            "a micro-batch has at least one sample",
            found=f"--micro-batch-size {args.micro_batch_size}",
            action="--micro-batch-size 1, or more",
        )
    final = args.global_batch_size or args.micro_batch_size * dp
    if args.rampup_batch_size is None:
        schedule = BatchSchedule.constant(final)
    else:
        start, increment, samples = args.rampup_batch_size
        schedule = BatchSchedule.ramp_up(start, increment, samples, final)
    check_sizes(schedule, 0, micro_batch_size=args.micro_batch_size, dp_size=dp)
    return dp, schedule


def rank_and_size() -> tuple[int, int]:
    """Rank and number of ranks, from torchrun, deepspeed or a Slurm script; (0, 1) without a launcher."""
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
    import torch  # deferred, so that a missing package is reported in a sentence

    device = _device(args)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # On a CPU, megatron-core compiles its fused functions at their first call, with a C++ compiler, and setting
        # that up takes a third of its import.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # One thread per rank, so that sums are always computed in the same order.
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
    # megatron-core warns at import, on every rank, about missing optional packages.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    import deepspeed  # deferred: it chooses an accelerator when imported

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        # Otherwise DeepSpeed compiles a shared-memory collective at start, and a kill during that leaves a lock.
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
    """The warning if torchrun would restart ranks in place and they could not meet; None if they can.

    The agents keep one store for all restarts (pytorch issue 135712): restarted ranks find their predecessors'
    addresses in it, and fail with "Connection refused".
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
    """Seed the generators of torch and megatron-core."""
    import torch
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    # The official inference tracker keeps no state, so it needs no GPU.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=device.type == "cpu")


def shut_down() -> None:
    """Leave the groups; without this, a process may end in ``terminate called without an active exception``."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def stop_at_once(status: int) -> NoReturn:
    """End the process without waiting for anything; the launcher then ends the other ranks."""
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
