"""Applies recipes to a user's training script: format-preserving, checkable, reversible byte for byte.

    recipe.py    what a recipe is; its YAML, checked with the line of every mistake; where the shipped ones are
    script.py    a script as a concrete syntax tree: what its names mean, and where a function is called
    provider.py  whether an expression is a datasets provider
    choose.py    the one recipe that fits, by evidence in the script and in the megatron package beside it
    codemod.py   the changes of a recipe, as a transformation of the tree
    marker.py    the comment that names the recipe and holds the changed lines; finds and undoes them
    files.py     reads and replaces the script, losing nothing
    patch.py     apply, check, revert
    command.py   `megaresume patch`
    errors.py    the error of a script that cannot be changed safely

A patch only inserts text. The comment that it leaves holds the lines as they were, so no backup file is needed, and
lines that the user edits elsewhere stay as they are.
"""
