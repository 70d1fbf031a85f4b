"""What several commands read alike: flags with dashes and with underscores are the same flag; ranges of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from megaresume.stream.errors import UsageError

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


def number_range(flag: str, text: str, lowest: int) -> tuple[int, int]:
    """``A:B`` as (A, B), ``A`` as (A, A + 1).

    Args:
        flag: whose value it is.
        text: the value.
        lowest: A, if it is left out, and the least that it may be.

    Raises:
        UsageError: it is none.
    """
    first, colon, stop = text.partition(":")
    try:
        numbers = int(first) if first else lowest, int(stop) if colon else int(first) + 1
    except ValueError:
        numbers = (0, -1)
    if not lowest <= numbers[0] < numbers[1]:
        raise UsageError(
            f"bad range of {flag[2:]}",
            found=repr(text),
            expected=f"A:B with {lowest} <= A < B: from A to B-1" + (" (steps are counted from 1)" if lowest else ""),
            action=f"for example {flag} {lowest}:{lowest + 8}",
        )
    return numbers
