"""Errors about options of `megaresume.attach` that a trainer does not have, that are missing, or that have another
type: they say what to write instead.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megaresume.checkpoint.settings import Checkpoints, DataOptions, LoaderOptions
from megaresume.checkpoint.stopping import StopConditions
from megaresume.stream.errors import UsageError, near, nearest

#: options that are groups of settings, and a setting of each as an example.
_GROUPS: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "checkpoints": (Checkpoints, {"save_dir": "run"}),
    "stop": (StopConditions, {"before_end": "auto"}),
    "loader_options": (LoaderOptions, {"num_workers": 2}),
    "data_options": (DataOptions, {"on_change": "stage"}),
}
#: how to pass the loader without a name.
_LOADER = "a loader is the second argument, without a name"
_DEEPSPEED = ("it is for checkpoints of a DeepSpeed engine", "leave it out")
#: names that are not options of some trainers, or of any: cause, and what to do instead.
_INSTEAD = {
    "loader": (None, _LOADER),
    "elastic": _DEEPSPEED,
    "adopt": _DEEPSPEED,
    "checkpoints": (
        "this trainer writes, chooses and deletes its checkpoints by itself, and the state of the prompts is in them",
        "leave checkpoints out, and let it save where a new machine finds them (a file system that is mounted there), "
        "or copy a complete checkpoint, and then prompts.jsonl; docs/attach.md says which trainer has which options",
    ),
}
#: what a trainer may need -> what it is; how to pass it, if the trainer's call does not show that.
_NEEDED = {
    "global_batch_size": ("samples of a step, of all replicas together", "pass global_batch_size=64, for example"),
    "data": ("what it is to train", None),
    "checkpoints": ("where it saves", 'pass checkpoints="run", the directory to save to'),
}


def check_groups(options: Mapping[str, Any]) -> None:
    """Raise a UsageError for an option that should be a group of settings, but is something else."""
    for name, (cls, example) in _GROUPS.items():
        value = options.get(name)
        if value is None or isinstance(value, cls):
            continue
        is_spelled = isinstance(value, Mapping) and value.keys() <= {one.name for one in dataclasses.fields(cls)}
        is_loader = name == "loader_options" and not isinstance(value, Mapping)
        raise UsageError(
            f"bad value of {name}",
            found=f"{name}={value!r:.200}",
            expected=f"megaresume.{cls.__name__}(...){', or a directory' if name == 'checkpoints' else ''}",
            action=f"write {name}={_call(cls, value if is_spelled and value else example)}"
            + (f"; {_LOADER}" if is_loader else ""),
        )


def check_options(call: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise a UsageError for an option that this trainer does not have, or for one that is missing.

    Args:
        call: the beginning of its call of `megaresume.attach`.
        function: attaches it.
        options: as given.
    """
    _, *parameters = inspect.signature(function).parameters.values()
    known = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    if len(known) == len(parameters):  # otherwise it checks further ones itself
        for name, value in options.items():
            if name not in known:
                raise unknown_option(call, name, value, known)
    for one in parameters:
        if one.default is one.empty and one.name in _NEEDED and one.name not in options:
            expected, action = _NEEDED[one.name]
            raise UsageError(
                f"megaresume.{call}) needs {one.name}",
                found=f"no {one.name}",
                expected=expected,
                action=action or f"pass the {call.rpartition(', ')[2]} as the second argument",
            )


def unknown_option(
    call: str, name: str, value: Any, known: Collection[str], *, action: str | None = None
) -> UsageError:
    """The error for an option that a trainer does not have.

    Args:
        call: the beginning of its call of `megaresume.attach`.
        name, value: of the option.
        known: the options that this trainer has.
        action: what is known about this one; by default from `_INSTEAD`, or guessed from the option's value.
    """
    cause, instead = _INSTEAD.get(name, (None, None))
    action = action or instead
    group_of = {one.name: group for group in _GROUPS if group in known for one in dataclasses.fields(_GROUPS[group][0])}
    group = name if name in _GROUPS and isinstance(value, _GROUPS[name][0]) else None
    words = [*known, *group_of]
    if action is None and group:
        action = _without_its_group(call, value, known)
    elif action is None and (word := nearest(name, words)) is not None:
        cause = near(name, words)
        inside = group_of.get(word)
        action = f"pass {inside}={_call(_GROUPS[inside][0], {word: value})}" if inside else f"write {word}"
    return UsageError(
        f"megaresume.{call}) has no {name}",
        found=f"{name}={_call(type(value), _given(value)) if group else repr(value):.200}",
        expected=", ".join(known),
        cause=cause,
        action=action or f"leave {name} out; docs/attach.md says which trainer has which options",
    )


def _given(settings: Any) -> dict[str, Any]:
    """The settings of a group that differ from the defaults."""
    values = {one.name: (getattr(settings, one.name), one.default) for one in dataclasses.fields(settings)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.80}" for name, value in settings.items())


def _call(group: type[Any], settings: Mapping[str, Any]) -> str:
    return f"megaresume.{group.__name__}({_words(settings)})"


def _without_its_group(call: str, settings: Any, known: Collection[str]) -> str | None:
    """How to pass the settings of a group to a trainer that does not accept it; None if unknown."""
    given = _given(settings)
    if given and given.keys() <= set(known):
        return f"pass {_words(given)} itself"
    if given and call.endswith(", loader") and isinstance(settings, LoaderOptions | DataOptions):
        return f"pass {_words(given)} where the loader is made"
    return None
