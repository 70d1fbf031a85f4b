"""Folders of a source checkout that an installed package brings along as copies (see setup.py)."""

from __future__ import annotations

from pathlib import Path

from megaresume.stream.errors import SetupError

_PACKAGE = Path(__file__).resolve().parent


def shipped_dir(copy: str, checkout: str, *, holds: str, what: str, install: str) -> Path:
    """Where such a folder is.

    Args:
        copy: inside the package, as the build makes it.
        checkout: at the top of a checkout, also of one installed with -e, which has only this one.
        holds: a pattern of files that lie in it.
        what: the files, in words.
        install: what pip has to install for them.

    Raises:
        SetupError: the installation has lost it.
    """
    for folder in (_PACKAGE / copy, _PACKAGE.parent / checkout):
        if any(folder.glob(holds)):
            return folder
    raise SetupError(
        f"the {what} are missing",
        found=f"no {holds} in {_PACKAGE / copy}",
        expected=f"the {what} that the package brings",
        cause="an incomplete installation",
        action=f"pip install --force-reinstall {install}",
    )
