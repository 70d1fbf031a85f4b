"""Every package says in its docstring which files it has, so that a reader knows from it where to go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megaresume

ROOT = Path(megaresume.__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=[str(path.relative_to(ROOT)) for path in PACKAGES])
def test_a_package_names_its_files(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    files = [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    folders = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert [name for name in sorted(files + folders) if name not in docstring] == []
