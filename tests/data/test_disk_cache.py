from __future__ import annotations

import logging
import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megaresume.data import disk_cache, read_ahead, shard_files
from megaresume.data.disk_cache import BLOCK, DiskCache
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.shard_files import SMALL, Place, ShardFiles
from megaresume.data.shard_source import ShardSource
from megaresume.stream.errors import CorpusError, SetupError, UsageError
from tests.data.far import serve, wait_for_threads
from tests.data.kit import captions, encoder, write_shard
from tests.data.test_ahead import batches, loader, shards  # noqa: F401

pytest.importorskip("aiohttp")


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def kept(cache: Path) -> list[Path]:
    """Files of records."""
    return [path for path in cache.rglob("*") if path.is_file() and path.name != "used"]


def all_kept(cache: Path) -> list[Path]:
    """The same, as soon as nothing is read any more: a record is handed over before the cache has it."""
    wait_for_threads()
    return kept(cache)


def taken(cache: Path) -> int:
    """Bytes that they take, without holes."""
    return sum(512 * path.stat().st_blocks for path in kept(cache))


def bytes_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(1000 + number * 997 % 9000)


def flipped(data: bytes) -> bytes:
    """The same with a bit of each byte changed."""
    return bytes(byte ^ 1 for byte in data)


@pytest.mark.parametrize("options", [{}, {"read_ahead": 0}])
def test_what_was_read_once_is_not_asked_for_again(shards, cache, options):  # noqa: F811
    with serve(shards) as far:
        assert batches(shards, far.url, cache_dir=cache, **options) == batches(shards)
        first = len(far.reads)
        assert len(all_kept(cache)) == 3 < first, "one for a MiB of each shard"
        assert batches(shards, far.url, cache_dir=cache, **options) == batches(shards)
        assert len(far.reads) == first
        assert batches(shards, far.url, cache_dir=cache, stop=32) == batches(shards, stop=32)
        assert len(far.reads) > first


@pytest.mark.process
def test_workers_and_ranks_share_it(shards, cache, monkeypatch):  # noqa: F811
    monkeypatch.setattr(shard_files, "SMALL", SMALL)  # a spawned worker has it
    with serve(shards) as far:
        assert batches(shards, far.url, cache_dir=cache, num_workers=2) == batches(shards)
        first = len(far.reads)
        for rank in range(2):
            options = {"dp": (rank, 2), "num_workers": 1, "start_method": ("fork", "spawn")[rank]}
            assert batches(shards, far.url, cache_dir=cache, **options) == batches(shards, dp=(rank, 2))
        assert len(far.reads) == first


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "another"])
def test_what_is_damaged_is_read_again(shards, cache, damage):  # noqa: F811
    with serve(shards) as far:
        batches(shards, far.url, cache_dir=cache)
        files, first = all_kept(cache), len(far.reads)
        for path in files:
            data = (files[0] if damage == "another" else path).read_bytes()
            path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "flipped": flipped(data)}.get(damage, data))
        assert batches(shards, far.url, cache_dir=cache) == batches(shards)
        again = len(far.reads)
        assert again == 2 * first if damage in ("empty", "flipped") else 1.2 * first < again < 2 * first
        all_kept(cache)
        assert batches(shards, far.url, cache_dir=cache) == batches(shards)
        assert len(far.reads) == again


def test_a_shard_that_was_written_again_is_another_one(shards, cache):  # noqa: F811
    with serve(shards) as far:
        before = batches(shards, far.url, cache_dir=cache)
        records = captions(30)
        path = shards / "pairs-000000.tar"
        size = path.stat().st_size
        write_shard(path, [(name, members | {"txt": members["txt"].upper()}) for name, members in records])
        assert path.stat().st_size == size
        prepare_shards([shards / "*.tar"], shards.parent / "pairs", encoder(), overwrite=True)
        assert batches(shards, far.url, cache_dir=cache) == batches(shards) != before


