from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.data.documents import TextOptions
from megaresume.data.prepare.blocks import Position
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.prepare.encode import PartFiles, merge_parts
from megaresume.data.record_index import RowIndex
from megaresume.data.split import IndexedSource, open_corpus
from megaresume.encoding.text.tokenizers import load_tokenizer
from megaresume.stream.errors import CorpusError, SetupError, UsageError


def write_jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def contents(prefix: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}.*") if path.is_file()}


@pytest.fixture
def texts():
    rng = np.random.default_rng(0)
    return ["".join(map(chr, rng.integers(32, 700, rng.integers(0, 300)))) for _ in range(500)]


@pytest.fixture
def source(tmp_path, texts):
    return write_jsonl(tmp_path / "in.jsonl", texts)


def in_megatron(prefix: Path) -> list[list[int]]:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    dataset = indexed.IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("append_eod", [False, True])
def test_megatron_opens_it_and_reads_every_document(
    source, texts, tmp_path, tokenizer_json, with_tokenizer, append_eod
):
    path = tokenizer_json if with_tokenizer else None
    options = PrepareOptions(tokenizer=path, append_eod=append_eod, block_bytes=5000)
    summary = prepare([source], tmp_path / "out", options)
    tokenizer = load_tokenizer(path)
    eod = [tokenizer.eod] if append_eod else []
    expected = [[*tokens.tolist(), *eod] for tokens in tokenizer.encode_batch(texts) if len(tokens)]
    assert in_megatron(tmp_path / "out") == expected
    opened = IndexedSource(tmp_path / "out")
    assert [opened.get(i).tolist() for i in range(len(opened))] == expected
    assert [tokenizer.decode(opened.get(i)) for i in range(len(opened))] == [t for t in texts if t]
    assert opened.dtype == np.uint16
    assert (summary.documents, summary.tokens) == (len(expected), sum(map(len, expected)))
    assert summary.empty == texts.count("")
    assert summary.text_bytes == sum(len(t.encode()) for t in texts)
    assert summary.blocks > 10
    assert opened.fingerprint().tokenizer == tokenizer.fingerprint()
    assert opened.tokenizer["append_eod"] is append_eod
    names = {"in.jsonl", "out.bin", "out.idx", "out.megaresume.json"}
    assert {p.name for p in tmp_path.iterdir()} == names


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), block_bytes=st.integers(1, 300))
def test_any_text_round_trips(texts, block_bytes):
    with tempfile.TemporaryDirectory() as directory:
        path = write_jsonl(Path(directory, "in.jsonl"), texts)
        if not any(texts):
            with pytest.raises(CorpusError, match="the input has no document"):
                prepare([path], Path(directory, "out"), PrepareOptions())
            return
        prepare([path], Path(directory, "out"), PrepareOptions(block_bytes=block_bytes))
        opened = IndexedSource(Path(directory, "out"))
        decode = load_tokenizer(None).decode
        assert [decode(opened.get(i)) for i in range(len(opened))] == [t for t in texts if t]


@pytest.mark.process
def test_result_does_not_depend_on_workers_or_blocks(source, tmp_path, tokenizer_json):
    results = []
    for i, (workers, block_bytes) in enumerate([(1, None), (1, 1000), (2, 3000), (3, 20_000)]):
        (tmp_path / str(i)).mkdir()
        prefix = tmp_path / str(i) / "out"
        options = PrepareOptions(tokenizer=tokenizer_json, workers=workers, block_bytes=block_bytes)
        prepare([source], prefix, options)
        results.append(contents(prefix))
    assert set(results[0]) == {"out.bin", "out.idx", "out.megaresume.json"}
    assert all(result == results[0] for result in results[1:])


class Stop(Exception):
    pass


def stop_after(monkeypatch, blocks: int) -> None:
    """The process ends without cleaning up after so many blocks."""
    real, count = PartFiles.write_part, 0

    def write(self, index, *args, **kwargs):
        nonlocal count
        if count == blocks:
            raise Stop
        count += 1
        return real(self, index, *args, **kwargs)

    monkeypatch.setattr(PartFiles, "write_part", write)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_goes_on_where_it_stopped(source, tmp_path, monkeypatch, after):
    (tmp_path / "whole").mkdir()
    options = PrepareOptions(block_bytes=5000)
    prepare([source], tmp_path / "whole" / "out", options)
    with monkeypatch.context() as patch:
        stop_after(patch, after)
        with pytest.raises(Stop):
            prepare([source], tmp_path / "out", options)
    assert not list(tmp_path.glob("out.idx"))
    summary = prepare([source], tmp_path / "out", options)
    assert summary.resumed_blocks == after
    assert contents(tmp_path / "out") == contents(tmp_path / "whole" / "out")


