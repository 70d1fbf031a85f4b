"""Sources that were renamed.

    sources: {web2: {was: web, path: ...}}

A source keeps its first name forever in what must not change: the keys of its permutation, the identity of its
samples, its place in a state. `SourceConfig.name` is that name, `SourceConfig.names` are those that came after it, the
last one is what people call it today. A state records them, so that a second rename needs to say no more than the
first: ``web3: {was: web2}``; and so that ``was`` can be left out once it was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megaresume.stream.errors import ConfigError, StateError

if TYPE_CHECKING:
    from megaresume.stream.config import SourceConfig, StreamConfig


def check_names(sources: Sequence[SourceConfig]) -> None:
    """Check that no two sources claim one name.

    Raises:
        ConfigError: an alias to itself, to a source that is still there, a cycle, or two to one.
    """
    by_label = {source.label: source for source in sources}
    seen: dict[str, str] = {}
    for source in sorted(sources, key=lambda s: s.renamed):  # those that say that they were renamed come last
        label, earlier = source.label, (source.name, *source.names[:-1])
        if source.renamed and label in earlier:
            raise ConfigError(
                f"source '{label}' is said to have been itself",
                found=f"sources.{label}.was: {', '.join(earlier)}",
                expected="the name that it had before",
                action=f"remove sources.{label}.was",
            )
        for name in earlier if source.renamed else (source.name,):
            if source.renamed and (other := by_label.get(name)):
                cycle = other.renamed and label in (other.name, *other.names)
                raise ConfigError(
                    f"source '{label}' cannot have been '{name}': that one is still there",
                    found=f"sources.{label}.was: {name}, and a source '{name}'"
                    + (f", which was '{label}': a cycle" if cycle else ""),
                    expected="a name that no source of today has",
                    action="give each source a name that was never used" if cycle else f"remove or rename '{name}'",
                )
            if name in seen:
                raise ConfigError(
                    f"two sources are said to have been '{name}'",
                    found=f"'{seen[name]}' and '{label}'",
                    expected="one source that continues where it was",
                    action=f"remove was: {name} from the new one",
                )
            seen[name] = label


def resolved(config: StreamConfig, known: Mapping[str, Mapping[str, Any]]) -> StreamConfig:
    """The config with every source under the first name that a run knows it by.

    Args:
        config: the current one.
        known: the sources of a state: ``state.config["sources"]``.

    Raises:
        StateError: an alias to nothing; a new source with a name that another one had.
    """
    identity = {label: name for name, entry in known.items() for label in entry.get("names", ())}
    identity |= {name: name for name in known}
    first: dict[str, str] = {}
    sources = []
    taken: dict[str, str] = {}
    for source in config.sources:
        name = identity.get(source.name, source.name)
        if source.renamed and name not in known:
            raise StateError(
                f"source '{source.label}' is said to have been one that the run never had",
                found=f"sources.{source.label}.was: {source.name}",
                expected=f"one of {', '.join([*known, *(n for n in identity if n not in known)])}",
                cause="a typing error, or the data config of another run",
                action=f"correct sources.{source.label}.was, or remove it if the source is new",
            )
        if name in taken:
            raise StateError(
                f"'{source.label}' is a name that source '{taken[name]}' had",
                found=f"'{source.label}' and '{taken[name]}' in the data config",
                expected="a new source with a name that the run has never used",
                cause=f"its samples could not be distinguished from those of '{taken[name]}'",
                action=f"rename '{source.label}'",
            )
        taken[name] = source.label
        first[source.name] = name
        names = tuple(known.get(name, {}).get("names", ()))
        if source.label != (names[-1] if names else name):
            names = (*names, source.label)
        sources.append(replace(source, name=name, names=names))
    stages = tuple(
        stage
        if stage.weights is None
        else replace(stage, weights=tuple((first[name], weight) for name, weight in stage.weights))
        for stage in config.stages
    )
    return replace(config, sources=tuple(sources), stages=stages, skip=config.skip.renamed(first))


def renames(then: StreamConfig, now: StreamConfig) -> tuple[str, ...]:
    """What is called by another name than at the time of a state, in words."""
    before = {source.name: source.label for source in then.sources}
    return tuple(
        f"source '{before[source.name]}' is called '{source.label}'"
        for source in now.sources
        if source.name in before and before[source.name] != source.label
    )
