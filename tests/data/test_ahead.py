from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data import read_ahead, remote, s3_ranges, shard_files
from megaresume.data.disk_cache import DiskCache
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.read_ahead import Ahead, joined
from megaresume.data.shard_files import Place, ShardFiles
from megaresume.data.shard_source import ShardSource
from megaresume.stream.batches import Balance, BatchSchedule
from megaresume.stream.errors import CorpusError, SetupError, UsageError
from tests.data.far import serve, wait_for_threads
from tests.data.kit import captions, encoder, write_shard, write_shards
from tests.release import release

pytest.importorskip("aiohttp")


@pytest.fixture
def shards(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    # The shards are so small that one request would read all of one.
    monkeypatch.setattr(read_ahead, "GAP", -1)
    monkeypatch.setattr(shard_files, "SMALL", 1024)
    write_shards(tmp_path / "shards", [30, 20, 40])
    prepare_shards([tmp_path / "shards/*.tar"], tmp_path / "pairs", encoder())
    return tmp_path / "shards"


def loader(shards, url=None, *, shuffle=None, start=0, stop=16, dp=(0, 1), **options) -> StreamLoader:
    source = {"kind": "webdataset", "index": str(shards.parent / "pairs.shards.idx")}
    if url is not None:
        source["path"] = [f"{url}/{path.name}" for path in sorted(shards.iterdir())]
    if shuffle is not None:
        source["shuffle"] = shuffle
    packing = {"mode": "best_fit", "open_bins": 4}
    stream = open_stream({"seed": 3, "seq_length": 96, "packing": packing, "sources": {"pairs": source}})
    schedule = BatchSchedule.constant(4)
    layout = {"micro_batch_size": 2, "dp_rank": dp[0], "dp_size": dp[1]}
    return StreamLoader(stream, schedule, start=start, stop=stop, **layout, **options)


def batches(*args, **options) -> list[tuple[list[int], bytes, bytes]]:
    """Numbers of the samples, tokens and pixels of each micro-batch, in order."""
    return [
        (batch["samples"].tolist(), batch["tokens"].numpy().tobytes(), batch["pixel_values"].numpy().tobytes())
        for batch in loader(*args, **options)
    ]


def check_once(requests) -> None:
    """Nothing was asked for twice."""
    assert len({(r.method, r.name, r.start) for r in requests}) == len(requests)


def test_a_validation_over_the_same_shards_between_two_batches(shards):
    with serve(shards) as far:
        train = loader(shards, far.url, prefetch=0, stop=12)
        validation = StreamLoader(
            train.stream, train.schedule, micro_batch_size=2, dp_rank=0, dp_size=1, start=12, stop=16, prefetch=0
        )
        reading = iter(train)
        next(reading)
        assert len(list(validation)) == 2
        assert len(list(reading)) == 5
    check_once(far.reads)


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"read_ahead": 0}, {"requests": 1}])
def test_batches_are_those_of_local_shards_and_nothing_is_asked_twice(shards, options):
    with serve(shards) as far:
        assert batches(shards, far.url, **options) == batches(shards)
    check_once(far.requests)
    assert not [thread for thread in threading.enumerate() if thread.name == "megaresume-ahead"]


@pytest.mark.parametrize(
    "options", [{"dp": (1, 2)}, {"dp": (0, 2), "balance": Balance(objective="step")}, {"start": 8}]
)
def test_it_reads_what_this_rank_needs_from_where_it_goes_on(shards, options):
    with serve(shards) as far:
        assert batches(shards, far.url, **options) == batches(shards, **options)
    check_once(far.requests)
    needed = set()
    made = loader(shards, **options)
    for samples in made.indices():
        for sample in samples:
            for document in made.stream.plan(sample, sample + 1).table[:, 2].tolist():
                (place,) = made.stream.sources[0].places(document)
                needed.add((place.path.rpartition("/")[2], place.offset))
    assert {(r.name, r.start) for r in far.reads} <= needed


