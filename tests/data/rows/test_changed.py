"""What is not as it was when the index was made is refused, naming file and row."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.record_index import RowIndex, places_path
from megaresume.data.split import open_corpus
from megaresume.stream.errors import CorpusError, SetupError, UsageError
from tests.data.rows.conftest import lines, pyarrow, texts, write, write_arrow, write_parquet


def rows_of(tmp_path: Path, name: str, count: int = 200):
    path = write(tmp_path, name, texts(3, count))
    prepare([path], tmp_path / "out", PrepareOptions(index_only=True))
    return path, open_corpus(tmp_path / "out")


def changed(text: str) -> str:
    """Another text of as many bytes."""
    return text.replace("fox", "cat")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_text_that_changed_in_place(tmp_path, name):
    path, rows = rows_of(tmp_path, name)
    some = [changed(text) if k == 90 else text for k, text in enumerate(texts(3, 200))]
    assert some != texts(3, 200)
    size = path.stat().st_size
    if name == "a.jsonl":
        path.write_bytes(lines(some))
    elif name == "a.parquet":
        write_parquet(path, some)
    else:
        write_arrow(path, some)
    assert path.stat().st_size == size
    i = sum(1 for text in some[:90] if text)  # empty texts are no documents
    rows.get(i - 1)
    # Two of three lines have one end, and one has two.
    where = {"a.jsonl": r"a\.jsonl:121 ", "a.parquet": r"a\.parquet:91 ", "a.arrow": r"a\.arrow \(row 31 of"}[name]
    with pytest.raises(CorpusError, match=f"{where}.*does not give the tokens that the index has of it") as caught:
        rows.get(i)
    assert f"document {i} of" in caught.value.expected
    assert "put the file back" in caught.value.action


def test_the_line_is_the_line_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'\n{"text": "six"}\n'))
    path.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    prepare([path, tmp_path / "b.jsonl.gz"], tmp_path / "out", PrepareOptions(index_only=True))
    path.write_text('{"text": "one"}\n\n{"next": "two"}\n')
    rows = open_corpus(tmp_path / "out")
    assert bytes(rows.get(0)[:3].tolist()) == b"one"
    with pytest.raises(CorpusError, match=r"a\.jsonl:3 does not give the tokens") as caught:
        rows.get(1)
    assert "has no key 'text'" in caught.value.found
    assert not (tmp_path / "cache/unpacked").exists()
    assert bytes(rows.get(2)[:3].tolist()) == b"six"
    unpacked = next((tmp_path / "cache/unpacked").glob("b.jsonl-*"))
    unpacked.write_bytes(unpacked.read_bytes().replace(b"six", b"SIX"))
    with pytest.raises(CorpusError, match=r"b\.jsonl\.gz:2 does not give the tokens"):
        open_corpus(tmp_path / "out").get(2)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_file_that_was_cut_grew_or_went(tmp_path, name):
    path, rows = rows_of(tmp_path, name)
    whole = path.read_bytes()
    for data in (whole[:-1], whole + b"\n"):
        path.write_bytes(data)
        with pytest.raises(CorpusError, match=f"{name} changed since its index was made") as caught:
            rows.get(0)
        assert caught.value.found == f"{len(data)} bytes"
    path.unlink()
    with pytest.raises(CorpusError, match=f"{name} is missing"):
        rows.get(0)
    path.write_bytes(whole)
    assert len(rows.get(0)) == rows.length(0)


def test_a_table_with_another_schema(tmp_path):
    path, rows = rows_of(tmp_path, "a.parquet")
    size = path.stat().st_size
    write_parquet(path, texts(3, 200), column="next")
    assert path.stat().st_size == size
    with pytest.raises(CorpusError, match=r"a\.parquet:2 cannot be read") as caught:
        rows.get(0)
    assert "no column text" in caught.value.found


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_that_was_damaged(tmp_path, name):
    path, rows = rows_of(tmp_path, name)
    data = bytearray(path.read_bytes())
    data[500:1500] = bytes(1000)
    path.write_bytes(data)
    with pytest.raises(CorpusError, match=rf"{name}.* (cannot be read|does not give the tokens)"):
        for i in range(len(rows)):
            rows.get(i)


def test_a_table_whose_footer_was_damaged(tmp_path):
    path, rows = rows_of(tmp_path, "a.parquet")
    data = bytearray(path.read_bytes())
    footer = int.from_bytes(data[-8:-4], "little")
    data[-8 - footer : -8] = b"\xff" * footer
    path.write_bytes(data)
    with pytest.raises(CorpusError, match=r"a\.parquet \(row 2 of row group 0\) cannot be read") as caught:
        rows.get(0)
    assert "put the file back" in caught.value.action


def test_another_version_of_the_tokenizers_library_is_named(tmp_path, tokenizer_json, monkeypatch):
    path = write(tmp_path, "a.jsonl", texts(3, 50))
    prepare([path], tmp_path / "out", PrepareOptions(index_only=True, tokenizer=tokenizer_json))
    rows = open_corpus(tmp_path / "out")
    from megaresume.data import row_source as source
    from megaresume.encoding.text.tokenizers import HuggingFaceTokenizer

    real = HuggingFaceTokenizer.encode_batch
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_batch", lambda self, texts: [t[::-1] for t in real(self, texts)])
    monkeypatch.setattr(source, "library_versions", lambda: {"tokenizers": "9.9"})
    with pytest.raises(CorpusError, match=r"a\.jsonl:\d+ does not give the tokens") as caught:
        rows.get(5)
    assert "tokenizers" in caught.value.cause and "with 9.9 here" in caught.value.cause
    assert "install these versions" in caught.value.action


def test_the_tokenizer_is_that_of_the_index_whatever_became_of_its_file(tmp_path, tokenizer_json):
    mine = tmp_path / "tokenizer.json"
    shutil.copy(tokenizer_json, mine)
    path = write(tmp_path, "a.jsonl", texts(3, 50))
    prepare([path], tmp_path / "out", PrepareOptions(index_only=True, tokenizer=mine))
    expected = open_corpus(tmp_path / "out").get(4).tolist()
    mine.unlink()
    assert open_corpus(tmp_path / "out").get(4).tolist() == expected


def test_places_that_are_damaged_or_of_another_corpus(tmp_path):
    path, rows = rows_of(tmp_path, "a.jsonl")
    del rows
    places = places_path(tmp_path / "out")
    whole = places.read_bytes()
    bad = {
        "do not start": b"?" + whole[1:],
        "first bytes": whole[:32] + b"\x02" + whole[33:],
        "records take": whole[:-1],
        "its header": whole[:-1] + b"?",
    }
    for text, data in bad.items():
        places.write_bytes(data)
        with pytest.raises(CorpusError, match=r"out\.places is damaged") as caught:
            open_corpus(tmp_path / "out")
        assert text in caught.value.found
    places.write_bytes(whole)
    prepare([path], tmp_path / "other", PrepareOptions(index_only=True, append_eod=False, block_bytes=900))
    path.write_text('{"text": "x"}\n')
    prepare([path], tmp_path / "small", PrepareOptions(index_only=True))
    shutil.copy(places_path(tmp_path / "small"), places)
    with pytest.raises(CorpusError, match=r"out\.places is damaged"):
        open_corpus(tmp_path / "out")
    places.unlink()
    with pytest.raises(CorpusError, match=r"out\.bin is missing"):
        open_corpus(tmp_path / "out")


@pytest.mark.parametrize("column", RowIndex.COLUMNS)
def test_a_damaged_column_is_found_with_the_fingerprint(tmp_path, column):
    _, rows = rows_of(tmp_path, "a.jsonl")
    rows.fingerprint()
    places = places_path(tmp_path / "out")
    data = bytearray(places.read_bytes())
    data[RowIndex.column_places(len(rows))[column]] ^= 1
    places.write_bytes(data)
    with pytest.raises(CorpusError, match=r"out\.places is damaged") as caught:
        open_corpus(tmp_path / "out").fingerprint(recompute=True)
    assert f"column {column}" in caught.value.found


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_damaged_place_never_gives_other_tokens(tmp_path, name):
    _, rows = rows_of(tmp_path, name)
    expected = [rows.get(i).tolist() for i in range(len(rows))]
    places = places_path(tmp_path / "out")
    whole, rng = places.read_bytes(), np.random.default_rng(1)
    refused = 0
    at = RowIndex.column_places(len(rows))
    for i in rng.integers(0, len(rows), 60).tolist():
        column, dtype = list(RowIndex.COLUMNS.items())[rng.integers(len(RowIndex.COLUMNS))]
        bit = int(rng.integers(8 * dtype.itemsize))
        data = bytearray(whole)
        data[at[column] + i * dtype.itemsize + bit // 8] ^= 1 << bit % 8
        places.write_bytes(data)
        try:
            # A line may be read with the white space after it.
            assert open_corpus(tmp_path / "out").get(i).tolist() == expected[i]
        except CorpusError:
            refused += 1
    assert refused > 50
    places.write_bytes(whole)
    assert [open_corpus(tmp_path / "out").get(i).tolist() for i in (0, 5)] == [expected[0], expected[5]]


def test_dictionaries_of_arrow_are_refused_by_name(tmp_path):
    table = pyarrow.table({"text": pyarrow.array(["a", "b"]).dictionary_encode()})
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UsageError, match=r"a\.arrow has columns that are dictionaries"):
        prepare([tmp_path / "a.arrow"], tmp_path / "out", PrepareOptions(index_only=True))
    prepare([tmp_path / "a.arrow"], tmp_path / "out", PrepareOptions(restart=True))


def test_no_room_to_unpack(tmp_path, monkeypatch, cache):
    path, rows = rows_of(tmp_path, "a.jsonl.gz")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(SetupError, match=f"{path.name} cannot be unpacked") as caught:
        rows.get(0)
    assert caught.value.found == "10 bytes free" and "MEGARESUME_CACHE" in caught.value.action
    assert not list((cache / "unpacked").glob("a*"))


def test_an_index_that_was_copied_over_an_older_corpus(tmp_path):
    for name, more in (("old", {}), ("new", {"index_only": True})):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f'{{"text": "{name}"}}\n')
        (tmp_path / name).mkdir()
        prepare([path], tmp_path / name / "web", PrepareOptions(**more))
    shutil.copytree(tmp_path / "new", tmp_path / "old", dirs_exist_ok=True)
    with pytest.raises(CorpusError, match=r"old/web has two kinds of tokens") as caught:
        open_corpus(tmp_path / "old/web")
    assert caught.value.found == "web.bin and web.places"
    (tmp_path / "old/web.bin").unlink()
    assert bytes(open_corpus(tmp_path / "old/web").get(0)[:-1].tolist()) == b"new"
