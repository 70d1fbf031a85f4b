from .global_vars import get_args
from .utils import print_rank_0

from .initialize import initialize_megatron  # isort: skip
from .training import pretrain  # isort: skip

__all__ = ["get_args", "initialize_megatron", "pretrain", "print_rank_0"]
