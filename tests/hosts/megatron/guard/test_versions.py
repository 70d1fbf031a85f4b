"""Other versions of megatron-core, and a run that goes on under another one than it began with.

Fetched from the registry into a directory that is kept between runs (``MEGARESUME_TEST_CORES``); skipped where there
is no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.megatron.guard.conftest import Corpora, Run, run_program
from tests.release import release

VERSIONS = ("0.8.0", "0.10.0", "0.12.3", "0.14.0")
CACHE = Path(os.environ.get("MEGARESUME_TEST_CORES", Path(tempfile.gettempdir()) / "megaresume-test-cores"))
WEIGHTS = [0.6, 0.3, 0.1]


def fetched(version: str) -> Path:
    """Directory of that megatron-core."""
    target = CACHE / f"{version}-{sys.implementation.cache_tag}"  # its wheels hold compiled code
    if not (target / "megatron" / "core").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        # 0.8 asks pkg_resources for versions, which setuptools has no more.
        packages = [f"megatron-core=={version}", *(["setuptools<81"] if version == "0.8.0" else [])]
        done = subprocess.run([*pip, "--target", str(target), *packages], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"megatron-core {version} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return target


RELEASE = release(
    "further versions, each a download",
    "the same, `[0.8.0]`, and the installed one in "
    "`tests/hosts/megatron/guard/test_pin.py::test_weights_spelled_differently`",
)


@pytest.mark.process
@pytest.mark.parametrize("version", [VERSIONS[0], *(pytest.param(version, marks=RELEASE) for version in VERSIONS[1:])])
def test_another_version(corpora: Corpora, build: Run, tmp_path: Path, version: str) -> None:
    core = fetched(version)
    spec: dict[str, Any] = {"paths": corpora.paths, "weights": WEIGHTS}
    caches = [str(tmp_path / f"core{i}") for i in range(5)]
    ours = build(**spec)
    starts = [
        spec | {"cache": caches[0], "guard": False},
        spec | {"cache": caches[1]},
        spec | {"cache": caches[2], "resume": True, "sizes": [700, 40, 20], "weights": [6, 3, 1], "samples": 200},
        spec | {"cache": caches[3], "resume": True, "seed": 7, "samples": 200},
        spec | {"cache": caches[4], "loaded": ours["payload"], "samples": 200},
    ]
    stock, recorded, longer, refused, of_this_version = run_program(tmp_path, starts, core=core)[0]
    assert "error" not in recorded and "error" not in longer, (recorded, longer)
    assert recorded["payload"]["megatron"].startswith(version.rsplit(".", 1)[0])
    assert (recorded["train"], recorded["valid"]) == (stock["train"], stock["valid"]), "adopting changes nothing"
    for split in ("train", "valid", "test"):
        assert longer[split][: len(recorded[split])] == recorded[split]
    assert len(longer["train"]) >= 700
    assert refused["type"] == "StateError" and "--seed 1234" in refused["error"]
    # What one version began, another goes on with, both ways.
    assert of_this_version["train"][: len(ours["train"])] == ours["train"]
    after_upgrade = build(**spec, loaded=recorded["payload"], samples=200)
    assert after_upgrade["train"] == recorded["train"]