def test_gaps_between_finished_blocks_are_filled(source, tmp_path, monkeypatch):
    """Workers finish in any order."""
    options = PrepareOptions(block_bytes=5000)
    prepare([source], tmp_path / "a", options)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(Stop):
            prepare([source], tmp_path / "out", options)
    PartFiles(tmp_path / "out").path("part-00000002").unlink()
    path = PartFiles(tmp_path / "out").path("part-00000004")
    path.write_bytes(path.read_bytes()[:-1])  # shorter than it says: made again
    PartFiles(tmp_path / "out").path("part-00000005").write_bytes(b"{\n")
    summary = prepare([source], tmp_path / "out", options)
    assert summary.resumed_blocks == 4
    assert IndexedSource(tmp_path / "out").fingerprint() == IndexedSource(tmp_path / "a").fingerprint()
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


@pytest.mark.parametrize("where", ["arrays", "head"])
def test_damaged_part_is_noticed_and_made_again(source, tmp_path, monkeypatch, where):
    options = PrepareOptions(block_bytes=5000)
    prepare([source], tmp_path / "a", options)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(Stop):
            prepare([source], tmp_path / "out", options)
    path = PartFiles(tmp_path / "out").path("part-00000003")
    data = bytearray(path.read_bytes())
    data[-1 if where == "arrays" else data.index(b'"documents": ') + 13] ^= 1  # another digit
    path.write_bytes(data)
    with pytest.raises(CorpusError, match="part-00000003 is damaged"):
        prepare([source], tmp_path / "out", options)
    assert not (tmp_path / "out.idx").exists()
    prepare([source], tmp_path / "out", options)
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


def test_rest_of_another_run_is_refused_with_the_differences(source, tmp_path, monkeypatch, tokenizer_json):
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stop):
            prepare([source], tmp_path / "out", PrepareOptions(block_bytes=5000))
    other = write_jsonl(tmp_path / "other.jsonl", ["x"])
    changes = [
        ([source], {"append_eod": False}, "append_eod was True, is False"),
        ([source], {"tokenizer": tokenizer_json}, "tokenizer was"),
        ([source], {"dtype": "int32"}, "dtype was 'uint16', is 'int32'"),
        ([source], {"block_bytes": 999}, "block_bytes was 5000, is 999"),
        ([source], {"text": TextOptions(json_key="body")}, "json_key was 'text', is 'body'"),
        ([source, other], {}, "other.jsonl is new"),
        ([other], {}, "in.jsonl is gone"),
    ]
    for inputs, change, text in changes:
        with pytest.raises(UsageError, match="was left by a prepare of other input") as caught:
            prepare(inputs, tmp_path / "out", PrepareOptions(**{"block_bytes": 5000, **change}))
        assert text in caught.value.found
    source.write_text(source.read_text() + '{"text": "more"}\n')
    with pytest.raises(UsageError, match="was left by a prepare of other input") as caught:
        prepare([source], tmp_path / "out", PrepareOptions(block_bytes=5000))
    assert "in.jsonl changed" in caught.value.found
    summary = prepare([source], tmp_path / "out", PrepareOptions(block_bytes=999, restart=True))
    assert summary.resumed_blocks == 0


def test_two_at_once(source, tmp_path):
    files = PartFiles(tmp_path / "out")
    with files.locked({"inputs": []}, restart=False), pytest.raises(SetupError, match="another prepare is working on"):
        prepare([source], tmp_path / "out", PrepareOptions())


@pytest.mark.parametrize("output", ["", ".", "..", "/", "a/.."])
def test_an_output_without_a_name(source, output):
    with pytest.raises(UsageError, match="--output names no corpus"):
        prepare([source], output, PrepareOptions())


def test_existing_output_is_kept_without_overwrite(source, tmp_path):
    prepare([source], tmp_path / "out", PrepareOptions())
    before = contents(tmp_path / "out")
    other = write_jsonl(tmp_path / "other.jsonl", ["x"])
    with pytest.raises(UsageError, match=r"out\.idx exists"):
        prepare([other], tmp_path / "out", PrepareOptions())
    assert contents(tmp_path / "out") == before
    prepare([other], tmp_path / "out", PrepareOptions(overwrite=True))
    assert len(IndexedSource(tmp_path / "out")) == 1
    (tmp_path / "out.idx").unlink()
    with pytest.raises(UsageError, match=r"out\.bin exists"):
        prepare([other], tmp_path / "out", PrepareOptions())


