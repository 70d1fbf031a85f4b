"""Reads a recipe's YAML. Every mistake is reported with its line, what was found and what was expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from megaresume.patching.recipe import Accepts, AddImport, Called, Matches, Recipe, WrapArgument
from megaresume.patching.versions import parse_range
from megaresume.sources.yaml_text import load_yaml
from megaresume.stream.errors import ConfigError, UsageError

__all__ = ["parse_recipe", "read_recipe"]

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A node of the YAML, with the words for where it is."""

    node: yaml.Node
    path: str
    file: str

    def error(self, headline: str, *, expected: str, action: str | None = None, found: object = None) -> ConfigError:
        """What to raise: with file, line and key."""
        line = self.node.start_mark.line + 1
        where = f"{self.file}, line {line}" + (f", {self.path}" if self.path else "")
        if found is None:
            found = self.node.value if isinstance(self.node, yaml.ScalarNode) else _kind(self.node)
        return ConfigError(
            f"recipe {where}: {headline}",
            found=found,
            expected=expected,
            cause="a slip in the recipe",
            action=action or f"correct line {line}; docs/patching.md describes every key",
        )

    def fields(self, known: Sequence[str], *, required: Sequence[str] = ()) -> dict[str, _Place]:
        """The keys of a mapping. Raises ConfigError for another kind of node, and unknown, repeated or missing keys."""
        result = self.mapping()
        for key, place in result.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"write {near[0]}" if near else "remove it"
                raise place.error(f"unknown key {key}", found=key, expected="one of " + ", ".join(known), action=hint)
        for key in required:
            if key not in result:
                raise self.error(f"{key} is missing", found="no " + key, expected=f"{key}: ...")
        return result

    def mapping(self) -> dict[str, _Place]:
        """The entries of a mapping with any keys."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error("not a mapping", expected="key: value pairs")
        result: dict[str, _Place] = {}
        for key_node, value in self.node.value:
            key = str(key_node.value)
            path = f"{self.path}.{key}" if self.path else key
            place = _Place(node=value, path=path, file=self.file)
            if key in result:
                raise place.error(f"{key} is given twice", found=key, expected="every key once")
            result[key] = place
        return result

    def items(self) -> list[_Place]:
        """The items of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("not a list", expected="a list, as [a, b]")
        return [_Place(node=node, path=f"{self.path}[{i}]", file=self.file) for i, node in enumerate(self.node.value)]

    def text(self, pattern: re.Pattern[str] | None = None, expected: str = "a text") -> str:
        """A scalar, as it is written."""
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag == "tag:yaml.org,2002:null":
            raise self.error("not a text", expected=expected)
        value = str(self.node.value)
        if pattern is not None and not pattern.fullmatch(value):
            raise self.error("not valid", expected=expected)
        return value

    def dotted(self) -> str:
        """A dotted Python name."""
        return self.text(_DOTTED, "a dotted name, as megatron.training")

    def identifier(self) -> str:
        """A Python name."""
        return self.text(_IDENTIFIER, "a Python name, as pretrain")

    def number(self, lowest: int) -> int:
        """A whole number."""
        text = self.text(expected=f"a whole number from {lowest}")
        if not text.isdecimal() or len(text) > 9 or int(text) < lowest:
            raise self.error("not valid", expected=f"a whole number from {lowest}")
        return int(text)

    def regex(self) -> str:
        """A regular expression."""
        text = self.text(expected="a regular expression")
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise self.error(f"not a regular expression: {error}", expected="a regular expression") from error
        return text

    def many(self, read: Callable[[_Place], T]) -> tuple[T, ...]:
        """A list of one kind."""
        return tuple(read(item) for item in self.items())


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a value"


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a file.

    Raises:
        UsageError: no such file, or not readable as text.
        ConfigError: not a valid recipe.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(
            "cannot read the recipe", found=f"{path}: {reason}", expected="a recipe, a YAML file"
        ) from error
    return parse_recipe(text, str(path))


def parse_recipe(text: str, file: str) -> Recipe:
    """Read a recipe from its text; ``file`` is named in errors. Raises ConfigError."""
    try:
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
    if node is None:
        raise ConfigError(f"recipe {file}: empty", expected="a recipe", action="docs/patching.md has an example")
    top = _Place(node=node, path="", file=file)
    keys = ("name", "version", "upstream", "versions", "summary", "run", "calls", "matches", "edits")
    fields = top.fields(keys, required=("name", "version", "upstream", "calls", "matches", "edits"))
    calls = {name: _called(name, place) for name, place in fields["calls"].mapping().items()}
    add_import, wraps = _edits(fields["edits"], calls)
    return Recipe(
        name=fields["name"].text(_NAME, "lower-case letters, digits, dots and dashes"),
        version=fields["version"].number(1),
        upstream=fields["upstream"].text(),
        versions=_versions(fields["versions"]) if "versions" in fields else "",
        summary=fields["summary"].text() if "summary" in fields else "",
        run=fields["run"].text() if "run" in fields else "torchrun --nproc-per-node GPUS {script} ARGUMENTS",
        calls=calls,
        matches=_matches(fields["matches"], calls),
        add_import=add_import,
        wraps=wraps,
        path=file,
    )


