"""What a command needs beyond the base installation, said before it starts anything."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from megaresume.stream.errors import SetupError


def need_packages(what: str, names: Iterable[str], *, extra: str) -> None:
    """Refuse unless these packages are installed.

    Args:
        what: the command, in words.
        names: of modules.
        extra: what brings them all.

    Raises:
        SetupError: with those that are missing, and the extra.
    """
    missing = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        raise SetupError(
            f"{what} needs packages that are not installed",
            found=f"no {', '.join(missing)}",
            action=f"pip install 'megaresume[{extra}]', or make demo in a clone",
        )
