"""Apply, check and revert: from bytes to bytes, every result verified before anything is written."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaresume.patching.choose import Beside, choose
from megaresume.patching.codemod import Codemod
from megaresume.patching.errors import PatchError
from megaresume.patching.marker import Lost, Marker, diff, find, read_marker, undo, with_marker
from megaresume.patching.recipe import Recipe
from megaresume.patching.script import Script


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change in words."""

    #: in the patched file, from 1.
    line: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A patched script."""

    data: bytes
    recipe: Recipe
    changes: tuple[Change, ...]
    already: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reverted:
    """A script without the patch."""

    data: bytes
    recipe: str
    version: int
    #: whether it is the original byte for byte; else other lines were edited since, and stay so.
    exact: bool


Status = Literal["patched", "unpatched", "older", "newer", "edited", "stale", "unknown recipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Whether a script is patched as it would be now."""

    status: Status
    recipe: str | None = None
    version: int | None = None
    #: why not, and what to do.
    reason: str | None = None
    action: str | None = None

    @property
    def ok(self) -> bool:
        """Patched with the current version of its recipe."""
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
        return _again(data, name, recipes, beside)
    script = Script(data, name)
    fit = choose(script, recipes, beside)
    codemod = Codemod(script, fit)
    patched = script.encode(script.wrapper.visit(codemod).code)
    marker = Marker(
        recipe=fit.recipe.name,
        version=fit.recipe.version,
        original=hashlib.sha256(data).hexdigest(),
        hunks=diff(data, patched, codemod.line - 1),
    )
    result = with_marker(patched, marker, codemod.line - 1)
    _verify(data, result, name)
    note = beside.note(fit.recipe) if beside is not None else None
    changes = _changes(codemod, marker)
    return Applied(data=result, recipe=fit.recipe, changes=changes, already=False, notes=(note,) if note else ())


def _changes(codemod: Codemod, marker: Marker) -> tuple[Change, ...]:
    first = codemod.line + marker.num_lines
    lines = {first + hunk.line + i: text for hunk in marker.hunks for i, text in enumerate(hunk.new)}
    found = [
        Change(line=next(number for number, text in lines.items() if needle in text), what=what)
        for what, needle in codemod.changes
    ]
    return tuple(sorted(found, key=lambda change: change.line))


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


def _again(data: bytes, name: str, recipes: Sequence[Recipe], beside: Beside | None) -> Applied:
    """A script that is patched already: nothing to do if it is so with the recipe of now."""
    state = check(data, name, recipes, beside)
    recipe = next((recipe for recipe in recipes if recipe.name == state.recipe), None)
    if state.ok and recipe is not None:
        return Applied(data=data, recipe=recipe, changes=(), already=True, notes=())
    raise PatchError(f"{name} is patched already", found=state.reason, action=state.action)


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
    marker, rest, origin = found
    try:
        result = undo(rest, marker.hunks, origin)
    except Lost as lost:
        raise _edited(data, name, marker, lost) from lost
    exact = hashlib.sha256(result).hexdigest() == marker.original
    return Reverted(data=result, recipe=marker.recipe, version=marker.version, exact=exact)


def _edited(data: bytes, name: str, marker: Marker, lost: Lost) -> PatchError:
    """The error that shows a line of the patch as it is now, and as it was written."""
    added = next(line for line in lost.hunk.new if line not in lost.hunk.old)
    ours = next((word for word in ("megaresume.provider", "import megaresume") if word in added), "megaresume.")
    if lost.places:
        found = f"these lines several times: {', '.join(map(str, lost.places))} (counted without the marker)"
    else:
        hits = [
            f"line {number}: {line.decode('utf-8', 'replace').strip()[:160]}"
            for number, line in enumerate(data.splitlines(), 1)
            if ours.encode() in line and not line.startswith(b"# megaresume-patch")
        ]
        found = "; ".join(hits) or f"no line with {ours}"
    return PatchError(
        f"{name}: lines of the patch were edited since",
        found=found,
        expected=f"the line as recipe {marker.recipe} version {marker.version} wrote it: {added.strip()}",
        cause="a formatter, a merge, or an edit by hand",
        action="take out by hand `import megaresume`, every megaresume.SOMETHING(...) around an argument, and the "
        "lines that begin with # megaresume-patch; or restore the lines from version control and revert then",
    )


def check(data: bytes, name: str, recipes: Sequence[Recipe], beside: Beside | None) -> Checked:
    """Whether a script is patched with the current version of its recipe, and as that would patch it now.

    Raises:
        UsageError: not Python.
    """
    try:
        found = read_marker(data, name)
    except PatchError as error:
        return Checked(status="edited", reason=str(error.found), action=error.action)
    if found is None:
        return Checked(status="unpatched", reason="it is not patched", action=f"megaresume patch {name}")
    marker, rest, origin = found
    status, reason, action = _judge(data, rest, origin, name, marker, recipes, beside)
    return Checked(status=status, recipe=marker.recipe, version=marker.version, reason=reason, action=action)


def _judge(
    data: bytes,
    rest: bytes,
    origin: int,
    name: str,
    marker: Marker,
    recipes: Sequence[Recipe],
    beside: Beside | None,
) -> tuple[Status, str | None, str | None]:
    """What is to be said of a patched script, why, and what to do."""
    again = f"megaresume patch --revert {name} && megaresume patch {name}"
    recipe = next((recipe for recipe in recipes if recipe.name == marker.recipe), None)
    label = f"it was patched with version {marker.version} of {marker.recipe}"
    try:
        find(rest, marker.hunks, origin)
    except Lost as lost:
        edited = _edited(data, name, marker, lost)
        return "edited", f"{edited.headline}: {edited.found}", edited.action
    if recipe is None:
        others = ", ".join(recipe.name for recipe in recipes)
        reason = f"it was patched with recipe {marker.recipe}, which is not among {others}"
        return "unknown recipe", reason, "name its file: --recipe FILE; or revert it: --revert"
    if marker.version < recipe.version:
        return "older", f"{label}; version {recipe.version} is current", again
    if marker.version > recipe.version:
        return "newer", f"{label}; this megaresume has {recipe.version}", "use the newer megaresume"
    try:
        now = read_marker(apply(revert(data, name).data, name, [recipe], beside).data, name)
    except PatchError as error:
        return "stale", f"the recipe does not fit any more: {error.headline}: {error.found}", error.action
    assert now is not None
    if [(hunk.old, hunk.new) for hunk in now[0].hunks] != [(hunk.old, hunk.new) for hunk in marker.hunks]:
        return "stale", "the script was edited, and the recipe would now patch it differently", again
    return "patched", None, None
