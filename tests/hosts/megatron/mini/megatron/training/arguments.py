import argparse
import os
import sys
from types import SimpleNamespace


def add_megatron_arguments(parser):
    parser = _add_training_args(parser)
    parser = _add_checkpointing_args(parser)
    parser = _add_data_args(parser)
    return _add_mini_args(parser)


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
    parser = add_megatron_arguments(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    if args.yaml_cfg is not None:
        args = load_yaml(args.yaml_cfg)
    args.rank = int(os.getenv("RANK", "0"))
    args.world_size = int(os.getenv("WORLD_SIZE", "1"))
    return args


def load_yaml(path):
    """As upstream: what the file says and nothing else; the command line and the parser's defaults are dropped."""
    import yaml

    with open(path) as file:
        args = SimpleNamespace(**yaml.safe_load(file))
    args.yaml_cfg = path
    return args


def parse_and_validate_args(extra_args_provider=None, ignore_unknown_args=False, args_defaults={}):
    from megatron.training.global_vars import set_global_variables

    args = parse_args(extra_args_provider, ignore_unknown_args)
    if args.yaml_cfg is not None:
        args = validate_yaml(args, args_defaults)
    else:
        validate_args(args, args_defaults)
    set_global_variables(args)
    return args


def validate_args(args, defaults={}):
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return _derive(args)


def validate_yaml(args, defaults={}):
    given = vars(args)
    for name, value in vars(add_megatron_arguments(argparse.ArgumentParser()).parse_args([])).items():
        if not name.startswith("megaresume"):
            given.setdefault(name, value)
    return _derive(args)


def _derive(args):
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    assert args.world_size % model_parallel == 0
    args.data_parallel_size = args.world_size // model_parallel
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    assert (args.train_iters is None) != (args.train_samples is None)
    args.consumed_train_samples = 0
    args.skipped_train_samples = 0
    args.consumed_valid_samples = 0
    args.use_dist_ckpt = args.ckpt_format != "torch"
    if args.dataloader_type is None:
        args.dataloader_type = "single"
    if args.rank == 0:
        print("arguments:", " ".join(sys.argv[1:]), flush=True)
    return args


def _add_training_args(parser):
    group = parser.add_argument_group(title="training")
    for name in ("tensor", "pipeline"):
        group.add_argument(f"--{name}-model-parallel-size", type=int, default=1)
    group.add_argument("--context-parallel-size", type=int, default=1)
    group.add_argument("--num-virtual-stages", type=int, default=None, help="ours: model chunks on each stage")
    group.add_argument("--micro-batch-size", type=int, default=None)
    group.add_argument("--global-batch-size", type=int, default=None)
    group.add_argument("--rampup-batch-size", nargs="*", default=None)
    group.add_argument("--decrease-batch-size-if-needed", action="store_true", default=False)
    group.add_argument("--train-iters", type=int, default=None)
    group.add_argument("--train-samples", type=int, default=None)
    group.add_argument("--exit-interval", type=int, default=None)
    group.add_argument("--exit-signal-handler", action="store_true")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--lr", type=float, default=0.1)
    group.add_argument("--iterations-to-skip", nargs="+", type=int, default=[])
    group.add_argument("--eval-interval", type=int, default=1000)
    group.add_argument("--eval-iters", type=int, default=0)
    group.add_argument("--skip-train", action="store_true", default=False)
    group.add_argument("--phase-transition-iterations", default=None)
    group.add_argument("--rerun-mode", default="disabled")
    group.add_argument("--sft", action="store_true", default=False)
    group.add_argument("--yaml-cfg", default=None)
    return parser


def _add_checkpointing_args(parser):
    group = parser.add_argument_group(title="checkpointing")
    group.add_argument("--save", default=None)
    group.add_argument("--no-save-rng", action="store_true", default=None)
    group.add_argument("--no-load-rng", action="store_true", default=None)
    group.add_argument("--save-interval", type=int, default=None)
    group.add_argument("--load", default=None)
    group.add_argument("--pretrained-checkpoint", default=None)
    group.add_argument("--ckpt-step", type=int, default=None)
    group.add_argument("--ckpt-format", default="torch_dist", choices=["torch", "torch_dist"])
    group.add_argument("--finetune", action="store_true")
    group.add_argument("--async-save", action="store_true", default=None)
    group.add_argument("--exit-on-missing-checkpoint", action="store_true")
    group.add_argument("--override-ckpt-iteration", type=int, default=None)
    group.add_argument("--non-persistent-save-interval", type=int, default=None)
    group.add_argument("--non-persistent-ckpt-type", default=None, choices=["global"])
    group.add_argument("--non-persistent-global-ckpt-dir", default=None)
    return parser


def _add_data_args(parser):
    group = parser.add_argument_group(title="data and dataloader")
    group.add_argument("--data-path", nargs="*", default=None)
    group.add_argument("--data-args-path", default=None)
    for part in ("train", "valid", "test"):
        group.add_argument(f"--{part}-data-path", nargs="*", default=None)
    group.add_argument("--per-split-data-args-path", default=None)
    group.add_argument("--data-cache-path", default=None)
    group.add_argument("--split", default=None)
    group.add_argument("--mock-data", action="store_true", default=False)
    group.add_argument("--seq-length", type=int, default=None)
    group.add_argument("--num-workers", type=int, default=0)
    group.add_argument("--dataloader-type", default=None, choices=["single", "cyclic", "external"])
    group.add_argument("--no-data-sharding", action="store_false", dest="data_sharding")
    group.add_argument("--no-mmap-bin-files", action="store_false", dest="mmap_bin_files")
    group.add_argument("--reset-position-ids", action="store_true")
    group.add_argument("--reset-attention-mask", action="store_true")
    group.add_argument("--eod-mask-loss", action="store_true")
    group.add_argument(
        "--no-create-attention-mask-in-dataloader", action="store_false", dest="create_attention_mask_in_dataloader"
    )
    group.add_argument("--num-dataset-builder-threads", type=int, default=1)
    group.add_argument("--mid-level-dataset-surplus", type=float, default=0.005)
    group.add_argument("--full-validation", action="store_true")
    group.add_argument("--multiple-validation-sets", action="store_true")
    group.add_argument("--tokenizer-type", default=None)
    group.add_argument("--vocab-size", type=int, default=256)
    return parser


def _add_mini_args(parser):
    group = parser.add_argument_group(title="of this stand-in")
    group.add_argument("--mini-log", default=None)
    group.add_argument("--mini-rerun-at", type=int, default=None)
    group.add_argument("--mini-state-file", default=None)
    group.add_argument("--mini-fail-in-evaluation", action="store_true", default=False)
    return parser
