"""What a recipe is, how its YAML is read, and where the shipped ones are. ``docs/launcher.md`` explains every key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, ValidationError

from megaresume.shipped import shipped_dir
from megaresume.stream.errors import ConfigError, UsageError
from megaresume.stream.schema import Options, Within, read, read_mapping, refused


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


Regex = Annotated[str, AfterValidator(_is_regex)]
Modules = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Called(Options):
    """A function that the script calls, by its parameters in order; leading ones are enough."""

    #: that it is imported from.
    modules: Modules
    parameters: Annotated[tuple[str, ...], AfterValidator(_are_parameters)]
    #: files that may define it, relative to the folder of the megatron package; the first that exists is compared.
    defined_in: tuple[str, ...] = ()
    #: functions that take it and give back one with the same parameters: ``f = wrapper(f)`` is still ``f``.
    wrappers: Modules = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches(Options):
    """Conditions on the script, all of which must hold."""

    imports_any_of: Modules = ()
    imports_none_of: Modules = ()
    #: imported by the script, or by the file beside it that defines one of the calls.
    uses: Modules = ()
    #: parameter of the call that takes the provider -> what the source of the argument must hold.
    arguments: dict[str, Regex] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument(Options):
    """The argument of a call that is wrapped."""

    #: the function that is called.
    of: str
    parameter: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderCall(Argument):
    """The datasets provider; a call without one is refused."""

    #: for the name of one that the script does not show (imported, an attribute).
    named: Regex = "(?i)(?<!model_)(?<!args_)provider"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Options):
    """One recipe: for one upstream and one range of its versions."""

    name: Annotated[str, AfterValidator(_is_name)]
    #: raised when the changes are others, so that a script patched by an older one is told apart.
    version: Annotated[int, Within(1, 1_000_000)]
    upstream: str
    #: range of megatron.core, as ``>=0.18,<0.19``; empty: any.
    versions: Annotated[str, AfterValidator(_is_range)] = ""
    #: how a patched script is started; ``{script}`` stands for it.
    run: str = "torchrun --nproc-per-node GPUS {script} ARGUMENTS"
    calls: dict[str, Called]
    matches: Matches = Matches()
    #: becomes ``megaresume.provider(...)``.
    provider: ProviderCall
    #: the function that adds flags: becomes ``megaresume.extra_args_provider(...)``, added if there is none.
    flags: Argument
    #: ``import megaresume`` goes before the first import of one of these, and after all of those.
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
        """All changes as a user would make them."""
        wraps = (
            f"in {one.of}(...): {one.parameter}={function}(WHAT_IS_THERE_NOW)"
            for one, function in ((self.provider, PROVIDER), (self.flags, FLAGS))
        )
        return "; ".join(("import megaresume", *wraps))


#: what the arguments are wrapped in.
PROVIDER, FLAGS = "megaresume.provider", "megaresume.extra_args_provider"


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a file.

    Raises:
        ConfigError: it cannot be read, or is not a valid recipe: with the line of the mistake.
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
            action=f"correct line {line}; docs/launcher.md describes every key",
        ) from error
    return recipe


def _line(path: Path, error: BaseException | None) -> int:
    """The line, from 1, of the value that pydantic refused, or of the nearest above it."""
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


# -- where they are


def recipe_dir() -> Path:
    """The folder of the shipped recipes. Raises SetupError if the installation has lost it."""
    return shipped_dir("hosts/megatron/patching/recipes", holds="*.yaml", what="recipes", install="'megaresume[patch]'")


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
    if Path(name_or_file).is_file():
        return read_recipe(Path(name_or_file))
    raise UsageError(
        "no such recipe", found=f"--recipe {name_or_file}", expected="a file, or one of " + ", ".join(shipped)
    )
