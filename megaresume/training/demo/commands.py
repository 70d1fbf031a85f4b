"""Commands of the program, as a user would give them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from megaresume.stream.errors import SetupError

__all__ = ["ask"]


def ask(*words: str) -> dict[str, Any]:
    """What a command of the program prints with --json; its exit status is in there too.

    Raises:
        SetupError: it printed nothing.
    """
    done = subprocess.run([sys.executable, "-m", "megaresume", *words, "--json"], stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        raise SetupError(
            f"megaresume {words[0]} failed",
            found=f"exit status {done.returncode}",
            expected="a result",
            action=f"run it by hand: megaresume {' '.join(words)}",
        )
    result: dict[str, Any] = json.loads(done.stdout)
    return result
