"""Rows of JSON lines and a folder of images: the records of tar shards, without the shards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megaresume.shards import ShardIndex, ShardSource
from megaresume.shards import prepare as prepare_module
from megaresume.shards.join import join_indexes
from megaresume.shards.prepare import prepare_shards
from megaresume.stream.errors import CorpusError, UsageError
from tests.images.kit import file, picture
from tests.shards.kit import encoder, key, same, write_shard

CHAT = {"kind": "chat", "style": "plain"}


def write_images(folder: Path, count: int = 12) -> list[str]:
    """Images in two folders, with names that are in another order than their numbers."""
    names = []
    for i in range(count):
        name = f"{'ab'[i % 2]}/{(7 * i) % count}.{('png', 'JPG')[i % 3 == 0]}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file(picture(20 + i, 16, seed=i), "PNG" if name.endswith("png") else "JPEG"))
        names.append(name)
    return names


def chats(names: list[str], count: int = 40) -> list[dict[str, object]]:
    """Conversations: of no image, of one as LLaVA names it, of several in a list, of some in parts of turns."""
    rows: list[dict[str, object]] = []
    for i in range(count):
        shown = [names[(i + 5 * k) % len(names)] for k in range(i % 4)]
        turn = {"from": "human", "value": "<image>\n" * len(shown) + f"What is it, {i}? " + "x" * (i * 7 % 30)}
        row: dict[str, object] = {"id": i, "conversations": [turn, {"from": "gpt", "value": f"Number {i} ü"}]}
        if len(shown) == 1:
            row["image"] = shown[0]
        elif len(shown) == 3:
            parts = [{"type": "image", "image": name} for name in shown]
            row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": f"Say {i}"}]}
        elif shown:
            row["images"] = shown
        rows.append(row)
    return rows


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def as_tar(row: dict[str, object], folder: Path) -> dict[str, bytes]:
    """The members that one would write into a shard: images by numbers, and the row with these names."""
    named = row.get("images") or ([row["image"]] if "image" in row else [])
    members: dict[str, bytes] = {}

    def member(name: str) -> str:
        short = f"{len(members)}{Path(name).suffix.lower()}"
        members[short] = (folder / name).read_bytes()
        return short

    changed = {k: v for k, v in row.items() if k != "image"}
    if named:
        changed["images"] = [member(name) for name in named]
    for turn in changed.get("messages", ()):
        if isinstance(turn["content"], list):
            parts = [{**part, "image": member(part["image"])} for part in turn["content"]]
            changed["messages"] = [{**turn, "content": parts}, *changed["messages"][1:]]
    return {"json": json.dumps(changed, ensure_ascii=False).encode(), **members}


@pytest.fixture
def both(tmp_path: Path) -> tuple[ShardSource, ShardSource]:
    """The same 40 conversations, in two files of lines beside a folder, and in two tar shards."""
    names = write_images(tmp_path / "images")
    rows = chats(names)
    for k in range(2):
        write_rows(tmp_path / f"{k}.jsonl", rows[20 * k : 20 * k + 20])
        members = [(f"{i:06d}", as_tar(rows[i], tmp_path / "images")) for i in range(20 * k, 20 * k + 20)]
        write_shard(tmp_path / f"{k}.tar", members)
    prepare_shards([tmp_path / "{0..1}.tar"], tmp_path / "tar", encoder(template=CHAT))
    prepare_shards([tmp_path / "*.jsonl"], tmp_path / "lines", encoder(template=CHAT), folder=str(tmp_path / "images"))
    return ShardSource(tmp_path / "lines.shards.idx"), ShardSource(tmp_path / "tar.shards.idx")


def test_documents_are_those_of_the_same_records_in_tar(both):
    lines, tar = both
    assert len(lines) == len(tar) == 40
    for name in ("tokens", "image_tokens", "num_images", "shard"):
        assert np.array_equal(lines.index.column(name), tar.index.column(name)), name
    assert all(same(lines.encoded(i, key(i)), tar.encoded(i, key(i))) for i in range(40))
    assert sum(len(lines.encoded(i, key(i)).images) for i in range(40)) == 60
