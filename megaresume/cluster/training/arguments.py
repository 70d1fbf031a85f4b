"""The flags of the reference pretraining program: Megatron-LM's own names if it has them, ours with a prefix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megaresume.checkpoint.saving.retention import Retention
from megaresume.checkpoint.session.flags import flag, group, parse_flags
from megaresume.checkpoint.session.settings import Checkpoints, DataOptions, LaunchOptions, Loader
from megaresume.checkpoint.session.stopping import SIGNALS, StopConditions
from megaresume.stream.batches import BatchSchedule, micro_batches
from megaresume.stream.errors import UsageError

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]
_DECAY_STYLES = get_args(DecayStyle)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Everything that the command line says."""

    # model
    num_layers: int = flag(None, "transformer layers", required=True)
    hidden_size: int = flag(None, "width of the model", required=True)
    num_attention_heads: int = flag(None, "attention heads", required=True)
    ffn_hidden_size: int | None = flag(None, "width of the MLP; default: 4 times hidden-size")
    num_query_groups: int | None = flag(None, "groups of grouped-query attention; default: one a head")
    max_position_embeddings: int | None = flag(None, "learned positions; default: seq-length")
    position_embedding_type: Literal["learned_absolute", "rope"] = flag(
        "learned_absolute", "how positions enter", choices=["learned_absolute", "rope"]
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "kind", choices=["LayerNorm", "RMSNorm"])
    untie_embeddings_and_output_weights: bool = flag(False, "separate output weights")
    attention_dropout: float = flag(0.0, "keyed by seed, step, micro-step and rank: exact after a resume")
    hidden_dropout: float = flag(0.0, "likewise")
    vocab_size: int | None = flag(None, "token ids; default: what the corpora's tokenizer says")
    make_vocab_size_divisible_by: int = flag(128, "padding of the embedding table")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    transformer_impl: Literal["auto", "local", "transformer_engine"] = flag(
        "auto",
        "auto: Transformer Engine's layers on a GPU where it is installed",
        choices=["auto", "local", "transformer_engine"],
    )
    tensor_model_parallel_size: int = flag(1, "ranks that share a layer")
    pipeline_model_parallel_size: int = flag(1, "only 1 here; megaresume.attach works with DeepSpeed's pipelines")

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
    lr_decay_iters: int | None = flag(None, "steps until min-lr; default: train-iters")
    lr_decay_samples: int | None = flag(None, "samples until min-lr; default: train-samples")
    lr_warmup_iters: int = flag(0, "steps of linear warm-up")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, "fraction of the decay used for warm-up")
    weight_decay: float = flag(0.01, "decay of matrices; vectors are not decayed")
    adam_beta1: float = flag(0.9, "AdamW")
    adam_beta2: float = flag(0.999, "AdamW")
    adam_eps: float = flag(1e-8, "AdamW")
    clip_grad: float = flag(1.0, "largest norm of the gradient; 0: none")
    bf16: bool = flag(False, "train in bfloat16")
    fp16: bool = flag(False, "train in float16 with a dynamic loss scale (GPU)")
    zero_stage: int = flag(0, "DeepSpeed's ZeRO", choices=[0, 1, 2, 3])
    seed: int = flag(1234, "seed of weights and data")
    deterministic_mode: bool = flag(False, "only deterministic GPU kernels: the same loss bit for bit")

    # data
    data_path: tuple[str, ...] | None = flag(None, "corpora, or weights and corpora in turn", nargs="+")
    data_args_path: str | None = flag(None, "a file with the arguments of data-path")
    skip_train_iteration_range: tuple[str, ...] | None = flag(
        None, "steps whose samples to leave out, counted from 1", nargs="+", metavar="FIRST-LAST"
    )
    split: str | None = flag(None, "weights of train, valid, test; default: 969, 30, 1 with data-path")
    dataloader_type: str = flag("single", "only single: one order for the whole run")
    num_workers: int = flag(0, "worker processes that read; 0: a thread, which is faster for tokens")

    # checkpoints
    save: str | None = flag(None, "directory of checkpoints")
    load: str | None = flag(None, "directory to resume from; an empty one is a fresh start")
    save_interval: int | None = flag(None, "steps between checkpoints; the end is saved too")
    save_retain_interval: int | None = flag(
        None, "keep the newest checkpoint and those whose step is a multiple of this; delete the others"
    )
    ckpt_step: int | None = flag(None, "load exactly this iteration")
    finetune: bool = flag(False, "load weights only: step 0, sample 0")
    exit_on_missing_checkpoint: bool = flag(False, "fail if --load finds no checkpoint")
    universal_checkpoint: bool = flag(False, "load what deepspeed.checkpoint.ds_to_universal wrote")

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

    # what other hosts have too
    launch: LaunchOptions = group(LaunchOptions)
    data_options: DataOptions = group(DataOptions)
    loader: Loader = group(Loader)
    checkpoints: Checkpoints = group(Checkpoints)
    stop: StopConditions = group(StopConditions)

    # launching
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "default: nccl on a GPU, gloo without", choices=["nccl", "gloo"]
    )
    distributed_timeout_minutes: int = flag(10, "timeout of collectives")
    local_rank: int = flag(-1, "set by the deepspeed launcher")
    deepspeed: bool = flag(False, "accepted, always on")
    deepspeed_config: str | None = flag(None, "a DeepSpeed config to start from; the flags override it")

    @property
    def length(self) -> dict[str, int | None]:
        """Of the run, for `is_over` and `end_of_run`."""
        return {"train_iters": self.train_iters, "train_samples": self.train_samples}

    def replace(self, **changes: object) -> Arguments:
        """A copy with some flags changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse and check what does not depend on the number of ranks.

    Raises:
        UsageError: an unknown flag, a bad value, or flags that contradict each other.
    """
    args = parse_flags(
        Arguments,
        argv,
        prog="megaresume.cluster.training",
        description="Pretrain a GPT of megatron-core under DeepSpeed, with exact data resume.",
    )
    _check_run(args)
    _check_data(args)
    _check_vision(args)
    stop_conditions(args)
    retention(args)
    return args.replace(data_path=_data_path(args))


