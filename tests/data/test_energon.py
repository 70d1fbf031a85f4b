from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from megaresume.batches.open import open_stream
from megaresume.data.catalog import open_sources
from megaresume.data.data_config import DataConfig
from megaresume.data.energon import Fields
from megaresume.data.metadatasets import expand_metadatasets
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.shard_files import RecordError
from megaresume.encoding.images.document import Record
from megaresume.stream.errors import ConfigError, CorpusError
from tests.data.kit import captions, encoder, key, write_shard
from tests.encoding.images.kit import file, picture
from tests.encoding.images.test_pages import build, page

pytestmark = pytest.mark.process

CAPTIONING = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
    "field_map": {"image": "png", "caption": "txt"},
}


def prepared(directory: Path, shards: dict[str, list], dataset: dict = CAPTIONING, **split: list[str]) -> Path:
    """A data set as ``energon prepare`` leaves it, by its own code."""
    webdataset = pytest.importorskip("megatron.energon.flavors.webdataset.prepare")
    for name, records in shards.items():
        write_shard(directory / name, records)
    patterns = [(part, pattern) for part, found in split.items() for pattern in found]
    webdataset.WebdatasetPreparator.prepare_dataset(
        directory, list(shards), split_parts_patterns=patterns, workers=1, shuffle_seed=None
    )
    (directory / ".nv-meta/dataset.yaml").write_text(yaml.safe_dump(dataset))
    return directory


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    shards = {f"s{k}.tar": captions(4 + k, 10 * k) for k in range(4)}
    return prepared(
        tmp_path_factory.mktemp("energon") / "coco", shards, train=["s[03].tar"], val=["s1.tar"], test=["s2.tar"]
    )


@pytest.fixture
def coco(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "coco")
    prepare_shards([tmp_path / "coco"], tmp_path / "coco", encoder())
    return tmp_path / "coco"


def keys(directory: Path, part: str = "train", **options) -> list[str]:
    specs = {"pairs": {"kind": "energon", "path": str(directory), **options}}
    source = open_sources(specs, split="90,10", part=part)["pairs"]
    return [source.record(i).key for i in range(len(source))]


def names(*ranges) -> list[str]:
    return [f"data/{i:06d}" for first, count in ranges for i in range(first, first + count)]


def test_its_parts_are_those_of_its_own_split_in_its_order(coco):
    assert keys(coco) == names((0, 4), (30, 7))
    assert keys(coco, "valid") == names((10, 5))
    assert keys(coco, "test") == names((20, 6))
    assert keys(coco, "train", split_part="val") == keys(coco, "valid")


def energon_keys(directory: Path) -> list[str]:
    """Keys of the train part, read by Energon."""
    energon = pytest.importorskip("megatron.energon")
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = energon.get_val_dataset(str(directory), split_part="train", worker_config=config, batch_size=None)
    return [sample.__key__[-len("data/000000") :] for sample in energon.get_loader(dataset)]


def test_energon_itself_reads_the_same(coco):
    energon = pytest.importorskip("megatron.energon")
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = energon.get_val_dataset(str(coco), split_part="val", worker_config=config, batch_size=None)
    theirs = energon.get_loader(dataset)
    specs = {"pairs": {"kind": "energon", "path": str(coco)}}
    ours = open_sources(specs, part="valid")["pairs"]
    found = [(s.__key__, s.caption, list(s.image.shape)) for s in theirs]
    mine = []
    for i in range(len(ours)):
        shown, record = ours.describe(i), ours.record(i)
        width, height = shown["images"]["png"]
        mine.append((f"{Path(shown['shard']).name}/{record.key}", record.members["txt"].decode(), [3, height, width]))
    assert [(key.rpartition("data/")[2], *rest) for key, *rest in found] == [
        (key.rpartition("data/")[2], *rest) for key, *rest in mine
    ]
    assert len(found) == 5


