"""Parses YAML from people or damaged disks, with one kind of error for every fault.

PyYAML leaks the errors of int(), dates and dictionaries for ``0x_``, ``2001-13-45`` or ``!!bool maybe``, and follows
aliases without limit: nine lines that each name the previous line nine times stand for a billion values.

Separate from `schema`, which the launcher imports before a script and which must not need PyYAML.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megaresume.stream.errors import ConfigError, NoFileError

#: the most values that the aliases of a file may stand for.
MAX_VALUES = 1_000_000

#: a character that JSON escapes in two halves, after an even number of backslashes.
_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89aAbB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


class UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses duplicate keys, as YAML requires; PyYAML would silently drop the first value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    "in a mapping", node.start_mark, f"the key '{key.value}' occurs twice", key.start_mark
                )
            seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
        return node


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """Parse a YAML text to plain Python. Nothing else is ever constructed.

    Args:
        text: of the file.
        loader: PyYAML's `SafeLoader`, or a class of it.

    Raises:
        yaml.YAMLError: not YAML, nested too deeply, recursive, or expands to too many values.
    """

    try:
        reader = loader(_PAIR.sub(_as_one, text))
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _check_size(node)
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise yaml.YAMLError(f"a value that its kind does not allow: {error}") from error


def _as_one(pair: re.Match[str]) -> str:
    """Join the two halves (a surrogate pair) in which JSON escapes a character that YAML counts as one."""
    slashes, high, low = pair.groups()
    return f"{slashes}\\U{0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF):08x}"


def read_mapping(path: Path, what: str, holds: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        path: of the file.
        what: the file is, for errors: "a data config".
        holds: what is expected in it.

    Raises:
        ConfigError: missing, unreadable, not YAML, a duplicate key, or not a mapping.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except OSError as error:
        raise NoFileError.unreadable(path, error, f"{what} in YAML", action="check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not YAML", found=str(error), expected=f"{what} in YAML", action=f"correct {path}"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} is not {what}",
            found="an empty file" if data is None else f"a {type(data).__name__}",
            expected=holds,
            action=f"correct {path}",
        )
    return data


def read_encoder(path: Path) -> dict[str, Any]:
    """The options of an encoder in a YAML file. Raises ConfigError as `read_mapping`."""
    return read_mapping(path, "an encoder", "a mapping with processor, template, tokenizer and so on")


def _check_size(node: yaml.Node) -> None:
    """Raise a `yaml.YAMLError` if aliases are circular, or expand to too many values."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise yaml.YAMLError(f"it stands within itself, by an alias in line {node.start_mark.line + 1}")
        if known is not None:
            return known
        sizes[id(node)] = 0
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        total = 1 + sum(size(part) for part in inner)
        if total > MAX_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MAX_VALUES:,} values")
        sizes[id(node)] = total
        return total

    size(node)
