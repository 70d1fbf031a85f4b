"""Apply, check and revert: from bytes to bytes, every result verified before anything is written."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megaresume.patching.errors import PatchError
from megaresume.patching.hunks import Lost, digest, find, insert, undo
from megaresume.patching.lines import END, line_of, split_lines
from megaresume.patching.marker import Marker, read_marker, with_marker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megaresume.patching.beside import Beside
    from megaresume.patching.recipe import Recipe

__all__ = ["Applied", "Change", "Checked", "Reverted", "apply", "check", "revert"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Whether a script is patched as it would be now."""

    status: Literal["patched", "unpatched", "older", "newer", "edited", "stale", "unknown recipe"]
    recipe: str | None
    version: int | None
    #: why not, and what to do.
    reason: str | None
    action: str | None

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
    from megaresume.patching.choose import choose
    from megaresume.patching.edits import plan
    from megaresume.patching.script import Script

    script = Script(data, name)
    fit = choose(script, recipes, beside)
    at, edits = plan(script, fit)
    groups = [
        [(script.in_file(item.offset), item.text) for item in sorted(edit.insertions, key=lambda i: i.rank)]
        for edit in edits
    ]
    patched, hunks = insert(data, groups)
    at = script.in_file(at)
    marker = Marker(
        recipe=fit.recipe.name,
        version=fit.recipe.version,
        original=hashlib.sha256(data).hexdigest(),
        patched=digest(patched),
        line=line_of(data, at),
        hunks=tuple(hunks),
    )
    newline = END.search(data, at)
    result = with_marker(patched, marker, newline[0] if newline else b"\n")
    _verify(data, result, name)
    changes = _changes([edit.what for edit in edits], groups, data, marker)
    note = beside.note(fit.recipe) if beside is not None else None
    return Applied(data=result, recipe=fit.recipe, changes=changes, already=False, notes=(note,) if note else ())


def _changes(words: list[str], groups: list[list[tuple[int, str]]], data: bytes, marker: Marker) -> tuple[Change, ...]:
    result = []
    for what, group in zip(words, groups, strict=True):
        before = sum(text.count("\n") for items in groups for offset, text in items if offset < group[0][0])
        extra = 1 if group[0][1].startswith(("\n", "\r\n", ",\n", ",\r\n")) else 0
        line = line_of(data, group[0][0]) + before + extra + marker.num_lines
        result.append(Change(line=line, what=what))
    return tuple(sorted(result, key=lambda change: change.line))


def _verify(data: bytes, patched: bytes, name: str) -> None:
    """Undoing must give the original, and the result must be Python, before anything is written."""
    from megaresume.patching.script import Script

    Script(patched, name)
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
    marker, rest, line = found
    try:
        result = undo(rest, marker.hunks, line - marker.line)
    except Lost as lost:
        raise _edited(data, name, marker, lost) from lost
    untouched = digest(rest) == marker.patched
    exact = hashlib.sha256(result).hexdigest() == marker.original
    if untouched and not exact:
        raise PatchError(
            f"{name}: the marker does not belong to this file",
            found="undoing it does not give the file that it names",
            expected=f"SHA-256 {marker.original}",
            cause="the marker was copied from another script",
            action="restore the file from version control",
        )
    return Reverted(data=result, recipe=marker.recipe, version=marker.version, exact=exact)


def _edited(data: bytes, name: str, marker: Marker, lost: Lost) -> PatchError:
    lines = split_lines(data)
    inserted = " and ".join(repr(text.strip()) for _, text in lost.hunk.cuts)
    if lost.places:
        found = f"these lines several times: {', '.join(map(str, lost.places))} (counted without the marker)"
    else:
        needles = [text.strip(" ,\n").partition("(")[0].encode() for _, text in lost.hunk.cuts]
        needle = next((needle for needle in needles if needle), b"megaresume")
        hits = [
            f"line {i}: {line.decode('utf-8', 'replace').strip()[:160]}"
            for i, line in enumerate(lines, 1)
            if needle in line and not line.startswith(b"# megaresume-patch")
        ]
        found = "; ".join(hits) or f"no line with {needle.decode()}"
    return PatchError(
        f"{name}: lines of the patch were edited since",
        found=found,
        expected=f"the lines as recipe {marker.recipe} version {marker.version} wrote them, with {inserted}",
        cause="a formatter, a merge, or an edit by hand",
        action=f"take {inserted} out by hand, and the lines that begin with # megaresume-patch; "
        "or restore the lines from version control and revert then",
    )


def check(data: bytes, name: str, recipes: Sequence[Recipe], beside: Beside | None) -> Checked:
    """Whether a script is patched with the current version of its recipe, and as that would patch it now.

    Raises:
        UsageError: not Python.
    """
    try:
        found = read_marker(data, name)
    except PatchError as error:
        return Checked(status="edited", recipe=None, version=None, reason=str(error.found), action=error.action)
    again = f"megaresume patch --revert {name} && megaresume patch {name}"
    if found is None:
        action = f"megaresume patch {name}"
        return Checked(status="unpatched", recipe=None, version=None, reason="it is not patched", action=action)
    marker, rest, line = found
    recipe = next((recipe for recipe in recipes if recipe.name == marker.recipe), None)

    def answer(status: str, reason: str | None = None, action: str | None = None) -> Checked:
        return Checked(
            status=status,  # type: ignore[arg-type]
            recipe=marker.recipe,
            version=marker.version,
            reason=reason,
            action=action,
        )

    try:
        find(rest, marker.hunks, line - marker.line)
    except Lost as lost:
        edited = _edited(data, name, marker, lost)
        return answer("edited", f"{edited.headline}: {edited.found}", edited.action)
    if recipe is None:
        others = ", ".join(recipe.name for recipe in recipes)
        reason = f"it was patched with recipe {marker.recipe}, which is not among {others}"
        return answer("unknown recipe", reason, "name its file: --recipe FILE; or revert it: --revert")
    if marker.version < recipe.version:
        reason = f"it was patched with version {marker.version} of {marker.recipe}; version {recipe.version} is current"
        return answer("older", reason, again)
    if marker.version > recipe.version:
        reason = (
            f"it was patched with version {marker.version} of {marker.recipe}; this megaresume has {recipe.version}"
        )
        return answer("newer", reason, "use the newer megaresume")
    try:
        now = read_marker(apply(revert(data, name).data, name, [recipe], beside).data, name)
    except PatchError as error:
        return answer("stale", f"the recipe does not fit any more: {error.headline}: {error.found}", error.action)
    assert now is not None
    if [hunk.digest for hunk in now[0].hunks] != [hunk.digest for hunk in marker.hunks]:
        return answer("stale", "the script was edited so that the recipe would patch it otherwise now", again)
    return answer("patched")
