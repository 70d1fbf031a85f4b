from __future__ import annotations

import os
import signal

import pytest

from megaresume.data import remote, s3_ranges
from megaresume.data.remote import RemoteStore
from megaresume.data.s3_ranges import FAILURES, S3Ranges
from megaresume.stream.errors import CorpusError, SetupError
from tests.data.far import serve

pytest.importorskip("obstore")
s3fs = pytest.importorskip("s3fs")

DATA = bytes(range(256)) * 400


@pytest.fixture
def far(tmp_path, monkeypatch):
    """A bucket ``data`` with one object; the server's faults are a test's."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    for name, value in {"AWS_ACCESS_KEY_ID": "of-the-environment", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_ranges, "_of_parent", False)
    s3fs.S3FileSystem.clear_instance_cache()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/object").write_bytes(DATA)
    with serve(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def by_s3fs(monkeypatch) -> list[int]:
    """Where the ranges begin that s3fs read."""
    begun = []
    real = s3fs.S3FileSystem._cat_file

    async def cat_file(self, path, start=None, end=None, **options):
        begun.append(start)
        return await real(self, path, start=start, end=end, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", cat_file)
    return begun


def read(store: RemoteStore, offset: int, nbytes: int = 1000) -> bool:
    return store.read("s3://data/object", offset, nbytes) == DATA[offset : offset + nbytes]


def test_ranges_are_read_by_obstore_and_signed_with_what_s3fs_has(far, by_s3fs, monkeypatch):
    store = RemoteStore("s3")
    assert all(read(store, offset) for offset in (0, 70_000, len(DATA) - 1000))
    assert not by_s3fs
    assert all("of-the-environment" in said for said in far.authorizations)
    monkeypatch.setitem(remote._OPTIONS, "s3", {"key": "of-the-options", "secret": "test"})
    assert read(RemoteStore("s3"), 5)
    assert "of-the-options" in far.authorizations[-1] and not by_s3fs


@pytest.mark.parametrize("fault", ["short", "drop", "whole", 503, 403])
def test_what_fails_is_read_by_s3fs(far, by_s3fs, fault, caplog):
    far.fault = lambda number, request: fault if number == 1 else None
    store = RemoteStore("s3")
    assert all(read(store, offset) for offset in (0, 1, 2))
    assert by_s3fs == [1] and "s3://data/object could not be read at byte 1, and is tried again" in caplog.text


def test_what_panics_is_read_by_s3fs(far, by_s3fs, monkeypatch):
    class Panic(BaseException):
        """As Rust's."""

    def get_range(*args, **options):
        raise Panic

    monkeypatch.setattr("obstore.get_range", get_range)
    assert read(RemoteStore("s3"), 7) and by_s3fs == [7]


def test_an_error_is_the_one_of_s3fs(far):
    store = RemoteStore("s3")
    with pytest.raises(CorpusError, match="s3://data/none is missing"):
        store.read("s3://data/none", 0, 10)
    far.fault = lambda number, request: 403
    with pytest.raises(SetupError, match="cannot be read") as raised:
        read(store, 0)
    assert "PermissionError" in raised.value.found


def test_one_that_keeps_failing_is_left_alone_for_a_while(far, by_s3fs, monkeypatch):
    monkeypatch.setattr(S3Ranges, "_store", lambda self, bucket: {}[bucket])  # as a certificate that it cannot check
    store = RemoteStore("s3")
    assert all(read(store, offset) for offset in range(FAILURES + 3))
    assert store._failed == FAILURES and len(by_s3fs) == FAILURES + 3
    monkeypatch.undo()
    monkeypatch.setattr(s3_ranges.time, "monotonic", lambda: 1e12)
    assert store._ranges_of(store.opened()) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"anon": True},
        {"requester_pays": True},
        {"client_kwargs": {"verify": False}},
        {"config_kwargs": {"proxies": {"https": "http://127.0.0.1:9"}}},
        {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256"}},
    ],
)
def test_settings_that_it_does_not_know_leave_the_reads_to_s3fs(far, options):
    assert S3Ranges.of(s3fs.S3FileSystem(**options)) is None
    assert S3Ranges.of(s3fs.S3FileSystem(config_kwargs={"max_pool_connections": 64})) is not None


@pytest.mark.process
def test_a_forked_process_reads_by_s3fs(far):
    """Threads of obstore are in the parent: a request of the child would have no end."""
    store = RemoteStore("s3")
    assert read(store, 0)
    if not (child := os.fork()):
        signal.alarm(60)
        os._exit(0 if read(store, 7) and store._ranges[1] is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read(store, 9)