def test_several_requests_are_on_their_way_and_no_more_than_asked(shards):
    begin = time.perf_counter()
    with serve(shards, latency=0.05) as far:
        batches(shards, far.url, requests=6)
    assert far.most == 6
    assert time.perf_counter() - begin < 0.05 * len(far.requests)


def test_neighbours_are_one_request(shards, monkeypatch):
    monkeypatch.setattr(read_ahead, "GAP", 0)
    monkeypatch.setattr(read_ahead, "LONGEST", 16 << 10)
    with serve(shards) as far:
        assert batches(shards, far.url, shuffle={"block": 30, "window": 1}) == batches(
            shards, shuffle={"block": 30, "window": 1}
        )
    check_once(far.requests)
    assert sum(r.stop - r.start for r in far.reads) >= 45 << 11
    assert len(far.reads) <= 45 / 3, "45 records or more, of 2 KiB, in requests of at most 16"


def test_neighbours_meet_also_where_no_more_may_be_planned(shards, monkeypatch):
    monkeypatch.setattr(read_ahead, "GAP", 16 << 10)
    how = {"shuffle": {"block": 8, "window": 1}, "stop": 32}
    monkeypatch.setattr("megaresume.batches.ahead.BLOCKS", 12 / loader(shards).stream.block_samples)
    with serve(shards) as far:
        assert batches(shards, far.url, **how) == batches(shards, **how)
    check_once(far.requests)
    assert len(far.reads) <= 90 / 4, "of twelve samples that are planned six are asked for together, of some 16 records"


def test_places_to_requests():
    files, other = ShardFiles(), ShardFiles()

    def place(offset, nbytes, path="a", of=files):
        return Place(of, path, 1 << 40, offset, nbytes)

    far, near = place(10 << 20, 10), place(0, 1000)
    places = [far, place(1000 + read_ahead.GAP, 500), near, place(0, 1000, "b"), place(1000, 9, of=other)]
    assert joined(places) == [[far], [near, places[1]], [places[3]], [places[4]]]
    apart = [place(0, 1000), place(1001 + read_ahead.GAP, 500)]
    assert joined(apart) == [[apart[0]], [apart[1]]]
    big = [place(k << 18, 1 << 18) for k in range(9)]
    assert [len(request) for request in joined(big)] == [4, 4, 1]


