"""What a state is carried in: a JSON object with its format, its version and a checksum of all the rest.

A checkpoint's data state is such an object, and the state of a stream inside it is another one. Read here, so that what
is missing, unreadable, of another program, newer or damaged is refused in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megaresume.stream.errors import ConfigError, NewerFormatError, StateError
from megaresume.stream.state_text import checksum
from megaresume.stream.text import parse_json

T = TypeVar("T")

_INSPECT = "load an older checkpoint: megaresume inspect DIR lists those that are whole (under Megatron: --ckpt-step N)"


def is_version(found: object, newest: int, what: str, path: Path | None = None) -> bool:
    """Whether this is a version that is known here.

    Args:
        found: the member ``version`` of something intact.
        newest: that is known.
        what, path: for the error.

    Raises:
        NewerFormatError: it is a later one.
    """
    if type(found) is int and found > newest:
        raise NewerFormatError(
            f"{what} was written by a newer megaresume",
            found=f"version {found}" if path is None else f"{path}: version {found}",
            expected=f"version {newest} or older",
            action="upgrade megaresume on this machine to the version that wrote it: pip install --upgrade megaresume",
        )
    return type(found) is int and found >= 1


def check_version(found: object, newest: int, what: str) -> None:
    """Refuse a version that is not known here.

    Raises:
        NewerFormatError: it is a later one.
        StateError: it is none.
    """
    if not is_version(found, newest, what):
        raise StateError(
            f"{what} has a version that this release cannot read",
            found=f"version {found!r}",
            expected=f"a version from 1 to {newest}",
            cause="it was changed by another program",
            action=_INSPECT,
        )


def open_envelope(
    data: object, make: Callable[[dict[str, Any]], T], *, format_name: str, version: int, texts: type | tuple[type, ...]
) -> T:
    """What ``make`` builds of the members of a data state.

    Args:
        data: a mapping, or the JSON of one.
        make: takes the members, without the checksum.
        format_name: the ``format`` that it must have.
        version: the newest that is known here.
        texts: the types of a text.

    Raises:
        StateError: there is nothing, or it is cut short, damaged, of another format, or ``make`` finds that a member is
            missing or of the wrong kind.
        NewerFormatError: of a later version.
    """
    fields = _parse(data, texts)
    if fields.get("format") != format_name:
        raise StateError(
            "this is not a data state of megaresume",
            found=f"format {fields.get('format')!r}",
            expected=f"format {format_name!r}",
            cause="another program's state, or another file",
            action="check which checkpoint is being loaded: megaresume inspect DIR",
        )
    body = {key: value for key, value in fields.items() if key != "checksum"}
    check_version(fields.get("version"), version, "the data state")
    if fields.get("checksum") != checksum(body):
        raise StateError(
            "the data state is damaged",
            found=f"checksum {fields.get('checksum')!r} in the state, {checksum(body)!r} computed",
            expected="the same checksum",
            cause="a bit changed on disk or in transit, or the state was edited by hand",
            action=_INSPECT,
        )
    try:
        return make(body)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise StateError(
            "the data state lacks a field or has one of the wrong kind",
            found=f"{type(error).__name__}: {error}",
            expected=f"the fields of version {version}",
            cause="it was written by a faulty program: its checksum is right",
            action=_INSPECT,
        ) from error


def _parse(data: object, texts: type | tuple[type, ...]) -> Mapping[str, Any]:
    if data is None or (isinstance(data, str | bytes) and isinstance(data, texts) and not data.strip()):
        raise StateError(
            "there is no data state",
            found="nothing",
            expected="the state that megaresume saved with the checkpoint",
            cause="the checkpoint was written without megaresume, or the file is empty",
            action="megaresume inspect DIR shows which checkpoints have a data state",
        )
    found, why = f"{type(data).__name__} {str(data)[:80]!r}", "another program uses the same name"
    if isinstance(data, str | bytes) and isinstance(data, texts):
        size = len(data)
        try:
            data = parse_json(data)
        except ValueError as error:
            found, why = f"{size} bytes that are not JSON ({error})", "the text was cut short or damaged"
    if isinstance(data, Mapping):
        return data
    raise StateError(
        "the data state is unreadable", found=found, expected="one JSON object", cause=why, action=_INSPECT
    )
