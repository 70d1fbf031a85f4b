"""The error of a script that cannot be changed safely."""

from __future__ import annotations

from megaresume.stream.errors import MegaresumeError


class PatchError(MegaresumeError):
    """A script that no recipe can change, or undo, without guessing. Whoever keeps the script must act."""
