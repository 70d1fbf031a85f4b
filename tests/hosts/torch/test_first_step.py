"""What a program imports until its first step, in the program of `benchmarks.first_step`: its time is that of imports.

A name comes off these lists only if the first step cannot do without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "first_step_program.py"
#: runs it, and shows what it has imported.
SHOWN = """
import os, runpy, sys
leave, sys.argv = os._exit, sys.argv[1:]

def show(status):
    print(*sys.modules)
    sys.stdout.flush()
    leave(status)

os._exit = show
runpy.run_path(sys.argv[0], run_name="__main__")
"""
#: of others.
HEAVY = {
    "fsspec",  # torch.distributed.checkpoint's, for directories in stores
    "numba.np.arrayobj",  # for compiling
    "pydantic",  # for what is wrong in a data.yaml
    "scipy.linalg",  # for compiling
}
#: of others, for saves and loads.
SAVING = {"torch.distributed.checkpoint"}
#: our own, for what this program does not do.
OWN = {
    *(
        "megaresume.checkpoint.metrics.meter",
        "megaresume.checkpoint.copies.session_copies",
        "megaresume.checkpoint.store.store",
    ),
    *("megaresume.data.remote", "megaresume.encoding.images.pixels", "megaresume.runs"),
}


def imported(state: str, directory: Path) -> set[str]:
    command = [sys.executable, "-c", SHOWN, str(PROGRAM), "torch", "ours", state, str(directory)]
    env = os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.process
@pytest.mark.cold
def test_nothing_heavy_is_imported_before_the_first_step(tmp_path: Path) -> None:
    heavy: set[str] = set()
    for attempt in ("first", "second"):  # the first one may compile functions, which are kept from there on
        fresh, _, resumed = (imported(state, tmp_path / attempt) for state in ("fresh", "saving", "resumed"))
        assert "megaresume.hosts.loop" in fresh & resumed
        heavy = (fresh | resumed) & (HEAVY | OWN) | fresh & SAVING
        if not heavy:
            break
    assert heavy == set()