@pytest.mark.parametrize("options", [{}, {"read_ahead": 0}])
def test_what_was_kept_while_a_shard_was_another_one_is_read_again(shards, cache, options, monkeypatch):  # noqa: F811
    monkeypatch.setattr("megaresume.batches.ahead.FIRST", 1)  # not all before the first batch
    with serve(shards) as far:
        made = iter(loader(shards, far.url, cache_dir=cache, prefetch=0, **options))
        next(made)
        before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards.iterdir()}
        for path, (data, _) in before.items():
            path.write_bytes(data.replace(b"picture", b"PICTURE"))
        with pytest.raises(CorpusError, match="not the indexed one"):
            list(made)
        for path, (data, mtime_ns) in before.items():
            path.write_bytes(data)
            os.utime(path, ns=(mtime_ns, mtime_ns))
        assert batches(shards, far.url, cache_dir=cache, **options) == batches(shards)
        first = len(far.reads)
        assert batches(shards, far.url, cache_dir=cache, **options) == batches(shards)
        assert len(far.reads) == first


@pytest.fixture
def small(shards, monkeypatch):  # noqa: F811
    """The same shards, of which regions are kept: 8 records of 2 KiB and a part of another."""
    monkeypatch.setattr(shard_files, "REGION", (18 << 10) - 16)
    monkeypatch.setattr(shard_files, "SMALL", 4 << 10)
    monkeypatch.setattr(read_ahead, "GAP", 18 << 10)
    monkeypatch.setattr(read_ahead, "LONGEST", 36 << 10)
    return shards


