"""Environments with packages that the one of the tests lacks, or has in another version."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(directory: Path, *install: object) -> Path:
    """Make one that sees the packages of the running one as well, but for those that are installed in it.

    Args:
        directory: of the environment.
        install: what follows ``pip install``.

    Returns:
        its interpreter.
    """
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = directory / "bin" / "python"
    (site,) = directory.glob("lib/*/site-packages")
    # With its .pth files, for an editable megaresume.
    (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    words = [python, "-m", "pip", "install", "-q", *map(str, install)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python


def versions_in(python: str | Path, *packages: str) -> dict[str, str]:
    """The versions of packages that an interpreter has, without what follows a plus sign."""
    code = f"import importlib.metadata as m; print(*map(m.version, {packages}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {name: found.partition("+")[0] for name, found in zip(packages, done.stdout.split(), strict=True)}
