"""What a recipe is, how its YAML is read, and where the shipped ones are. ``docs/patching.md`` explains every key."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from megaresume.corpora.yaml_text import UniqueKeyLoader, load_yaml, parse_yaml
from megaresume.shipped import shipped_dir
from megaresume.stream.errors import ConfigError, UsageError


def _slip(headline: str, expected: str, *at: str | int) -> PydanticCustomError:
    """An error of ours; ``at`` is the place, where that is below what is validated."""
    return PydanticCustomError("slip", "{headline}", {"headline": headline, "expected": expected, "at": list(at)})


def _like(pattern: str, expected: str) -> Any:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise _slip("not valid", expected)
        return text

    return AfterValidator(check)


def _is_regex(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise _slip(f"not a regular expression: {error}", "a regular expression") from error
    return text


def _is_range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise _slip("not a range of versions", "a range, as >=0.18,<0.19") from error
    return text


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise _slip("a parameter twice", "each once")
    return names


_PYTHON = r"[A-Za-z_][A-Za-z0-9_]*"
Identifier = Annotated[str, _like(_PYTHON, "a Python name, as pretrain")]
Dotted = Annotated[str, _like(rf"{_PYTHON}(\.{_PYTHON})*", "a dotted name, as megatron.training")]
Regex = Annotated[str, AfterValidator(_is_regex)]
Modules = tuple[Dotted, ...]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _knows_its_keys(cls, value: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in value if isinstance(value, dict) else ():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise _slip(f"unknown key {key}{hint}", "one of " + ", ".join(known), key)
        return value


class Called(_Part):
    """A function that the script calls, by its parameters in order; leading ones are enough."""

    modules: Modules = Field(alias="from")
    parameters: Annotated[tuple[Identifier, ...], AfterValidator(_once)]
    #: files that may define it, relative to the folder of the megatron package; the first that exists is compared.
    defined_in: tuple[str, ...] = ()
    #: functions that take it and give back one with the same parameters: ``f = wrapper(f)`` is still ``f``.
    wrappers: Modules = ()


class Matches(_Part):
    """Conditions on the script, all of which must hold."""

    imports: Modules = ()
    imports_any_of: Modules = ()
    imports_none_of: Modules = ()
    #: imported by the script, or by the file beside it that defines one of the calls.
    uses: Modules = ()
    calls: tuple[str, ...] = ()
    calls_none_of: tuple[str, ...] = ()
    #: call -> parameter -> what the source of the argument must hold.
    arguments: dict[str, dict[str, Regex]] = {}


class Accepts(_Part):
    """How an argument is recognised as what it should be. None: anything will do."""

    #: required positional parameters of a function that the script itself shows.
    parameters: Annotated[int, Field(ge=0)] | None = None
    #: for the name of what the script does not show (imported, an attribute).
    name: Regex | None = None


class AddImport(_Part):
    """``import MODULE``, before the first import of ``before`` and after all imports of ``after``."""

    module: Dotted = Field(alias="add_import")
    before: Modules = ()
    after: Modules = ()


class Wrap(_Part):
    """The argument of a call becomes ``function(argument)``."""

    parameter: Identifier = Field(alias="wrap_argument")
    call: Identifier = Field(alias="of")
    function: Dotted = Field(alias="with")
    #: where the call has no such argument: ``parameter=function()`` is added, or the script is refused.
    if_absent: Literal["add_keyword", "refuse"] = "refuse"
    accepts: Accepts = Accepts()


def _kind_of_edit(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else ()
    return next((kind for kind in ("add_import", "wrap_argument") if kind in keys), None)


Edit = Annotated[
    Annotated[AddImport, Tag("add_import")] | Annotated[Wrap, Tag("wrap_argument")],
    Discriminator(_kind_of_edit, custom_error_type="slip", custom_error_message="add_import or wrap_argument"),
]


class Recipe(_Part):
    """One recipe: for one upstream and one range of its versions."""

    name: Annotated[str, _like(r"[a-z0-9][a-z0-9._-]*", "lower-case letters, digits, dots and dashes")]
    #: raised when the edits change, so that a script patched by an older one is told apart.
    version: Annotated[int, Field(ge=1)]
    upstream: str
    #: range of megatron.core, as ``>=0.18,<0.19``; empty: any.
    versions: Annotated[str, AfterValidator(_is_range)] = ""
    summary: str = ""
    #: how a patched script is started; ``{script}`` stands for it.
    run: str = "torchrun --nproc-per-node GPUS {script} ARGUMENTS"
    calls: dict[Identifier, Called]
    matches: Matches
    edits: tuple[Edit, ...]

    @property
    def add_import(self) -> AddImport:
        """The one import."""
        return next(edit for edit in self.edits if isinstance(edit, AddImport))

    @property
    def wraps(self) -> tuple[Wrap, ...]:
        """The arguments to wrap."""
        return tuple(edit for edit in self.edits if isinstance(edit, Wrap))

    @property
    def by_hand(self) -> str:
        """All changes as a user would make them."""
        wraps = (f"in {one.call}(...): {one.parameter}={one.function}(WHAT_IS_THERE_NOW)" for one in self.wraps)
        return "; ".join((f"import {self.add_import.module}", *wraps))

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Recipe:
        imports = [edit for edit in self.edits if isinstance(edit, AddImport)]
        if len(imports) != 1 or not self.wraps:
            raise _slip("not one import and something to wrap", "one add_import, and wrap_argument", "edits")
        for index, edit in enumerate(self.edits):
            if isinstance(edit, AddImport):
                continue
            self._known(edit.call, edit.parameter, ("edits", index, "of"), ("edits", index, "wrap_argument"))
            if not edit.function.startswith(imports[0].module + "."):
                expected = f"{imports[0].module}.SOMETHING, which add_import brings"
                raise _slip("a function that the import does not bring", expected, "edits", index, "with")
            if [(one.call, one.parameter) for one in self.wraps].count((edit.call, edit.parameter)) > 1:
                raise _slip("this argument is wrapped twice", "one edit for each argument", "edits", index)
        for key in ("calls", "calls_none_of"):
            for index, name in enumerate(getattr(self.matches, key)):
                self._known(name, None, ("matches", key, index))
        for name, parameters in self.matches.arguments.items():
            for parameter in parameters:
                place = ("matches", "arguments", name)
                self._known(name, parameter, place, (*place, parameter))
        return self

    def _known(self, call: str, parameter: str | None, *places: tuple[str | int, ...]) -> None:
        if call not in self.calls:
            raise _slip("this call is not described under calls", "one of " + ", ".join(self.calls), *places[0])
        if parameter is not None and parameter not in (known := self.calls[call].parameters):
            raise _slip(f"{call} has no parameter {parameter}", "one of " + ", ".join(known), *places[-1])


# -- reading


def parse_recipe(text: str, file: str) -> Recipe:
    """Read a recipe from its text; ``file`` is named in errors. Raises ConfigError, with the line of the mistake."""
    try:
        value = parse_yaml(text, UniqueKeyLoader)
        node = load_yaml(lambda: yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"recipe {file}" + (f", line {mark.line + 1}" if mark else "") + ": not valid YAML",
            found=getattr(error, "problem", None) or str(error),
            expected="a recipe, a YAML mapping",
            cause="a slip in the indentation or the quotes",
            action="correct the line; docs/patching.md has an example",
        ) from error
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        one = error.errors(include_url=False)[0]
        # Of an edit, pydantic also names the kind, which is no key above it.
        place = [part for index, part in enumerate(one["loc"]) if one["loc"][0] != "edits" or index != 2]
        is_missing = one["type"] == "missing"
        slip: dict[str, Any] = one.get("ctx", {})
        place = place[:-1] if is_missing else [*place, *slip.get("at", ())]
        line, found = _look_up(node, place)
        path = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, place)))
        headline = f"{one['loc'][-1]} is missing" if is_missing else slip.get("headline", "not valid")
        raise ConfigError(
            f"recipe {file}, line {line}{f', {path}' if path else ''}: {headline}",
            found=f"no {one['loc'][-1]}" if is_missing else found,
            expected=slip.get("expected", one["msg"]).removeprefix("Input should be ").replace("tuple", "list"),
            cause="a slip in the recipe",
            action=f"correct line {line}; docs/patching.md describes every key",
        ) from error


def _look_up(node: yaml.Node | None, place: list[str | int]) -> tuple[int, str]:
    """The line, from 1, of the value at a place, or of the nearest above it; and the value."""
    for part in place:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == str(part)), node)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
    if node is None:
        return 1, "an empty file"
    found = "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
    return node.start_mark.line + 1, str(node.value) if isinstance(node, yaml.ScalarNode) else found


# -- where they are


def recipe_dir() -> Path:
    """The folder of the shipped recipes. Raises SetupError if the installation has lost it."""
    return shipped_dir("patching/recipes", "patches", holds="*.yaml", what="recipes", install="'megaresume[patch]'")


def shipped_recipes() -> list[Recipe]:
    """All shipped recipes, in the order of their names. Raises ConfigError for one that is not valid."""
    return [read_recipe(path) for path in sorted(recipe_dir().glob("*.yaml"), key=lambda path: path.stem)]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a file.

    Raises:
        UsageError: it cannot be read.
        ConfigError: it is no valid recipe.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(
            "cannot read the recipe", found=f"{path}: {reason}", expected="a recipe, a YAML file"
        ) from error
    return parse_recipe(text, str(path))


def find_recipe(name_or_file: str) -> Recipe:
    """The recipe that ``--recipe`` names: a shipped one by its name, or a YAML file.

    Raises:
        UsageError: neither.
        ConfigError: a file that is not a valid recipe.
    """
    shipped = {recipe.name: recipe for recipe in shipped_recipes()}
    if name_or_file in shipped:
        return shipped[name_or_file]
    if Path(name_or_file).is_file():
        return read_recipe(Path(name_or_file))
    raise UsageError(
        "no such recipe", found=f"--recipe {name_or_file}", expected="a file, or one of " + ", ".join(shipped)
    )
