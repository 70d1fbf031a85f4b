"""docs/shards.md: its commands, its scripts and its data.yaml, as they stand there, on fewer pictures."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import PIL.Image
import pytest
import yaml

from megaresume.program import main

pytest.importorskip("webdataset")

TEXT = (Path(__file__).parents[2] / "docs" / "shards.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
DATA = next(text for text in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL) if "# data.yaml" in text)
ENCODER = re.search(r"```yaml\n(  # encoder\.yaml.*?)```", TEXT, flags=re.DOTALL)[1]
COMMANDS = re.findall(r"\$ (megaresume .*)", TEXT)


def test_commands_and_scripts_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    fewer = SCRIPTS[0].replace("maxcount=250", "maxcount=70").replace("range(1000)", "range(280)")
    assert fewer.count("70") == 1 and "import io" not in fewer
    exec(fewer, {})
    (tmp_path / "encoder.yaml").write_text(ENCODER)
    (tmp_path / "data.yaml").write_text(DATA)
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "line {i} of a text corpus"}}\n' for i in range(300)))
    _write_chats(tmp_path)
    local = [
        shlex.split(c, comments=True)
        for c in COMMANDS
        if "s3://" not in c and "DATASET" not in c and "metadataset" not in c
    ]
    assert [c[1] for c in local] == [*["prepare"] * 6, "stream", "prepare"]
    for command in local:
        capsys.readouterr()
        workers = ["--workers", "1"] if command[1] == "prepare" else []
        assert main([*command[1:], *workers]) == 0
        said = capsys.readouterr().out
        if command[1] == "stream":
            assert "pairs:" in said and "text:" in said and "samples 0 to 3" in said
    assert "2 records in 1 files" in said and "2 images" in said
    exec(SCRIPTS[1], {})
    assert "280" in (out := capsys.readouterr().out) and "'key': '000269'" in out
    assert yaml.safe_load(json.dumps(yaml.safe_load(DATA)))["sources"]["pairs"]["on_fault"] == "mask"


def _write_chats(directory: Path) -> None:
    """Two images of one name in two folders, in one conversation."""
    for folder in ("a", "b"):
        (directory / "images" / folder).mkdir(parents=True)
        PIL.Image.new("RGB", (56, 56)).save(directory / "images" / folder / "1.png")
    turns = [{"from": "human", "value": "<image> <image> which is b?"}, {"from": "gpt", "value": "the second"}]
    alone = [{"from": "human", "value": "hello"}, turns[1]]
    lines = [{"conversations": turns, "images": ["a/1.png", "b/1.png"]}, {"conversations": alone, "images": []}]
    (directory / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_options_in_the_tables_are_those_of_the_code():
    from megaresume.data.shard_options import ImageFolderOptions

    named = set(re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.MULTILINE))
    assert {field.name for field in dataclasses.fields(ImageFolderOptions)} <= named
