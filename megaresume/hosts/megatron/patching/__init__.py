"""Applies recipes to a user's training script: keeps its formatting, can be checked, and can be undone byte for byte.

    recipe.py    what a recipe is; its YAML, with the line of every mistake; where the shipped ones are; the comment
                 in a script that names its recipe and holds the changed lines: finds and undoes them
    script.py    a script as a concrete syntax tree: what its names mean, where a function is called, and whether an
                 expression is a datasets provider
    choose.py    the one recipe that fits, by evidence in the script and in the megatron package beside it
    patch.py     apply, check, revert; the changes of a recipe, as a transformation of the tree
    command.py   `megaresume patch`: reads and replaces the script, losing nothing

A patch only inserts text. The comment it leaves holds the original lines, so no backup file is needed, and lines that
the user edits elsewhere are kept.
"""

from __future__ import annotations

from megaresume.stream.errors import MegaresumeError


class PatchError(MegaresumeError):
    """A script that no recipe can change, or undo, without guessing. The script's owner must act."""
