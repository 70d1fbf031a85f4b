from __future__ import annotations

import json

import pytest

from megaresume.data.record_index import ShardIndex
from megaresume.program import main
from tests.data.kit import OPTIONS, captions, encoder, write_shard, write_shards

PATCHES = "{kind: patches, size: 16, patch_size: 8}"


@pytest.fixture
def there(tmp_path, monkeypatch):
    write_shards(tmp_path / "shards", [3, 2])
    (tmp_path / "text.jsonl").write_text('{"text": "a text of some words"}\n' * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_flags_and_a_file_make_the_same_index(there, capsys):
    (there / "encoder.yaml").write_text(json.dumps({**OPTIONS, "template": {"kind": "caption", "prompt": "? "}}))
    template = "{kind: caption, prompt: '? '}"
    assert (
        main(
            [
                "prepare",
                "shards/pairs-{000000..000001}.tar",
                "--output",
                "a",
                "--workers",
                "1",
                "--encoder",
                "encoder.yaml",
            ]
        )
        == 0
    )
    flags = ["--processor", PATCHES, "--template", template, "--json", "--workers", "1"]
    capsys.readouterr()
    assert main(["prepare", "shards/*.tar", "--output", "b", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["encoder"] == ShardIndex("a.shards.idx").header["encoder"]["fingerprint"]
    assert (there / "a.shards.idx").read_bytes() == (there / "b.shards.idx").read_bytes()


def test_the_summary_names_what_was_left_out(there, capsys):
    write_shard(there / "bad.tar", [*captions(2), ("x", {"png": b"", "txt": b"a"})])
    command = ["prepare", "bad.tar", "--output", "bad", "--processor", PATCHES, "--decode"]
    assert main(command) == 1
    assert main([*command, "--invalid", "mask"]) == 0
    out = capsys.readouterr().out
    assert (
        "1 records could not be measured (masked" in out and "document 2, bad.tar 'x': record 'x': png is empty" in out
    )


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (["shards/*.tar"], 2, "no image processor"),
        (["shards/*.tar", "text.jsonl", "--processor", PATCHES], 2, "shards and text"),
        (["shards/*.tar", "--processor", PATCHES, "--json-key", "a"], 2, "--json-key does not hold for tar shards"),
        (["shards/*.tar", "--processor", PATCHES, "--bad-lines", "skip"], 2, "--invalid drop leaves bad records out"),
        (["text.jsonl", "--image-folder", ".", "--part", "1/2"], 2, "not hold for JSON lines with --image-folder"),
        (["text.jsonl", "--decode"], 2, "--decode does not hold for text"),
        (["text.jsonl", "--invalid", "mask"], 2, "--invalid does not hold for text"),
        (["shards/*.tar", "--processor", "{kind"], 2, "is not YAML"),
        (["shards/*.tar", "--processor", "patch"], 1, "did you mean 'patches'"),
        (["shards/*.tar", "--processor", PATCHES, "--encoder", "encoder.yaml"], 2, "in a file and by flags"),
        (["none.tar", "--processor", PATCHES], 1, "none.tar is missing"),
        (["shards/pairs-000000.tar.gz", "--processor", PATCHES], 1, "missing"),
    ],
)
def test_errors_have_a_status_and_no_traceback(there, capsys, args, status, text):
    assert main(["prepare", *args, "--output", "out"]) == status
    err = capsys.readouterr().err
    assert text in err and "Traceback" not in err


@pytest.mark.process
def test_a_blend_of_shards_and_text_is_a_stream(there, capsys):
    assert main(["prepare", "shards/*.tar", "--output", "pairs", "--processor", PATCHES]) == 0
    assert main(["prepare", "text.jsonl", "--output", "text"]) == 0
    config = {
        "seq_length": 64,
        "packing": "best_fit",
        "sources": {"text": {"path": "text"}, "pairs": {"kind": "webdataset", "index": "pairs.shards.idx"}},
    }
    (there / "data.yaml").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["stream", "data.yaml", "--samples", "0:3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    segments = [s for sample in found["samples"] for s in sample["segments"]]
    lengths = [len(m["txt"].strip()) + 5 for _, m in captions(5)]
    pairs = [s for s in segments if s["source"] == "pairs"]
    assert len(pairs) > 2 and all(s["length"] == lengths[s["document"]] and s["offset"] == 0 for s in pairs)
    assert encoder().fingerprint == ShardIndex("pairs.shards.idx").header["encoder"]["fingerprint"]
