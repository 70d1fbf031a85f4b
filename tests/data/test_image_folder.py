"""Rows of JSON lines and a folder of images: the records of tar shards, without the shards."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
import zstandard

from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data import image_folder as folder
from megaresume.data import remote
from megaresume.data.catalog import open_sources
from megaresume.data.image_folder import Folder
from megaresume.data.prepare import shards as prepare_module
from megaresume.data.prepare.shards import join_indexes, prepare_shards
from megaresume.data.record_index import ShardIndex
from megaresume.data.shard_source import ShardSource
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import ConfigError, CorpusError, UsageError
from tests.data.far import serve
from tests.data.kit import OPTIONS, encoder, key, killed_and_run_again, same, write_shard
from tests.data.test_ahead import FAULTS
from tests.encoding.images.kit import file, picture
from tests.release import release

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
    """Conversations: of no image, of one as LLaVA names it, of two in a list, of some in parts of turns."""
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
            row["images" if i % 8 == 2 else "image"] = shown
        rows.append(row)
    return rows


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def as_tar(row: dict[str, object], folder: Path) -> dict[str, bytes]:
    """The members that one would write into a shard: images by numbers, and the row with these names."""
    named = row.get("images", row.get("image", []))
    named = [named] if isinstance(named, str) else named
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
    assert [file.records for file in lines.index.files] == [file.records for file in tar.index.files]
    for name in ("tokens", "image_tokens", "num_images"):
        assert np.array_equal(lines.index.column(name), tar.index.column(name)), name
    assert all(same(lines.encoded(i, key(i)), tar.encoded(i, key(i))) for i in range(40))
    assert sum(len(lines.encoded(i, key(i)).images) for i in range(40)) == 60


AUGMENT = [{"flip": 0.5}, {"crop": {"scale": [0.6, 1.0]}}]


def loader(directory: Path, kind: str, *, start: int = 0, stop: int = 24, dp=(0, 1), **options) -> StreamLoader:
    """Of the conversations of `both`; ``kind``: lines or tar; further options of the source and of the loader."""
    source = {"kind": {"lines": "image_folder", "tar": "webdataset"}[kind], "index": f"{kind}.shards.idx"}
    of_source = {name: options.pop(name) for name in ("path", "image_folder", "split", "on_fault") if name in options}
    source |= {"augment": AUGMENT, **of_source}
    config = {"seed": 3, "seq_length": 256, "packing": {"mode": "best_fit", "open_bins": 4}, "sources": {"c": source}}
    stream = open_stream(config, base_dir=directory)
    layout = {"micro_batch_size": 2, "dp_rank": dp[0], "dp_size": dp[1]}
    return StreamLoader(stream, BatchSchedule.constant(4), start=start, stop=stop, **layout, **options)


def batches(*args, **options) -> list[tuple[object, ...]]:
    """Samples, tokens, masks and pixels of each micro-batch, in order."""
    names = ("tokens", "labels", "loss_mask", "pixel_values")
    return [
        (batch["samples"].tolist(), *(batch[name].numpy().tobytes() for name in names))
        for batch in loader(*args, **options)
    ]


def page(names: list[str], i: int) -> dict[str, object]:
    """Texts and images in turn, as OBELICS (even) or MMC4 has them."""
    shown = [names[(i + k) % len(names)] for k in range(i % 4)]
    if i % 2:
        infos = [{"image_name": name, "matched_text_index": k} for k, name in enumerate(shown)]
        return {"text_list": [f"text {k} of {i}" for k in range(i % 4 + 1)], "image_info": infos}
    texts = [text for k in range(len(shown)) for text in (None, f"text {k} of {i}")]
    return {"texts": ["first", *texts], "images": [None, *(x for name in shown for x in (name, None))]}


def renamed(value: object, names: dict[str, str]) -> object:
    """JSON with other names of images."""
    if isinstance(value, dict):
        return {key: renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


TEMPLATES = {
    "caption": {"kind": "caption", "json_key": "text", "text_only": True, "prompt": ": "},
    "interleaved": {"kind": "interleaved"},
    "split": {"kind": "interleaved", "split": 24},
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_other_templates(tmp_path, template):
    names = write_images(tmp_path / "images")
    rows = [page(names, i) for i in range(16)]
    if template == "caption":
        keys = ("image", "file_name", "images")
        rows = [{keys[i % 3]: [names[i]] if i % 3 == 2 else names[i], "text": f"number {i}"} for i in range(9)]
        rows.append({"text": "no image"})
    write_rows(tmp_path / "rows.jsonl", rows)
    records = []
    for i, row in enumerate(rows):
        text = json.dumps(row)
        used = sorted((name for name in names if f'"{name}"' in text), key=lambda name: text.index(f'"{name}"'))
        short = {name: f"{k}{Path(name).suffix.lower()}" for k, name in enumerate(used)}
        if template == "caption":
            short = {name: Path(name).suffix.lower()[1:] for name in used}
        images = {short[name]: (tmp_path / "images" / name).read_bytes() for name in used}
        records.append((f"{i:06d}", {"json": json.dumps(renamed(row, short)).encode(), **images}))
    write_shard(tmp_path / "rows.tar", records)
    made = encoder(template=TEMPLATES[template])
    prepare_shards([tmp_path / "rows.tar"], tmp_path / "tar", made)
    prepare_shards([tmp_path / "rows.jsonl"], tmp_path / "lines", made, folder=str(tmp_path / "images"))
    lines, tar = (ShardSource(tmp_path / f"{name}.shards.idx") for name in ("lines", "tar"))
    assert len(lines) == len(tar) >= len(rows) and (len(lines) > len(rows)) == (template == "split")
    assert lines.index.header["images"] > 6
    assert all(same(lines.encoded(i, key(i)), tar.encoded(i, key(i))) for i in range(len(tar)))


def test_another_file_of_rows_is_appended(both, tmp_path):
    """Old rows are what they were: a run goes on with the new ones."""
    old = both[0].range_fingerprint(0, 20)
    prepare_shards([tmp_path / "0.jsonl"], tmp_path / "old", encoder(template=CHAT), folder=str(tmp_path / "images"))
    assert ShardSource(tmp_path / "old.shards.idx").fingerprint() == old


@pytest.mark.parametrize("options", [{}, {"read_ahead": 0}, {"dp": (1, 2), "start": 8}, {"split": "80,20"}])
def test_batches_are_those_of_tar_shards(both, tmp_path, options):
    made = batches(tmp_path, "lines", **options)
    assert made == batches(tmp_path, "tar", **options) and len(made) > 3


@pytest.mark.process
def test_in_workers_too(both, tmp_path):
    assert batches(tmp_path, "lines", num_workers=2) == batches(tmp_path, "tar")


@pytest.mark.parametrize("store", ["http", "s3"])
def test_images_of_a_store_are_read_ahead_once_each(both, tmp_path, monkeypatch, store):
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    expected = batches(tmp_path, "lines")
    with serve(tmp_path, latency=0.01) as far:  # a bucket "images"
        monkeypatch.setenv("AWS_ENDPOINT_URL", far.url)
        url = "s3://images" if store == "s3" else f"{far.url}/images"
        assert batches(tmp_path, "lines", image_folder=url, requests=8) == expected
        assert far.most > 2 and {request.method for request in far.requests} == {"GET"}
        asked = len(far.requests)
        source = ShardSource(tmp_path / "lines.shards.idx", folder=url)
        assert same(source.encoded(7, key(7)), both[0].encoded(7, key(7)))
    documents = loader(tmp_path, "lines").stream.plan(0, 24).table[:, 2].tolist()
    assert asked < sum(len(both[0].places(i)) for i in documents)


@pytest.mark.parametrize("url", ["http", "memory"])
def test_names_that_an_address_would_be_read_in(tmp_path, url):
    pytest.importorskip("aiohttp")
    names = ["a b#1?x=2.png", "50%41.png", "[a]*{b}.png", "ü/ß.png", "~/$HOME.png"]
    store = fsspec.filesystem("memory")
    for i, name in enumerate(names):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(file(picture(seed=i)))
        store.pipe_file(f"/odd/{name}", file(picture(seed=i)))
    near = prepared(tmp_path, *[{"image": name, "text": "x"} for name in names])
    with serve(tmp_path / "images") as server:
        far = ShardSource(near.index, folder=server.url if url == "http" else "memory://odd")
        assert all(same(near.encoded(i, key(i)), far.encoded(i, key(i))) for i in range(len(names)))


@pytest.mark.parametrize("fault", ["busy", "gone", "wrong length"])
def test_a_store_that_fails_now_and_then(both, tmp_path, monkeypatch, fault):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    expected = batches(tmp_path, "lines")
    with serve(tmp_path / "images", fault=FAULTS[fault]) as far:
        assert batches(tmp_path, "lines", image_folder=far.url) == expected


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_lines_of_a_store_or_compressed(both, tmp_path, monkeypatch, end):
    """They are unpacked once; the index is the same but for the bytes of the files."""
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("MEGARESUME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    for k in range(2):
        content = (tmp_path / f"{k}.jsonl").read_bytes()
        (tmp_path / "images" / f"{k}.jsonl{end}").write_bytes(packed(content, end))
    expected = batches(tmp_path, "lines")
    with serve(tmp_path / "images", latency=0.005) as far:
        lines = [f"{far.url}/{k}.jsonl{end}" for k in range(2)]
        prepare_shards(lines, tmp_path / "far", encoder(template=CHAT), folder=far.url)
        assert far.most > 2
        index = ShardIndex(tmp_path / "far.shards.idx")
        for name in ShardIndex.COLUMNS:
            assert np.array_equal(index.column(name), both[0].index.column(name)), name
        (tmp_path / "far.shards.idx").rename(tmp_path / "lines.shards.idx")
        assert batches(tmp_path, "lines") == expected
        lines = [request for request in far.reads if "jsonl" in request.name]
        assert len(lines) == 2 and len(list((tmp_path / "cache/unpacked").glob("[01]*"))) == 2
    if not end:
        return
    near = ShardSource(
        index, shards=[str(tmp_path / f"images/{k}.jsonl{end}") for k in range(2)], folder=str(tmp_path / "images")
    )
    assert same(near.encoded(25, key(25)), both[0].encoded(25, key(25)))


def packed(content: bytes, end: str) -> bytes:
    if end == ".gz":
        return gzip.compress(content)
    return zstandard.compress(content) if end == ".zst" else content


def test_what_the_cache_has_of_another_image_is_read_again(both, tmp_path):
    from megaresume.batches.ahead import use_cache

    pytest.importorskip("aiohttp")
    images, good = tmp_path / "images", both[0].encoded(1, key(1))
    name = both[0].record(1).images[0]
    kept = (images / name).read_bytes()
    with serve(images) as far:
        for content in (file(picture(21, 16, seed=99), "PNG"), kept, kept):
            (images / name).write_bytes(content)
            source = ShardSource(tmp_path / "lines.shards.idx", folder=far.url, policy="mask")
            use_cache([source], tmp_path / "cache", gib=1)
            assert same(source.encoded(1, key(1)), good) == (content == kept)
        assert len(far.requests) == 2 + 1  # twice what was bad (once past the cache), once anew, then the cache


@pytest.mark.parametrize("piece", [11, 700])
def test_any_pieces_give_the_same_index(both, tmp_path, monkeypatch, piece):
    whole = (tmp_path / "lines.shards.idx").read_bytes()
    monkeypatch.setattr(prepare_module, "PIECE", piece)
    made = encoder(template=CHAT)
    prepare_shards([tmp_path / "*.jsonl"], tmp_path / "again", made, folder=str(tmp_path / "images"))
    assert (tmp_path / "again.shards.idx").read_bytes() == whole


def test_indexes_of_several_machines_are_joined(both, tmp_path):
    for k in range(2):
        prepare_shards(
            [tmp_path / f"{k}.jsonl"], tmp_path / f"part{k}", encoder(template=CHAT), folder=str(tmp_path / "images")
        )
    join_indexes([tmp_path / f"part{k}.shards.idx" for k in range(2)], tmp_path / "joined")
    assert (tmp_path / "joined.shards.idx").read_bytes() == (tmp_path / "lines.shards.idx").read_bytes()
    shutil.copytree(tmp_path / "images", tmp_path / "others")
    prepare_shards([tmp_path / "1.jsonl"], tmp_path / "part2", encoder(template=CHAT), folder=str(tmp_path / "others"))
    with pytest.raises(UsageError, match="two ways: --image-folder"):
        join_indexes([tmp_path / "part0.shards.idx", tmp_path / "part2.shards.idx"], tmp_path / "no")


def test_lines_and_images_that_were_moved(both, tmp_path):
    expected = batches(tmp_path, "lines")
    (tmp_path / "there").mkdir()
    for name in ("images", "0.jsonl", "1.jsonl"):
        (tmp_path / name).rename(tmp_path / "there" / name)
    with pytest.raises(CorpusError, match=r"0\.jsonl is missing"):
        batches(tmp_path, "lines")
    with pytest.raises(CorpusError, match="images is missing"):
        batches(tmp_path, "lines", path="there/{0..1}.jsonl")
    assert batches(tmp_path, "lines", path="there/{0..1}.jsonl", image_folder="there/images") == expected


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        *(({"image_folder": bad}, "image_folder") for bad in (5, ["images"], {"a": 1}, True, "")),
        *(({"path": bad}, kind) for bad in (5, [5], True, "") for kind in ("image_folder", "webdataset")),
    ],
)
def test_a_path_of_another_type_is_told(both, tmp_path, options, kind):
    index = {"image_folder": "lines", "webdataset": "tar"}[kind]
    with pytest.raises(ConfigError, match=rf"bad value of sources\.c\.{next(iter(options))}") as error:
        open_sources({"c": {"kind": kind, "index": f"{index}.shards.idx", **options}}, base_dir=tmp_path)
    assert "or URL" in error.value.expected


@pytest.mark.parametrize(("kind", "index"), [("webdataset", "lines"), ("energon", "lines"), ("image_folder", "tar")])
def test_a_source_of_another_kind_is_told(both, tmp_path, kind, index):
    options = {"kind": kind, "index": f"{index}.shards.idx"} | ({"path": "."} if kind == "energon" else {})
    with pytest.raises(ConfigError, match="is of another kind"):
        open_sources({"c": options}, base_dir=tmp_path)


CAPTION = {"kind": "caption", "json_key": "text"}


def prepared(tmp_path: Path, *rows: object, template: object = CAPTION, **options: object) -> ShardSource:
    """Rows (bytes: as they are) beside a folder with one image, a.png."""
    (tmp_path / "images").mkdir(exist_ok=True)
    (tmp_path / "images/a.png").write_bytes(file(picture()))
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines))
    made = encoder(template=template)
    prepare_shards([tmp_path / "rows.jsonl"], tmp_path / "rows", made, folder=str(tmp_path / "images"), **options)
    return ShardSource(tmp_path / "rows.shards.idx")


GOOD = {"image": "a.png", "text": "good"}
BAD = {
    "is missing": {"image": "b.png", "text": "x"},
    "no such image: a folder": {"image": ".", "text": "x"},
    "a folder": {"image": "sub", "text": "x"},
    "a pipe": {"image": "pipe", "text": "x"},
    "leaves the folder": {"image": "../rows.jsonl", "text": "x"},
    "leaves it deeper": {"image": "a/../../rows.jsonl", "text": "x"},
    "absolute": {"image": "/etc/passwd", "text": "x"},
    "an address": {"image": "http://127.0.0.1/a.png", "text": "x"},
    "the image itself": {"image": "data:image/png;base64,aaaa", "text": "x"},
    "too long a name": {"image": "a" * 5000, "text": "x"},
    "no name": {"image": 7, "text": "x"},
    "half a letter": {"image": "\ud800.png", "text": "x"},
    "a byte of 0": {"image": "a\0.png", "text": "x"},
    "damaged": {"image": "bad.png", "text": "x"},
    "empty": {"image": "empty.png", "text": "x"},
    "not JSON": b'{"image": "a.png", "text": "x"\n',
    "twice a key": b'{"image": "a.png", "image": "a.png", "text": "x"}\n',
    "a list": b"[1]\n",
    "not UTF-8": b'{"image": "a.png", "text": "\xff"}\n',
    "too deep": b"[" * 100_000 + b"\n",
    "no image": {"text": "x"},
    "no text": {"image": "a.png"},
    "two images of a caption": {"image": ["a.png", "link.png"], "text": "x"},
    "a video": {"image": "a.mp4", "text": "x"},
    "other images under two keys": {"image": "a.png", "images": ["link.png"], "text": "x"},
    "more images under one key": {"file_name": "a.png", "images": ["a.png", "link.png"], "text": "x"},
}


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    images = tmp_path / "images"
    (images / "sub").mkdir(parents=True)
    os.mkfifo(images / "pipe")
    (images / "bad.png").write_bytes(b"<html>")
    (images / "empty.png").touch()
    (images / "a.mp4").write_bytes(b"x")
    (images / "link.png").symlink_to("a.png")
    return tmp_path


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_by_file_and_line(odd, what):
    with pytest.raises(CorpusError) as error:
        prepared(odd, GOOD, b" \r\n", GOOD, BAD[what], GOOD)
    assert f"{odd}/rows.jsonl:4: record 'byte " in str(error.value), str(error.value)
    assert "--invalid mask" in str(error.value)


def test_bad_rows_are_left_out_and_listed_by_their_lines(odd, monkeypatch):
    monkeypatch.setattr(prepare_module, "PIECE", 100)
    rows = [row for bad in BAD.values() for row in (GOOD, bad, b"\n")]
    source = prepared(odd, *rows, invalid="drop")
    first = source.index.header["invalid"]["first"]
    assert [entry["key"] for entry in first] == [f"line {3 * k + 2}" for k in range(len(BAD))]
    assert source.lengths(np.arange(2 * len(BAD))).tolist() == [4 + 4 + 1, 0] * len(BAD)


def test_rows_that_are_good(odd):
    """A mark at the start, a line without an end, an end of Windows, links, an image twice, a row without one."""
    turns = [{"from": "human", "value": "<image><image>"}, {"from": "gpt", "value": "x"}]
    text = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]
    rows = [
        b"\xef\xbb\xbf" + json.dumps({"image": ["a.png", "./a.png"], "conversations": turns}).encode() + b"\r\n",
        {"image": ["link.png", "link.png"], "conversations": turns},
        {"image": None, "conversations": text},
        {"images": [], "image": None, "file_name": "", "conversations": text},
        {"images": [], "image": ["a.png", "a.png"], "conversations": turns},
        json.dumps({"images": ["a.png", "a.png"], "image": ["a.png", "a.png"], "conversations": turns}).encode(),
    ]
    source = prepared(odd, *rows, template=CHAT)
    assert source.index.column("num_images").tolist() == [2, 2, 0, 0, 2, 2]
    documents = [source.encoded(i, key(0)) for i in range(6)]
    assert all(same(documents[0], documents[i]) for i in (1, 4, 5)) and same(documents[2], documents[3])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "has no row"),
        (b"\n \n", "has no row"),
        (b'[\n{"image": "a.png"}]', "is one list, not JSON lines"),
        (b"\x1f\x8b" + bytes(20), "is compressed"),
        (b"x" * 2000, "is too long"),
    ],
)
def test_files_that_are_no_rows(tmp_path, monkeypatch, content, match):
    monkeypatch.setattr(folder, "LONGEST", 1000)
    with pytest.raises(CorpusError, match=match):
        prepared(tmp_path, content)
    assert not (tmp_path / "rows.shards.idx").exists()


def test_a_page_is_kept_without_images_that_are_missing(tmp_path):
    """An image of the same name in another place is not taken for it."""
    page = {"texts": ["x", None, None, "y"], "images": [None, "sub/a.png", "a.png", None]}
    with pytest.raises(CorpusError, match=r"no image 'sub/a\.png'"):
        prepared(tmp_path, page, template="interleaved")
    source = prepared(tmp_path, page, template={"kind": "interleaved", "missing_images": True}, restart=True)
    document = source.encoded(0, key(0))
    assert len(document.images) == 1 and len(document.tokens) == 1 + 4 + 1 + 1
    (tmp_path / "images/sub").mkdir()
    shutil.copy(tmp_path / "images/a.png", tmp_path / "images/sub/a.png")
    with pytest.raises(CorpusError, match=r"is not as long as its index says"):
        source.encoded(0, key(0))


CHANGES = {
    "other pixels in as many bytes": ("is not the indexed one", lambda d: swap(d / "images/a.png")),
    "another size": (
        "is not as long as its index says|not the indexed",
        lambda d: shutil.copy(d / "c.png", d / "images/a.png"),
    ),
    "deleted": ("has no image 'a.png'", lambda d: (d / "images/a.png").unlink()),
    "another row": ("is not the indexed one", lambda d: edit(d / "rows.jsonl", b"good", b"evil")),
    "a damaged row": ("is not a row of JSON", lambda d: edit(d / "rows.jsonl", b'"text"', b"'text'")),
}


def swap(path: Path) -> None:
    """Another image of the same size and bytes."""
    content = path.read_bytes()
    seeds = (file(picture(seed=seed)) for seed in range(5, 1000))
    path.write_bytes(next(other for other in seeds if len(other) == len(content) and other != content))


def edit(path: Path, old: bytes, new: bytes) -> None:
    assert path.read_bytes().count(old)
    path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_since_is_refused_or_masked(tmp_path, what):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/other.png").write_bytes(file(picture(seed=2)))
    source = prepared(tmp_path, b"\n", GOOD, {"image": "other.png", "text": "x"})
    (tmp_path / "c.png").write_bytes(file(picture(40, 90, seed=8)))
    match, change = CHANGES[what]
    change(tmp_path)
    with pytest.raises(CorpusError, match=match) as error:
        source.encoded(0, key(0))
    assert f"{tmp_path}/rows.jsonl:2: " in str(error.value)
    document = ShardSource(source.index, policy="mask").encoded(0, key(0))
    assert document.fault.policy == "mask" and not document.trained.any() and len(document.tokens) == 9
    assert str(tmp_path) not in document.fault.reason


def test_a_folder_that_goes_away_while_it_is_measured(tmp_path, monkeypatch):
    real = Folder.record

    def record(self, *args, **options):
        if (tmp_path / "images").exists() and len(seen) == 3:
            (tmp_path / "images").rename(tmp_path / "gone")
        seen.append(args)
        return real(self, *args, **options)

    seen: list[object] = []
    monkeypatch.setattr(Folder, "record", record)
    with pytest.raises(CorpusError, match="images is missing"):
        prepared(tmp_path, *[GOOD] * 9, invalid="drop")
    assert len(seen) == 4


def test_what_no_policy_covers(tmp_path):
    source = prepared(tmp_path, GOOD)
    (tmp_path / "images").rename(tmp_path / "gone")
    with pytest.raises(CorpusError, match="images is missing"):
        ShardSource(source.index, policy="mask")
    source.policy = "mask"
    with pytest.raises(CorpusError, match="images is missing"):
        source.encoded(0, key(0))
    with open(tmp_path / "rows.jsonl", "ab") as file:
        file.write(b'{"image": "a.png", "text": "more"}\n')
    with pytest.raises(CorpusError, match=r"rows\.jsonl is not the"):
        ShardSource(source.index, policy="mask")


@pytest.mark.parametrize("where", ["empty", "deeper", "url", "pages"])
def test_another_folder_is_refused_whatever_the_policy(both, tmp_path, where):
    pytest.importorskip("aiohttp")
    with serve(tmp_path) as far:
        (tmp_path / "none").mkdir()
        folder = {"deeper": str(tmp_path / "images/a"), "url": f"{far.url}/typo"}.get(where, str(tmp_path / "none"))
        source = ShardSource(tmp_path / "lines.shards.idx", folder=folder, policy="mask")
        for i in (1, 2):
            with pytest.raises(CorpusError, match="has none of the images that the rows name"):
                source.encoded(i, key(i))
        assert source.encoded(4, key(4)).fault is None  # a row of text
        rows, template = [tmp_path / "0.jsonl"], CHAT
        if where == "pages":
            template = {"kind": "interleaved", "missing_images": True}
            rows = [write_rows(tmp_path / "pages.jsonl", [page(["x.png"], i) for i in range(6)])]
        for invalid in ("mask", "drop"):
            with pytest.raises(CorpusError, match="has none of the images that the rows name"):
                prepare_shards(rows, tmp_path / "out", encoder(template=template), folder=folder, invalid=invalid)
            assert not list(tmp_path.glob("out.*"))


@pytest.mark.parametrize("far", [False, True])
def test_one_image_that_is_there_makes_it_the_folder(both, tmp_path, far):
    """Those that are missing are asked for first; the others are looked for once."""
    pytest.importorskip("aiohttp")
    lines = both[0]
    shown = [i for i in range(40) if lines.index.column("num_images")[i]]
    keep = lines.record(shown[-1]).images[0]
    rows = "".join((tmp_path / f"{k}.jsonl").read_text() for k in range(2)).splitlines()
    for path in (tmp_path / "images").glob("*/*"):
        if str(path.relative_to(tmp_path / "images")) != keep:
            path.unlink()
    with serve(tmp_path / "images") as server:
        source = ShardSource(lines.index, folder=server.url if far else None, policy="mask")
        lost = [i for i in shown[:4] if keep not in rows[i]]
        faults = [source.encoded(i, key(i)).fault for i in lost]
        asked = len(server.requests)
        assert all(fault.policy == "mask" and "has no image" in fault.reason for fault in faults)
        source.encoded(lost[0], key(0))
        assert len(server.requests) - asked == 2 * far  # asked again, past the cache


def test_prepare_of_rows_without_images_needs_none(tmp_path):
    source = prepared(tmp_path, {"text": "x"}, b"[]\n", template={**CAPTION, "text_only": True}, invalid="drop")
    assert source.lengths(np.arange(2)).tolist() == [2, 0]


def command(tmp_path: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "megaresume", "prepare", str(tmp_path / "rows.jsonl"), "--image-folder"),
        *(str(tmp_path / "images"), "--output", str(tmp_path / "out"), "--processor", json.dumps(OPTIONS["processor"])),
        *("--template", json.dumps(CHAT), *more),
    ]


@pytest.mark.process
def test_killed_and_run_again_gives_the_same_bytes(tmp_path):
    rows = chats(write_images(tmp_path / "images"), 40)
    for row in rows:
        row["padding"] = "x" * 100_000
    write_rows(tmp_path / "rows.jsonl", rows * 5)
    made = encoder(template=CHAT)
    whole = prepare_shards([tmp_path / "rows.jsonl"], tmp_path / "whole", made, folder=str(tmp_path / "images"))
    summary = killed_and_run_again(partial(command, tmp_path), tmp_path / "out.shards.idx")
    assert summary["resumed_shards"] >= 2 and summary["records"] == whole.records == 200
    assert (tmp_path / "out.shards.idx").read_bytes() == (tmp_path / "whole.shards.idx").read_bytes()


READ = """
import json, sys
from pathlib import Path
from tests.data.test_image_folder import loader

directory, start, workers = sys.argv[1:]
for batch in loader(Path(directory), "lines", start=int(start), stop=80, num_workers=int(workers)):
    samples, tokens = batch["samples"].tolist(), batch["tokens"].tolist()
    print(json.dumps([samples, tokens, float(batch["pixel_values"].sum())]), flush=True)
"""


@pytest.mark.process
@release(
    "three starts of a reader",
    "`::test_batches_are_those_of_tar_shards`, `::test_in_workers_too`",
)
def test_killed_in_training_and_resumed(both, tmp_path):
    expected = [
        [batch["samples"].tolist(), batch["tokens"].tolist(), float(batch["pixel_values"].sum())]
        for batch in loader(tmp_path, "tar", stop=80)
    ]
    got, workers = [], [0, 2, 1]
    for k, num_workers in enumerate(workers):
        words = [sys.executable, "-c", READ, str(tmp_path), str(2 * len(got)), str(num_workers)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                got.append(json.loads(line))
                if k < len(workers) - 1 and not len(got) % 10:
                    process.kill()
                    break
    assert got == expected
