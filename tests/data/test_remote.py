from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random

import fsspec
import numpy as np
import pytest

from megaresume.data import remote
from megaresume.data.catalog import open_sources
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.record_index import ShardIndex
from megaresume.data.remote import RemoteStore
from megaresume.data.shard_files import ShardFiles
from megaresume.data.shard_source import ShardSource
from megaresume.stream.errors import CorpusError, SetupError
from tests.data.far import serve
from tests.data.kit import captions, encoder, key, same, write_shard, write_shards


@pytest.fixture(scope="module")
def server():
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    """s3://pairs/shards with the shards of ``tmp_path/shards``; the store is found by the environment alone."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    store = fsspec.filesystem("s3")
    if store.exists("pairs"):
        store.rm("pairs", recursive=True)
    store.mkdir("pairs")
    write_shards(tmp_path / "shards", [5, 3, 7])
    for path in (tmp_path / "shards").iterdir():
        store.put_file(str(path), f"pairs/shards/{path.name}")
    return store


@pytest.fixture
def pairs(bucket, tmp_path):
    prepare_shards(["s3://pairs/shards/pairs-{000000..000002}.tar"], tmp_path / "pairs", encoder())
    return tmp_path / "pairs.shards.idx"


def local(tmp_path) -> ShardSource:
    prepare_shards([tmp_path / "shards/*.tar"], tmp_path / "local", encoder(), overwrite=True)
    return ShardSource(tmp_path / "local.shards.idx")


def test_shards_on_s3_are_the_same_documents(pairs, tmp_path):
    theirs, source = local(tmp_path), ShardSource(pairs)
    assert source.fingerprint() == theirs.fingerprint()
    assert all(same(source.encoded(i, key(i)), theirs.encoded(i, key(i))) for i in range(15))
    assert source.describe(6)["shard"] == "s3://pairs/shards/pairs-000001.tar"
    assert [s.path for s in ShardIndex(pairs).files][2] == "s3://pairs/shards/pairs-000002.tar"


def test_a_record_is_one_range_read(pairs, monkeypatch):
    source, calls = ShardSource(pairs), []
    source.record(0)
    real = RemoteStore.view

    def read(self, url, offset, nbytes):
        calls.append((url.rpartition("/")[2], offset, nbytes))
        return real(self, url, offset, nbytes)

    monkeypatch.setattr(RemoteStore, "view", read)
    source.record(7)
    offset, nbytes = (int(source.index.column(c)[7]) for c in ("offset", "nbytes"))
    assert calls == [("pairs-000001.tar", offset, nbytes)] and offset == 4096


@pytest.mark.process
def test_wildcards_and_an_index_made_here_of_what_lies_there(pairs, bucket, tmp_path):
    prepare_shards(["s3://pairs/shards/*.tar"], tmp_path / "again", encoder(), workers=2)
    assert (tmp_path / "again.shards.idx").read_bytes() == pairs.read_bytes()
    ours = local(tmp_path)
    specs = {
        "a": {"kind": "webdataset", "index": "local.shards.idx", "path": "s3://pairs/shards/pairs-00000{0..2}.tar"}
    }
    moved = open_sources(specs, base_dir=tmp_path)["a"]
    assert same(moved.encoded(9, key(9)), ours.encoded(9, key(9)))


def _tokens(source, queue) -> None:
    queue.put(source.get(13))


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_connect_for_themselves(pairs, method):
    source = ShardSource(pairs)
    here = source.get(13)  # the connection is open when it forks
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=_tokens, args=(source, queue))
    process.start()
    assert np.array_equal(queue.get(), here)
    process.join()
    assert len(pickle.dumps(source)) < 2000


@pytest.mark.process
def test_a_forked_process_leaves_the_connections_of_its_parent_alone(tmp_path, monkeypatch):
    """It closed them in the epoll that both share: the parent waited for an answer that had come."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    monkeypatch.setattr(remote, "PATIENCE", 20.0)
    (tmp_path / "file").write_bytes(b"x" * 100)
    with serve(tmp_path) as far:
        store = RemoteStore("http")
        assert store.size(f"{far.url}/file") == 100
        if not (child := os.fork()):
            store.opened()  # its own, and nothing holds the parent's any more
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        assert store.size(f"{far.url}/file") == 100


def test_a_changed_or_missing_object_is_refused_by_name(pairs, bucket, tmp_path):
    path = write_shard(tmp_path / "other.tar", captions(60))
    bucket.put_file(str(path), "pairs/shards/pairs-000001.tar")
    with pytest.raises(CorpusError, match="not the shard that the index was made of"):
        ShardSource(pairs, policy="mask").get(6)
    bucket.rm("pairs/shards/pairs-000001.tar")
    with pytest.raises(CorpusError, match=r"s3://pairs/shards/pairs-000001\.tar is missing"):
        ShardSource(pairs, policy="mask").get(6)
    with pytest.raises(CorpusError, match="missing"):
        prepare_shards(["s3://pairs/none.tar"], tmp_path / "none", encoder())
    with pytest.raises(CorpusError, match="matches no file"):
        prepare_shards(["s3://pairs/none-*.tar"], tmp_path / "none", encoder())


