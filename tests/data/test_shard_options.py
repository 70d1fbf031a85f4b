from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from megaresume.batches.open import open_stream
from megaresume.data.catalog import open_sources
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.shard_source import ShardSource
from megaresume.stream.errors import ConfigError, CorpusError, SetupError
from tests.data.kit import OPTIONS, captions, encoder, key, same, write_shard, write_shards


def opened(pairs, *, split=None, part="train", **options):
    specs = {"pairs": {"kind": "webdataset", "index": pairs.name, **options}}
    return open_sources(specs, base_dir=pairs.parent, split=split, part=part)["pairs"]


def test_the_index_alone_is_enough(pairs):
    source = opened(pairs, on_fault="mask", augment=[{"flip": 1.0}])
    assert isinstance(source, ShardSource) and len(source) == 15 and source.policy == "mask"
    assert not same(source.encoded(3, key(3)), ShardSource(pairs).encoded(3, key(3)))
    assert same(opened(pairs, index="pairs").encoded(3, key(3)), ShardSource(pairs).encoded(3, key(3)))


def test_a_split_of_documents(pairs):
    parts = [opened(pairs, split="60,20,20", part=part) for part in ("train", "valid", "test")]
    assert [len(p) for p in parts] == [9, 3, 3]
    assert [p.record(0).key for p in parts] == ["data/000000", "data/000009", "data/000012"]
    whole = ShardSource(pairs).lengths(np.arange(15)).tolist()
    assert [n for p in parts for n in p.lengths(np.arange(len(p))).tolist()] == whole


def test_shards_at_another_place_must_be_those_of_the_index(pairs, tmp_path):
    (tmp_path / "shards").rename(tmp_path / "moved")
    with pytest.raises(CorpusError, match="missing"):
        opened(pairs)
    source = opened(pairs, path="moved/pairs-{000000..000002}.tar")
    assert source.record(9).key == "data/000009"
    for path, found in (
        ("moved/pairs-{000000..000001}.tar", "2 shards"),
        (
            ["moved/pairs-000001.tar", "moved/pairs-000000.tar", "moved/pairs-000002.tar"],
            "number 0 is pairs-000001.tar",
        ),
    ):
        with pytest.raises(CorpusError, match=found):
            opened(pairs, path=path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_faults": "mask"}, "did you mean 'on_fault'"),
        ({"on_fault": "drop"}, "one of error, mask, truncate"),
        ({"too_long": "cut"}, "one of error, truncate, drop"),
        ({"too_long": "drop"}, "without max_tokens"),
        ({"max_tokens": 0}, "bad value of sources.pairs.max_tokens"),
        ({"augment": ["flap"]}, "did you mean 'flip'"),
        ({"index": None}, "has no index"),
    ],
)
def test_options_that_are_wrong(pairs, options, match):
    with pytest.raises(ConfigError, match=match):
        opened(pairs, **options)


@pytest.mark.parametrize("form", ["mapping", "file"])
def test_an_encoder_in_the_config_must_be_that_of_the_index(pairs, tmp_path, form):
    def given(options):
        if form == "mapping":
            return options
        (tmp_path / "encoder.yaml").write_text(json.dumps(options))
        return "encoder.yaml"

    assert len(opened(pairs, encoder=given(OPTIONS))) == 15
    changed = {"processor": {"kind": "patches", "size": 32, "patch_size": 8}}
    with pytest.raises(ConfigError) as error:
        opened(pairs, encoder=given(changed))
    other = encoder(**changed).fingerprint
    assert other in str(error.value) and encoder().fingerprint in str(error.value)
    assert "processor.size was 16, is 32" in str(error.value)


def test_a_blend_with_text_reads_the_documents_that_it_planned(pairs, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "some words of a text"}\n' * 30)
    prepare([tmp_path / "text.jsonl"], tmp_path / "text", PrepareOptions())
    sources = {"text": {"path": "text"}, "pairs": {"kind": "webdataset", "index": pairs.name, "weight": 2}}
    config = {"seed": 3, "seq_length": 64, "packing": "best_fit", "sources": sources}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(config))
    stream = open_stream(tmp_path / "data.yaml")
    plan = stream.plan(0, 12)
    segments = [segment for sample in range(12) for segment in plan.segments(sample)]
    images = [s for s in segments if s.source == 1]
    assert len(images) > 10 and all(s.offset == 0 and s.length == stream.sources[1].length(s.document) for s in images)
    # the state remembers where everything is, from any directory
    again = open_stream(stream.origin, base_dir="/")
    assert again.plan(0, 12).digests.tolist() == plan.digests.tolist()


def test_documents_that_were_left_out_are_passed_over(tmp_path):
    records = captions(6)
    records[2] = ("bad", {"png": b"", "txt": b"a"})
    write_shard(tmp_path / "a.tar", records)
    prepare_shards([tmp_path / "a.tar"], tmp_path / "a", encoder(), invalid="drop")
    sources = {"a": {"kind": "webdataset", "index": "a.shards.idx"}}
    stream = open_stream({"seq_length": 64, "packing": "best_fit", "sources": sources}, base_dir=tmp_path)
    plan = stream.plan(0, 8)
    drawn = {s.document for sample in range(8) for s in plan.segments(sample)}
    assert drawn == {0, 1, 3, 4, 5}


def test_opening_to_plan_builds_no_tokenizer(pairs, monkeypatch):
    from megaresume.encoding.images.encoder import ImageTextEncoder

    monkeypatch.setattr(ImageTextEncoder, "__init__", None)
    source = opened(pairs, split="60,40")
    assert len(source) == 9 and source.fingerprint().documents == 9


def test_many_shards_in_one_index(tmp_path):
    write_shards(tmp_path / "shards", [1] * 30)
    prepare_shards([tmp_path / "shards/pairs-0000{00..29}.tar"], tmp_path / "pairs", encoder())
    source = opened(tmp_path / "pairs.shards.idx")
    assert [source.record(i).key for i in range(30)] == [f"data/{i:06d}" for i in range(30)]


def test_a_missing_library_is_named(pairs, tmp_path, monkeypatch):
    import sys

    for name in ("braceexpand", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    assert opened(pairs, path="shards/*.tar").record(3).key == "data/000003"
    with pytest.raises(SetupError, match="'braceexpand' is missing"):
        opened(pairs, path="shards/pairs-{000000..000002}.tar")
    with pytest.raises(SetupError, match="'fsspec' is missing"):
        opened(pairs, path="s3://bucket/*.tar")