def _versions(place: _Place) -> str:
    text = place.text(expected="a range, as >=0.18,<0.19")
    try:
        parse_range(text)
    except ValueError as error:
        raise place.error(str(error), expected="a range, as >=0.18,<0.19") from error
    return text


def _called(name: str, place: _Place) -> Called:
    if not _IDENTIFIER.fullmatch(name):
        raise place.error("not a function name", found=name, expected="a Python name, as pretrain")
    fields = place.fields(("from", "parameters", "defined_in"), required=("from", "parameters"))
    parameters = fields["parameters"].many(_Place.identifier)
    if len(set(parameters)) != len(parameters):
        raise fields["parameters"].error("a parameter twice", found=", ".join(parameters), expected="each once")
    return Called(
        name=name,
        modules=fields["from"].many(_Place.dotted),
        parameters=parameters,
        defined_in=fields["defined_in"].many(_Place.text) if "defined_in" in fields else (),
    )


def _known_call(place: _Place, calls: dict[str, Called]) -> str:
    name = place.identifier()
    if name not in calls:
        raise place.error(
            "this call is not described under calls",
            expected="one of " + (", ".join(calls) or "none: calls is empty"),
            action=f"describe {name} under calls: {name}: {{from: [...], parameters: [...]}}",
        )
    return name


def _known_parameter(place: _Place, name: str, call: Called) -> str:
    if name not in call.parameters:
        raise place.error(
            f"{call.name} has no parameter {name}", found=name, expected="one of " + ", ".join(call.parameters)
        )
    return name


def _matches(place: _Place, calls: dict[str, Called]) -> Matches:
    modules = ("imports", "imports_any_of", "imports_none_of")
    called = ("calls", "calls_none_of")
    fields = place.fields((*modules, *called, "arguments"))
    arguments: dict[tuple[str, str], str] = {}
    for call_name, inner in (fields["arguments"].mapping() if "arguments" in fields else {}).items():
        if call_name not in calls:
            expected = "one of " + ", ".join(calls)
            raise inner.error("this call is not described under calls", found=call_name, expected=expected)
        for parameter, value in inner.mapping().items():
            _known_parameter(value, parameter, calls[call_name])
            arguments[call_name, parameter] = value.regex()
    return Matches(
        **{key: fields[key].many(_Place.dotted) if key in fields else () for key in modules},
        **{
            key: tuple(_known_call(item, calls) for item in fields[key].items()) if key in fields else ()
            for key in called
        },
        arguments=arguments,
    )


def _edits(place: _Place, calls: dict[str, Called]) -> tuple[AddImport, tuple[WrapArgument, ...]]:
    imports: list[AddImport] = []
    wraps: list[WrapArgument] = []
    for item in place.items():
        keys = item.mapping()
        if "add_import" in keys:
            fields = item.fields(("add_import", "before", "after"))
            lists = {key: fields[key].many(_Place.dotted) if key in fields else () for key in ("before", "after")}
            imports.append(AddImport(module=fields["add_import"].dotted(), **lists))
        elif "wrap_argument" in keys:
            wraps.append(_wrap(item, calls))
            if len({(wrap.call, wrap.parameter) for wrap in wraps}) != len(wraps):
                raise item.error("this argument is wrapped twice", expected="one edit for each argument")
        else:
            raise item.error("unknown edit", found=", ".join(keys), expected="add_import or wrap_argument")
    if len(imports) != 1:
        raise place.error(
            "a recipe needs one add_import", found=f"{len(imports)} of them", expected="- add_import: megaresume"
        )
    if not wraps:
        raise place.error("a recipe needs a wrap_argument", found="none", expected="- wrap_argument: ...")
    for wrap in wraps:
        if not wrap.function.startswith(imports[0].module + "."):
            raise place.error(
                "a function that the import does not bring",
                found=f"with: {wrap.function}, add_import: {imports[0].module}",
                expected=f"with: {imports[0].module}.SOMETHING",
            )
    return imports[0], tuple(wraps)


def _wrap(item: _Place, calls: dict[str, Called]) -> WrapArgument:
    fields = item.fields(
        ("wrap_argument", "of", "with", "if_absent", "accepts"), required=("wrap_argument", "of", "with")
    )
    call = calls[_known_call(fields["of"], calls)]
    if_absent = fields["if_absent"].text() if "if_absent" in fields else "refuse"
    if if_absent not in ("add_keyword", "refuse"):
        raise fields["if_absent"].error("not valid", expected="add_keyword or refuse")
    accepts = Accepts()
    if "accepts" in fields:
        inner = fields["accepts"].fields(("parameters", "name"))
        accepts = Accepts(
            parameters=inner["parameters"].number(0) if "parameters" in inner else None,
            name=inner["name"].regex() if "name" in inner else None,
        )
    parameter = fields["wrap_argument"].identifier()
    return WrapArgument(
        call=call.name,
        parameter=_known_parameter(fields["wrap_argument"], parameter, call),
        function=fields["with"].dotted(),
        if_absent="add_keyword" if if_absent == "add_keyword" else "refuse",
        accepts=accepts,
    )