#: of all three shards.
REGIONS = sum(-(-(2048 * records + 10240) // ((18 << 10) - 16)) for records in (30, 20, 40))


@pytest.mark.parametrize("options", [{}, {"read_ahead": 0}])
def test_of_small_records_whole_regions_are_read_and_kept(small, cache, options):
    with serve(small) as far:
        assert batches(small, far.url, cache_dir=cache, **options) == batches(small)
        assert len(kept(cache)) == 3
        assert len(far.reads) <= REGIONS < 45 / 3, "of 45 records or more"
        first = len(far.reads)
        assert batches(small, far.url, cache_dir=cache, **options) == batches(small)
        assert len(far.reads) == first


def test_a_small_record_is_the_same_from_every_cache(small, cache):
    """Kept in regions, and damaged there."""
    source = ShardSource(small.parent / "pairs.shards.idx")
    size = (small / "pairs-000000.tar").stat().st_size
    expected = [source.files.fetch(place) for i in range(30) for place in source.places(i)]
    with serve(small) as far:
        here = [place._replace(path=f"{far.url}/pairs-000000.tar") for i in range(30) for place in source.places(i)]
        files = ShardFiles(cache=DiskCache(cache, 1 << 30))
        assert [files.fetch(place) for place in here] == expected
        assert len(far.reads) <= -(-size // shard_files.REGION)
        after = len(far.reads)
        for path in kept(cache):
            path.write_bytes(flipped(path.read_bytes()))
        assert [files.fetch(place) for place in here] == expected
        assert len(far.reads) <= after + -(-size // shard_files.REGION)
        one = files.fetch(here[7], again=True)
        assert one == expected[7] and far.reads[-1].stop - far.reads[-1].start >= shard_files.REGION


@pytest.mark.parametrize("longest", [20_000, 100_000, 3_000_000])
def test_records_of_a_mib_share_a_file_and_none_touches_another(cache, monkeypatch, longest):
    rng, memory = random.Random(longest), pytest.importorskip("fsspec").filesystem("memory")
    content = rng.randbytes(5 << 20)
    memory.pipe("/shared.bin", content)
    monkeypatch.setattr(ShardFiles, "identity", lambda self, path: f"{len(content)}:stamp")
    files, places, at = ShardFiles(cache=DiskCache(cache, 1 << 30)), [], 0
    while at < len(content):
        nbytes = min(rng.randint(1, 3) // 3 * rng.randint(0, longest) + SMALL + 1, len(content) - at)
        places.append(Place(files, "memory://shared.bin", len(content), at, nbytes))
        at += nbytes
    for place in rng.sample(places, len(places)):
        files.fetch(place)
    assert len(kept(cache)) <= 7, "6, and one of regions if the last record is small"
    assert taken(cache) <= len(content) + 7 * 16 * BLOCK
    monkeypatch.setattr(ShardFiles, "read_span", None)  # nothing is read any more
    assert [files.fetch(place) for place in places] == [content[place.offset : place.stop] for place in places]


def test_a_record_of_another_length_and_one_of_no_bytes(cache, monkeypatch):
    """At the place of a shorter one, as of an index that was made in another way; where a region begins, and ends."""
    content = random.Random(1).randbytes(5 << 20)
    pytest.importorskip("fsspec").filesystem("memory").pipe("/lengths.bin", content)
    monkeypatch.setattr(ShardFiles, "identity", lambda self, path: f"{len(content)}:stamp")
    region = shard_files.REGION
    for _ in range(2):  # from the store, and from the cache
        files = ShardFiles(cache=DiskCache(cache, 1 << 30))
        for offset in (0, 1, region - 1, region, 16 * region, 40 * region, len(content)):
            for nbytes in (0, 1, SMALL, SMALL + 1, region, region + 1, 3 * region):
                if offset + nbytes <= len(content):
                    place = Place(files, "memory://lengths.bin", len(content), offset, nbytes)
                    assert files.fetch(place) == content[offset : offset + nbytes]


def test_without_room_no_more_is_read_than_asked_for(small, cache):
    with serve(small) as far:
        files = ShardFiles(cache=DiskCache(cache, 8 * BLOCK))
        source = ShardSource(small.parent / "pairs.shards.idx")
        for i in range(30):
            (place,) = source.places(i)
            files.fetch(place._replace(path=f"{far.url}/pairs-000000.tar"))
        assert taken(cache) <= 8 * BLOCK
        assert sum(request.stop - request.start > 4096 for request in far.reads) <= 3
        assert len(far.reads) > 20


def test_a_region_that_fails_names_the_shard_and_the_byte(small, cache):
    with serve(small, fault=lambda number, request: 503 if request.method == "GET" else None) as far:
        with pytest.raises(SetupError, match=r"pairs-00000\d\.tar cannot be read") as raised:
            batches(small, far.url, cache_dir=cache)
        assert "read at byte" in raised.value.action
    assert not kept(cache)


def test_it_takes_no_more_than_it_may_and_keeps_what_is_in_use(cache):
    limit = 400 * BLOCK
    old = DiskCache(cache, limit)
    for number in range(150):
        old.put(str(number), bytes_of(number))
    time.sleep(0.02)  # the clock of files is coarse
    run = DiskCache(cache, limit)
    used = [number for number in range(0, 150, 3) if run.get(str(number), len(bytes_of(number))) == bytes_of(number)]
    assert len(used) == 50
    for number in range(150, 600):
        run.put(str(number), bytes_of(number))
        assert number % 20 or taken(cache) <= limit
    assert 0.8 * limit < taken(cache) <= limit
    assert all(run.get(str(number), len(bytes_of(number))) == bytes_of(number) for number in used)
    assert sum(run.get(str(number), len(bytes_of(number))) is not None for number in range(150)) < 150
    next_run = DiskCache(cache, limit // 2, began=time.time() + 1)
    (cache / "used").unlink()  # then it is counted
    next_run.put("more", b"more")
    assert taken(cache) <= limit // 2


def test_a_record_larger_than_the_bound_keeps_out_no_other(cache):
    used = DiskCache(cache, 10 * BLOCK)
    used.put("large", b"x" * 10 * BLOCK)
    assert used.has_room and not kept(cache)
    used.put("small", b"x")
    assert used.get("small", 1) == b"x"


def test_a_write_that_stops_short_is_not_served(cache, monkeypatch):
    written, write = DiskCache(cache, 1 << 20), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: write(file, [b"".join(parts)[:-1]], at))
    written.put("one", b"x" * 5000, 4096)
    assert written.get("one", 5000, 4096) is None
    monkeypatch.undo()
    assert not written.has("one", 4096), "so it is kept again"
    written.put("one", b"x" * 5000, 4096)
    assert written.get("one", 5000, 4096) == b"x" * 5000


def test_what_one_call_may_not_write_is_not_kept(cache, monkeypatch):
    monkeypatch.setattr(disk_cache, "LARGEST", 4 * BLOCK)
    used = DiskCache(cache, 1 << 20)
    used.put("large", b"x" * 4 * BLOCK)
    assert used.has_room and not kept(cache)
    used.put("small", b"x" * 3 * BLOCK)
    assert used.get("small", 3 * BLOCK) == b"x" * 3 * BLOCK


def test_a_count_that_cannot_be_is_made_again(cache):
    limit = 20 * BLOCK
    kept_all = DiskCache(cache, limit, began=0.0)
    for number in range(60):
        if number == 10:
            (cache / "used").write_bytes(b"\xff" * 16)
        kept_all.put(str(number), b"x" * 3000)
    assert 0.8 * limit < taken(cache) <= limit


def test_the_oldest_go_first(cache):
    old = DiskCache(cache, 1 << 30)
    for number in range(2000):
        old.put(str(number), b"x")
    for path in kept(cache):
        os.utime(path, (0, 0))
    for number in range(0, 2000, 2):  # used
        assert DiskCache(cache, 1 << 30, began=1.0).get(str(number), 1) == b"x"
    new = DiskCache(cache, 2000 * BLOCK, began=time.time() + 1)
    new.put("more", b"x")
    left = {number for number in range(2000) if new.get(str(number), 1) is not None}
    assert len(left) == pytest.approx(1800, abs=20)
    assert len([number for number in left if not number % 2]) > 990


def test_a_full_disk_is_said_and_changes_nothing(shards, cache, caplog):  # noqa: F811
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    expected = batches(shards)
    with serve(shards) as far, caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2050, hard))  # a record of 2,048 bytes and its checksum do not fit
        try:
            got = batches(shards, far.url, cache_dir=cache)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert got == expected == batches(shards, far.url, cache_dir=cache), "nor does what was half written"
    assert caplog.text.count("the cache") == 1 and "File too large" in caplog.text


def test_a_directory_that_cannot_be_is_said(shards, cache, caplog):  # noqa: F811
    cache.write_text("a file")
    with serve(shards) as far, caplog.at_level(logging.WARNING):
        assert batches(shards, far.url, cache_dir=cache) == batches(shards)
    assert caplog.text.count("the cache") == 1 and "directory" in caplog.text.lower()


@pytest.mark.parametrize("gib", [0, -1, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(shards, cache, gib):  # noqa: F811
    with pytest.raises(UsageError, match="bad size"):
        loader(shards, cache_dir=cache, cache_gib=gib)


def _work(cache: Path, seed: int) -> None:
    rng, used = random.Random(seed), DiskCache(cache, 300 * BLOCK)
    while True:
        number = rng.randrange(400)
        data = used.get(str(number), len(bytes_of(number)))
        if data is None:
            used.put(str(number), bytes_of(number))
        elif data != bytes_of(number):
            (cache.parent / f"wrong-{seed}").touch()


@pytest.mark.process
def test_processes_that_are_killed_at_any_moment_leave_nothing_wrong(cache):
    """Four write, read and delete at a time, and are killed after moments of all lengths."""
    context, rng = multiprocessing.get_context("fork"), random.Random(1)
    processes: list[multiprocessing.process.BaseProcess] = []
    for seed in range(30):
        process = context.Process(target=_work, args=(cache, seed), daemon=True)
        process.start()
        processes.append(process)
        time.sleep(rng.uniform(0, 0.06))
        if len(processes) > 3:
            victim = processes.pop(rng.randrange(4))
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
    for process in processes:
        process.kill()
        process.join()
    assert not list(cache.parent.glob("wrong-*"))
    # What each of them was writing while another one counted, and deleted, may come on top.
    assert 0 < taken(cache) <= (300 + 4) * BLOCK
    again = DiskCache(cache, 300 * BLOCK)
    found = [again.get(str(number), len(bytes_of(number))) for number in range(400)]
    assert all(data is None or data == bytes_of(number) for number, data in enumerate(found))
    assert any(found)