def test_fingerprints_of_parts_need_no_scan(coco, monkeypatch):
    from megaresume.data.shard_source import ShardSource
    from megaresume.stream.source import hash_lengths

    specs = {"pairs": {"kind": "energon", "path": str(coco)}}
    for part in ("train", "valid"):
        source = open_sources(specs, part=part)["pairs"]
        scanned = hash_lengths(source)
        with monkeypatch.context() as patch:
            patch.setattr(ShardSource, "lengths", None)
            found = source.fingerprint()
        assert (found.documents, found.tokens, found.lengths) == (len(source), scanned.tokens, scanned.lengths)


def test_shards_and_records_that_its_split_excludes_are_left_out(made, tmp_path):
    shutil.copytree(made, tmp_path / "coco")
    path = tmp_path / "coco/.nv-meta/split.yaml"
    split = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**split, "exclude": ["s0.tar", "s3.tar/data/000032"]}))
    summary = prepare_shards([tmp_path / "coco"], tmp_path / "coco", encoder())
    assert (summary.excluded, dict(summary.parts)) == (1, {"train": 7, "val": 5, "test": 6})
    source = open_sources({"pairs": {"kind": "energon", "path": str(tmp_path / "coco")}})["pairs"]
    assert [source.length(i) == 0 for i in range(7)] == [False, False, True, False, False, False, False]
    ours = {source.record(i).key for i in range(7) if source.length(i)}
    assert ours == set(energon_keys(tmp_path / "coco"))
    path.write_text(yaml.safe_dump({**split, "exclude": ["s3.tar/2"]}))
    with pytest.raises(CorpusError, match=r"no record that split\.yaml excludes from it[\s\S]*2, which is not the key"):
        prepare_shards([tmp_path / "coco"], tmp_path / "other", encoder())


def test_a_split_or_field_map_that_was_changed_is_noticed(coco):
    path = coco / ".nv-meta/split.yaml"
    path.write_text(path.read_text().replace("s1.tar", "s2.tar"))
    with pytest.raises(CorpusError, match="is not the index of"):
        keys(coco)


def test_pages_that_are_split_stay_in_their_part(tmp_path):
    shards = {f"s{k}.tar": [(f"{k}-{i}", page(10 * k + i)) for i in range(2)] for k in range(2)}
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    pages = prepared(tmp_path / "pages", shards, crude, train=["s0.tar"], val=["s1.tar"])
    summary = prepare_shards([pages], pages, build(40))
    assert summary.records == 4 < summary.documents
    for part, k in (("train", 0), ("valid", 1)):
        found = keys(pages, part)
        assert list(dict.fromkeys(found)) == [f"{k}-0", f"{k}-1"] and len(found) > 4


def test_a_shard_that_was_written_again_after_energon_prepare_is_noticed(made, tmp_path):
    shutil.copytree(made, tmp_path / "coco")
    write_shard(tmp_path / "coco/s1.tar", captions(3))
    with pytest.raises(CorpusError, match=r"s1\.tar is not the shard that Energon has prepared[\s\S]*5 records"):
        prepare_shards([tmp_path / "coco"], tmp_path / "coco", encoder())


def records_of(members: dict[str, bytes]) -> dict[str, list]:
    return {"a.tar": [(f"r{i}", members) for i in range(2)]}


@pytest.mark.parametrize("kind", ["caption", "vqa"])
def test_half_a_surrogate_pair_is_a_fault_of_its_record(kind):
    record = Record(key="7", path="a.tar", members={"jpg": b"", "json": b'{"text": "\\ud800"}'})
    text = [["json", "text"]]
    fields = Fields(kind=kind, places={"image": [["jpg"]], "caption": text, "context": text})
    with pytest.raises(RecordError, match=r"record '7': its (caption|context) is not UTF-8"):
        fields.apply(record)


