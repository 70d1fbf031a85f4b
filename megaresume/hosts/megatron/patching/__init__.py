"""Applies recipes to a user's training script: format-preserving, checkable, reversible byte for byte.

    recipe.py    what a recipe is; its YAML, checked with the line of every mistake; where the shipped ones are; the
                 comment in a script that names its recipe and holds the changed lines: finds and undoes them
    script.py    a script as a concrete syntax tree: what its names mean, where a function is called, and whether an
                 expression is a datasets provider
    choose.py    the one recipe that fits, by evidence in the script and in the megatron package beside it
    patch.py     apply, check, revert; the changes of a recipe, as a transformation of the tree
    command.py   `megaresume patch`: reads and replaces the script, losing nothing

A patch only inserts text. The comment that it leaves holds the lines as they were, so no backup file is needed, and
lines that the user edits elsewhere stay as they are.
"""

from __future__ import annotations

from megaresume.stream.errors import MegaresumeError


class PatchError(MegaresumeError):
    """A script that no recipe can change, or undo, without guessing. Whoever keeps the script must act."""
