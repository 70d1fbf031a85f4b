"""``--on NODESxRANKS``: changes the layout in the user's launch command."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from megaresume.stream.errors import UsageError

#: launcher -> its flags for the number of nodes, and of processes per node (or in all, see ``total``).
_LAUNCHERS: Mapping[str, tuple[str, str]] = {
    "torchrun": ("--nnodes", "--nproc-per-node"),
    "torch.distributed.run": ("--nnodes", "--nproc-per-node"),
    "torch.distributed.launch": ("--nnodes", "--nproc-per-node"),
    "deepspeed": ("--num_nodes", "--num_gpus"),
    "accelerate": ("--num_machines", "--num_processes"),
}
#: The launchers whose second flag is the number of all processes.
_TOTAL = ("accelerate",)


def laid_out(words: Sequence[str], on: str) -> list[str]:
    """A launch command with another number of nodes and processes.

    Args:
        words: the command.
        on: ``1x4``: nodes x processes per node.

    Raises:
        UsageError: ``on`` is malformed; or the launcher is unknown.
    """
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", on)
    if sizes is None:
        raise UsageError("bad --on", found=repr(on), expected="NODESxRANKS", action="for example --on 1x4")
    nodes, ranks = map(int, sizes.groups())
    place = next((i for i, word in enumerate(words) if os.path.basename(word) in _LAUNCHERS), None)
    if place is None:
        raise UsageError(
            "--on does not know this launcher",
            found=" ".join(words[:3]),
            expected=", ".join(_LAUNCHERS),
            action="leave --on out, and change the numbers in the command itself",
        )
    name = os.path.basename(words[place])
    begin = place + (2 if words[place + 1 : place + 2] == ["launch"] else 1)
    head, tail = list(words[:begin]), list(words[begin:])
    for flag, number in zip(_LAUNCHERS[name], (nodes, nodes * ranks if name in _TOTAL else ranks), strict=True):
        tail = _without(tail, flag)
        head += [flag, str(number)]
    return head + tail


def _without(words: list[str], flag: str) -> list[str]:
    """The words before the script, without a flag (spelt with dashes or underscores) and its value."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.endswith(".py") or word == "-m":  # the rest belongs to the script
            return [*found, word, *rest]
        name, equals, _ = word.partition("=")
        if name.startswith("--") and name.replace("_", "-") == flag.replace("_", "-"):
            if not equals:
                next(rest, None)
            continue
        found.append(word)
    return found
