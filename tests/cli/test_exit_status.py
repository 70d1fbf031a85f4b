"""Exit status 2 for a path that leads nowhere, in every command; and what to install where a package is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.program import COMMANDS, main

#: of every command that is given a path.
WRONG = [
    "prepare NOWHERE --output OUT",
    "prepare FILE --format text --output OUT --tokenizer NOWHERE",
    "prepare NOWHERE-{0..3}.tar --output OUT --encoder NOWHERE",
    "stream NOWHERE.yaml",
    "stream NOWHERE --seq-length 8",
    "stream 0.5 NOWHERE 0.5 FILE --seq-length 8",
    "stream DATA --state NOWHERE",
    "inspect NOWHERE",
    "inspect FILE",
    "latest FILE",
    "trace NOWHERE --steps 1:2",
    "top NOWHERE --once",
    "plan NOWHERE",
    "convert NOWHERE",
    "verify FILE",
    "replay NOWHERE --step 1",
    "report NOWHERE",
    "doctor NOWHERE",
    "doctor --log NOWHERE",
    "patch NOWHERE.py",
    "patch DIR",
    "run NOWHERE.py",
    "smoke --script NOWHERE",
    "new torch FILE",
]


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_path(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"NOWHERE": "nowhere", "FILE": "file", "DIR": "directory", "OUT": "out", "DATA": "data.yaml"}
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "data.yaml").write_text("seq_length: 8\nsources: {web: nothing}\n")
    for word, name in places.items():
        words = words.replace(word, str(tmp_path / name))
    try:
        status = main(words.split())
    except SystemExit as error:
        status = int(str(error.code))
    said = capsys.readouterr()
    assert status == 2, said.err
    assert str(tmp_path) in said.err and "Traceback" not in said.err


def test_every_command_was_tried() -> None:
    # A directory without checkpoints is what `latest` is asked about at the first launch; `demo` and
    # `completion` read no path.
    assert {words.split()[0] for words in WRONG} == set(COMMANDS) - {"demo", "completion"}


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "deepspeed"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import megaresume
engine = type("DeepSpeedEngine", (), {"__module__": "deepspeed.runtime.engine"})()
for name, call in {
    "attach, an engine": lambda: megaresume.attach(engine, "data.yaml"),
    "attach, a loop": lambda: megaresume.attach({"model": object()}, []),
    "StreamLoader": lambda: megaresume.StreamLoader,
    "open_stream": lambda: megaresume.open_stream and print("open_stream is there"),
}.items():
    try:
        call()
    except megaresume.MegaresumeError as error:
        print(name, type(error).__name__, error.action)
"""


@pytest.mark.process
def test_without_torch() -> None:
    """`attach` says when it is called what the trainer that it is given needs; until then nobody knows."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "attach, an engine SetupError pip install 'megaresume[deepspeed]'",
        "attach, a loop SetupError pip install 'megaresume[torch]'",
        "StreamLoader SetupError pip install 'megaresume[torch]'",
        "open_stream is there",
    ], done.stderr
