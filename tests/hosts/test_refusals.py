"""In a script of the user's own a refusal is one message for the whole job; tracebacks that are not ours stay."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.cluster.processes import LocalJob

pytestmark = pytest.mark.process

#: `Of` is a class of the script whose error makes us refuse.
OWN = """
from megaresume import attach
from megaresume.stream.errors import CorpusError

class Of:
    def read(self):
        return {}["caption"]

def refuse():
    attach(object())

def refuse_because():
    try:
        Of().read()
    except KeyError as error:
        raise CorpusError("a record cannot be read", found=repr(error)) from error


def fail():
    Of().read()
"""
#: Each rank by itself, rank 1 first.
GROUP = """
import os, time
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
time.sleep(0.5 * (dist.get_rank() == 0))
refuse()
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], tuple[int, str]]:
    def run(call: str) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(f"{OWN}\n{call}\n")
        done = subprocess.run([sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_refusal_is_a_message_and_other_errors_are_not_touched(run: Callable[[str], tuple[int, str]]) -> None:
    status, said = run("refuse()")
    assert status == 1 and said.startswith("megaresume: error: megaresume.attach does not recognise this trainer")
    assert "Traceback" not in said and "next action:" in said
    status, said = run("fail()")
    assert status == 1 and said.startswith("Traceback") and "megaresume: error" not in said
    assert re.findall("in (.*)", said) == ["<module>", "fail", "read"]


def test_the_traceback_of_the_scripts_own_code_stays_if_it_is_the_cause(run: Callable[[str], tuple[int, str]]) -> None:
    status, said = run("refuse_because()")
    trace, _, refusal = said.partition("megaresume: error: ")
    assert status == 1 and re.findall("in (.*)", trace) == ["refuse_because", "read"]
    assert trace.endswith("KeyError: 'caption'\n") and refusal.startswith("a record cannot be read\n")
    # What is ours or Python's own failed below us: nothing of the script's.
    status, said = run("from megaresume import open_stream\nopen_stream('/none/data.yaml')")
    assert status == 1 and said.startswith("megaresume: error: ") and "Traceback" not in said


def test_ranks_that_find_the_same_say_it_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN + GROUP)
    with LocalJob(str(tmp_path / "train.py"), [], num_processes=2, output=tmp_path / "out", launcher="env") as job:
        status, said = job.wait(60), job.text()
    assert status == 1, said
    assert re.findall("megaresume: error: (.*)", said) == ["megaresume.attach does not recognise this trainer"]
    assert "Traceback" not in said
