"""YAML that people wrote or disks damaged: one kind of error for whatever is wrong with it.

PyYAML raises what int(), dates and dictionaries raise for ``0x_``, ``2001-13-45`` or ``!!bool maybe``, and follows
aliases forever: nine lines in which each names the line before nine times stand for a billion values.

Apart from `schema`, which the launcher imports before a script: it does without PyYAML.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megaresume.stream.errors import ConfigError, NoFileError

#: values that the aliases of a file may stand for, beyond which it is not a configuration.
MAX_VALUES = 1_000_000

#: a character that JSON escapes in two halves, after an even number of backslashes.
_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89aAbB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


class UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses a key that is given twice, as YAML wants it; the library would drop the first value
    silently."""

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
    """The value of a YAML text, in plain Python. Nothing else is ever constructed.

    Args:
        text: of the file.
        loader: PyYAML's `SafeLoader`, or a class of it.

    Raises:
        yaml.YAMLError: it is not YAML, nested too deeply, within itself, or stands for too much.
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
    """Join what JSON escapes as two halves (outside of the first plane of Unicode) and YAML counts as one character."""
    slashes, high, low = pair.groups()
    return f"{slashes}\\U{0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF):08x}"


def read_mapping(path: Path, what: str, holds: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        path: of the file.
        what: the file is, for errors: "a data config".
        holds: what is expected in it.

    Raises:
        ConfigError: missing, unreadable, not YAML, a key that stands in a mapping twice, or not a mapping.
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
    """Raise a `yaml.YAMLError` where aliases lead in a circle, or multiply."""
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