@pytest.mark.parametrize("name", ["CaptioningSample", "VQASample", "TextSample"])
def test_a_field_map_into_json(tmp_path, name):
    content = {"text": ["a cat", "no"], "q": {"de": "was?"}, "a": ["dog", "no"]}
    fields = {
        "CaptioningSample": {"image": "jpg,png", "caption": "json[text][0]"},
        "VQASample": {"image": "png", "context": "json[q][de]", "answers": "json[a]"},
        "TextSample": {"text": "json[text][1]"},
    }[name]
    dataset = {"sample_type": {"__module__": "megatron.energon", "__class__": name}, "field_map": fields}
    members = {"png": file(picture(16, 16)), "json": json.dumps(content).encode()}
    path = prepared(tmp_path / "a", records_of(members), dataset, train=[".*"])
    template = {"VQASample": {"kind": "chat"}, "TextSample": {"kind": "caption", "text_only": True}}
    prepare_shards([path], path, encoder(template=template.get(name, {"kind": "caption"})))
    source = open_sources({"a": {"kind": "energon", "path": str(path)}})["a"]
    text = source.encoder.tokenizer.decode([t for t in source.get(1) if t < 256])
    expected = {"CaptioningSample": "a cat", "TextSample": "no"}
    if name == "VQASample":
        assert "was?" in text and "dog" in text and text.index("was?") < text.index("dog") and "no" not in text
    else:
        assert text == expected[name]
    document = source.encoded(1, key(1))
    assert len(document.images) == (0 if name == "TextSample" else 1)


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        ({**CAPTIONING, "field_map": None, "sample_loader": "loader.py:load", "part_filter": ["png"]}, "sample_loader"),
        ({"sample_type": {"__module__": "mine", "__class__": "MySample"}, "field_map": {}}, r"mine\.MySample"),
        ({"sample_type": {"__module__": "megatron.energon", "__class__": "OCRSample"}, "field_map": {}}, "OCRSample"),
        ({**CAPTIONING, "field_map": {"image": "png"}}, "field map with image, caption"),
    ],
)
def test_what_needs_code_is_refused_by_name(made, tmp_path, dataset, match):
    shutil.copytree(made, tmp_path / "coco")
    (tmp_path / "coco/.nv-meta/dataset.yaml").write_text(yaml.safe_dump(dataset))
    with pytest.raises(CorpusError, match=match):
        prepare_shards([tmp_path / "coco"], tmp_path / "coco", encoder())


def test_no_data_set(tmp_path):
    (tmp_path / ".nv-meta").mkdir()
    with pytest.raises(CorpusError, match="energon prepare"):
        prepare_shards([tmp_path], tmp_path / "out", encoder())


def metadataset(path: Path, **splits) -> Path:
    path.write_text(yaml.safe_dump({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}))
    return path


def config(**more) -> dict:
    pairs = {"kind": "energon", "path": "meta.yaml", "weight": "3/10"}
    blend = {"unit": "tokens"}
    return {"seed": 1, "seq_length": 64, "packing": "best_fit", "blend": blend, "sources": {"pairs": {**pairs, **more}}}


@pytest.fixture
def several(made, tmp_path) -> Path:
    """``coco``, ``coyo`` and ``sub/coyo``, prepared, with an index beside each."""
    for name in ("coco", "coyo", "sub/coyo"):
        shutil.copytree(made, tmp_path / name)
        prepare_shards([tmp_path / name], tmp_path / name, encoder())
    return tmp_path


def weights(data: dict) -> dict[str, Fraction]:
    return {name: Fraction(str(entry["weight"])) for name, entry in data["sources"].items()}


