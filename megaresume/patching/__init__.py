"""Applies recipes to a user's training script: format-preserving, checkable, reversible byte for byte.

    recipe.py       what a recipe is; its YAML, checked with the line of every mistake
    library.py      where the shipped recipes lie, and how one is found by name or file
    script.py       a script as bytes, text and syntax tree, with exact offsets
    names.py        what a name in the script means, and where the calls of it are
    providers.py    whether an expression is a datasets provider
    beside.py       the megatron package next to the script
    choose.py       the one recipe that fits, by content
    edits.py        a recipe and a script -> pure insertions
    hunks.py        insertions -> patched lines that can be found and undone again
    marker.py       the comment that names recipe and version and holds what undoing needs
    files.py        reads and replaces the script, losing nothing
    patch.py        apply, check, revert

A patch only ever inserts text. Undoing removes what was inserted, so no backup file is needed, and lines that the
user edits elsewhere stay as they are.
"""
