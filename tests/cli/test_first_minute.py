"""What somebody sees first: no command at all, and the help by task."""

from __future__ import annotations

from pathlib import Path

import pytest

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
