"""Pages longer than a document: the parts are the page, no image is cut, and every part is read by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megaresume.data.prepare.shards import join_indexes, prepare_shards
from megaresume.data.shard_source import ShardSource
from megaresume.encoding.images.document import Key, Record
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.runs.trace.documents import show
from megaresume.stream.errors import ConfigError, CorpusError
from tests.data.kit import key, same, write_shard
from tests.encoding.images.kit import KEY, file, picture

IMAGES = {f"{i}.png": file(picture(28 * (1 + i % 3), 28, seed=i)) for i in range(6)}
#: tokens are bytes; an image of 28 x 28 is 4 tokens of 14 x 14, with < and > around it.
NATIVE = {"kind": "native", "merge": 1, "min_pixels": 196}


def build(split: int | None, **options: object) -> ImageTextEncoder:
    template = {"kind": "interleaved", "split": split}
    marks = {"image_start": "<", "image_end": ">"}
    return ImageTextEncoder.from_options({"processor": NATIVE, "template": template, **marks, **options})


def page(seed: int) -> dict[str, bytes]:
    """Images and texts in random order; most texts are short, some longer than a document."""
    generator = np.random.default_rng(seed)
    texts, images = [], []
    for name in [*IMAGES, *[None] * 7]:
        texts.append(None if name else "".join(chr(97 + i % 26) for i in range(int(generator.choice([3, 9, 30, 70])))))
        images.append(name)
    order = generator.permutation(len(texts))
    data = {"texts": [texts[i] for i in order], "images": [images[i] for i in order]}
    return {"json": json.dumps(data).encode(), **IMAGES}


def shown(encoder: ImageTextEncoder, texts: list[str | None], images: list[str | None]) -> list[str]:
    """Each document as text, with I for a token of an image."""
    item = _record({"json": json.dumps({"texts": texts, "images": images}).encode(), **_named(images)})
    documents = [encoder.encode(item, KEY, part) for part in range(len(encoder.measures(item)))]
    letters = {encoder.image_token_id: "I", encoder.filler: "."}
    return ["".join(letters.get(t) or chr(t) for t in document.tokens.tolist()) for document in documents]


def _record(members: dict[str, bytes]) -> Record:
    return Record(key="dir/000123", path="/data/pages.tar", members=members)


def _named(images: list[str | None]) -> dict[str, bytes]:
    return {name: IMAGES[name] for name in images if name}


def test_where_a_page_is_cut():
    lists = (["abc", None, "de", None, "f"], [None, "0.png", None, "3.png", None])
    assert shown(build(None), *lists) == ["abc<IIII>de<IIII>f."]
    assert shown(build(19), *lists) == ["abc<IIII>de<IIII>f."]
    assert shown(build(18), *lists) == ["abc<IIII>de", "<IIII>f."]
    # an image stays with its text
    assert shown(build(10), *lists) == ["abc", "<IIII>de", "<IIII>f."]
    assert shown(build(8, eod=False), *lists) == ["abc", "<IIII>de", "<IIII>f"]
    # unless both do not fit into one document
    assert shown(build(8), *lists) == ["abc", "<IIII>", "de", "<IIII>f."]
    assert shown(build(7), *lists) == ["abc", "<IIII>", "de", "<IIII>", "f."]
    assert shown(build(4), ["abcdefgh", "ij"], [None, None]) == ["abc", "def", "gh", "\nij."]
    assert shown(build(7), ["a", None], [None, "0.png"]) == ["a", "<IIII>."]
    with pytest.raises(CorpusError, match=r"0\.png does not fit into a document[\s\S]*found: +6 tokens"):
        shown(build(6), *lists)


@pytest.mark.parametrize("split", [16, 33, 64, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_the_parts_are_the_page(split, seed):
    item = _record(page(seed))
    whole, encoder = build(None).encode(item, KEY), build(split)
    measures = encoder.measures(item)
    parts = [encoder.encode(item, KEY, part) for part in range(len(measures))]
    assert [len(part.tokens) for part in parts] == [measure.tokens for measure in measures]
    assert [len(part.images) for part in parts] == [measure.num_images for measure in measures]
    assert max(measure.tokens for measure in measures) <= split and all(measure.tokens for measure in measures)
    assert np.concatenate([part.tokens for part in parts]).tolist() == whole.tokens.tolist()
    assert np.concatenate([part.trained for part in parts]).tolist() == whole.trained.tolist()
    at, images = 0, []
    for part in parts:
        images += [(at + image.offset, image.num_tokens, image.pixels) for image in part.images]
        at += len(part.tokens)
    assert [image[:2] for image in images] == [(image.offset, image.num_tokens) for image in whole.images]
    assert all(np.array_equal(mine[2], image.pixels) for mine, image in zip(images, whole.images, strict=True))
    with pytest.raises(CorpusError, match="not as long as its index says"):
        encoder.encode(item, KEY, len(parts))


def test_documents_of_an_index_are_the_parts(tmp_path):
    encoder = build(40)
    pages = [(f"{i}", page(i)) for i in range(4)]
    broken = ("broken", {"json": b"{", **IMAGES})
    write_shard(tmp_path / "a.tar", [*pages[:2], broken, pages[2]])
    write_shard(tmp_path / "b.tar", [pages[3], ("short", {"json": b'{"texts": ["a"]}'})])
    summary = prepare_shards([tmp_path / "a.tar", tmp_path / "b.tar"], tmp_path / "both", encoder, invalid="mask")
    source = ShardSource(tmp_path / "both.shards.idx", augment=[{"flip": 0.5}])
    counts = [
        len(encoder.measures(source.record(i))) for i in np.flatnonzero(_first(source)).tolist() if _whole(source, i)
    ]
    assert summary.records == 6 and summary.documents == len(source) == sum(counts) + 1 > 12
    assert summary.first_invalid[0]["document"] == sum(counts[:2]) and summary.first_invalid[0]["key"] == "broken"
    for i in range(len(source)):
        read, where = source.encoded(i, key(i)), source.describe(i)
        assert len(read.tokens) == source.length(i) <= 40
        if where["key"] == "broken":
            assert read.fault is not None
            continue
        direct = encoder.augmented([{"flip": 0.5}]).encode(source.record(i), key(i), where["part"])
        assert same(read, direct) and read.fault is None
        pictures = [(picture.member, picture.offset) for picture in show(source, key(i)).pictures]
        members = [member for member, *_ in encoder.images(source.record(i), where["part"])]
        assert pictures == [(m, image.offset) for m, image in zip(members, read.images, strict=True)]
    for name in "ab":
        prepare_shards([tmp_path / f"{name}.tar"], tmp_path / name, encoder, invalid="mask")
    joined = join_indexes([tmp_path / "a.shards.idx", tmp_path / "b.shards.idx"], tmp_path / "joined")
    assert (joined.records, joined.documents) == (summary.records, summary.documents)
    assert (tmp_path / "joined.shards.idx").read_bytes() == (tmp_path / "both.shards.idx").read_bytes()


def _first(source: ShardSource) -> list[bool]:
    return [source.part(i) == 0 for i in range(len(source))]


def _whole(source: ShardSource, i: int) -> bool:
    return source.describe(i)["key"] != "broken"


def test_a_page_that_lost_parts_is_a_fault_of_each(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("0", page(0))])
    prepare_shards([path], tmp_path / "a", build(40))
    source = ShardSource(tmp_path / "a.shards.idx", policy="truncate")
    lengths = source.lengths(np.arange(len(source))).tolist()
    short = {**page(0), "json": page(0)["json"].replace(b"texts", b"tests")}
    write_shard(path, [("0", short)])
    for i, length in enumerate(lengths):
        read = source.encoded(i, Key(seed=1, source="pairs", document=100 + i, epoch=0))
        assert len(read.tokens) == length and read.fault is not None and not read.trained.any()


def test_only_pages_are_split():
    with pytest.raises(ConfigError, match="split"):
        ImageTextEncoder.from_options({"processor": NATIVE, "template": {"kind": "chat", "split": 40}})
