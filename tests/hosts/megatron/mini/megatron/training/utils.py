import torch


def is_rank0():
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def print_rank_0(message, rank=None):
    if is_rank0():
        print(message, flush=True)


def blend_from_list(words):
    """What follows --data-path: prefixes, or pairs of weight and prefix."""
    if not words:
        return None
    if len(words) % 2 == 1:
        return words, None
    return words[1::2], [float(weight) for weight in words[0::2]]


def get_blend_and_blend_per_split(args):
    words = args.data_path
    if args.data_args_path is not None:
        with open(args.data_args_path) as file:
            words = file.read().split()
    if words is not None:
        return blend_from_list(words), None
    parts = [args.train_data_path, args.valid_data_path, args.test_data_path]
    return None, [blend_from_list(part) for part in parts] if any(parts) else None
