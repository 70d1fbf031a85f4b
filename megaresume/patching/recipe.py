"""What a recipe is: which scripts it is for, and what it inserts into them.

A recipe describes the functions that a script calls by their parameters, in order (``calls``); says by conditions
which scripts it is for (``matches``); and names the arguments to wrap (``edits``). Positional or keyword makes no
difference to it. ``docs/patching.md`` explains the YAML, ``recipe_file.py`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Accepts", "AddImport", "Called", "Matches", "Recipe", "WrapArgument"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """A function that the script calls."""

    name: str
    #: modules that it is imported from, as the script spells them.
    modules: tuple[str, ...]
    #: its parameters in order; leading ones are enough.
    parameters: tuple[str, ...]
    #: files that may define it, relative to the folder of the megatron package; the first that exists is compared.
    defined_in: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    """Conditions on the script, all of which must hold."""

    imports: tuple[str, ...] = ()
    imports_any_of: tuple[str, ...] = ()
    imports_none_of: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    calls_none_of: tuple[str, ...] = ()
    #: (call, parameter) -> regular expression, searched in the source of the argument.
    arguments: Mapping[tuple[str, str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepts:
    """How an argument is recognised as what it should be. None: anything will do."""

    #: required positional parameters of a function that the script itself shows.
    parameters: int | None = None
    #: regular expression for the name of what the script does not show (imported, an attribute).
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AddImport:
    """``import MODULE``, before the first import of ``before`` and after all imports of ``after``."""

    module: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapArgument:
    """The argument of a call becomes ``function(argument)``."""

    call: str
    parameter: str
    function: str
    #: where the call has no such argument: ``parameter=function()`` is added, or the script is refused.
    if_absent: Literal["add_keyword", "refuse"] = "refuse"
    accepts: Accepts = Accepts()

    @property
    def by_hand(self) -> str:
        """The change as a user would make it."""
        return f"in {self.call}(...): {self.parameter}={self.function}(WHAT_IS_THERE_NOW)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One recipe: for one upstream and one range of its versions."""

    name: str
    #: raised when the edits change, so that a script patched by an older one is told apart.
    version: int
    upstream: str
    #: range of megatron.core, as ``>=0.18,<0.19``; empty: any.
    versions: str
    summary: str
    #: how a patched script is started; ``{script}`` stands for it.
    run: str
    calls: Mapping[str, Called]
    matches: Matches
    add_import: AddImport
    wraps: tuple[WrapArgument, ...]
    #: the file that it was read from.
    path: str

    @property
    def by_hand(self) -> str:
        """All changes as a user would make them."""
        steps = [f"import {self.add_import.module}", *(wrap.by_hand for wrap in self.wraps)]
        return "; ".join(steps)

    @property
    def label(self) -> str:
        """Name and version, as the marker and the messages have them."""
        return f"{self.name} version {self.version}"
