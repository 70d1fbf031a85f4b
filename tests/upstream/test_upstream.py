"""Real upstream code, from clones that the environment names; see docs/compatibility.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: option -> environment variable.
VARIABLES = {
    "--clone": "MEGARESUME_UPSTREAM_CLONE",
    "--mds": "MEGARESUME_UPSTREAM_MDS",
    "--bigscience": "MEGARESUME_UPSTREAM_BIGSCIENCE",
    "--python312": "MEGARESUME_UPSTREAM_PYTHON312",
    "--shim-dir": "MEGARESUME_UPSTREAM_SHIM_DIR",
}
CLONES = ("--clone", "--mds", "--bigscience")


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(
    not any(os.environ.get(VARIABLES[option]) for option in CLONES),
    reason="no clone of an upstream: set " + ", ".join(VARIABLES[option] for option in CLONES),
)
def test_nothing_fails_on_upstream_code(tmp_path: Path) -> None:
    from tests.upstream.__main__ import main

    options = [
        word for option, name in VARIABLES.items() if os.environ.get(name) for word in (option, os.environ[name])
    ]
    document = tmp_path / "compatibility.md"
    assert main([*options, "--scratch", str(tmp_path / "scratch"), "--output", str(document)]) == 0, (
        document.read_text()
    )
