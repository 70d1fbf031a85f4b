"""Recipes: what one is, how its YAML is read, where the shipped ones are. For its keys see
``docs/megatron-launcher.md``.

A patch leaves a comment that names the recipe and holds the changed lines, old and new:

    # megaresume-patch {"format": 1, "recipe": "megatron-lm-0.19", "version": 1, "undo": "megaresume patch ..."}
    # megaresume-patch [0, [], ["import megaresume"]]
    # megaresume-patch [462, ["        provider,"], ["        megaresume.provider(provider),"]]
    # megaresume-patch {"original": "6b3c...", "check": "1d2c3b4a59687766"}
    import megaresume

One line per `Hunk`, with its line number counted from the first line after the comment. ``original`` is the SHA-256 of
the file before the patch, ``check`` a hash of the comment. Lines are compared without their ends, so a checkout that
converts line ends changes nothing; bytes above 127 are written as Latin-1, whatever the file's encoding.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import ValidationError

from megaresume.hosts.megatron.patching import PatchError
from megaresume.shipped import shipped_dir
from megaresume.stream.errors import ConfigError, UsageError
from megaresume.stream.schema import After, Options, Within, read, refused
from megaresume.stream.yaml_text import read_mapping


def _is_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", text):
        raise refused(expected="lower-case letters, digits, dots and dashes")
    return text


def _is_regex(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise refused(
            "{place} is not a regular expression", expected="a regular expression", cause=str(error)
        ) from error
    return text


def _is_range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise refused("{place} is not a range of versions", expected="a range, as >=0.18,<0.19") from error
    return text


def _are_parameters(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
        raise refused("{place} are not the parameters of a function", expected="Python names, each once")
    return names


Regex = Annotated[str, After(_is_regex)]
Modules = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Called(Options):
    """A function that the script calls, by its parameters in order; the leading ones are enough."""

    #: Modules that it may be imported from.
    modules: Modules
    parameters: Annotated[tuple[str, ...], After(_are_parameters)]
    #: Files that may define it, relative to the folder of the megatron package; the first existing one is compared.
    defined_in: tuple[str, ...] = ()
    #: Functions that take it and return one with the same parameters: after ``f = wrapper(f)`` it is still ``f``.
    wrappers: Modules = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches(Options):
    """Conditions on the script, all of which must hold."""

    imports_any_of: Modules = ()
    imports_none_of: Modules = ()
    #: Imported by the script, or by the file beside it that defines one of the calls.
    uses: Modules = ()
    #: Parameter of the call that takes the provider -> pattern to find in the argument's source.
    arguments: dict[str, Regex] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument(Options):
    """The argument of a call that is wrapped."""

    #: The function that is called.
    of: str
    parameter: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderCall(Argument):
    """The datasets provider; a call without one is refused."""

    #: Pattern for the name of a provider whose definition the script does not show (imported, an attribute).
    named: Regex = "(?i)(?<!model_)(?<!args_)provider"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Options):
    """One recipe, for one upstream and one range of its versions."""

    name: Annotated[str, After(_is_name)]
    #: Increased whenever the changes are different, to recognize a script patched by an older version.
    version: Annotated[int, Within(1, 1_000_000)]
    upstream: str
    #: Range of megatron.core versions, like ``>=0.18,<0.19``; empty: any.
    versions: Annotated[str, After(_is_range)] = ""
    #: How to start a patched script, which ``{script}`` stands for.
    run: str = "torchrun --nproc-per-node GPUS {script} ARGUMENTS"
    calls: dict[str, Called]
    matches: Matches = Matches()
    #: The argument that becomes ``megaresume.provider(...)``.
    provider: ProviderCall
    #: The argument that adds flags: becomes ``megaresume.extra_args_provider(...)``, and is added if missing.
    flags: Argument
    #: ``import megaresume`` goes before the first import of one of these, and after all of ``import_after``.
    import_before: Modules = ()
    import_after: Modules = ()

    def __post_init__(self) -> None:
        for place, argument in (("provider", self.provider), ("flags", self.flags)):
            if argument.of not in self.calls:
                expected = ", ".join(self.calls)
                raise refused(
                    "{place} is not described under calls", found=argument.of, expected=expected, at=(place, "of")
                )
            self._check(argument.of, argument.parameter, place)
        for parameter in self.matches.arguments:
            self._check(self.provider.of, parameter, "matches", "arguments")

    def _check(self, call: str, parameter: str, *at: str) -> None:
        known = self.calls[call].parameters
        if parameter not in known:
            raise refused(f"{call} has no parameter {parameter}", found=parameter, expected=", ".join(known), at=at)

    @property
    def by_hand(self) -> str:
        """All changes, as a user would make them by hand."""
        wraps = (
            f"in {one.of}(...): {one.parameter}={function}(WHAT_IS_THERE_NOW)"
            for one, function in ((self.provider, PROVIDER), (self.flags, FLAGS))
        )
        return "; ".join(("import megaresume", *wraps))


#: The functions that wrap the arguments.
PROVIDER, FLAGS = "megaresume.provider", "megaresume.extra_args_provider"


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a file.

    Raises:
        ConfigError: it cannot be read, or is not a valid recipe (gives the line of the mistake).
    """
    value = read_mapping(path, "a recipe", "name, version, upstream, calls and so on")
    try:
        recipe: Recipe = read(Recipe, value, "the recipe", inside="")
    except ConfigError as error:
        line = _line(path, error.__cause__)
        raise ConfigError(
            f"recipe {path}, line {line}: {error.headline}",
            found=error.found,
            expected=error.expected,
            cause=error.cause or "a slip in the recipe",
            action=f"correct line {line}; docs/megatron-launcher.md describes every key",
        ) from error
    return recipe