class Flaky:
    """A store that fails so many times before it answers, or answers short."""

    def __init__(self, store, failures: int, error: Exception | None = None) -> None:
        self.store, self.failures, self.error, self.calls = store, failures, error, 0

    def cat_file(self, path, start, end):
        self.calls += 1
        if self.calls <= self.failures:
            if self.error is not None:
                raise self.error
            return self.store.cat_file(path, start=start, end=end)[:-1]
        return self.store.cat_file(path, start=start, end=end)


def flaky(source: ShardSource, store, *args) -> Flaky:
    found = Flaky(store, *args)
    source.files._store("s3://")._opened = (os.getpid(), found)
    return found


@pytest.mark.parametrize("error", [OSError("503 slow down"), TimeoutError("timed out"), None])
def test_it_tries_again_and_moves_no_global_random_number(pairs, bucket, error):
    source = ShardSource(pairs)
    expected = source.get(3)
    store = flaky(source, bucket, 3, error)
    random.seed(5)
    before = random.getstate()
    assert np.array_equal(source.get(3), expected)
    assert store.calls == 4 and random.getstate() == before


def test_a_store_that_is_down_ends_with_an_error_and_no_policy_covers_it(pairs, bucket):
    source = ShardSource(pairs, policy="mask")
    source.get(3)
    store = flaky(source, bucket, 10**6, OSError("503 slow down"))
    with pytest.raises(SetupError) as error:
        source.get(3)
    assert store.calls == remote.ATTEMPTS
    text = str(error.value)
    assert "503 slow down" in text and f"{remote.ATTEMPTS} times" in text and "pairs-000000.tar" in text


def test_missing_credentials_are_not_tried_again(pairs, bucket):
    source = ShardSource(pairs)
    source.get(3)
    store = flaky(source, bucket, 10**6, PermissionError("Access Denied"))
    with pytest.raises(SetupError, match=r"Access Denied[\s\S]*credentials"):
        source.get(3)
    assert store.calls == 1


def test_no_credentials_at_all_are_the_cause(bucket, monkeypatch, tmp_path):
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(SetupError, match=rf"likely cause: no credentials[\s\S]*{remote.ATTEMPTS} times"):
        RemoteStore("s3").size("s3://pairs/shards/pairs-000000.tar")


def test_other_stores(tmp_path):
    memory = fsspec.filesystem("memory")
    path = write_shard(tmp_path / "a.tar", captions(3))
    memory.pipe_file("/shards/a.tar", path.read_bytes())
    prepare_shards(["memory://shards/a.tar"], tmp_path / "memory", encoder())
    prepare_shards([f"file://{path}"], tmp_path / "file", encoder())
    first, second = ShardSource(tmp_path / "memory.shards.idx"), ShardSource(tmp_path / "file.shards.idx")
    assert all(same(first.encoded(i, key(i)), second.encoded(i, key(i))) for i in range(3))
    with pytest.raises(SetupError, match="unknown"):
        RemoteStore("unknown").size("unknown://a.tar")


@pytest.mark.parametrize("status", [401, 403])
def test_what_is_forbidden_is_called_so_at_once(tmp_path, status):
    write_shard(tmp_path / "a.tar", captions(3))
    with serve(tmp_path) as far:
        store = RemoteStore("http")
        assert store.size(f"{far.url}/a.tar") > 0
        far.fault = lambda number, request: status
        for ask in (lambda: store.size(f"{far.url}/a.tar"), lambda: store.read(f"{far.url}/a.tar", 0, 9)):
            before = len(far.reads)
            with pytest.raises(SetupError, match=rf"(?s)a\.tar is forbidden.*HTTP status {status}"):
                ask()
            assert len(far.reads) <= before + 1
        far.fault = lambda number, request: 404
        with pytest.raises(CorpusError, match="is missing"):
            store.size(f"{far.url}/a.tar")


def test_a_server_that_ignores_ranges_is_refused_at_prepare(tmp_path):
    write_shard(tmp_path / "a.tar", captions(3))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with serve(tmp_path, fault=lambda number, request: "whole") as far:
        with pytest.raises(SetupError, match="comes from a server that ignores ranges"):
            prepare_shards([f"{far.url}/a.tar"], tmp_path / "out", encoder())
        assert len(far.reads) <= 2, "it is not tried again"
        rows, store = [f"{far.url}/a.jsonl"], ShardFiles()
        with pytest.raises(SetupError, match="comes from a server that ignores ranges"):
            prepare(rows, tmp_path / "rows", PrepareOptions(store=store, index_only=True))
        assert prepare(rows, tmp_path / "rows", PrepareOptions(store=store)).documents == 1
