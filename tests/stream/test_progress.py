from __future__ import annotations

import pytest

import megaresume.stream.progress as module
from megaresume.stream.progress import progress


def test_lines_in_a_log(capsys, monkeypatch):
    monkeypatch.setattr(module, "LOG_INTERVAL", 0.0)
    with progress("reading", 4_000_000, "B") as advance:
        advance(1_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("reading: 1.0 MB of 4.0 MB (25 %), ")


def test_short_work_is_silent(capsys):
    with progress("reading", 10, "documents") as advance:
        advance(10)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [(999, "B", "999 B"), (1000, "B", "1.0 KB"), (2.5e9, "documents", "2.5 G documents"), (1e16, "B", "10000.0 TB")],
)
def test_short_numbers(amount, unit, text):
    assert module.spell_amount(amount, unit) == text


def test_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(module, "QUIET_SECONDS", 0)
    with progress("reading", 10, "documents") as advance:
        advance(10)
    assert "reading: 100%" in capsys.readouterr().err


def test_an_unknown_amount(capsys, monkeypatch):
    monkeypatch.setattr(module, "LOG_INTERVAL", 0.0)
    with progress("reading", None, "B") as advance:
        advance(1_000_000)
    assert "reading: 1.0 MB, " in capsys.readouterr().err
