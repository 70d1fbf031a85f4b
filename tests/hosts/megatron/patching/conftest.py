"""Short ways to patch a script that is a text."""

from __future__ import annotations

from megaresume.hosts.megatron.patching.choose import Beside
from megaresume.hosts.megatron.patching.patch import Applied, apply
from megaresume.hosts.megatron.patching.recipe import shipped_recipes

RECIPES = shipped_recipes()


def patch(script: str | bytes, beside: Beside | None = None, recipes: list | None = None) -> Applied:
    """Patch a script with the shipped recipes, as if nothing lay beside it."""
    data = script.encode() if isinstance(script, str) else script
    return apply(data, "train.py", RECIPES if recipes is None else recipes, beside)