@pytest.mark.parametrize("fail_at", ["out.bin", "out.idx", "out.places"])
def test_killed_between_the_renames_leaves_no_mixed_pair(source, tmp_path, monkeypatch, fail_at):
    index_only = fail_at == "out.places"
    other = write_jsonl(tmp_path / "other.jsonl", ["an older corpus"])
    prepare([other], tmp_path / "out", PrepareOptions())
    real = os.replace

    def replace(old, new):
        if Path(new).name == fail_at:
            raise Stop
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", replace)
        with pytest.raises(Stop):
            prepare([source], tmp_path / "out", PrepareOptions(overwrite=True, index_only=index_only))
    with pytest.raises(CorpusError, match="is missing"):
        IndexedSource(tmp_path / "out")
    # The .bin that is there is of the interrupted run: no need to allow overwriting again.
    prepare([source], tmp_path / "out", PrepareOptions(index_only=index_only))
    assert len(open_corpus(tmp_path / "out")) > 400
    assert sorted(p.name for p in tmp_path.glob(".*")) == []


def test_text_files_and_directories(tmp_path):
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "b.py").write_text("print(1)\n")
    (tmp_path / "src" / "deep" / "a.py").write_text("x = 2\n\ny = 3\n")
    (tmp_path / "src" / "empty.py").write_text("")
    (tmp_path / "src" / "notes.txt").write_text("no")
    options = {"glob": "**/*.py", "append_eod": False}

    def documents(**more):
        prepare([tmp_path / "src"], tmp_path / "out", PrepareOptions(overwrite=True, **options, **more))
        opened = IndexedSource(tmp_path / "out")
        return [bytes(opened.get(i).astype(np.uint8)).decode() for i in range(len(opened))]

    assert documents() == ["print(1)\n", "x = 2\n\ny = 3\n"]
    assert documents(text_unit="line") == ["print(1)", "x = 2", "y = 3"]
    assert documents(text_unit="paragraph") == ["print(1)", "x = 2", "y = 3"]


def test_output_inside_the_directory_that_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one " * 100)
    (tmp_path / "b.txt").write_text("two " * 100)
    options = PrepareOptions(block_bytes=10, overwrite=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            prepare([tmp_path], tmp_path / "out", options)
    assert prepare([tmp_path], tmp_path / "out", options).resumed_blocks == 1
    assert prepare([tmp_path], tmp_path / "out", options).files == 2


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_line_names_file_and_line_and_keeps_what_is_finished(source, tmp_path, workers):
    lines = source.read_text().splitlines()
    good = lines[300]
    lines[300] = good[:-5]
    source.write_text("\n".join(lines))
    options = PrepareOptions(block_bytes=5000, workers=workers)
    with pytest.raises(CorpusError, match=r"in\.jsonl:301 is not JSON"):
        prepare([source], tmp_path / "out", options)
    assert not (tmp_path / "out.idx").exists()


def test_policies_for_invalid_text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"fine\nb\xffd\n")
    options = {"text_unit": "line", "overwrite": True}
    with pytest.raises(CorpusError, match=r"in\.txt:2 is not UTF-8"):
        prepare([path], tmp_path / "out", PrepareOptions(**options))
    summary = prepare([path], tmp_path / "out", PrepareOptions(text=TextOptions(invalid="skip"), **options))
    assert (summary.documents, summary.skipped) == (1, 1)
    with pytest.raises(Stop), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 0)
        prepare([path], tmp_path / "out", PrepareOptions(text=TextOptions(invalid="skip"), **options))
    with pytest.raises(UsageError, match="was left by a prepare"):  # what "skip" left out is lost for "replace"
        prepare([path], tmp_path / "out", PrepareOptions(text=TextOptions(invalid="replace"), **options))
    options["restart"] = True
    summary = prepare([path], tmp_path / "out", PrepareOptions(text=TextOptions(invalid="replace"), **options))
    assert (summary.documents, summary.skipped) == (2, 0)
    assert IndexedSource(tmp_path / "out").get(1).tolist() == [*"b\ufffdd".encode(), 256]