def test_a_blend_is_several_sources_and_weights_multiply(several):
    metadataset(several / "sub/inner.yaml", train={"blend": [{"path": "coyo", "weight": 3}, {"path": "../coyo"}]})
    metadataset(
        several / "meta.yaml",
        train={
            "blend": [
                {"path": "coco", "weight": 5, "subflavors": {"a": 1}},
                {"path": "coco", "weight": 1, "split_part": "val"},
                {"path": "sub/inner.yaml", "weight": 4},
            ]
        },
    )
    data = config(on_fault="mask")
    data["sources"] = {"text": {"path": "text", "weight": 0.7}, **data["sources"]}
    data["stages"] = [{"from_samples": 10, "weights": {"text": 1, "pairs": 2}}]
    found = expand_metadatasets(data, several)
    assert weights(found) == {
        "text": Fraction("0.7"),
        "pairs/coco": Fraction(3, 20),
        "pairs/coco#2:val": Fraction(3, 100),
        "pairs/sub/coyo": Fraction(9, 100),
        "pairs/coyo": Fraction(3, 100),
    }
    assert found["sources"]["pairs/sub/coyo"] == {
        "kind": "energon", "on_fault": "mask", "path": "sub/coyo", "weight": "9/100",
    }  # fmt: skip
    assert found["sources"]["pairs/coco#2:val"]["split_part"] == "val"
    assert found["stages"][0]["weights"]["text"] == 1
    assert Fraction(found["stages"][0]["weights"]["pairs/coco"]) == 1
    (several / "data.yaml").write_text(yaml.safe_dump(config()))
    assert list(DataConfig.of(several / "data.yaml").mapping_for("train")["sources"]) == list(found["sources"])[1:]
    stream = open_stream(several / "data.yaml")
    assert [s.name for s in stream.config.sources] == list(found["sources"])[1:]
    assert [len(s) for s in stream.sources] == [11, 5, 11, 11]
    assert len(stream.plan(0, 20)) == 20
    again = open_stream(stream.origin, base_dir="/")
    assert again.plan(0, 20).digests.tolist() == stream.plan(0, 20).digests.tolist()


def test_a_metadataset_that_is_renamed_goes_on_where_it_was(several):
    blend = [{"path": "coco", "weight": 5}, {"path": "coco", "split_part": "val"}, {"path": "coyo"}]
    metadataset(several / "meta.yaml", train={"blend": blend})
    data = config()
    stream = open_stream(data, base_dir=several)
    state, expected = stream.state_at(7), stream.plan(0, 20).digests.tolist()
    for was, name in (("pairs", "both"), (["pairs", "both"], "all")):
        data["sources"] = {name: {**config()["sources"]["pairs"], "was": was}}
        renamed = open_stream(data, base_dir=several, state=state)
        assert renamed.plan(7, 20).digests.tolist() == expected[7:]
        assert [s.label for s in renamed.config.sources] == [f"{name}/{s}" for s in ("coco", "coco#2:val", "coyo")]
        state = renamed.state_at(7)