def _line(path: Path, error: BaseException | None) -> int:
    """The line, from 1, of the value that pydantic refused, or of the nearest one above it."""
    assert isinstance(error, ValidationError)
    one = error.errors(include_url=False)[0]
    context = one.get("ctx", {})
    node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    line = 0
    for part in (*one["loc"], *context.get("at", ()), context.get("key")):
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, node = key.start_mark.line, value
    return line + 1


def recipe_dir() -> Path:
    """The folder of the shipped recipes. Raises SetupError if the installation lacks it."""
    return shipped_dir("hosts/megatron/patching/recipes", holds="*.yaml", what="recipes", install="'megaresume[patch]'")


def shipped_recipes() -> list[Recipe]:
    """All shipped recipes, in the order of their names. Raises ConfigError if one is invalid."""
    return [read_recipe(path) for path in sorted(recipe_dir().glob("*.yaml"), key=lambda path: path.stem)]


def find_recipe(name_or_file: str) -> Recipe:
    """The recipe that ``--recipe`` names: a shipped one by name, or a YAML file.

    Raises:
        UsageError: it is neither.
        ConfigError: the file is not a valid recipe.
    """
    shipped = {recipe.name: recipe for recipe in shipped_recipes()}
    if name_or_file in shipped:
        return shipped[name_or_file]
    if Path(name_or_file).is_file():
        return read_recipe(Path(name_or_file))
    raise UsageError(
        "no such recipe",
        found=f"--recipe {name_or_file}",
        expected="a file, or one of " + ", ".join(shipped),
        action="leave --recipe out to have it chosen",
    )


#: Increased whenever the comment's format changes.
FORMAT = 1