@pytest.fixture
def slow(monkeypatch):
    """What reads ahead places of a file in memory, and the ranges that it has asked for, each to be let through."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/slow.tar", SLOW)
    asked, let = [], threading.Semaphore(0)
    real = ShardFiles.read_span

    def read_span(self, place, start, stop):
        asked.append((start, stop))
        assert let.acquire(timeout=60)
        return real(self, place, start, stop)

    monkeypatch.setattr(ShardFiles, "read_span", read_span)
    reader = Ahead(1)
    yield reader, asked, let
    for _ in range(20):
        let.release()
    reader.close()


SLOW = np.random.default_rng(5).bytes(8 << 20)


def reached(asked, count) -> None:
    deadline = time.monotonic() + 60
    while len(asked) < count:
        assert time.monotonic() < deadline, asked
        time.sleep(0.005)


def test_what_lies_in_a_range_that_is_being_read_is_not_asked_for_again(slow):
    reader, asked, let = slow
    files = ShardFiles()
    first, last, within, outside = (
        Place(files, "memory://slow.tar", len(SLOW), offset, 1000) for offset in (0, 60_000, 30_000, 60_500)
    )
    reader.want([first, last])
    reached(asked, 1)
    reader.want([within, outside])
    for _ in range(2):
        let.release()
    for place in (first, last, within, outside):
        assert reader.take(place) == SLOW[place.offset : place.stop]
    assert asked == [(0, 61_000), (60_500, 61_500)]


def test_what_waits_is_asked_for_with_what_is_wanted_later_but_not_what_is_needed_soon(slow):
    reader, asked, let = slow
    files = ShardFiles()

    def places(*offsets):
        return [Place(files, "memory://slow.tar", len(SLOW), offset, 1000) for offset in offsets]

    far = [k << 20 for k in range(6)]
    reader.want(places(*far))
    reached(asked, 1)
    # Next come `SOON` requests: of them one has what is wanted now, if it lies within; the others grow.
    reader.want(places(*(offset + 5000 for offset in far), (1 << 20) + 500))
    for _ in range(20):
        let.release()
    for offset in far:
        for place in places(offset, offset + 5000):
            assert reader.take(place) == SLOW[place.offset : place.stop]
    soon = [(offset, offset + 1000) for offset in far[:3]]
    late = [(offset, offset + 6000) for offset in far[3:]]
    assert asked[:3] == soon and asked[3:6] == late
    assert sorted(asked[6:]) == [
        (5000, 6000),
        ((1 << 20) + 500, (1 << 20) + 6000),
        ((2 << 20) + 5000, (2 << 20) + 6000),
    ]


def test_who_waits_for_what_another_loader_has_released_reads_it_itself(slow):
    reader, asked, let = slow
    files = ShardFiles()
    place = Place(files, "memory://slow.tar", len(SLOW), 0, 1000)
    reader.want([place])  # for one of two loaders of the same shards; both ask whoever was last to read ahead
    reached(asked, 1)
    got = []
    other = threading.Thread(target=lambda: got.append(files.fetch(place)), daemon=True)
    other.start()
    deadline = time.monotonic() + 60
    while not reader._changed._waiters and time.monotonic() < deadline:
        time.sleep(0.005)
    reader.release([place])
    for _ in range(2):
        let.release()
    other.join(10)
    assert got == [SLOW[:1000]]


def test_bytes_are_those_of_the_file_however_places_lie(tmp_path, monkeypatch):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setattr(read_ahead, "GAP", 0)
    region, rng = shard_files.REGION, np.random.default_rng(7)
    shapes = {"a": 10, "b": region - 1, "c": region, "d": 3 * region + 1, "e": 2_000_000}
    contents = {f"memory://{name}.bin": SLOW[k : k + size] for k, (name, size) in enumerate(shapes.items())}
    for path, data in contents.items():
        memory.pipe(path, data)
    monkeypatch.setattr(ShardFiles, "identity", lambda self, path: f"{len(contents[path])}:stamp")
    real = ShardFiles.read_span

    def read_span(self, place, start, stop):
        time.sleep(0.003)  # so others wait, and are wanted meanwhile
        return real(self, place, start, stop)

    monkeypatch.setattr(ShardFiles, "read_span", read_span)
    cache = DiskCache(tmp_path, 1 << 30)
    for count in (1, 4, 4):
        for path in sorted(tmp_path.rglob("*"))[::2]:  # the cache has a part of what it had
            path.unlink() if path.is_file() else None
        files, reader, planned = ShardFiles(cache=cache), Ahead(count), []
        for _ in range(12):
            places = []
            for _ in range(rng.integers(1, 40)):
                path = list(contents)[rng.integers(len(contents))]
                size = len(contents[path])
                nbytes = min(int(rng.choice([1, 900, 16_000, 17_000, 90_000])), size)
                starts = (0, size - nbytes, rng.integers(size - nbytes + 1), region * rng.integers(40))
                offset = min(int(starts[rng.integers(4)]), size - nbytes)
                places.append(Place(files, path, size, offset, nbytes))
            reader.want(places)
            planned.append(places)
            if len(planned) == 4:
                for place in planned[0]:
                    assert files.fetch(place) == contents[place.path][place.offset : place.stop]
                reader.release(planned.pop(0))
        reader.release([place for places in planned for place in places])
        assert reader.held == 0
        reader.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_request_that_panicked(monkeypatch):
    class Panic(BaseException):
        """As Rust's in obstore."""

    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/panic.bin", SLOW[:1000])
    real = ShardFiles.read_span

    def read_span(self, *args):
        if threading.current_thread().name == "megaresume-ahead":
            raise Panic
        return real(self, *args)

    monkeypatch.setattr(ShardFiles, "read_span", read_span)
    files, reader, got = ShardFiles(), Ahead(1), []
    for start in (0, 500):  # the thread goes on
        place = Place(files, "memory://panic.bin", 1000, start, 100)
        reader.want([place])
        waits = threading.Thread(target=lambda place=place: got.append(files.fetch(place)), daemon=True)
        waits.start()
        waits.join(10)
    reader.close()
    assert got == [SLOW[:100], SLOW[500:600]]


