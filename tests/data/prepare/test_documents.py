from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.data.documents import LeftOut, Piece, TextOptions, documents_of
from megaresume.data.inputs import find_inputs
from megaresume.data.prepare import blocks
from megaresume.data.prepare.blocks import BlockReader, Position
from megaresume.stream.errors import CorpusError

LINES = st.lists(st.sampled_from(["a", "bb b", "", "  ", "ü🦊", "\u2028x", "c" * 40]), max_size=40)


def all_texts(paths, unit, size, start=None):
    """Every block from a position on: (end, texts)."""
    reader = BlockReader(find_inputs(paths).files, unit, size)
    position, found = start or Position(), []
    while (block := reader.read(position)) is not None:
        found.append((block, [t for piece in block.pieces for t in documents_of(piece, TextOptions())]))
        position = block.end
    reader.close()
    return found


def write(directory, files, newline="\n"):
    paths = []
    for i, lines in enumerate(files):
        path = Path(directory, f"{i:03d}.txt")
        path.write_bytes(newline.join(lines).encode())
        paths.append(path)
    return paths


@settings(max_examples=150, deadline=None)
@given(
    files=st.lists(LINES, min_size=1, max_size=5),
    size=st.integers(1, 200),
    unit=st.sampled_from(["file", "line", "paragraph"]),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_blocks_cover_the_input_once_and_restart_at_every_end(files, size, unit, newline):
    with tempfile.TemporaryDirectory() as directory:
        paths = write(directory, files, newline)
        found = all_texts(paths, unit, size)
        texts = [t for _, block_texts in found for t in block_texts]
        if unit == "file":
            assert texts == [newline.join(lines) for lines in files]
        elif unit == "line":
            assert texts == [line for lines in files for line in lines if line.strip()]
        else:
            expected = []
            for lines in files:
                groups = [[]]
                for line in lines:
                    groups.append([]) if not line.strip() else groups[-1].append(line)
                expected += ["\n".join(group) for group in groups if group]
            assert texts == expected
        assert sum(block.raw_bytes for block, _ in found) == sum(p.stat().st_size for p in paths)
        # A rerun that starts at the end of any block sees the same blocks as the first run.
        for i, (block, _) in enumerate(found):
            assert all_texts(paths, unit, size, block.end) == found[i + 1 :]


def test_lines_are_numbered_across_blocks(tmp_path):
    (path,) = write(tmp_path, [["x"] * 10 + ["bad"] + ["x"] * 10])
    reader = BlockReader(find_inputs([path], format="jsonl").files, "file", 7)
    position = Position()
    with pytest.raises(CorpusError, match=r"000\.txt:11 is not JSON"):
        while (block := reader.read(position)) is not None:
            position = block.end
            for piece in block.pieces:
                data = piece.data.replace(b"x", b'{"text": "x"}')
                list(documents_of(Piece(name=piece.name, unit=piece.unit, line=piece.line, data=data), TextOptions()))


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_document_that_is_too_large(tmp_path, monkeypatch, unit):
    monkeypatch.setattr(blocks, "MAX_DOCUMENT_BYTES", 100)
    (path,) = write(tmp_path, [["x" * 200] if unit != "paragraph" else ["x" * 9] * 40])
    with pytest.raises(CorpusError, match="has a document that is too large"):
        all_texts([path], unit, 10)


def jsonl(*lines: bytes, line=0) -> Piece:
    return Piece(name="a.jsonl", unit="jsonl", line=line, data=b"\n".join(lines))


def test_json_lines():
    piece = jsonl(
        b"\xef\xbb\xbf" + b'{"text": "one", "n": 1}', b"", b'  {"text": "tw\\u00f6\\ud83e\\udd8a"}\r', b'{"text": ""}'
    )
    assert list(documents_of(piece, TextOptions())) == ["one", "twö🦊", ""]
    assert list(documents_of(jsonl(b'{"content": "x"}'), TextOptions(json_key="content"))) == ["x"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{", "a.jsonl:8 is not JSON"),
        (b'{"text": "cut', "a.jsonl:8 is not JSON"),
        (b"[" * 100_000, "a.jsonl:8 is not JSON"),
        (b"[1]", "a.jsonl:8 is not a JSON object"),
        (b'"text"', "a.jsonl:8 is not a JSON object"),
        (b'{"content": "x"}', "a.jsonl:8 has no key 'text'"),
        (b"{}", "a.jsonl:8 has no key 'text'"),
        (b'{"text": ["x"]}', "a.jsonl:8: 'text' is not a text"),
        (b'{"text": "\xff"}', "a.jsonl:8 is not UTF-8"),
        (b'{"text": "\\ud800"}', "a.jsonl:8 is not UTF-8"),
    ],
)
def test_bad_json_line(line, text):
    with pytest.raises(CorpusError, match=text) as caught:
        list(documents_of(jsonl(b'{"text": "fine"}', line, line=6), TextOptions()))
    assert len(str(caught.value)) < 2000
    assert caught.value.action
    if "UTF-8" not in text:
        pieces = list(
            documents_of(jsonl(b'{"text": "fine"}', line, b'{"text": "x"}', line=6), TextOptions(bad_lines="skip"))
        )
        assert pieces[::2] == ["fine", "x"] and pieces[1].option == "bad_lines" and pieces[1].why.startswith(text)
        assert "--bad-lines skip" in caught.value.action


@pytest.mark.parametrize("line", [b'{"text": "a\xffb"}', b'{"text": "a\\ud800b"}'])
def test_policies_for_text_that_is_not_utf8(line):
    assert list(documents_of(jsonl(line, b'{"text": "x"}'), TextOptions(invalid="replace"))) == ["a\ufffdb", "x"]
    assert list(documents_of(jsonl(line, b'{"text": "x"}'), TextOptions(invalid="skip"))) == [
        LeftOut("invalid", "a.jsonl:1 is not UTF-8"),
        "x",
    ]


@pytest.mark.parametrize(("unit", "line"), [("file", 3), ("line", 3), ("paragraph", 3)])
def test_line_of_a_bad_byte(unit, line):
    piece = Piece(name="a.txt", unit=unit, line=0, data=b"one\n\nth\xffree\nfour\n")
    with pytest.raises(CorpusError, match=rf"a\.txt:{line} is not UTF-8"):
        list(documents_of(piece, TextOptions()))


def test_utf16_is_named():
    piece = Piece(name="a.txt", unit="file", line=0, data="text".encode("utf-16"))
    with pytest.raises(CorpusError, match="is not UTF-8") as caught:
        list(documents_of(piece, TextOptions()))
    assert "UTF-16" in caught.value.cause


def test_json_array_over_lines_is_named():
    piece = jsonl(*json.dumps([{"text": "x"}], indent=1).encode().split(b"\n"))
    with pytest.raises(CorpusError, match="is not JSON") as caught:
        list(documents_of(piece, TextOptions()))
    assert "several lines" in caught.value.cause
