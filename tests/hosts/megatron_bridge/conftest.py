"""An environment that has Megatron-Bridge: that of MEGARESUME_BRIDGE_PYTHON.

None is made here: Bridge needs Python 3.12, a torch built for CUDA even where there is no GPU, and about 100 packages.
docs/megatron-bridge.md says which were installed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from tests.environments import versions_in

PACKAGES = ("megatron-bridge", "megatron-core", "torch")


@pytest.fixture(scope="session")
def python(record_testsuite_property: Callable[[str, object], None]) -> str:
    """Its interpreter; the report of the tests says which versions it has."""
    given = os.environ.get("MEGARESUME_BRIDGE_PYTHON")
    if given is None:
        pytest.skip("MEGARESUME_BRIDGE_PYTHON names no interpreter that has Megatron-Bridge")
    done = subprocess.run([given, "--version"], capture_output=True, text=True, check=True)
    record_testsuite_property("python", done.stdout.split()[-1])
    for package, version in versions_in(given, *PACKAGES).items():
        record_testsuite_property(package, version)
    return given
