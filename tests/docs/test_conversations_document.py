"""docs/conversations.md: its commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megaresume.program import main
from tests.encoding.text.families import FAMILIES
from tests.encoding.text.kit import write_tokenizer

DOCUMENT = Path(__file__).parents[2] / "docs" / "conversations.md"


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "model", FAMILIES["chatml"])
    turns = [{"role": role, "content": "the quick brown fox " * 20} for role in ("user", "assistant") * 4]
    rows = [{"messages": turns[: 2 * (1 + i % 4)]} for i in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "corpora").mkdir()
    commands = re.findall(r"^    megaresume (.*)$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        assert main([*command.split(), "--workers", "1"]) == 0, command
        assert "tokens are trained" in capsys.readouterr().out
    shapes = re.findall(r"^\| `(.*?)` \| `(\{.*?\})`", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len(shapes) == 5
    for shape, row in shapes:
        (tmp_path / "row.jsonl").write_text(row)
        words = f"prepare row.jsonl --output {shape} --tokenizer model --chat --workers 1"
        assert main(words.split()) == 0, shape
