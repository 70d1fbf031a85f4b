"""Flags with dashes and with underscores are the same flag."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["normalise"]

#: flags whose value is flags of another program: as it is, and also where it begins with dashes.
_OF_OTHERS = frozenset({"--sbatch-options"})


def normalise(argv: Sequence[str]) -> list[str]:
    """``--save_interval=5`` as ``--save-interval=5``; values, and everything after a lone ``--``, stay as they are.

    ``--sbatch-options --exclusive`` becomes one word, with ``=``.
    """
    result: list[str] = []
    for i, word in enumerate(argv):
        if word == "--":
            return [*result, *argv[i:]]
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            word = flag.replace("_", "-") + equals + value
        if result and result[-1] in _OF_OTHERS:
            result[-1] += "=" + argv[i]
            continue
        result.append(word)
    return result