def _check_run(args: Arguments) -> None:
    if (args.train_iters is None) == (args.train_samples is None):
        raise UsageError(
            "the length of the run must be given once",
            found=f"--train-iters {args.train_iters}, --train-samples {args.train_samples}",
            expected="one of the two",
            action="add or remove one of the flags",
        )
    if args.pipeline_model_parallel_size != 1:
        raise UsageError(
            "this program has no pipeline parallelism",
            found=f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}",
            expected="1",
            action="remove the flag; for a PipelineEngine of your own see docs/deepspeed.md",
        )
    if args.bf16 and args.fp16:
        raise UsageError("two precisions", found="--bf16 and --fp16", expected="one of them")
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
    for flag_name, needs in [("ckpt_step", args.ckpt_step), ("finetune", args.finetune or None)]:
        if needs is not None and args.load is None:
            name = flag_name.replace("_", "-")
            raise UsageError(f"--{name} needs --load", action=f"--load DIRECTORY, or remove --{name}")


def _check_data(args: Arguments) -> None:
    given = {
        "--megaresume-data": args.launch.data,
        "--data-path": args.data_path,
        "--data-args-path": args.data_args_path,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise UsageError(
            "the data must be given once",
            found=" and ".join(named) or "none",
            expected=f"one of {', '.join(given)}",
            action="add or remove one of the flags",
        )
    if args.dataloader_type != "single":
        raise UsageError(
            "only one order of the data can be resumed exactly",
            found=f"--dataloader-type {args.dataloader_type}",
            expected="--dataloader-type single",
            cause="the order of cyclic changes with the data-parallel size; shuffling is the stream's own business",
            action="remove the flag: the stream shuffles documents anew in every epoch",
        )


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


def _data_path(args: Arguments) -> tuple[str, ...] | None:
    if args.data_args_path is None:
        return args.data_path
    try:
        return tuple(Path(args.data_args_path).read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --data-args-path {args.data_args_path}", found=str(error)) from error


def retention(args: Arguments) -> Retention:
    """Which checkpoints stay.

    Raises:
        UsageError: numbers below 1, or two flags for the same thing.
    """
    if args.save_retain_interval is None:
        return Retention(keep_last=args.checkpoints.keep_last, keep_every=args.checkpoints.keep_every)
    if args.checkpoints.keep_every is not None:
        raise UsageError(
            "two flags say which steps to keep",
            found=f"--save-retain-interval {args.save_retain_interval}, --megaresume-keep-every "
            f"{args.checkpoints.keep_every}",
            expected="one of them",
            action="remove --save-retain-interval",
        )
    return Retention(keep_last=args.checkpoints.keep_last or 1, keep_every=args.save_retain_interval)


def stop_conditions(args: Arguments) -> StopConditions | None:
    """When to save and exit; None: no flag says it.

    Raises:
        UsageError: times that are none, or an end of the job that nobody tells.
    """
    signals = SIGNALS if args.exit_signal_handler else ()
    conditions = dataclasses.replace(args.stop, signals=signals, after_minutes=args.exit_duration_in_mins)
    return conditions if conditions else None


def check_layout(args: Arguments, world_size: int) -> tuple[int, BatchSchedule]:
    """Check what depends on the number of ranks.

    Returns:
        data-parallel size, and the global batch size by sample.

    Raises:
        UsageError: ranks or batches that do not divide, with the numbers that would.
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
        )
    if args.hidden_size % args.num_attention_heads:
        low = args.hidden_size // args.num_attention_heads * args.num_attention_heads
        raise UsageError(
            "the hidden size does not divide over the attention heads",
            found=f"--hidden-size {args.hidden_size}, --num-attention-heads {args.num_attention_heads}",
            expected=f"--hidden-size {low or args.num_attention_heads} or {low + args.num_attention_heads}",
        )
    dp = world_size // tp
    if args.micro_batch_size < 1:
        raise UsageError("a micro-batch has at least one sample", found=f"--micro-batch-size {args.micro_batch_size}")
    final = args.global_batch_size or args.micro_batch_size * dp
    if args.rampup_batch_size is None:
        schedule = BatchSchedule.constant(final)
    else:
        start, increment, samples = args.rampup_batch_size
        schedule = BatchSchedule.ramp_up(start, increment, samples, final)
    for _, size in schedule.segments:
        micro_batches(0, size, micro_batch_size=args.micro_batch_size, dp_rank=0, dp_size=dp)
    return dp, schedule
