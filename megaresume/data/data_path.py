"""The classic ``--data-path``, weights and paths in one list, read as Megatron reads it.

Source of the rules: ``get_blend_from_list`` and ``BlendedMegatronDatasetBuilder`` of megatron-core.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from megaresume.data.layout import prefix_of
from megaresume.data.split import Part, open_corpus, split_part
from megaresume.stream.errors import ConfigError


def sources_from_data_path(
    values: Sequence[str], *, base_dir: str | Path = ".", split: str | None = None, part: Part = "train"
) -> dict[str, dict[str, Any]]:
    """The ``sources`` mapping of a data.yaml for ``--data-path VALUES``.

    Accepts one path; weights and paths in turn (``0.6 web 0.4 code``); or several paths without weights, which
    are then weighted by their tokens (of the part, if there is a split).

    Args:
        values: the words after the flag.
        base_dir: the base of relative paths.
        split: ``--split``, if it applies.
        part: of the split.

    Returns:
        name -> ``{"path": ..., "weight": ...}`` and ``"split"`` if there is one, in the order given.

    Raises:
        ConfigError: nothing given, or weights that do not pair up with paths.
        CorpusError: a corpus whose size is needed is missing or damaged.
    """
    words = [str(value).strip() for value in values]
    weighted = _is_weighted(words)
    paths = words[1::2] if weighted else words
    prefixes = [str(prefix_of(path)) for path in paths]
    weights: Sequence[str | int]
    if weighted:
        weights = words[0::2]
    elif len(paths) == 1:
        weights = [1]
    else:
        weights = [_tokens(Path(base_dir, prefix), split, part) for prefix in prefixes]
    entries = zip(source_names(prefixes), prefixes, weights, strict=True)
    common = {} if split is None else {"split": split}
    return {name: {"path": prefix, "weight": weight, **common} for name, prefix, weight in entries}


def source_names(prefixes: Sequence[str]) -> list[str]:
    """A name for each corpus: its file name, preceded by as many directories as make it unique; a number is added if it
    is given twice.

    A name depends on the set of paths alone, not on their order: it keys the permutation of the source.
    """
    unique = sorted(set(prefixes))
    names: dict[str, str] = {}
    for prefix in unique:
        parts = PurePath(prefix).parts
        for depth in range(1, len(parts) + 1):
            tail = parts[-depth:]
            if sum(PurePath(other).parts[-depth:] == tail for other in unique) == 1:
                break
        names[prefix] = "/".join(tail).replace("//", "/")
    seen: dict[str, int] = {}
    result = []
    for prefix in prefixes:
        count = seen[prefix] = seen.get(prefix, 0) + 1
        result.append(names[prefix] if count == 1 else f"{names[prefix]}#{count}")
    return result


def _is_weighted(words: Sequence[str]) -> bool:
    numbers = [_is_number(word) for word in words]
    if not words:
        problem = "nothing"
    elif not any(numbers):
        return False
    elif len(words) % 2 == 0 and all(numbers[0::2]) and not any(numbers[1::2]):
        return True
    else:
        problem = " ".join(words)
    raise ConfigError(
        "--data-path cannot be read",
        found=problem,
        expected="one path; weights and paths in turn (0.6 web_text_document 0.4 code_text_document); or paths only",
        cause="a weight without a path or a path without a weight" if words else None,
        action="correct --data-path",
    )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _tokens(prefix: Path, split: str | None, part: Part) -> int:
    source = open_corpus(prefix)
    if split is None:
        return source.num_tokens
    return split_part(source, split, part).fingerprint().tokens
