"""What somebody sees first: no command at all, the help by task, and completion in a shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megaresume.program import COMMANDS
from tests.cli.conftest import megaresume


def test_no_command_says_how_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = megaresume()
    assert done.returncode == 0
    assert "megaresume demo" in done.stdout and "megaresume new " in done.stdout and "--help" in done.stdout
    assert "checkpoints in" not in done.stdout


@pytest.mark.parametrize("name", ["iter_0000010", "global_step40", "global_step_7", "checkpoint-10", "step-10"])
def test_no_command_beside_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "data.yaml").touch()
    done = megaresume()
    assert done.returncode == 0
    assert "megaresume latest runs " in done.stdout and "megaresume stream data.yaml" in done.stdout
    monkeypatch.chdir(tmp_path / "runs")
    assert "megaresume latest . " in megaresume().stdout


def completed(words: str, directory: Path) -> list[str]:
    """What bash offers for the last of these words."""
    script = megaresume("completion", "bash").stdout
    ask = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _megaresume; "
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout.split()


@pytest.mark.process
def test_bash(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert completed("megaresume do", tmp_path) == ["doctor"]
    assert completed("megaresume de", tmp_path) == ["demo"]
    assert completed("megaresume demo --s", tmp_path) == ["--sft", "--steps"]
    assert completed("megaresume latest check", tmp_path) == ["checkpoints"]
    assert completed("megaresume latest --layout v", tmp_path) == ["verl"]
    assert completed("megaresume new t", tmp_path) == ["torch", "trainer"]


@pytest.mark.process
def test_zsh_takes_the_script(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    script = megaresume("completion", "zsh").stdout
    assert all(f"'{name}:" in script for name in COMMANDS)
    ask = (
        'autoload -Uz compinit; compinit -D -u; eval "$(cat script)"; whence -w _megaresume; print $_comps[megaresume]'
    )
    (tmp_path / "script").write_text(script)
    done = subprocess.run(["zsh", "-f", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["_megaresume: function", "_megaresume"] and done.stderr == ""