def test_threads_of_a_reader_that_nobody_closed_end(monkeypatch):
    monkeypatch.setattr(read_ahead, "IDLE", 0.05)
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/idle.bin", SLOW[:1000])
    files, reader = ShardFiles(), Ahead(4)
    place = Place(files, "memory://idle.bin", 1000, 10, 100)
    for _ in range(2):  # and they begin again
        reader.want([place])
        assert files.fetch(place) == SLOW[10:110]
        reader.release([place])
        deadline = time.monotonic() + 60
        while reader._threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not reader._threads
    dropped = weakref.ref(reader)
    del reader, files, place
    deadline = time.monotonic() + 60
    while dropped() is not None and time.monotonic() < deadline:
        gc.collect()
    assert dropped() is None


def test_what_the_cache_has_between_two_places_is_not_asked_for(slow, tmp_path, monkeypatch):
    monkeypatch.setattr(read_ahead, "GAP", shard_files.REGION - 4000)
    reader, asked, let = slow
    files = ShardFiles(cache=DiskCache(tmp_path, 1 << 30))
    let.release()
    middle = Place(files, "memory://slow.tar", len(SLOW), shard_files.REGION + 30_000, 1000)
    monkeypatch.setattr(ShardFiles, "identity", lambda self, path: f"{len(SLOW)}:stamp")
    assert files.fetch(middle) == SLOW[middle.offset : middle.stop]
    around = [middle._replace(offset=offset) for offset in (40_000, 2 * shard_files.REGION + 10_000)]
    for _ in range(2):
        let.release()
    reader.want([around[0], middle, around[1]])
    for place in (*around, middle):
        assert reader.take(place) == SLOW[place.offset : place.stop]
    assert asked == [(k * shard_files.REGION, (k + 1) * shard_files.REGION) for k in (1, 0, 2)]


def test_memory_is_bounded(shards, monkeypatch):
    most = []
    real = Ahead.want

    def want(self, places):
        real(self, places)
        most.append(self.held)

    monkeypatch.setattr(Ahead, "want", want)
    made = loader(shards, prefetch=0)
    made.read_ahead = 1
    monkeypatch.setattr("megaresume.batches.ahead.FARTHEST", 12)
    assert len(list(made)) == 8
    assert len(most) > 3 and max(most) <= 20 * 4096


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_system_that_has_no_more_threads(monkeypatch, spare, caplog):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/threads.tar", bytes(range(250)) * 4000)
    started = []
    real = threading.Thread.start

    def start(thread):
        if thread.name == "megaresume-ahead":
            if len(started) == spare:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    made = Ahead(4)
    places = [Place(ShardFiles(), "memory://threads.tar", 1_000_000, k * 200_000, 500) for k in range(5)]
    for _ in range(2):
        made.want(places)
        assert [made.take(place) for place in places] == [bytes(range(250)) * 2 if spare else None] * 5
        made.release(places)
    made.close()
    assert "can't start new thread" in caplog.text and made.held == 0


