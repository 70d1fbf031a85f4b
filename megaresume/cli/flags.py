"""Flags with dashes and with underscores are the same flag."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["normalise"]


def normalise(argv: Sequence[str]) -> list[str]:
    """``--save_interval=5`` as ``--save-interval=5``; values, and everything after a lone ``--``, stay as they are."""
    result: list[str] = []
    for i, word in enumerate(argv):
        if word == "--":
            return [*result, *argv[i:]]
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            word = flag.replace("_", "-") + equals + value
        result.append(word)
    return result
