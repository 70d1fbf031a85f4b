"""Whatever ends the command, nothing that it has started is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaresume.cluster.processes import MARK
from megaresume.cluster.smoke.interrupted import cleaned_up
from tests.cluster.smoke.conftest import ROOT

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def marked(directory: Path) -> list[int]:
    """Processes of a test below a directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if MARK.encode() in environment and str(directory).encode() in environment:
            found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """Tests in the background of a script ignore SIGINT, under nohup SIGHUP; so would what they start."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.process
@pytest.mark.parametrize("number", SIGNALS)
def test_nothing_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "train.sh"
    # Its ranks have a session of their own, and ignore what ends others.
    script.write_text("trap '' TERM HUP INT\nsetsid sleep 100 & wait # \"$@\"\n")
    command = [sys.executable, "-m", "megaresume", "smoke", "--out", "out", "--script", str(script)]
    smoke = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while len(marked(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(marked(tmp_path)) == 2
    smoke.send_signal(number)
    _, said = smoke.communicate(timeout=60)
    assert smoke.returncode == 130 and "interrupted" in said and "Traceback" not in said
    assert not marked(tmp_path)


def test_the_end_is_not_interrupted() -> None:
    ended = []
    with pytest.raises(KeyboardInterrupt), cleaned_up():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # impatience
            ended.append(True)
    assert ended and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with cleaned_up():
        for _ in range(3):
            try:
                os.kill(os.getpid(), signal.SIGHUP)
            except KeyboardInterrupt:
                ended.append(False)
        # The first, and the third: nobody has to wait for ever.
    assert ended == [True, False, False]
