"""`megaresume prepare` as a real process, killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaresume.data.split import IndexedSource

pytestmark = pytest.mark.process

PROGRAM = """
import argparse, sys
from megaresume.data.prepare import command as prepare
from megaresume.stream.errors import MegaresumeError, UsageError
parser = argparse.ArgumentParser()
prepare.add_arguments(parser)
try:
    sys.exit(prepare.run(parser.parse_args()))
except MegaresumeError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, UsageError) else 1)
"""


def command(*args: object) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *map(str, args)]


def prepare(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "in.jsonl"
    with open(path, "w") as file:
        for i in range(20_000):
            file.write(json.dumps({"text": f"document {i} " * (i % 40 + 1)}) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("whole") / "out"
    result = prepare(source, "--output", prefix, "--workers", 1)
    assert result.returncode == 0, result.stderr
    return prefix


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def places(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("places") / "out"
    result = prepare(source, "--output", prefix, "--workers", 1, "--index-only")
    assert result.returncode == 0, result.stderr
    assert "out.places and .idx: 20000 documents" in result.stdout
    return prefix


@pytest.mark.parametrize(("workers", "flags"), [(1, ()), (2, ()), (2, ("--index-only",))])
def test_killed_twice_and_run_again_gives_the_same_bytes(source, whole, places, tmp_path, workers, flags):
    prefix, whole = tmp_path / "out", places if flags else whole
    args = (source, "--output", prefix, "--workers", workers, "--block-bytes", 20_000, "--json", *flags)
    for parts in (3, 30):
        process = subprocess.Popen(command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("out.prepare/part-*"))) < parts:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        below = children(process.pid)
        assert workers == 1 or len(below) >= workers
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        # Workers must not outlive the program that was killed.
        while any(alive(child) for child in below):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.stderr.close()
        assert not prefix.with_suffix(".idx").exists()
    result = prepare(*args)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["resumed_blocks"] >= 30
    made = sorted(p.name for p in whole.parent.iterdir())
    assert made == sorted(["out.idx", "out.megaresume.json", "out.places" if flags else "out.bin"])
    assert [(prefix.parent / name).read_bytes() for name in made] == [(whole.parent / n).read_bytes() for n in made]
    assert sorted(p.name for p in tmp_path.iterdir()) == made


def test_parts_at_once_one_killed_and_one_started_twice(source, whole, tmp_path):
    prefix = tmp_path / "out"
    args = (source, "--output", prefix, "--workers", 1, "--block-bytes", 20_000)
    first, killed = (
        subprocess.Popen(command(*args, "--part", f"{k}/3"), stdout=subprocess.PIPE, text=True) for k in (1, 2)
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("out.prepare/00002-of-00003/part-*"))) < 3:
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGSTOP)
    for twice in (("--part", "2/3"), ()):  # the same part, and the merge of all
        result = prepare(*args, *twice)
        assert result.returncode == 1
        assert "another prepare is working on" in result.stderr
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    killed.stdout.close()
    assert "part 1/3 of" in first.communicate()[0]
    assert first.returncode == 0
    made = json.loads(prepare(*args, "--part", "2/3", "--json").stdout)
    assert made["blocks"] > made["resumed_blocks"] >= 3
    merged = json.loads(prepare(*args, "--json").stdout)  # the third is missing
    assert merged["blocks"] > merged["resumed_blocks"] > made["blocks"]
    for suffix in ("bin", "idx", "megaresume.json"):
        assert Path(f"{prefix}.{suffix}").read_bytes() == Path(f"{whole}.{suffix}").read_bytes()


def test_summary_for_people_and_for_programs(source, whole, tmp_path):
    result = prepare(source, "--output", tmp_path / "a")
    assert result.returncode == 0
    opened = IndexedSource(whole)
    assert f"{len(opened)} documents, {opened.num_tokens} tokens (uint16)" in result.stdout
    result = prepare(source, "--output", tmp_path / "b", "--json", "--no-append-eod", "--dtype", "int32")
    summary = json.loads(result.stdout)
    assert (summary["documents"], summary["tokens"]) == (len(opened), opened.num_tokens - len(opened))
    assert (summary["dtype"], summary["tokenizer"], summary["eod"]) == ("int32", "bytes", 256)
    assert summary["bin_bytes"] == (tmp_path / "b.bin").stat().st_size
    assert summary["seconds"] > 0


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (["nothing.txt"], 2, "nothing.txt does not exist"),
        (["in.jsonl", "--json-key", "body"], 1, "in.jsonl:1 has no key 'body'"),
        (["in.jsonl", "--tokenizer", "none.json"], 2, "tokenizer none.json cannot be read"),
        (["in.jsonl", "--workers", "0"], 2, "bad --workers"),
        (["in.jsonl", "--block-bytes", "0"], 2, "--block-bytes: must be at least 1"),
        (["in.jsonl", "--part", "1"], 2, "bad --part"),
        (["in.jsonl", "--text-unit", "word"], 2, "invalid choice: 'word'"),
        ([], 2, "required: INPUT"),
    ],
)
def test_errors_have_a_status_and_no_traceback(source, tmp_path, args, status, text):
    args = [str(source) if a == "in.jsonl" else a for a in args]
    result = prepare(*args, "--output", tmp_path / "out")
    assert result.returncode == status
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("out.[bi]*"))


def test_help_needs_no_heavy_import():
    program = PROGRAM.replace("parser.parse_args()", "parser.parse_args(['--help'])")
    check = (
        "import sys, atexit; atexit.register(lambda: print(sorted({'numba', 'numpy', 'torch'} & set(sys.modules))))\n"
    )
    result = subprocess.run([sys.executable, "-c", check + program], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("[]")
