"""Apply, check and revert: from bytes to bytes, every result verified before anything is written."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaresume.hosts.megatron.patching.choose import Beside, choose
from megaresume.hosts.megatron.patching.codemod import Codemod
from megaresume.hosts.megatron.patching.errors import PatchError
from megaresume.hosts.megatron.patching.marker import PatchMarker, diff, read_marker, undo, with_marker
from megaresume.hosts.megatron.patching.recipe import Recipe
from megaresume.hosts.megatron.patching.script import Script


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A patched script."""

    data: bytes
    recipe: Recipe
    #: the lines of ours: number in the patched file, from 1, and text.
    changes: tuple[tuple[int, str], ...]
    already: bool
    note: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reverted:
    """A script without the patch."""

    data: bytes
    marker: PatchMarker
    #: whether it is the original byte for byte; else other lines were edited since, and stay so.
    exact: bool


Status = Literal["patched", "unpatched", "older", "newer", "edited", "stale", "unknown recipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Whether a script is patched with the current version of its recipe, and as that would patch it now."""

    status: Status
    recipe: str | None = None
    version: int | None = None
    #: why not, and what to do.
    reason: str | None = None
    action: str | None = None

    @property
    def ok(self) -> bool:
        """Nothing is to be done."""
        return self.status == "patched"


def apply(data: bytes, name: str, recipes: Sequence[Recipe], beside: Beside | None) -> Applied:
    """Patch a script.

    Args:
        data: its bytes.
        name: what to call it in messages.
        recipes: to choose from.
        beside: the megatron package next to it.

    Raises:
        UsageError: not Python.
        PatchError: no recipe fits, several do, the script cannot be changed safely, or it has another patch.
    """
    if read_marker(data, name) is not None:
        state = check(data, name, recipes, beside)
        if not state.ok:
            raise PatchError(f"{name} is patched already", found=state.reason, action=state.action)
        return Applied(data=data, recipe=_named(state.recipe, recipes), changes=(), already=True)
    script = Script(data, name)
    fit = choose(script, recipes, beside)
    codemod = Codemod(script, fit)
    patched = script.wrapper.visit(codemod).bytes
    marker = PatchMarker(
        recipe=fit.recipe.name,
        version=fit.recipe.version,
        original=hashlib.sha256(data).hexdigest(),
        hunks=diff(data, patched, codemod.line - 1),
        place=codemod.line - 1,
    )
    result = with_marker(patched, marker)
    _verify(data, result, name)
    first = codemod.line + marker.num_lines
    ours = ((first + hunk.line + i, text) for hunk in marker.hunks for i, text in enumerate(hunk.new))
    return Applied(
        data=result,
        recipe=fit.recipe,
        changes=tuple((number, text.strip()) for number, text in ours if "megaresume" in text),
        already=False,
        note=None if beside is None else beside.note(fit.recipe),
    )


def _named(name: str | None, recipes: Sequence[Recipe]) -> Recipe:
    return next(recipe for recipe in recipes if recipe.name == name)


def _verify(data: bytes, patched: bytes, name: str) -> None:
    """Undoing must give the original, and the result must be Python, before anything is written."""
    ast.parse(patched)
    if revert(patched, name).data != data:
        raise PatchError(
            f"{name} cannot be patched reversibly",
            found="undoing the patch would not give the same bytes",
            expected="the same bytes",
            cause="an encoding or line ends that are not handled",
            action="please report this script; meanwhile use the launcher: torchrun -m megaresume.run",
        )


def revert(data: bytes, name: str) -> Reverted:
    """Take a patch out.

    Raises:
        PatchError: not patched, or lines of the patch were edited.
    """
    found = read_marker(data, name)
    if found is None:
        raise PatchError(
            f"{name} is not patched",
            found="no line that begins with # megaresume-patch",
            expected="the marker of a patch",
            cause="it was never patched, or the marker was deleted",
            action="nothing to do; what was changed by hand has to be undone by hand",
        )
    marker, rest = found
    result = undo(rest, marker, name)
    exact = hashlib.sha256(result).hexdigest() == marker.original
    return Reverted(data=result, marker=marker, exact=exact)


def check(data: bytes, name: str, recipes: Sequence[Recipe], beside: Beside | None) -> Checked:
    """Whether a script is patched with the current version of its recipe, and as that would patch it now.

    Raises:
        UsageError: not Python.
    """
    try:
        if read_marker(data, name) is None:
            return Checked(status="unpatched", reason="it is not patched", action=f"megaresume patch {name}")
        before = revert(data, name)
    except PatchError as error:
        return Checked(status="edited", reason=f"{error.headline}: {error.found}", action=error.action)
    status, reason, action = _judge(before, name, recipes, beside)
    marker = before.marker
    return Checked(status=status, recipe=marker.recipe, version=marker.version, reason=reason, action=action)


def _judge(
    before: Reverted, name: str, recipes: Sequence[Recipe], beside: Beside | None
) -> tuple[Status, str | None, str | None]:
    """What is to be said of a patched script, why, and what to do."""
    marker, again = before.marker, f"megaresume patch --revert {name} && megaresume patch {name}"
    if marker.recipe not in (names := [recipe.name for recipe in recipes]):
        reason = f"it was patched with recipe {marker.recipe}, which is not among {', '.join(names)}"
        return "unknown recipe", reason, "name its file: --recipe FILE; or revert it: --revert"
    recipe = _named(marker.recipe, recipes)
    label = f"it was patched with version {marker.version} of {marker.recipe}"
    if marker.version < recipe.version:
        return "older", f"{label}; version {recipe.version} is current", again
    if marker.version > recipe.version:
        return "newer", f"{label}; this megaresume has {recipe.version}", "use the newer megaresume"
    try:
        now = revert(apply(before.data, name, [recipe], beside).data, name).marker
    except PatchError as error:
        return "stale", f"the recipe does not fit any more: {error.headline}: {error.found}", error.action
    if now.hunks != marker.hunks:
        return "stale", "the script was edited, and the recipe would now patch it differently", again
    return "patched", None, None
