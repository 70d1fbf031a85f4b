"""Indexes of several machines to one: the same bytes as one prepare of all shards, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.data.prepare.shards import join_indexes, prepare_shards
from megaresume.program import main
from megaresume.stream.errors import CorpusError, UsageError
from tests.data.kit import captions, encoder, write_shard, write_shards
from tests.encoding.images.kit import file, picture

BAD = ("bad", {"png": b"", "txt": b"a"})


def read(path: Path) -> bytes:
    return path.with_name(path.name + ".shards.idx").read_bytes()


def test_the_same_bytes_as_one_prepare_of_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    counts = iter([3, 2, 4, 1, 2])
    for k, count in enumerate(counts):
        # more bad records than a header names, in the first shard and after
        bad = [(f"bad/{i}", BAD[1]) for i in range(30 if k < 2 else k)]
        write_shard(tmp_path / f"shards/pairs-{k:06d}.tar", [*bad, *captions(count, 10 * k), BAD])
    page = b'{"texts": ["a", null], "images": [null, "0.png"]}'
    write_shard(tmp_path / "shards/pairs-000005.tar", [("page", {"json": page, "png": file(picture())})])
    whole = prepare_shards(["shards/*.tar"], tmp_path / "whole", encoder(), invalid="mask")
    for name, shards in {"a": "pairs-{000000..000001}", "b": "pairs-000002", "c": "pairs-{000003..000005}"}.items():
        prepare_shards([f"shards/{shards}.tar"], tmp_path / "parts" / name, encoder(), invalid="mask")
    assert main(["prepare", *(f"parts/{name}.shards.idx" for name in "abc"), "--output", "joined"]) == 0
    assert f"{whole.records:,} records in 6 shards" in capsys.readouterr().out
    assert read(tmp_path / "joined") == read(tmp_path / "whole")
    assert join_indexes(["parts/*.shards.idx"], tmp_path / "b", overwrite=True).invalid == whole.invalid
    assert read(tmp_path / "b") == read(tmp_path / "whole")
    join_indexes(["parts/b.shards.idx", "parts/a.shards.idx"], tmp_path / "parts/a", overwrite=True)
    prepare_shards(
        [f"shards/pairs-{k:06d}.tar" for k in (2, 0, 1)], tmp_path / "parts/other", encoder(), invalid="mask"
    )
    assert read(tmp_path / "parts/a") == read(tmp_path / "parts/other")


def test_images_that_pages_miss_stay_counted(tmp_path):
    page = b'{"texts": ["a", null], "images": [null, "0.png"]}'
    kept = encoder(template={"kind": "interleaved", "missing_images": True})
    for name in "ab":
        write_shard(tmp_path / f"{name}.tar", [("0", {"json": page}), ("1", {"json": page})])
        prepare_shards([tmp_path / f"{name}.tar"], tmp_path / name, kept)
    whole = prepare_shards([tmp_path / "*.tar"], tmp_path / "whole", kept)
    joined = join_indexes([tmp_path / "a.shards.idx", tmp_path / "b.shards.idx"], tmp_path / "joined")
    assert joined.missing_images == whole.missing_images == 4
    assert read(tmp_path / "joined") == read(tmp_path / "whole")


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path, [2, 2])
    first, second = "pairs-000000.tar", "pairs-000001.tar"
    prepare_shards([first], "a", encoder())
    prepare_shards([second], "b", encoder())
    prepare_shards([second], "prompt", encoder(template={"kind": "caption", "prompt": "Say: "}))
    prepare_shards([second], "masked", encoder(), invalid="mask")
    for other, words in {"prompt": "encoder", "masked": "--invalid", "a": "twice"}.items():
        with pytest.raises(UsageError, match=words):
            join_indexes(["a.shards.idx", f"{other}.shards.idx"], "out")
    prepare_shards(["./" + first, second], "both", encoder())
    with pytest.raises(UsageError, match="one shard was given twice"):
        join_indexes(["a.shards.idx", "both.shards.idx"], "out")
    with pytest.raises(UsageError, match="exists"):
        join_indexes(["a.shards.idx", "b.shards.idx"], "both")
    for more in (["--processor", "patches"], [second], ["--restart"], ["--decode"], ["--no-append-eod"]):
        assert main(["prepare", "a.shards.idx", *more, "--output", "out"]) == 2
        assert "indexes are joined as they are" in capsys.readouterr().err
    damaged = bytearray(Path("b.shards.idx").read_bytes())
    damaged[4096] ^= 1
    Path("b.shards.idx").write_bytes(damaged)
    with pytest.raises(CorpusError, match="damaged"):
        join_indexes(["a.shards.idx", "b.shards.idx"], "out")
    write_shard(tmp_path / first, captions(5))
    with pytest.raises(CorpusError, match="pairs-000000"):
        join_indexes(["a.shards.idx"], "out")
    assert not [*Path().glob("*out.shards.idx*")]
