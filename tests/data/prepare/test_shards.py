from __future__ import annotations

import io
import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megaresume.data.prepare import measure as index_measure
from megaresume.data.prepare import shards as prepare_module
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.record_index import ShardIndex
from megaresume.data.shard_source import ShardSource
from megaresume.stream.errors import CorpusError, UsageError
from tests.data.kit import captions, encoder, key, killed_and_run_again, write_shard, write_shards
from tests.encoding.images.kit import file, picture


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return [str(path) for path in write_shards(tmp_path / "shards", [5, 3, 7, 4, 6])]


class Stop(Exception):
    """A kill, in this process."""


def stop_after(monkeypatch, count: int) -> None:
    real, left = index_measure.measure_shard, [count]

    def measure(spec, task):
        if not left[0]:
            raise Stop
        left[0] -= 1
        return real(spec, task)

    monkeypatch.setattr(prepare_module, "measure_shard", measure)


def measured(monkeypatch) -> list[str]:
    """Names of the shards that are measured from here on."""
    real, names = index_measure.measure_shard, []

    def measure(spec, task):
        names.append(Path(task.path).name[-6:-4])
        return real(spec, task)

    monkeypatch.setattr(prepare_module, "measure_shard", measure)
    return names


@pytest.mark.process
def test_the_same_bytes_whatever_the_workers(shards, tmp_path):
    one = prepare_shards(shards, tmp_path / "one", encoder())
    many = prepare_shards(shards, tmp_path / "many", encoder(), workers=3)
    assert (tmp_path / "one.shards.idx").read_bytes() == (tmp_path / "many.shards.idx").read_bytes()
    assert (one.records, one.tokens, one.shards) == (many.records, many.tokens, many.shards) == (25, one.tokens, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["many.shards.idx", "one.shards.idx", "shards"]


def test_lengths_are_what_encoding_gives(shards, tmp_path):
    summary = prepare_shards(shards, tmp_path / "a", encoder())
    source = ShardSource(tmp_path / "a.shards.idx")
    documents = [source.encoded(i, key(i)) for i in range(len(source))]
    assert source.lengths(np.arange(25)).tolist() == [len(d.tokens) for d in documents]
    assert summary.tokens == sum(len(d.tokens) for d in documents)
    assert summary.image_tokens == sum(image.num_tokens for d in documents for image in d.images)
    assert (summary.images, summary.longest) == (25, max(len(d.tokens) for d in documents))


@pytest.mark.parametrize("done", [0, 1, 4])
def test_goes_on_where_it_stopped(shards, tmp_path, monkeypatch, done):
    prepare_shards(shards, tmp_path / "whole", encoder())
    with monkeypatch.context() as patch:
        stop_after(patch, done)
        with pytest.raises(Stop):
            prepare_shards(shards, tmp_path / "out", encoder())
    assert not (tmp_path / "out.shards.idx").exists()
    names = measured(monkeypatch)
    assert prepare_shards(shards, tmp_path / "out", encoder()).resumed_shards == done
    assert names == ["00", "01", "02", "03", "04"][done:]
    assert (tmp_path / "out.shards.idx").read_bytes() == (tmp_path / "whole.shards.idx").read_bytes()


def test_a_part_is_used_again_only_for_the_shard_as_it_is(shards, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stop):
            prepare_shards(shards, tmp_path / "out", encoder())
    # the same size, another content and time
    before = os.path.getsize(shards[1])
    write_shard(Path(shards[1]), captions(3, 100))
    assert os.path.getsize(shards[1]) == before
    for part in (tmp_path / "out.shards.idx.prepare").glob("shard-*"):
        if b"pairs-000003.tar" in part.read_bytes():
            part.write_bytes(part.read_bytes()[:-1])
    names = measured(monkeypatch)
    prepare_shards(shards, tmp_path / "out", encoder())
    assert names == ["01", "03", "04"]
    assert ShardSource(tmp_path / "out.shards.idx").record(5).key == "data/000100"


def test_shards_added_to_the_list_keep_what_is_finished(shards, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            prepare_shards(shards[1:4], tmp_path / "out", encoder())
    names = measured(monkeypatch)
    prepare_shards(shards, tmp_path / "out", encoder())
    assert names == ["00", "03", "04"]


def test_another_encoder_is_refused_with_both(shards, tmp_path, monkeypatch):
    other = encoder(template={"kind": "caption", "prompt": "Say: "})
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            prepare_shards(shards, tmp_path / "out", encoder())
    with pytest.raises(UsageError) as error:
        prepare_shards(shards, tmp_path / "out", other)
    assert encoder().fingerprint in str(error.value) and other.fingerprint in str(error.value)
    assert prepare_shards(shards, tmp_path / "out", other, restart=True).resumed_shards == 0


def test_an_index_that_is_there_is_kept_without_overwrite(shards, tmp_path):
    prepare_shards(shards[:2], tmp_path / "out", encoder())
    before = (tmp_path / "out.shards.idx").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        prepare_shards(shards, tmp_path / "out.shards.idx", encoder())
    assert (tmp_path / "out.shards.idx").read_bytes() == before
    assert prepare_shards(shards, tmp_path / "out", encoder(), overwrite=True).records == 25


def test_a_run_that_fails_leaves_the_old_index(shards, tmp_path, monkeypatch):
    prepare_shards(shards[:2], tmp_path / "out", encoder())
    before = (tmp_path / "out.shards.idx").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            prepare_shards(shards, tmp_path / "out", encoder(), overwrite=True)
    assert (tmp_path / "out.shards.idx").read_bytes() == before


def bomb() -> bytes:
    """A picture of 30000 x 30000 pixels, by its header."""
    data = bytearray(file(picture(16, 16)))
    data[16:24] = (30000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


BAD = {
    "0 bytes": {"png": b"", "txt": b"a"},
    "no image": {"png": b"<html>", "txt": b"a"},
    "a bomb": {"png": bomb(), "txt": b"a"},
    "not UTF-8": {"png": file(picture()), "txt": b"\xff\xfe"},
    "no caption": {"png": file(picture())},
    "no picture": {"txt": b"a"},
}


@pytest.fixture
def mixed(tmp_path) -> tuple[str, list[int]]:
    """A shard with good and bad records in turn, and the numbers of the bad ones."""
    records = []
    for i, (name, members) in enumerate(BAD.items()):
        records += [captions(1, i)[0], (f"bad/{name}", members)]
    return str(write_shard(tmp_path / "mixed.tar", records)), list(range(1, 12, 2))


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_a_record_that_cannot_be_measured_stops_and_names_the_way_out(mixed, shards, tmp_path, workers):
    with pytest.raises(CorpusError) as error:
        prepare_shards([shards[0], mixed[0]], tmp_path / "out", encoder(), workers=workers)
    text = str(error.value)
    assert "mixed.tar, record 1 ('bad/0 bytes')" in text and "--invalid mask" in text
    # what was finished is kept, and a milder policy goes on with it
    assert prepare_shards([shards[0], mixed[0]], tmp_path / "out", encoder(), invalid="drop").resumed_shards == 1


@pytest.mark.parametrize(("invalid", "length"), [("mask", 1), ("drop", 0)])
def test_bad_records_are_counted_and_listed_and_keep_their_place(mixed, tmp_path, invalid, length):
    path, bad = mixed
    summary = prepare_shards([path], tmp_path / "out", encoder(), invalid=invalid)
    assert (summary.records, summary.invalid) == (12, len(bad))
    header = ShardIndex(tmp_path / "out.shards.idx").header["invalid"]
    assert header["policy"] == invalid and header["count"] == len(bad)
    assert [(e["document"], e["key"]) for e in header["first"]] == [
        (i, f"bad/{n}") for i, n in zip(bad, BAD, strict=True)
    ]
    assert "is empty" in header["first"][0]["reason"] and "pixels" in header["first"][2]["reason"]
    source = ShardSource(tmp_path / "out.shards.idx")
    assert source.lengths(np.array(bad)).tolist() == [length] * len(bad)
    assert (source.lengths(np.arange(0, 12, 2)) > 5).all()
    if invalid == "mask":  # declared: no error although the policy of the source is ``error``
        document = source.encoded(3, key(3))
        assert (document.fault.policy, len(document.tokens), bool(document.trained.any())) == ("mask", 1, False)
        assert header["first"][1]["reason"] in document.fault.reason
        write_shard(Path(path), [captions(1, i)[0] for i in range(12)])  # mended since: nothing moves
        assert source.encoded(3, key(3)).fault == document.fault


def test_a_missing_image_does_not_cost_the_page(tmp_path):
    page = json.dumps({"texts": ["a", None, "b"], "images": [None, "0.png", None]}).encode()
    path = write_shard(tmp_path / "a.tar", [("0", {"json": page}), ("1", {"json": page, "0.png": file(picture())})])
    with pytest.raises(CorpusError, match="no image '0"):
        prepare_shards([path], tmp_path / "refused", encoder(template="interleaved"))
    kept = encoder(template={"kind": "interleaved", "missing_images": True})
    assert prepare_shards([path], tmp_path / "a", kept).missing_images == 1
    source = ShardSource(tmp_path / "a.shards.idx")
    assert bytes(source.get(0)[:-1].astype(np.uint8)) == b"a\nb"
    assert source.lengths(np.arange(2)).tolist() == [4, 1 + 4 + 1 + 1]


def test_decoding_finds_truncated_images(tmp_path):
    cut = file(picture(64, 64), "JPEG")[:-300]
    path = write_shard(tmp_path / "a.tar", [*captions(1), ("cut", {"jpg": cut, "txt": b"a"}), *captions(2, 1)])
    assert prepare_shards([path], tmp_path / "headers", encoder()).invalid == 0
    with pytest.raises(CorpusError, match=r"record 1 .*truncated or damaged"):
        prepare_shards([path], tmp_path / "error", encoder(), decode=True)
    summary = prepare_shards([path], tmp_path / "mask", encoder(), decode=True, invalid="mask")
    assert (summary.invalid, summary.first_invalid[0]["key"], summary.images) == (1, "cut", 3)
    whole = write_shard(tmp_path / "whole.tar", captions(3))
    for name, decode in (("read", False), ("decoded", True)):
        prepare_shards([whole], tmp_path / name, encoder(), decode=decode)
    assert (tmp_path / "read.shards.idx").read_bytes() == (tmp_path / "decoded.shards.idx").read_bytes()


def test_files_without_a_record_are_counted(tmp_path):
    import tarfile

    path = write_shard(tmp_path / "a.tar", captions(2))
    with tarfile.open(path, "a") as archive:
        archive.addfile(tarfile.TarInfo("README"), io.BytesIO())
    assert prepare_shards([path], tmp_path / "a", encoder()).ignored_files == 1


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [
        (["none.tar"], CorpusError, "missing"),
        (["none-*.tar"], CorpusError, "matches no file"),
        (["shards/pairs-{000000..000001.tar"], UsageError, "braces"),
        (["shards/pairs-000000.tar", "shards/pairs-00000{0..1}.tar"], UsageError, "twice"),
        (["shards/pairs-000000.tar", "./shards/../shards/pairs-000000.tar"], UsageError, "twice"),
    ],
)
def test_inputs_that_are_not_there(shards, tmp_path, monkeypatch, inputs, error, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        prepare_shards(inputs, tmp_path / "out", encoder())
    assert not (tmp_path / "out.shards.idx").exists()


def command(tmp_path: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "megaresume", "prepare", str(tmp_path / "shards/pairs-*.tar")),
        *("--output", str(tmp_path / "out"), "--processor", "{kind: patches, size: 16, patch_size: 8}", *more),
    ]


@pytest.mark.process
def test_killed_and_run_again_gives_the_same_bytes(tmp_path):
    write_shards(tmp_path / "shards", [150] * 12)
    whole = prepare_shards([tmp_path / "shards/*.tar"], tmp_path / "whole", encoder())
    summary = killed_and_run_again(partial(command, tmp_path), tmp_path / "out.shards.idx")
    assert summary["resumed_shards"] >= 2 and summary["records"] == whole.records == 1800
    assert (tmp_path / "out.shards.idx").read_bytes() == (tmp_path / "whole.shards.idx").read_bytes()
    assert not (tmp_path / "out.shards.idx.prepare").exists()


@pytest.mark.parametrize("invalid", ["mask", "drop"])
def test_an_index_of_nothing_that_can_be_measured_is_refused(tmp_path, invalid):
    shard = write_shard(tmp_path / "a.tar", [(f"{i}", {"png": b"no image", "txt": b"a"}) for i in range(3)])
    with pytest.raises(CorpusError, match=r"(?s)no record could be measured.*3 records.*the first, '0'"):
        prepare_shards([shard], tmp_path / "out", encoder(), invalid=invalid)
    assert not (tmp_path / "out.shards.idx").exists()
    with pytest.raises(CorpusError, match=r"record 0 \('0'\)"):  # the way out: no --restart is needed
        prepare_shards([shard], tmp_path / "out", encoder())