FAULTS = {
    "busy": lambda number, request: 503 if number % 3 == 1 else None,
    "too many": lambda number, request: 429 if number % 4 == 2 else None,
    "cut": lambda number, request: "short" if number % 3 == 0 and request.method == "GET" else None,
    "gone": lambda number, request: "drop" if number % 5 == 3 else None,
    "failing": lambda number, request: 500 if number % 4 == 1 else None,
    "wrong length": lambda number, request: "long" if number % 4 == 3 and request.method == "GET" else None,
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_faults_changes_nothing_and_is_reported(shards, fault, cached, tmp_path, caplog):
    options = {"cache_dir": tmp_path / "cache"} if cached else {}
    with serve(shards, fault=FAULTS[fault]) as far, caplog.at_level(logging.WARNING):
        assert batches(shards, far.url, **options) == batches(shards)
        assert batches(shards, far.url, **options) == batches(shards)
    assert fault == "gone" or ("tried again" in caplog.text and ".tar" in caplog.text)  # aiohttp connects again
    assert caplog.text.count("tried again") <= 2, "a few of many"


@pytest.fixture
def s3(shards, monkeypatch):
    """A server with the bucket ``shards``."""
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setattr(s3_ranges, "_of_parent", False)
    s3fs.S3FileSystem.clear_instance_cache()
    with serve(shards.parent) as far:
        monkeypatch.setenv("AWS_ENDPOINT_URL", far.url)
        yield far
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("fault", ["busy", "cut", "wrong length"])
def test_s3_with_faults_changes_nothing(shards, s3, fault, tmp_path):
    s3.fault = FAULTS[fault]
    assert batches(shards, "s3://shards", cache_dir=tmp_path / "cache", stop=4) == batches(shards, stop=4)
    assert len({(r.name, r.start) for r in s3.reads}) < len(s3.reads)


ENDS = ["pairs-000000.tar", "pairs-000002.tar"]


def test_of_a_shard_on_s3_nothing_is_asked_before_its_first_record(shards, s3):
    pytest.importorskip("obstore")
    assert batches(shards, "s3://shards") == batches(shards)
    heads = [request.name for request in s3.requests if request.method == "HEAD"]
    assert sorted(heads) == ENDS, "those that are checked when the source is opened"
    check_once(s3.requests)


def test_the_first_and_last_shard_on_s3_are_asked_for_at_a_time_by_one_client(shards, s3, monkeypatch):
    session = pytest.importorskip("aiobotocore.session")
    made = []
    real = session.AioSession.create_client

    def create_client(self, *args, **options):
        made.append(args)
        return real(self, *args, **options)

    monkeypatch.setattr(session.AioSession, "create_client", create_client)
    s3.latency = 0.5
    loader(shards, "s3://shards")
    assert [request.method for request in s3.requests] == ["HEAD"] * 2 and s3.most == 2
    assert len(made) == 1


def test_nor_if_the_cache_is_new_and_what_it_keeps_is_found_again(shards, s3, tmp_path):
    pytest.importorskip("obstore")
    url = "s3://shards/pairs-000001.tar"
    size = (shards / "pairs-000001.tar").stat().st_size
    read: list[bytes] = []
    for _ in range(2):
        files = ShardFiles(cache=DiskCache(tmp_path / "cache", 1 << 20))
        made = Ahead(4)
        places = [Place(files, url, size, at, 1500) for at in (0, 2000)]
        made.want(places)
        read += [made.take(place) for place in places]
        made.close()
        wait_for_threads()  # it is kept after it was given
        assert files._checked == {url: files.identity(url)}
    data = (shards / "pairs-000001.tar").read_bytes()
    assert read == [data[:1500], data[2000:3500]] * 2
    assert [request.method for request in s3.requests[:2]] == ["GET", "GET"] and len(s3.reads) == 2


def test_a_shard_on_s3_of_another_size_is_refused(shards, s3):
    write_shard(shards / "pairs-000001.tar", captions(60, first=500))
    with pytest.raises(CorpusError, match=r"pairs-000001\.tar is not the shard that the index was made of"):
        batches(shards, "s3://shards")


def test_what_stays_wrong_ends_the_run(shards, monkeypatch):
    def fault(number, request):
        return 503 if request.name == "pairs-000001.tar" and request.method == "GET" else None

    with serve(shards, fault=fault) as far:
        got = []
        with pytest.raises(SetupError, match=r"pairs-000001\.tar cannot be read"):
            got.extend(batch["samples"].tolist() for batch in loader(shards, far.url))
    expected = [samples for samples, *_ in batches(shards)]
    assert got == expected[: len(got)] and len(got) < len(expected)


def test_an_object_that_changed_is_refused(shards):
    with serve(shards) as far:
        write_shard(shards / "pairs-000001.tar", captions(20, first=500))
        with pytest.raises(CorpusError, match="not as long as its index says"):
            batches(shards, far.url)


def test_a_reader_that_goes_elsewhere_is_served(shards):
    with serve(shards) as far:
        made = loader(shards, far.url)
        reading = made.read_ahead_of()
        with reading.reading([0, 1]):
            first = made.dataset.read([0, 1])
        with reading.reading([8, 9]):
            other = made.dataset.read([8, 9])
        reading.close()
    local = loader(shards).dataset
    assert np.array_equal(first["tokens"], local.read([0, 1])["tokens"])
    assert np.array_equal(other["pixel_values"], local.read([8, 9])["pixel_values"])


def test_bad_numbers_are_refused(shards):
    for options in ({"read_ahead": -1}, {"requests": 0}):
        with pytest.raises(UsageError, match="reading ahead"):
            loader(shards, **options)


RELEASE = release(
    "`[spawn]`: another way to start workers",
    "the same, `[fork]`",
)


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=RELEASE)])
def test_workers_read_ahead_for_themselves(shards, method):
    with serve(shards, latency=0.01) as far:
        assert batches(shards, far.url, num_workers=2, start_method=method) == batches(shards)
    reads = far.reads
    assert len({(r.name, r.start) for r in reads}) == len(reads)
    assert far.most > 2 or method == "spawn", "there GAP is what it is"