def test_what_weights_of_a_blend_count_must_be_said(several):
    metadataset(several / "meta.yaml", train={"blend": [{"path": "coco"}, {"path": "coyo"}]}, val={"path": "coco"})
    data = config()
    del data["blend"]
    (several / "data.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=r"not say what its weights count[\s\S]*add blend: \{unit: documents\}"):
        open_stream(several / "data.yaml")
    assert list(expand_metadatasets(data, several, "valid")["sources"]) == ["pairs/coco"]


def test_repetitions_are_epochs_of_each_data_set(several):
    metadataset(
        several / "meta.yaml",
        train={"blend_epochized": [{"path": "coco", "repetitions": 3}, {"path": "coyo", "split_part": "val"}]},
    )
    data = config(max_epochs=2) | {"blend": {"unit": "documents"}}
    found = expand_metadatasets(data, several)
    assert weights(found) == {"pairs/coco": Fraction(33, 38) * Fraction(3, 10), "pairs/coyo:val": Fraction(15, 380)}
    assert [entry["max_epochs"] for entry in found["sources"].values()] == [6, 2]
    # Their sizes are asked of the data sets alone, whatever the blend says of the source.
    growing = expand_metadatasets(config(append="next_epoch") | {"blend": {"unit": "documents"}}, several)
    assert weights(growing) == weights(found)
    tokens = [open_sources({"a": {"kind": "energon", "path": str(several / n)}}, part=p)["a"].fingerprint().tokens
              for n, p in (("coco", "train"), ("coyo", "valid"))]  # fmt: skip
    by_tokens = weights(expand_metadatasets(config(), several))
    assert by_tokens["pairs/coco"] / by_tokens["pairs/coyo:val"] == Fraction(3 * tokens[0], tokens[1])


def test_validation_takes_the_data_sets_by_their_sizes_as_energon_puts_them_one_after_the_other(several):
    metadataset(
        several / "meta.yaml", train={"path": "coco"}, val={"blend": [{"path": "coco", "weight": 9}, {"path": "coyo"}]}
    )
    found = expand_metadatasets(config(), several, "valid")
    assert weights(found) == {"pairs/coco": Fraction(3, 20), "pairs/coyo": Fraction(3, 20)}
    (several / "data.yaml").write_text(yaml.safe_dump(config()))
    assert [len(s) for s in open_stream(several / "data.yaml", part="valid").sources] == [5, 5]
    assert [len(s) for s in open_stream(several / "data.yaml").sources] == [11]


@pytest.mark.parametrize(
    ("train", "match"),
    [
        ({"join": [{"path": "coco"}, {"path": "coyo"}], "joiner": {}}, "join"),
        ({"blend": [{"path": "coco", "subset": {"range": ["0%", "50%"]}}]}, "subset"),
        ({"blend": [{"path": "coco", "aux": {"a": "coyo"}}]}, "aux"),
        ({"blend": [{"path": "coco", "shuffle_over_epochs_multiplier": -1}]}, "shuffle_over_epochs_multiplier: -1"),
        ({"blend": [{"path": "none"}]}, "none, which is not a directory"),
        ({"blend": []}, "a list of data sets"),
        ({"blend": [{"path": "coco", "weight": 0}]}, "all 0"),
        ({"path": "meta.yaml"}, "itself"),
        ({"blend": [{"path": "inner.yaml"}, {"path": "coco"}]}, "blend of a metadataset with blend_epochized"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(several, train, match):
    inner = {"blend_epochized": [{"path": "coco"}, {"path": "coyo"}]}
    metadataset(several / "inner.yaml", train=inner)
    metadataset(several / "meta.yaml", train=train)
    with pytest.raises(ConfigError, match=match):
        expand_metadatasets(config(), several)


def test_a_file_that_is_no_metadataset(several):
    for text, match in (
        ("sources: {}", "is not a metadataset"),
        ("[]", "is not a metadataset"),
        ("splits: {}\nsplits: {}", r"the key 'splits' occurs twice"),
    ):
        (several / "meta.yaml").write_text(text)
        with pytest.raises(ConfigError, match=match):
            expand_metadatasets(config(), several)
    (several / "meta.yaml").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_metadatasets(config(), several)


def test_prepare_makes_the_index_of_every_data_set(made, tmp_path, monkeypatch, capsys):
    from megaresume.program import main

    for name in ("coco", "coyo"):
        shutil.copytree(made, tmp_path / name)
    metadataset(tmp_path / "meta.yaml", train={"blend": [{"path": "coco"}, {"path": "coyo"}]})
    monkeypatch.chdir(tmp_path)
    flags = ["--processor", "{kind: patches, size: 16, patch_size: 8}", "--workers", "1"]
    assert main(["prepare", "meta.yaml", "--output", "indices", *flags]) == 0
    assert sorted(p.name for p in (tmp_path / "indices").iterdir()) == ["coco.shards.idx", "coyo.shards.idx"]
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(config(index="indices")))
    assert [len(s) for s in open_stream("data.yaml").sources] == [11, 11]
