"""docs/prepare.md: its programs for Ray and datatrove, run on a small corpus; a killed part is done again alone.

They need ray and datatrove, which no extra installs: MEGARESUME_SCALE_PYTHON is an interpreter that has both; without
it, one is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest

import megaresume
from megaresume.program import main
from tests.docs.pages import section
from tests.environments import make_environment
from tests.packaging.conftest import ROOT
from tests.release import release

pytestmark = pytest.mark.process
#: before datatrove's program: its second task is killed at its end, before that is noted.
KILL = """
import os, signal
from datatrove.pipeline.tokens import megatron_tokenizer
run = megatron_tokenizer.MegatronDocumentTokenizer.run
def killed(self, data, rank=0, world_size=1):
    run(self, data, rank, world_size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
megatron_tokenizer.MegatronDocumentTokenizer.run = killed
"""


def programs(title: str) -> dict[str, str]:
    """File -> text, of a section."""
    return dict(re.findall(r"```(?:python|yaml)\n# ([\w.]+)\n(.*?)```", section("prepare.md", title), re.DOTALL))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that sees the packages of this one as well."""
    if given := os.environ.get("MEGARESUME_SCALE_PYTHON"):
        return given
    words = ("ray==2.60.0", "datatrove==0.10.1", "orjson")
    return str(make_environment(tmp_path_factory.mktemp("venv"), *words))


def start(python: str, directory: Path, name: str, text: str) -> subprocess.Popen[bytes]:
    (directory / name).write_text(text)
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with open(directory / "log", "ab") as log:
        return subprocess.Popen([python, name], cwd=directory, env=env, stdout=log, stderr=log, start_new_session=True)


def write_raw(directory: Path, documents: int) -> None:
    directory.mkdir()
    for name in ("a", "b"):
        rows = (json.dumps({"text": f"{name} {i} " * (1 + i % 9)}) for i in range(documents))
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


@release("Ray, which no extra installs", "`tests/cli/test_prepare.py`")
def test_ray_does_a_killed_part_again(python: str, tmp_path: Path) -> None:
    write_raw(tmp_path / "raw", 20_000)
    words = ["prepare", str(tmp_path / "raw"), "--glob", "**/*.jsonl", "--output", str(tmp_path / "whole")]
    assert main([*words, "--workers", "1"]) == 0
    text = (
        programs("On several machines")["prepare_with_ray.py"].replace("/shared", str(tmp_path)).replace('"8"', '"1"')
    )
    text = text.replace("num_cpus=8", "num_cpus=1").replace("PARTS = 16", "PARTS = 4")
    program = start(python, tmp_path, "prepare_with_ray.py", text)
    killed = False
    while program.poll() is None:  # a part has begun: its directory, and a task of Ray
        if not killed and (tmp_path / "web.prepare").exists():
            parts = [p for p in psutil.Process(program.pid).children(recursive=True) if "ray::part" in _title(p)]
            for process in parts[:1]:
                process.send_signal(signal.SIGKILL)
                killed = True
        psutil.wait_procs([psutil.Process()], timeout=0.01)
    said = (tmp_path / "log").read_text()
    assert program.returncode == 0 and killed, said[-3000:]
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"web{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _directory(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


@release("datatrove, which no extra installs", "`tests/data`")
def test_what_datatrove_wrote_is_a_source_as_it_is(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    write_raw(tmp_path / "raw", 300)
    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "?": 3} | {str(i): 4 + i for i in range(300)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    program = programs("Corpora that datatrove wrote")["tokenize_with_datatrove.py"]
    # One task is killed: of the same command, the other is not done again.
    killed = start(python, tmp_path, "killed.py", KILL + program.replace("workers=2", "workers=1"))
    assert killed.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()[-2000:]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(killed.pid, signal.SIGKILL)  # a process that datatrove started, which waits for the one that is dead
    done = tmp_path / "tokens" / "00000_tokens.idx"
    before = done.stat().st_mtime_ns
    whole = start(python, tmp_path, "tokenize_with_datatrove.py", program)
    assert whole.wait() == 0, (tmp_path / "log").read_text()[-2000:]
    assert done.stat().st_mtime_ns == before
    (tmp_path / "data.yaml").write_text(programs("Corpora that datatrove wrote")["data.yaml"].replace("4096", "64"))
    monkeypatch.chdir(tmp_path)
    stream = megaresume.open_stream("data.yaml")
    for source, name in zip(stream.sources, ("a", "b"), strict=True):
        assert len(source) == 300
        for i in range(300):
            expected = [words[name], words[str(i)]] * (1 + i % 9) + [0]
            assert np.array_equal(source.get(i), expected), (name, i)
    assert len(stream.plan(0, 50)) == 50
    assert [process for process in psutil.process_iter() if _directory(process) == str(tmp_path)] == [psutil.Process()]
