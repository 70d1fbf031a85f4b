"""Other people's objects: methods that are hooked, attributes that are others for a while, settings that are refused.

All of it on one instance; classes and modules stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megaresume.stream.errors import UsageError

#: where an object keeps what is attached to it.
SLOT = "_megaresume"

_MISSING: Any = object()


def hook(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one instance by ``function``, which is given the method before its arguments."""
    before = getattr(owner, name)
    setattr(owner, name, functools.wraps(before)(functools.partial(function, before)))


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within it, these attributes of one instance are others."""
    own = {name: vars(owner).get(name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            if value is _MISSING:  # its class has it
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def kind_of(one: Any) -> str:
    """The class of an object, with its module: for errors."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def check_new(
    owner: Any,
    what: str,
    *,
    missing: Sequence[str] = (),
    headline: str = "",
    expected: str = "",
    action: str | None = None,
) -> None:
    """Refuse an object of another kind, and one that has its data already.

    Args:
        owner: the object.
        what: it is called.
        missing: what it lacks, and objects of its kind have.
        headline, expected, action: of the error, if it lacks anything.

    Raises:
        UsageError: then.
    """
    if missing:
        raise UsageError(
            headline, found=f"{kind_of(owner)}, without {', '.join(missing)}", expected=expected, action=action
        )
    if getattr(owner, SLOT, None) is not None:
        raise UsageError(f"this {what} has its data already", action=f"call megaresume.attach once for each {what}")


def refuse(refused: Mapping[str, tuple[Any, str]], *, expected: str | None = None) -> None:
    """Refuse what would be other data, or is not known to work.

    Args:
        refused: by name, what was found (nothing, if that is false) and the way out.
        expected: in place of what was found, if that is more than True.

    Raises:
        UsageError: naming the first.
    """
    for name, (found, action) in refused.items():
        if found:
            raise UsageError(
                f"{name} cannot be used with megaresume.attach",
                found=f"{name}: {found}",
                expected="not set" if found is True else expected,
                action=action,
            )