@pytest.mark.process
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    reader = Ahead(2)
    place = Place(ShardFiles(), "http://127.0.0.1:9/a.tar", 100, 0, 10)
    with reader._changed:  # as a thread may at the moment of the fork
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if reader.take(place) is None and reader.close() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    reader.close()


READ = """
import json, sys
from pathlib import Path
from tests.data.test_ahead import loader

shards, url, start, workers = sys.argv[1:]
made = loader(Path(shards), url, start=int(start), stop=200, num_workers=int(workers))
for batch in made:
    samples, tokens = batch["samples"].tolist(), batch["tokens"].tolist()
    print(json.dumps([samples, tokens, float(batch["pixel_values"].sum())]), flush=True)
"""


@pytest.mark.process
@release(
    "four processes, three of them killed",
    "`::test_it_reads_what_this_rank_needs_from_where_it_goes_on`",
)
def test_killed_while_it_reads_ahead_and_resumed(shards):
    expected = [
        [batch["samples"].tolist(), batch["tokens"].tolist(), float(batch["pixel_values"].sum())]
        for batch in loader(shards, stop=200)
    ]
    got, workers = [], [0, 2, 1, 0]
    with serve(shards, latency=0.005, fault=FAULTS["busy"]) as far:
        for k, num_workers in enumerate(workers):
            words = [sys.executable, "-c", READ, str(shards), far.url, str(2 * len(got)), str(num_workers)]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
                for line in process.stdout:
                    got.append(json.loads(line))
                    if k < len(workers) - 1 and not len(got) % 22:
                        process.kill()
                        break
    assert got == expected


def test_a_source_says_where_its_documents_lie(shards):
    source = ShardSource(shards.parent / "pairs.shards.idx")
    (place,) = source.places(31)
    assert (place.path, place.offset, place.nbytes) == (str(shards / "pairs-000001.tar"), 2048, 2048)
