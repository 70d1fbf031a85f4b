"""Without what only Linux has: ``elsewhere/sitecustomize.py`` takes it away from every process of a test.

It is not macOS, where nobody has tried megaresume; it finds what is used without being asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import DATA, ROOT, SAVE

pytestmark = pytest.mark.process
ELSEWHERE = Path(__file__).parent / "elsewhere"
MODULES = """
import importlib, pkgutil, sys, traceback
import megaresume
assert sys.platform == "elsewhere"
for module in pkgutil.walk_packages(megaresume.__path__, "megaresume."):
    if ".starts." not in module.name and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except Exception as error:  # of a package that is not here, or that is not for such a system
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            missing = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("megaresume")
            if "/megaresume/" in last and not missing:
                raise
"""
LOADER = """
import json, megaresume
if __name__ == "__main__":
    def made():
        return megaresume.DataLoader(
            list(range(64)), batch_size=4, seed=1, num_workers=2, multiprocessing_context="spawn", max_epochs=1
        )
    loader = made()
    before = [batch.tolist() for _, batch in zip(range(5), loader)]
    resumed = made()
    resumed.load_state_dict(loader.state_dict())
    print(json.dumps([*before, *(batch.tolist() for batch in resumed)]))
"""


def run(directory: Path, *words: object, hidden: bool = True, **variables: str) -> tuple[int, str]:
    """(status, output) of Python."""
    path = [str(ROOT), *([str(ELSEWHERE)] if hidden else [])]
    (directory / "bin").mkdir(exist_ok=True)
    sysctl = directory / "bin" / "sysctl"  # of macOS, which names the boot
    sysctl.write_text('#!/bin/sh\ntest "$*" = "-n kern.bootsessionuuid" && echo 7D1C3A52-0F3B-4A43-9C55-0B2F3A6E1D11\n')
    sysctl.chmod(0o755)
    env = (
        os.environ | {"PYTHONPATH": os.pathsep.join(path), "PATH": f"{sysctl.parent}:{os.environ['PATH']}"} | variables
    )
    done = subprocess.run([sys.executable, *map(str, words)], cwd=directory, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_module_is_imported(tmp_path: Path) -> None:
    # TRL says at its import that this part of it may change.
    assert run(tmp_path, "-c", MODULES, TRL_EXPERIMENTAL_SILENCE="1") == (0, "")


def test_the_loader_resumes_as_it_does_here(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(LOADER)
    status, here = run(tmp_path, program, hidden=False)
    assert status == 0 and len(json.loads(here)) == 16, here
    assert run(tmp_path, program) == (status, here)


def test_commands_answer_as_they_do_here(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one\n\ntwo\n\nthree\n")
    (tmp_path / "data.yaml").write_text(DATA)
    (tmp_path / "save.py").write_text(SAVE)
    for words in (
        "-m megaresume prepare text.txt --output web --workers 2",
        "save.py",
        "-m megaresume verify save --data data.yaml",
        "-m megaresume trace save --steps 1 --data data.yaml",
        "-m megaresume plan save --data data.yaml",
        "-m megaresume inspect save",
        "-m megaresume latest save",
    ):
        status, text = run(tmp_path, *words.split())
        assert status == 0 and "Traceback" not in text, text
    assert "7D1C3A52" in next((tmp_path / "save" / "megaresume").glob("step_*.manifest*")).read_text()
    # What it knows of the machine is less: no word of its mounts, or of shared memory.
    status, text = run(tmp_path, "-m", "megaresume", "doctor", "save")
    assert "Traceback" not in text and status in (0, 1), text
