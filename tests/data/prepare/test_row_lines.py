"""Arrays of JSON and CSV: the corpus that the same rows make as JSON lines, in blocks, in parts, and by an index."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaresume.data import row_lines
from megaresume.data.documents import TextOptions, documents_of
from megaresume.data.inputs import find_inputs
from megaresume.data.prepare.blocks import BlockReader, Position
from megaresume.data.prepare.chat import ChatOptions
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.split import open_corpus
from megaresume.data.streams import of_content
from megaresume.program import main
from megaresume.stream.errors import CorpusError, UsageError
from tests.encoding.text.families import FAMILIES
from tests.encoding.text.kit import write_tokenizer

TEXTS = [f'{i}: "the" {{fox}}, [jumps]\\ over\n' * (1 + i % 4) + "naïve 🦊" for i in range(60)]
ROWS = [{"text": text, "id": i, "more": {"a": [1, "]"]}} for i, text in enumerate(TEXTS)]


def write(path: Path, rows: list[Any] = ROWS, **how: Any) -> Path:
    if ".csv" in path.suffixes or ".tsv" in path.suffixes:
        text = io.StringIO()
        table = csv.writer(text, delimiter="\t" if ".tsv" in path.suffixes else ",")
        table.writerow(["id", "text"])
        table.writerows([row["id"], row["text"]] for row in rows)
        data = text.getvalue().encode()
    elif ".json" in path.suffixes:
        data = json.dumps(rows, **how).encode()
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def content(prefix: Path) -> list[list[int]]:
    source = open_corpus(prefix)
    return [source.read(i, 0, source.length(i)).tolist() for i in range(len(source))]


@given(
    st.lists(st.recursive(st.none() | st.text(), lambda t: st.lists(t) | st.dictionaries(st.text(), t)), max_size=5),
    st.sampled_from([None, 0, 2]),
    st.integers(1, 9),
)
def test_an_array_becomes_lines_byte_for_byte(rows: list[Any], indent: int | None, chunk: int) -> None:
    data = f" \r\n{json.dumps(rows, ensure_ascii=False, indent=indent)}\n".encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_lines, "CHUNK", chunk)
        lines = io.BufferedReader(row_lines.ArrayLines(io.BytesIO(data))).read()
    assert len(lines) == len(data)
    assert [json.loads(line) for line in lines.split(b"\n") if line.strip()] == rows


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.csv", "a.tsv", "a.csv.gz"])
@pytest.mark.parametrize("size", [1, 400, 10**6])
def test_blocks_restart_at_every_end(tmp_path: Path, name: str, size: int) -> None:
    files = [of_content(file) for file in find_inputs([write(tmp_path / name, indent=1)]).files]
    positions, texts = [Position()], []
    while (block := BlockReader(files, "file", size).read(positions[-1])) is not None:  # each opened anew
        positions.append(block.end)
        texts += [text for piece in block.pieces for text in documents_of(piece, TextOptions())]
    assert texts == TEXTS
    assert len(positions) > (40 if size == 1 else 1)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.csv", "a.tsv"])
def test_the_corpus_is_that_of_json_lines(tmp_path: Path, name: str) -> None:
    prepare([write(tmp_path / "a.jsonl")], tmp_path / "lines", PrepareOptions())
    expected = (tmp_path / "lines.bin").read_bytes()
    path = write(tmp_path / name, indent=1)
    prepare([path], tmp_path / "one", PrepareOptions(block_bytes=100))
    assert (tmp_path / "one.bin").read_bytes() == expected
    for part in (1, 2, 3):
        prepare([path], tmp_path / "parts", PrepareOptions(part=(part, 3), block_bytes=100))
    prepare([path], tmp_path / "parts", PrepareOptions(block_bytes=100))
    assert (tmp_path / "parts.bin").read_bytes() == expected
    if "json" not in name:
        with pytest.raises(UsageError, match=r"(?s)is CSV, whose rows cannot be read one by one.*without --index-only"):
            prepare([path], tmp_path / "places", PrepareOptions(index_only=True))
        return
    prepare([path], tmp_path / "places", PrepareOptions(index_only=True, block_bytes=100))
    assert not (tmp_path / "places.bin").exists()
    assert content(tmp_path / "places") == content(tmp_path / "lines")
    assert open_corpus(tmp_path / "places").fingerprint() == open_corpus(tmp_path / "lines").fingerprint()


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.json", '[{"text": "a"}, {"text": "b"}', "is damaged"),
        ("a.json", '[{"text": "a"}, {"text": "b]', "is damaged"),
        ("a.json", '[{"text": "a"}, {"text": b}]', r"a\.json, element 2, is not JSON"),
        ("a.json", '[{"text": "a"}, 7]', r"a\.json, element 2, is not a JSON object"),
        ("a.json", '[{"text": "a"}] {"text": "b"} 7', r"a\.json, element \d, is not"),
        ("a.csv", "id,text\n1,a\n2\n", r"a\.csv:2 is not a JSON object"),
        ("a.csv", 'id,text\n1,"a\n', "is damaged"),
        ("a.csv", "id,id\n1,a\n", "is damaged"),
        ("a.csv", "id,words\n1,a\n", r"a\.csv:1 has no key 'text'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, data: str, text: str) -> None:
    (tmp_path / name).write_text(data)
    with pytest.raises(CorpusError, match=text):
        prepare([tmp_path / name], tmp_path / "out", PrepareOptions())


def test_null_and_empty_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": None}, {"text": "a"}, {"text": ""}, {"text": "b"}])
    for index_only in (False, True):
        options = PrepareOptions(index_only=index_only, overwrite=True)
        summary = prepare([path], tmp_path / "out", options)
        assert (summary.documents, summary.empty, summary.bad_lines) == (2, 2, 0)
        assert content(tmp_path / "out") == [[97, 256], [98, 256]]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_key_in_a_key(tmp_path: Path, suffix: str) -> None:
    rows = [{"meta": {"say": {"text": text}, "n": 1}, "text": "no"} for text in ("a", "b")]
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write(path, rows)
    for index_only in (False, True):
        text = TextOptions(json_key="meta.say.text")
        prepare([path], tmp_path / "out", PrepareOptions(text=text, index_only=index_only, overwrite=True))
        assert content(tmp_path / "out") == [[97, 256], [98, 256]]
    with pytest.raises(CorpusError, match=r"has no key 'meta\.say\.words'"):
        prepare([path], tmp_path / "no", PrepareOptions(text=TextOptions(json_key="meta.say.words")))
    write(tmp_path / "b.jsonl", [{"meta.text": "a", "meta": {"text": "b"}}])
    prepare([tmp_path / "b.jsonl"], tmp_path / "b", PrepareOptions(text=TextOptions(json_key="meta.text")))
    assert content(tmp_path / "b") == [[97, 256]], "a key that is written so comes first"


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary()])
@pytest.mark.parametrize("key", [None, "words", "in.words"])
def test_bytes_that_are_text(tmp_path: Path, kind: Any, key: str | None) -> None:
    column = key or "text"
    texts = pyarrow.array([b"caf\xc3\xa9", None, b"\xff", b"b"], kind)
    if key == "in.words":
        column, texts = "in", pyarrow.StructArray.from_arrays([texts], ["words"])
    image = pyarrow.array([b"\x89PNG"] * 4)
    pyarrow.parquet.write_table(pyarrow.table({column: texts, "image": image}), tmp_path / "a.parquet")
    for index_only in (False, True):
        text = TextOptions(json_key=key, invalid="skip")
        options = PrepareOptions(text=text, index_only=index_only, overwrite=True)
        summary = prepare([tmp_path / "a.parquet"], tmp_path / "out", options)
        assert (summary.documents, summary.skipped, summary.empty) == (2, 1, 1)
        assert [bytes(tokens[:-1]) for tokens in content(tmp_path / "out")] == [b"caf\xc3\xa9", b"b"]
    assert np.issubdtype(open_corpus(tmp_path / "out").dtype, np.integer)


def test_the_usual_file_of_sharegpt(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", FAMILIES["chatml"])
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = [{"id": i, "conversations": turns * i} for i in range(1, 9)]
    for name, how in (("a.jsonl", {}), ("a.json", {"indent": 2})):
        write(tmp_path / name, rows, **how)
        options = PrepareOptions(tokenizer=tokenizer, chat=ChatOptions())
        assert prepare([tmp_path / name], tmp_path / name, options).documents == 8
    for suffix in ("bin", "idx", "spans"):
        assert (tmp_path / f"a.json.{suffix}").read_bytes() == (tmp_path / f"a.jsonl.{suffix}").read_bytes()


def test_patterns_in_quotes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, row in (("b1", ROWS[1]), ("a2", ROWS[2]), ("a1", ROWS[0]), ("[x]", ROWS[3])):
        write(tmp_path / f"{name}.jsonl", [row])
    for pattern in ("a?.jsonl", "a*.jsonl", "a{1,2}.jsonl", "a[12].jsonl"):
        assert main(["prepare", str(tmp_path / pattern), "--output", str(tmp_path / "out"), "--overwrite"]) == 0
        assert [bytes(tokens[:-1]).decode() for tokens in content(tmp_path / "out")] == [TEXTS[0], TEXTS[2]]
    assert main(["prepare", str(tmp_path / "[x].jsonl"), "--output", str(tmp_path / "x")]) == 0, "a name, no pattern"
    capsys.readouterr()
    assert main(["prepare", str(tmp_path / "c*.jsonl"), "--output", str(tmp_path / "c")]) != 0
    assert "c*.jsonl matches no file" in capsys.readouterr().err


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def piped(data: bytes, *words: str) -> int:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        return main(
            ["prepare", "-", "--output", str(tmp_path / "out"), "--block-bytes", "100", "--workers", "1", *words]
        )

    lines = write(tmp_path / "a.jsonl").read_bytes()
    prepare([tmp_path / "a.jsonl"], tmp_path / "lines", PrepareOptions())
    assert piped(lines + b"no\n", "--format", "jsonl") == 1
    assert piped(lines + b"no\n", "--format", "jsonl", "--bad-lines", "skip") == 0, "it goes on"
    assert "blocks from an earlier run" in capsys.readouterr().out
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "lines.bin").read_bytes()
    assert not list(tmp_path.glob("*stdin*"))
    array = write(tmp_path / "a.json", indent=1).read_bytes()
    assert piped(array, "--format", "json", "--overwrite") == 0
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "lines.bin").read_bytes()
    for words in ((), ("--format", "jsonl", "--part", "1/2"), ("--format", "jsonl", "--index-only")):
        assert piped(lines, "--overwrite", *words) == 2
        assert "standard input" in capsys.readouterr().err
