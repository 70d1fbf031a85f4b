"""Where recipes are: ``patches/`` of a source checkout, or the copy inside an installed package."""

from __future__ import annotations

from pathlib import Path

from megaresume.patching.recipe import Recipe
from megaresume.patching.recipe_file import read_recipe
from megaresume.shipped import shipped_dir
from megaresume.stream.errors import UsageError

__all__ = ["find_recipe", "recipe_dir", "shipped_recipes"]


def recipe_dir() -> Path:
    """The folder of the shipped recipes. Raises SetupError if the installation has lost it."""
    return shipped_dir("patching/recipes", "patches", holds="*.yaml", what="recipes", install="'megaresume[patch]'")


def shipped_recipes() -> list[Recipe]:
    """All shipped recipes, in the order of their names. Raises ConfigError for one that is not valid."""
    return [read_recipe(path) for path in sorted(recipe_dir().glob("*.yaml"), key=lambda path: path.stem)]


def find_recipe(name_or_file: str) -> Recipe:
    """The recipe that ``--recipe`` names: a shipped one by its name, or a YAML file.

    Raises:
        UsageError: neither.
        ConfigError: a file that is not a valid recipe.
    """
    shipped = {recipe.name: recipe for recipe in shipped_recipes()}
    if name_or_file in shipped:
        return shipped[name_or_file]
    path = Path(name_or_file)
    if path.is_file():
        return read_recipe(path)
    raise UsageError(
        "no such recipe",
        found=f"--recipe {name_or_file}",
        expected="a file, or one of " + ", ".join(shipped),
    )
