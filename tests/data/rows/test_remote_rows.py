"""Raw files of an object store: indexed there, read there, read ahead, and tried again."""

from __future__ import annotations

import os
import threading

import fsspec
import pytest

from megaresume.batches.ahead import ReadAhead, use_cache
from megaresume.data import remote, shard_files
from megaresume.data.catalog import open_sources
from megaresume.data.remote import RemoteStore
from megaresume.data.split import IndexedSource, open_corpus
from megaresume.program import main
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import CorpusError
from megaresume.stream.stream import Stream
from tests.data.far import serve
from tests.data.rows.conftest import texts, write

FILES = ("a.jsonl", "b.parquet", "c.arrow", "d-file.arrow", "e.jsonl.zst")


@pytest.fixture
def store(monkeypatch, tmp_path):
    """memory://raw with files of every format, which also lie in ``raw``."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    store = fsspec.filesystem("memory")
    if store.exists("/raw"):
        store.rm("/raw", recursive=True)
    (tmp_path / "raw").mkdir()
    for k, name in enumerate(FILES):
        store.pipe_file(f"/raw/{name}", write(tmp_path / "raw", name, texts(k, 150)).read_bytes())
    return store


def prepared(tmp_path, *inputs: str, output: str = "rows", flags: tuple[str, ...] = ("--index-only",)):
    assert main(["prepare", *inputs, "--output", str(tmp_path / output), "--workers", "1", *flags]) == 0
    return open_corpus(tmp_path / output)


def test_files_of_a_store_give_the_documents_of_the_bin(store, tmp_path):
    rows = prepared(
        tmp_path, "memory://raw/*.jsonl", "memory://raw/b*.parquet", *(f"memory://raw/{name}" for name in FILES[2:])
    )
    prepared(tmp_path, str(tmp_path / "raw"), output="full", flags=())
    full = IndexedSource(tmp_path / "full")
    assert rows.raw_files.path(0) == "memory://raw/a.jsonl"
    assert rows.fingerprint() == full.fingerprint()
    assert [rows.get(i).tolist() for i in range(len(full))] == [full.get(i).tolist() for i in range(len(full))]
    there = prepared(tmp_path, *(f"memory://raw/{name}" for name in FILES), output="there", flags=())
    assert isinstance(there, IndexedSource) and there.fingerprint() == full.fingerprint()
    # An index that was made here serves where the files are, too.
    prepared(tmp_path, str(tmp_path / "raw"), output="here")
    moved = open_sources({"web": {"path": "here", "inputs": "memory://raw/"}}, base_dir=tmp_path)["web"]
    assert moved.get(3).tolist() == full.get(3).tolist()


def test_no_thread_of_arrow_reads_from_a_store(store, tmp_path, monkeypatch):
    """It would come back into a Python that has ended, and abort the process: as its answer may take a minute."""
    rows = prepared(tmp_path, "memory://raw/b.parquet")
    real, threads = type(store).cat_file, []

    def read(self, path, **more):
        threads.append(threading.get_ident())
        return real(self, path, **more)

    monkeypatch.setattr(type(store), "cat_file", read)
    assert len({len(rows.get(k)) for k in range(len(rows))}) > 10
    assert len(threads) >= 2 and set(threads) == {threading.get_ident()}


def test_a_file_that_changed_in_the_store(store, tmp_path):
    rows = prepared(tmp_path, *(f"memory://raw/{name}" for name in FILES[:2]))
    data = store.cat_file("/raw/a.jsonl")
    store.pipe_file("/raw/a.jsonl", data[:-1])
    with pytest.raises(CorpusError, match=r"memory://raw/a\.jsonl changed since its index was made"):
        rows.get(0)
    store.pipe_file("/raw/a.jsonl", data.replace(b"fox", b"cat"))
    changed = next(k for k, text in enumerate(text for text in texts(0, 150) if text) if "fox" in text)
    with pytest.raises(CorpusError, match=r"memory://raw/a\.jsonl \(at byte \d+\) does not give the tokens"):
        rows.get(changed)
    store.rm("/raw/b.parquet")
    with pytest.raises(CorpusError, match=r"memory://raw/b\.parquet is missing"):
        rows.get(len(rows) - 1)


def test_a_read_that_fails_is_tried_again(store, tmp_path, monkeypatch):
    rows = prepared(tmp_path, "memory://raw/a.jsonl")
    real, calls = type(store).cat_file, []

    def read(self, path, **more):
        calls.append(path)
        if len(calls) % 3:
            raise OSError("slow down")
        return real(self, path, **more)

    monkeypatch.setattr(type(store), "cat_file", read)
    expected = texts(0, 150)[1].encode()
    assert bytes(rows.get(0)[:-1].astype("u1")) == expected and len(calls) == 3


def test_lines_are_read_ahead_by_the_plan_with_few_requests(store, tmp_path, monkeypatch):
    prepared(tmp_path, "memory://raw/a.jsonl")
    config = {"seed": 3, "seq_length": 256, "sources": {"web": {"path": "rows", "split": "9,1", "shuffle": "blocks"}}}
    config = StreamConfig.from_dict(config)
    stream = Stream(config, list(open_sources({"web": config.sources[0].options}, base_dir=tmp_path).values()))
    real, requests = RemoteStore.view, []
    monkeypatch.setattr(
        RemoteStore, "view", lambda self, url, at, size: requests.append(size) or real(self, url, at, size)
    )
    ahead = ReadAhead(stream, [[k] for k in range(20)], memory=1 << 20, requests=2)
    read = 0
    for sample in range(20):
        with ahead.reading([sample]):
            for _, _, document, offset, length in stream.plan(sample, sample + 1).table.tolist():
                source = stream.sources[0]
                assert len(source.read(document, offset, length)) == length
                read += 1
    ahead.close()
    assert read > 30 and len(requests) < 10


def test_what_was_kept_while_a_file_was_another_one_is_read_again(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(shard_files, "SMALL", 1)  # or the first read would bring all of them
    path = write(tmp_path, "a.jsonl", texts(0, 150))
    with serve(tmp_path) as far:
        prepared(tmp_path, f"{far.url}/a.jsonl")
        opened = [open_corpus(tmp_path / "rows") for _ in range(2)]
        use_cache(opened, tmp_path / "kept", gib=1)
        opened[0].get(0)
        data, mtime_ns = path.read_bytes(), path.stat().st_mtime_ns
        path.write_bytes(data.replace(b"fox", b"cat"))
        changed = next(k for k, text in enumerate(text for text in texts(0, 150) if text) if "fox" in text and k)
        with pytest.raises(CorpusError, match="does not give the tokens"):
            opened[0].get(changed)
        path.write_bytes(data)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        assert b"fox" in bytes(opened[1].get(changed)[:-1].astype("u1"))
