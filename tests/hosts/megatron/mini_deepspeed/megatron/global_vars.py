"""The arguments of the process."""

from argparse import Namespace
from types import SimpleNamespace

_args: Namespace | None = None


def get_args() -> Namespace:
    assert _args is not None, "args is not initialized."
    return _args


def set_args(args: Namespace) -> None:
    global _args
    _args = args


def get_tokenizer() -> SimpleNamespace:
    return SimpleNamespace(eod=0)
