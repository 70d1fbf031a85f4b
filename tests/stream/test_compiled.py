"""Compiled code that cannot be kept, or was kept and is damaged or out of date: child processes with a package of their
own, as it lies in site-packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megaresume

PROGRAM = """
from megaresume.stream.permutation import permute_range, round_keys
print(permute_range(0, 12, 1000, round_keys(1, "web", 0)).tolist())
"""
CALLS_ANOTHER_FILE = """
import numpy as np

from megaresume.stream.compiled import compiled
from megaresume.stream.permutation import mix


@compiled
def twice(x):
    return mix(mix(x))


print(twice(np.uint64(1)))
"""

#: notes what LLVM optimizes, and each search through the metadata of packages.
WATCHED = """
import importlib.metadata
from numba.core import codegen

optimized, searched = [], []
optimize, search = codegen.CPUCodeLibrary._optimize_final_module, importlib.metadata.entry_points
codegen.CPUCodeLibrary._optimize_final_module = lambda self: (optimized.append(self.name), optimize(self))[1]
importlib.metadata.entry_points = lambda **some: (searched.append(some), search(**some))[1]
"""
CALLS_KEPT = """
import numba
import numpy as np

from megaresume.stream import permutation

keys, network = permutation.round_keys(1, "web", 0), permutation._network(1000)
once = permutation.permute(np.arange(12), 1000, keys)
print(once.tolist())
print(permutation.permute(once, 1000, keys).tolist())


@numba.njit
def twice(indices, out, keys, num, left_bits, right_bits, rounds):
    permutation._permute(indices, out, keys, num, left_bits, right_bits, rounds)
    permutation._permute(out.copy(), out, keys, num, left_bits, right_bits, rounds)


out = np.empty(12, np.int64)
twice(np.arange(12), out, keys, *network)
print(out.tolist())
"""


class Installed:
    """A copy of the package, without compiled code, and a home of its own."""

    def __init__(self, directory: Path) -> None:
        self.package = directory / "site" / "megaresume"
        ours = Path(megaresume.__file__).parent
        shutil.copytree(ours / "stream", self.package / "stream", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ours / "__init__.py", self.package)
        self.caches = self.package / "stream" / "__pycache__"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.directory = directory
        self.program = PROGRAM

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        known = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.package.parent), "HOME": "/proc/nowhere"}
        known |= {"TMPDIR": str(self.temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", self.program]
        return subprocess.run(
            command, env=known | environment, cwd=self.directory, capture_output=True, text=True, check=False
        )

    def kept(self, end: str) -> list[Path]:
        return sorted(self.caches.glob(f"permutation._permute-*{end}"))


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


@pytest.mark.process
def test_nowhere_but_the_temporary_directory(installed: Installed) -> None:
    """Read-only site-packages and no home, as in many containers. (Root may write anywhere: a file is in the way.)"""
    expected = installed.run().stdout
    assert installed.kept(".nbi")
    shutil.rmtree(installed.caches)
    installed.caches.write_text("")
    done = installed.run(NUMBA_CACHE_DIR="/proc/nowhere")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
    (own,) = installed.temporary.glob("megaresume-*")
    assert own.stat().st_mode & 0o777 == 0o700 and list(own.rglob("*.nbc"))
    # Code is loaded from there: not if others may have put it there. Then nothing is kept, and one line says so.
    own.chmod(0o777)
    done = installed.run(NUMBA_CACHE_DIR="/proc/nowhere")
    assert (done.returncode, done.stdout) == (0, expected)
    (line,) = done.stderr.splitlines()
    assert "compiled code cannot be kept" in line and "Set NUMBA_CACHE_DIR" in line


@pytest.mark.process
def test_damaged_files_are_written_anew(installed: Installed) -> None:
    """An index is a pickle, code has a hash before it: each is one check, whatever the damage."""
    expected = installed.run().stdout
    for end in (".nbi", ".nbc"):
        (path,) = installed.kept(end)
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
        damaged = whole[:middle] if end == ".nbi" else flipped
        path.write_bytes(damaged)
        done = installed.run()
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
        assert installed.kept(end) == [path] and len(path.read_bytes()) == len(whole)
        assert path.read_bytes() != damaged


@pytest.mark.process
def test_kept_code_is_loaded_without_what_compiling_needs(installed: Installed) -> None:
    """Half of numba, and scipy's linear algebra: a third of a second of every start."""
    installed.program = PROGRAM + "import sys; print(sorted({'numba.np.arrayobj', 'scipy.linalg'} & set(sys.modules)))"
    compiling, loading = (installed.run().stdout.splitlines() for _ in range(2))
    assert compiling[0] == loading[0]
    assert "numba.np.arrayobj" in compiling[1] and loading[1] == "[]"


@pytest.mark.process
def test_nothing_is_compiled_where_all_is_kept(installed: Installed) -> None:
    """Numba's memory manager included; nor is the metadata of all packages read for extensions of the compiler."""
    installed.program = WATCHED + PROGRAM + "print(optimized, len(searched))"
    compiling, loading = (installed.run().stdout.splitlines() for _ in range(2))
    assert compiling[0] == loading[0]
    assert "'nrt'" in compiling[1] and compiling[1].endswith(" 1") and loading[1] == "[] 0"


@pytest.mark.process
def test_kept_code_is_part_of_what_is_compiled_later(installed: Installed) -> None:
    installed.program = CALLS_KEPT
    for _ in range(2):  # compiled, then loaded
        done = installed.run()
        assert done.returncode == 0, done.stderr
        once, twice, by_another = done.stdout.splitlines()
        assert once != twice == by_another


@pytest.mark.process
@pytest.mark.parametrize("before", ["enable", "disable", "freeze"])
def test_the_collector_is_left_as_it_was(before: str) -> None:
    program = f"""
import gc
gc.{before}()
before = gc.isenabled(), gc.get_freeze_count() > 0
import megaresume
megaresume.StreamConfig
print((gc.isenabled(), gc.get_freeze_count() > 0) == before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.process
@pytest.mark.parametrize("before", ["import megaresume", ""])
def test_a_program_that_prints_on_rank_0_alone(installed: Installed, before: str) -> None:
    """Numba looks at its import where ``print`` comes from: a function within a function, in many references."""
    installed.program = f"""
import builtins
{before}

def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        if is_master:
            builtin_print(*args, **kwargs)

    builtins.print = print

setup_for_distributed(True)
theirs = builtins.print
import megaresume
megaresume.Stream
{PROGRAM}
print(builtins.print is theirs)
"""
    done = installed.run()
    assert (done.stderr, done.stdout.splitlines()[-1:]) == ("", ["True"])


@pytest.mark.process
def test_what_a_function_calls_in_another_file_is_part_of_it(installed: Installed) -> None:
    """An upgrade that changes the mixing function changes the order, on every machine and at once."""
    stream = installed.package / "stream"
    (stream / "another.py").write_text(CALLS_ANOTHER_FILE)
    installed.program = "from megaresume.stream import another"
    before = installed.run().stdout
    path = stream / "permutation.py"
    text = path.read_text()
    path.write_text(re.sub("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB", text))
    after = installed.run().stdout
    shutil.rmtree(installed.caches)
    assert before != after == installed.run().stdout


def test_every_kernel_is_compiled_by_it() -> None:
    package = Path(megaresume.__file__).parent
    users = {p.name for p in package.rglob("*.py") if re.search(r"numba\.(n?jit|vectorize)\b", p.read_text())}
    assert users == {"compiled.py"}
