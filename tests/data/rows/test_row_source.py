"""A corpus without a .bin has the documents, the order and the fingerprint of one with it, in every format."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megaresume.data.catalog import open_sources
from megaresume.data.documents import TextOptions
from megaresume.data.held_out import check_no_overlap
from megaresume.data.layout import bin_path, idx_path
from megaresume.data.prepare.chat import ChatOptions
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.record_index import places_path
from megaresume.data.row_source import RawFiles, RowSource
from megaresume.data.split import IndexedSource, open_corpus, range_of
from megaresume.encoding.text.turns import Selection
from megaresume.stream.errors import ConfigError, CorpusError, UsageError
from tests.data.rows.conftest import EOD, FORMATS, pyarrow, texts, tokenizers, write
from tests.encoding.text.families import FAMILIES, GENERATION
from tests.encoding.text.kit import reference_tokenizer, write_tokenizer

OPTIONS = {"block_bytes": 5000}


def make(directory: Path, files: tuple[str, ...], tokenizer: Path | None, count: int = 300):
    """Raw files, the corpora with and without a .bin, and what both hold."""
    raw = directory / "raw"
    raw.mkdir()
    rows = [texts(k, count) for k in range(len(files))]
    paths = [write(raw, name, some) for name, some in zip(files, rows, strict=True)]
    for output, index_only in (("full", False), ("rows", True)):
        prepare(paths, directory / output, PrepareOptions(tokenizer=tokenizer, index_only=index_only, **OPTIONS))
    expected = [[*text.encode(), 256] for some in rows for text in some if text]
    if tokenizer is not None:
        reader = tokenizers.Tokenizer.from_file(str(tokenizer))
        expected = [[*reader.encode(t).ids, reader.token_to_id(EOD)] for some in rows for t in some if t]
    return paths, expected


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_documents_of_the_bin(tmp_path, tokenizer_json, name):
    _, expected = make(tmp_path, FORMATS[name], tokenizer_json)
    full, rows = IndexedSource(tmp_path / "full"), open_corpus(tmp_path / "rows")
    assert isinstance(rows, RowSource)
    assert idx_path(tmp_path / "rows").read_bytes() == idx_path(tmp_path / "full").read_bytes()
    assert not bin_path(tmp_path / "rows").exists()
    order = np.random.default_rng(0).permutation(len(expected)).tolist()
    assert [rows.get(i).tolist() for i in order] == [expected[i] for i in order]
    assert [full.get(i).tolist() for i in order] == [expected[i] for i in order]
    assert rows.get(3).dtype == full.get(3).dtype
    assert rows.fingerprint() == full.fingerprint()
    assert rows.fingerprint(first=50) == full.fingerprint(first=50)
    again = pickle.loads(pickle.dumps(rows))
    assert again.read(7, 2, 3).tolist() == expected[7][2:5]


def test_texts_by_file_line_and_paragraph(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.txt").write_bytes("\ufeffone\r\ntwo\r\n\r\n\r\nthrée\n  \nfour".encode())
    (raw / "b.txt").write_bytes("\n\n\ufefffive\n\nsix\n".encode())
    expected = {
        "file": ["one\r\ntwo\r\n\r\n\r\nthrée\n  \nfour", "\n\n\ufefffive\n\nsix\n"],
        "line": ["one", "two", "thrée", "four", "\ufefffive", "six"],
        "paragraph": ["one\ntwo", "thrée", "four", "\ufefffive", "six"],
    }
    for unit, documents in expected.items():
        options = PrepareOptions(text_unit=unit, index_only=True, append_eod=False, block_bytes=5, overwrite=True)
        prepare([raw], tmp_path / "out", options)
        rows = open_corpus(tmp_path / "out")
        assert [bytes(rows.get(i).astype(np.uint8)).decode() for i in range(len(rows))] == documents


def test_rows_that_were_left_out_stay_out(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\nno\n{"text": ""}\n\n{"text": "\\ud800"}\n{"text": "\\ud800b"}\n')
    for invalid, documents in (("replace", ["a", "\ufffd", "\ufffdb"]), ("skip", ["a"])):
        text = TextOptions(bad_lines="skip", invalid=invalid)
        options = PrepareOptions(text=text, index_only=True, append_eod=False, overwrite=True)
        prepare([tmp_path / "in.jsonl"], tmp_path / "out", options)
        rows = open_corpus(tmp_path / "out")
        assert [bytes(rows.get(i).astype(np.uint8)).decode() for i in range(len(rows))] == documents


def test_a_broken_row_group_is_left_out_as_in_a_bin(tmp_path):
    path = write(tmp_path, "a.parquet", [f"row {i} " + "x" * 50 for i in range(210)])
    data = bytearray(path.read_bytes())
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(1)
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 40] = b"\xff" * 40
    path.write_bytes(data)
    for output, index_only in (("full", False), ("rows", True)):
        options = PrepareOptions(text=TextOptions(bad_lines="skip"), index_only=index_only)
        assert prepare([path], tmp_path / output, options).bad_lines == 70
    full, rows = IndexedSource(tmp_path / "full"), open_corpus(tmp_path / "rows")
    assert len(rows) == 140 and rows.fingerprint() == full.fingerprint()
    assert [rows.get(i).tolist() for i in range(140)] == [full.get(i).tolist() for i in range(140)]


def test_conversations_have_the_tokens_and_masks_of_the_bin(tmp_path):
    pytest.importorskip("jinja2")
    family = FAMILIES["chatml"]
    tokenizer = write_tokenizer(tmp_path / "tokenizer", family, template=GENERATION["chatml"])
    rows_of = [
        [{"role": "user", "content": f"How are you, {i}?"}, {"role": "assistant", "content": "the fox " * i}] * 2
        for i in range(1, 60)
    ]
    path = tmp_path / "in.parquet"
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"messages": rows_of, "other": ["x"] * 59}), path, row_group_size=7)
    chat = ChatOptions(max_tokens=80, too_long="turn", selection=Selection(turns="last"))
    for output, index_only in (("full", False), ("rows", True)):
        prepare([path], tmp_path / output, PrepareOptions(tokenizer=tokenizer, chat=chat, index_only=index_only))
    full, rows = IndexedSource(tmp_path / "full"), open_corpus(tmp_path / "rows")
    assert rows.fingerprint() == full.fingerprint() and rows.fingerprint().trained is not None
    ids = np.arange(len(full))
    assert len(full) > 20 and int(full.lengths(ids).max()) <= 80
    ours, theirs = rows.trained_spans(ids), full.trained_spans(ids)
    reference = reference_tokenizer(tokenizer)
    for i in ids.tolist():
        assert rows.get(i).tolist() == full.get(i).tolist()
        mask = ours.mask(i, 0, rows.length(i))
        assert mask.tolist() == theirs.mask(i, 0, full.length(i)).tolist() and mask.any()
    shown = {"add_special_tokens": False, "tokenize": True, "return_dict": False}
    assert rows.get(0).tolist() == list(reference.apply_chat_template(rows_of[0], **shown))


def test_parts_of_several_machines_are_the_same_bytes(tmp_path):
    paths, _ = make(tmp_path, FORMATS["jsonl"], None, count=600)
    for number in (2, 1, 3):
        prepare(paths, tmp_path / "merged", PrepareOptions(index_only=True, part=(number, 3), **OPTIONS))
    assert not places_path(tmp_path / "merged").exists()
    prepare(paths, tmp_path / "merged", PrepareOptions(index_only=True, **OPTIONS))
    for path in (places_path, idx_path):
        assert path(tmp_path / "merged").read_bytes() == path(tmp_path / "rows").read_bytes()


def test_a_bin_takes_the_place_of_places_and_the_other_way_round(tmp_path):
    paths, expected = make(tmp_path, FORMATS["jsonl"], None)
    with pytest.raises(UsageError, match=r"rows\.idx exists"):
        prepare(paths, tmp_path / "rows", PrepareOptions())
    prepare(paths, tmp_path / "rows", PrepareOptions(overwrite=True))
    assert not places_path(tmp_path / "rows").exists()
    assert isinstance(open_corpus(tmp_path / "rows"), IndexedSource)
    prepare(paths, tmp_path / "rows", PrepareOptions(overwrite=True, index_only=True))
    assert not bin_path(tmp_path / "rows").exists()
    assert open_corpus(tmp_path / "rows").get(5).tolist() == expected[5]


def test_raw_files_that_were_moved(tmp_path):
    _, expected = make(tmp_path, FORMATS["mixed"], None)
    (tmp_path / "raw").rename(tmp_path / "elsewhere")
    with pytest.raises(CorpusError, match=r"raw/a\.parquet is missing[\s\S]*inputs: DIRECTORY"):
        open_corpus(tmp_path / "rows").get(0)
    specs = {"text": {"path": "rows", "inputs": "elsewhere"}}
    rows = open_sources(specs, base_dir=tmp_path)["text"]
    assert [rows.get(i).tolist() for i in range(len(rows))] == expected
    assert pickle.loads(pickle.dumps(rows)).get(1).tolist() == expected[1]


def test_a_document_is_made_once_for_its_neighbouring_pieces(tmp_path, monkeypatch):
    _, expected = make(tmp_path, FORMATS["parquet"], None)
    rows = open_corpus(tmp_path / "rows")
    calls = []
    real = RawFiles.read
    monkeypatch.setattr(RawFiles, "read", lambda self, place, **more: calls.append(place) or real(self, place, **more))
    i = max(range(len(expected)), key=lambda i: len(expected[i]))
    for first in range(0, len(expected[i]) - 7, 7):
        assert rows.read(i, first, 7).tolist() == expected[i][first : first + 7]
    assert len(calls) == 1
    with pytest.raises(IndexError):
        rows.read(i, len(expected[i]) - 1, 2)


def test_validation_on_rows_that_are_trained_on_is_refused(tmp_path):
    paths, _ = make(tmp_path, FORMATS["jsonl"], None)
    prepare(paths[1:], tmp_path / "other", PrepareOptions(index_only=True))
    (tmp_path / "new").mkdir()
    prepare([write(tmp_path / "new", "c.jsonl", texts(9, 20))], tmp_path / "apart", PrepareOptions(index_only=True))
    rows, other, apart = (open_corpus(tmp_path / name) for name in ("rows", "other", "apart"))
    for held_out in (rows, other):
        with pytest.raises(ConfigError, match="holds documents that are trained on"):
            check_no_overlap({"web": rows}, {"web": held_out}, "held")
    check_no_overlap({"web": rows}, {"web": apart}, "held")
    check_no_overlap({"web": range_of(rows, 0, 90)}, {"web": range_of(rows, 90, 100)}, "held")
    # The last documents of the same files in another order are others.
    prepare(paths[::-1], tmp_path / "turned", PrepareOptions(index_only=True))
    prepare(paths, tmp_path / "wide", PrepareOptions(index_only=True, dtype="int32"))
    turned, same = (open_corpus(tmp_path / name) for name in ("turned", "wide"))
    check_no_overlap({"web": range_of(rows, 0, 90)}, {"web": range_of(same, 90, 100)}, "held")
    with pytest.raises(ConfigError, match="holds documents that are trained on"):
        check_no_overlap({"web": range_of(rows, 0, 90)}, {"web": range_of(turned, 90, 100)}, "held")