def test_milder_policy_after_invalid_text_goes_on(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"fine\n" * 100 + b"b\xffd\n")
    options = {"text_unit": "line", "block_bytes": 50}
    with pytest.raises(CorpusError, match="is not UTF-8"):
        prepare([path], tmp_path / "out", PrepareOptions(**options))
    summary = prepare([path], tmp_path / "out", PrepareOptions(text=TextOptions(invalid="skip"), **options))
    assert (summary.documents, summary.skipped) == (100, 1)
    assert summary.resumed_blocks == summary.blocks - 1 > 5


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_counted_and_named_and_what_was_done_is_kept(tmp_path, workers):
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": f"document {i}"}) for i in range(300)]
    bad = {250: '{"text": "cut', 260: "[1]", 270: '{"content": "x"}', 299: '{"text": 3}'}
    for number, line in bad.items():
        lines[number] = line
    path.write_text("\n".join(lines))
    options = {"block_bytes": 400, "workers": workers}
    with pytest.raises(CorpusError, match=r"in\.jsonl:251 is not JSON") as error:
        prepare([path], tmp_path / "out", PrepareOptions(**options))
    assert "--bad-lines skip" in error.value.action
    skip = TextOptions(bad_lines="skip")
    summary = prepare([path], tmp_path / "out", PrepareOptions(text=skip, **options))
    assert (summary.documents, summary.bad_lines, summary.skipped) == (296, 4, 0)
    assert summary.first_left_out == [
        f"{path}:251 is not JSON",
        f"{path}:261 is not a JSON object",
        f"{path}:271 has no key 'text'",
    ]
    assert summary.resumed_blocks > 10
    prepare([path], tmp_path / "again", PrepareOptions(text=skip, **options))
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "out.bin").read_bytes()
    # What was left out is not there for a run that would refuse it.
    with pytest.raises(Stop), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        prepare([path], tmp_path / "third", PrepareOptions(text=skip, block_bytes=400))
    with pytest.raises(UsageError, match="bad_lines was 'skip', is 'error'"):
        prepare([path], tmp_path / "third", PrepareOptions(block_bytes=400))


def test_nothing_but_bad_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"content": "x"}\n' * 3)
    with pytest.raises(CorpusError, match="the input has no document") as error:
        prepare([path], tmp_path / "out", PrepareOptions(text=TextOptions(bad_lines="skip")))
    assert f"3 left out, the first: {path}:1 has no key 'text'" in str(error.value.found)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n'])
def test_input_without_a_document(tmp_path, content):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match="the input has no document"):
        prepare([path], tmp_path / "out", PrepareOptions())
    assert not (tmp_path / "out.idx").exists()


def test_dtypes(source, tmp_path):
    for dtype in ("int32", "int64", "int16"):
        prepare([source], tmp_path / dtype, PrepareOptions(dtype=dtype))
        assert IndexedSource(tmp_path / dtype).dtype == np.dtype(dtype)
        assert in_megatron(tmp_path / dtype)[0] == IndexedSource(tmp_path / dtype).get(0).tolist()
    with pytest.raises(UsageError, match="the tokens do not fit into uint8"):
        prepare([source], tmp_path / "out", PrepareOptions(dtype="uint8"))
    with pytest.raises(UsageError, match="unknown dtype"):
        prepare([source], tmp_path / "out", PrepareOptions(dtype="float32"))


def test_tokenizer_without_an_eod(source, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    vocabulary = {"[UNK]": 0, **{chr(c): c for c in range(1, 700)}}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(path))
    with pytest.raises(UsageError, match="has no end-of-document token that we know"):
        prepare([source], tmp_path / "out", PrepareOptions(tokenizer=path))
    prepare([source], tmp_path / "out", PrepareOptions(tokenizer=path, append_eod=False))


def test_full_disk(source, tmp_path, monkeypatch):
    def write(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PartFiles, "write_part", write)
        with pytest.raises(SetupError, match="cannot be written") as caught:
            prepare([source], tmp_path / "out", PrepareOptions())
    assert "full" in caught.value.cause
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(SetupError, match="cannot be written"):
        prepare([source], tmp_path / "file" / "out", PrepareOptions())
    prepare([source], tmp_path / "out", PrepareOptions())


def test_bad_workers(source, tmp_path):
    with pytest.raises(UsageError, match="bad --workers"):
        prepare([source], tmp_path / "out", PrepareOptions(workers=0))


def test_a_document_of_more_bytes_than_int32_holds(tmp_path):
    """Where the next document begins is counted in int64, although lengths are int32; of an index alone."""
    files, length = PartFiles(tmp_path / "out"), 600_000_000
    files.directory.mkdir()
    counts = dict.fromkeys(("empty", "skipped", "bad_lines", "too_long", "shortened", "text_bytes", "raw_bytes"), 0)
    parts = {
        name: files.write_part(
            name,
            {"lengths": np.array([length], "<i4")} | {k: np.zeros(1, dtype) for k, dtype in RowIndex.COLUMNS.items()},
            end=Position(),
            places=[[0, 1]],
            first_left_out=[],
            **counts,
        )
        for name in ("part-00000000", "part-00000001")
    }
    raw = {
        "encoder": {},
        "made_with": {},
        "root": "",
        "files": [{"path": "a", "size": 1, "format": "jsonl", "unit": "jsonl"}],
    }
    merge_parts(tmp_path / "out", files, parts, "int32", {"fingerprint": "0" * 32}, lambda _: None, raw=raw)
    index = (tmp_path / "out.idx").read_bytes()
    # After the header: int32[2] lengths, int64[2] byte offsets.
    assert np.frombuffer(index, "<i8", 2, 34 + 8).tolist() == [0, 4 * length]
