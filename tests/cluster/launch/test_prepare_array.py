"""docs/prepare.md: `prepare --part K/N` as a Slurm array; a part that was killed is done again alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from megaresume.program import main
from tests.cluster.launch.conftest import Cluster
from tests.docs.pages import section
from tests.packaging.conftest import ROOT
from tests.release import release

BLOCKS = re.findall(r"```bash\n(.*?)```", section("prepare.md", "On several machines"), re.DOTALL)


@release("six jobs of a Slurm", "`tests/cli/test_prepare.py`")
def test_a_killed_part_is_done_again_alone(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "corpora").mkdir()
    for name in ("a", "b"):
        rows = (json.dumps({"text": f"{name} {i} " * (1 + i % 9)}) for i in range(3000))
        (tmp_path / "raw" / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    whole = ["prepare", str(tmp_path / "raw"), "--glob", "**/*.jsonl", "--output", str(tmp_path / "whole")]
    assert main([*whole, "--workers", "1"]) == 0
    # Smaller, of bytes, and part 2 of 4 waits to be killed.
    small = [("1-16", "1-4"), ("/16", "/4"), ("cpus-per-task=32", "cpus-per-task=1"), ("--workers 32", "--workers 1")]
    small += [(".zst", ""), (" --tokenizer tokenizer.json", ""), ("array=7", "array=2")]
    blocks = []
    for block in BLOCKS[:3]:
        for old, new in small:
            block = block.replace(old, new)
        blocks.append(block)
    array, merge, again = blocks
    wait = "if [ $SLURM_ARRAY_TASK_ID = 2 ] && [ ! -e waited ]; then touch waited; sleep 600; fi\n"
    (tmp_path / "prepare.sh").write_text(array.replace("megaresume prepare", f"{wait}megaresume prepare"))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "megaresume").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m megaresume "$@"\n')
    (programs / "megaresume").chmod(0o755)
    env = slurm.env | {"PATH": f"{programs}:{os.environ['PATH']}"}

    def bash(script: str) -> str:
        done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def until(condition: str) -> None:
        deadline = time.monotonic() + 300
        while subprocess.run(["bash", "-c", condition], cwd=tmp_path, env=env, capture_output=True).returncode:
            assert time.monotonic() < deadline, f"{condition}\n{slurm.slurm('squeue')}"
            time.sleep(0.2)

    first = bash(merge + "echo $array\n").split()[-1]
    until("test -e waited")
    bash(f"scancel --signal=KILL --full {first}_2")
    until("test $(squeue -h -r | wc -l) -le 1")  # the merge, which waits for what did not come
    assert not (tmp_path / "corpora" / "web.idx").exists()
    bash("scancel --state=PENDING --user=$(id -un)")
    bash(again)
    until('test -e corpora/web.idx && test -z "$(squeue -h)"')
    for suffix in (".bin", ".idx"):
        assert (tmp_path / "corpora" / f"web{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
