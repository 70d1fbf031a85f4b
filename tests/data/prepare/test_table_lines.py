from __future__ import annotations

import json
import sys

import pytest

from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.stream.errors import CorpusError, SetupError, UsageError

pyarrow = pytest.importorskip("pyarrow")
TEXTS = [f"text {i} ünïcödé " + "x" * (i * 37 % 200) for i in range(3000)]
OPTIONS = PrepareOptions(block_bytes=20_000)


def write_arrow(path, texts, kind="stream", rows=700, **more):
    """Batches of so many rows; ``stream`` is what Hugging Face's datasets write, ``file`` has an index at its end."""
    table = pyarrow.table({"text": texts, "image": [b"\x00"] * len(texts), **more})
    new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table, max_chunksize=rows)
    return path


def write_saved(directory, *parts):
    """As ``Dataset.save_to_disk`` does: one file for each part."""
    directory.mkdir(parents=True)
    names = [f"data-{k:05d}-of-{len(parts):05d}.arrow" for k in range(len(parts))]
    for name, texts in zip(names, parts, strict=True):
        write_arrow(directory / name, texts)
    (directory / "dataset_info.json").write_text('{\n "features": {}\n}')
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}, indent=1))
    return directory


@pytest.fixture
def expected(tmp_path):
    """Bytes of the corpus of the same texts as JSON lines."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return made(path, tmp_path / "expected")


def made(path, output):
    prepare([path], output, OPTIONS)
    return [output.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_rows_of_an_arrow_file_are_documents(tmp_path, expected, kind):
    assert made(write_arrow(tmp_path / "a.arrow", TEXTS, kind), tmp_path / "out") == expected


def test_a_saved_dataset_is_its_files_in_their_order(tmp_path, expected):
    assert made(write_saved(tmp_path / "saved", TEXTS[:1000], TEXTS[1000:]), tmp_path / "out") == expected


def test_several_datasets_are_refused_and_one_of_them_named(tmp_path):
    write_saved(tmp_path / "both/train", TEXTS[:10])
    (tmp_path / "both/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"train, test[\s\S]*both/train"):
        made(tmp_path / "both", tmp_path / "out")


def test_a_saved_dataset_that_is_not_whole_is_refused(tmp_path):
    saved = write_saved(tmp_path / "saved", TEXTS[:10], TEXTS[10:20])
    (saved / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(CorpusError, match="without data-00001-of-00002"):
        made(saved, tmp_path / "out")
    other = write_saved(tmp_path / "other", TEXTS[:10])
    state = json.loads((other / "state.json").read_text()) | {"_indices_files": [{"filename": "indices.arrow"}]}
    (other / "state.json").write_text(json.dumps(state))
    with pytest.raises(CorpusError, match="selected and not written"):
        made(other, tmp_path / "out")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_file_that_was_cut_anywhere_is_refused(tmp_path, kind):
    whole = write_arrow(tmp_path / "whole.arrow", TEXTS[:40], kind, rows=10).read_bytes()
    cut = tmp_path / "cut.arrow"
    for size in [0, 5, *range(8, len(whole), 61), len(whole) - 8, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises((CorpusError, UsageError)):
            made(cut, tmp_path / "out")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_two_files_in_one_are_refused(tmp_path, kind):
    one = write_arrow(tmp_path / "one.arrow", TEXTS[:40], kind).read_bytes()
    (tmp_path / "two.arrow").write_bytes(2 * one)
    with pytest.raises(CorpusError, match="something follows its end"):
        made(tmp_path / "two.arrow", tmp_path / "out")


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_columns_that_nobody_asked_for_stop_nothing(tmp_path, expected, kind):
    table = pyarrow.table(
        {"text": TEXTS, "at": pyarrow.array(range(len(TEXTS)), pyarrow.timestamp("ns")), "raw": [b"x"] * len(TEXTS)}
    )
    path = tmp_path / f"in.{kind}"
    if kind == "arrow":
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    assert made(path, tmp_path / "out") == expected


def test_columns_of_the_same_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(TEXTS)] * 2, ["text", "text"])
    with pyarrow.ipc.new_stream(str(tmp_path / "in.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorpusError, match="two columns have the same name"):
        made(tmp_path / "in.arrow", tmp_path / "out")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    whole = write_arrow(tmp_path / "a.arrow", TEXTS[:10]).read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole.replace("ünïcödé".encode(), b"\xff" * len("ünïcödé".encode()), 1))
    with pytest.raises(CorpusError, match=r"a\.arrow is damaged"):
        made(tmp_path / "a.arrow", tmp_path / "out")


def test_missing_pyarrow(tmp_path, monkeypatch):
    path = write_arrow(tmp_path / "a.arrow", TEXTS[:10])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match="'pyarrow' is missing"):
        made(path, tmp_path / "out")