_PREFIX = b"# megaresume-patch "
_LINE_END = re.compile(rb"[\r\n]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """Lines that a patch changed."""

    #: The first of them, counted from the place of the comment, in the file without it. Not compared.
    line: int = field(compare=False)
    old: list[str]
    new: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchMarker:
    """The content of the marker comment."""

    recipe: str
    version: int
    #: SHA-256 of the file before the patch.
    original: str
    hunks: tuple[Hunk, ...]
    #: The line of the file, from 0, where the comment now begins.
    place: int

    @property
    def num_lines(self) -> int:
        """Number of lines of the comment."""
        return len(self.hunks) + 2


def _texts(lines: Sequence[bytes]) -> list[str]:
    """Lines without their ends."""
    return [_LINE_END.sub(b"", line).decode("latin-1") for line in lines]


def _end(line: bytes) -> bytes:
    return (_LINE_END.search(line) or [b""])[0]


def diff(data: bytes, patched: bytes, place: int) -> tuple[Hunk, ...]:
    """The changed lines; ``place`` is the line, from 0, before which the comment will go."""
    old, new = _texts(data.splitlines()), _texts(patched.splitlines())
    return tuple(
        Hunk(line=first - place, old=old[begin:end], new=new[first:last])
        for tag, begin, end, first, last in difflib.SequenceMatcher(None, old, new).get_opcodes()
        if tag != "equal"
    )


def with_marker(patched: bytes, marker: PatchMarker) -> bytes:
    """Insert the comment into a patched file."""
    lines = patched.splitlines(keepends=True)
    undo = "megaresume patch --revert SCRIPT"
    head = {"format": FORMAT, "recipe": marker.recipe, "version": marker.version, "undo": undo}
    values = [head, *([hunk.line, hunk.old, hunk.new] for hunk in marker.hunks)]
    texts = _sealed([json.dumps(value) for value in values], marker.original)
    end = _end(lines[marker.place]) or b"\n"
    lines[marker.place : marker.place] = [_PREFIX + text.encode("ascii") + end for text in texts]
    return b"".join(lines)


def _sealed(texts: list[str], original: object) -> list[str]:
    """The lines of the comment, with the final one appended."""
    check = hashlib.sha256("\n".join([*texts, str(original)]).encode()).hexdigest()[:16]
    return [*texts, json.dumps({"original": original, "check": check})]


def read_marker(data: bytes, name: str) -> tuple[PatchMarker, bytes] | None:
    """Read the comment of a patched file.

    Returns:
        what it says, and the file without it; None if there is none.

    Raises:
        PatchError: the comment was edited, or comes from a newer megaresume.
    """
    lines = data.splitlines(keepends=True)
    indices = [i for i, line in enumerate(lines) if line.startswith(_PREFIX)]
    if not indices:
        return None
    first, stop = indices[0], indices[-1] + 1
    texts = [text[len(_PREFIX) :] for text in _texts([lines[i] for i in indices])]
    try:
        head, *hunks, end = (json.loads(text) for text in texts)
        if head["format"] > FORMAT:
            raise PatchError(
                f"{name} was patched by a newer megaresume",
                found=f"line {first + 1}: a marker of format {head['format']}",
                expected=f"a marker of format {FORMAT}",
                action="use that version, or a newer one",
            )
        if texts == _sealed(texts[:-1], end["original"]) and stop - first == len(indices):
            changed = tuple(Hunk(line=line, old=old, new=new) for line, old, new in hunks)
            marker = PatchMarker(
                recipe=head["recipe"], version=head["version"], original=end["original"], hunks=changed, place=first
            )
            return marker, b"".join(lines[:first] + lines[stop:])
    except (ValueError, TypeError, LookupError):
        pass
    raise PatchError(
        f"{name}: the marker of the patch was edited",
        found=f"lines {', '.join(str(i + 1) for i in indices)}: begin with {_PREFIX.decode().strip()}, "
        "but are not as they were written",
        expected="the comment as megaresume wrote it",
        cause="a formatter, a merge, or an edit by hand",
        action="restore these lines or the file from version control; or take out by hand the comment, "
        "`import megaresume`, and every megaresume.SOMETHING(...) around an argument",
    )


def undo(data: bytes, marker: PatchMarker, name: str) -> bytes:
    """Replace the new lines by the old ones, keeping the line ends of the new ones.

    Args:
        data: the patched file without the comment, possibly edited since.
        marker: what to undo; if a hunk fits several places, the one at its recorded distance from the comment counts.
        name: the file's name in messages.

    Raises:
        PatchError: a hunk's lines were edited, or copied so that the copies cannot be told apart.
    """
    lines = data.splitlines(keepends=True)
    texts = _texts(lines)
    places: list[int] = []
    for hunk in marker.hunks:
        count, expected = len(hunk.new), marker.place + hunk.line
        found = [i for i in range(len(texts) - count + 1) if texts[i : i + count] == hunk.new]
        found = [expected] if expected in found else found
        if len(found) != 1 or (places and found[0] <= places[-1]):
            raise _edited(texts, marker, hunk, found, name)
        places += found
    for place, hunk in reversed(list(zip(places, marker.hunks, strict=True))):
        ends = [_end(line) for line in lines[place : place + len(hunk.new)]]
        ends = ends[: len(hunk.old) - 1] + ends[-1:]
        old = [text.encode("latin-1") + end for text, end in zip(hunk.old, ends, strict=False)]
        lines[place : place + len(hunk.new)] = old
    return b"".join(lines)


def _edited(texts: list[str], marker: PatchMarker, hunk: Hunk, places: list[int], name: str) -> PatchError:
    """The error that shows a line of the patch as it is now and as it was written."""
    added = next(line for line in hunk.new if line not in hunk.old)
    ours = next((word for word in ("megaresume.provider", "import megaresume") if word in added), "megaresume.")
    numbers = [i + 1 + (marker.num_lines if i >= marker.place else 0) for i in range(len(texts))]
    if places:
        found = f"these lines several times: {', '.join(str(numbers[place]) for place in places)}"
    else:
        hits = [
            f"line {number}: {text.strip()[:160]}" for number, text in zip(numbers, texts, strict=True) if ours in text
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
