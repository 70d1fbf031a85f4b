from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tarfile
import threading

import numpy as np
import pytest
import xxhash

from megaresume.batches.open import open_stream
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.python_source import as_source
from megaresume.data.record_index import ShardIndex
from megaresume.data.shard_source import ShardSource
from megaresume.data.source import DocumentSource, Source
from megaresume.data.split import range_of
from megaresume.stream.errors import CorpusError, StateError, StreamExhausted
from megaresume.stream.source import check_fingerprint, hash_lengths
from tests.data.kit import add, captions, encoder, key, same, write_shard, write_shards
from tests.encoding.images.kit import file, picture


def expected(i: int, k=None):
    """Document i, encoded without shards and index."""
    from megaresume.encoding.images.document import Record

    name, members = captions(1, i)[0]
    return encoder().encode(Record(key=name, path="", members=members), k or key(i))


def damage_record(path, at: int) -> None:
    """Overwrite the header of the member at this byte; the size stays."""
    with open(path, "r+b") as shard:
        shard.seek(at)
        shard.write(b"\xff" * 512)


def test_documents_are_the_records_in_order_bit_for_bit(pairs):
    source = ShardSource(pairs)
    assert isinstance(source, Source) and isinstance(source, DocumentSource) and as_source(source) is source
    assert len(source) == 15
    for i in (14, 0, 7, 5, 4, 8, 3):
        document = source.encoded(i, key(i))
        assert same(document, expected(i))
        assert len(document.tokens) == source.length(i) and len(document.images) == 1
        assert np.array_equal(source.get(i), document.tokens)
        assert np.array_equal(source.read(i, 3, 5), document.tokens[3:8])
    ids = np.array([14, 0, 7, 7], np.int64)
    assert source.lengths(ids).tolist() == [len(expected(i).tokens) for i in ids]
    assert source.lengths(ids).dtype == np.int64


@pytest.mark.parametrize("i", [-1, 15])
def test_documents_that_are_not_there(pairs, i):
    source = ShardSource(pairs)
    for call in (source.length, source.record, source.get, source.describe):
        with pytest.raises(IndexError):
            call(i)
    with pytest.raises(IndexError):
        source.read(3, 0, 1000)


def test_fingerprint_needs_no_scan_and_is_that_of_the_lengths(pairs, monkeypatch):
    source = ShardSource(pairs)
    scanned = hash_lengths(source)
    monkeypatch.setattr(ShardSource, "lengths", None)
    found = source.fingerprint()
    assert (found.documents, found.tokens, found.lengths) == (15, scanned.tokens, scanned.lengths)
    assert found.tokenizer == encoder().fingerprint
    assert found.contents == xxhash.xxh3_64_hexdigest(np.array(source.index.column("content")).tobytes())


def test_a_range_reads_shifted_and_keeps_the_key(pairs):
    source = ShardSource(pairs, augment=[{"flip": {"p": 0.5}}])
    view = range_of(source, 4, 12)
    assert len(view) == 8 and view.whole and view.encoder is source.encoder
    for i in range(8):
        assert same(view.encoded(i, key(i)), source.encoded(i + 4, key(i)))
        assert view.describe(i) == source.describe(i + 4)
        assert view.record(i) == source.record(i + 4)
    assert view.fingerprint() == ShardSource(pairs).range_fingerprint(4, 12)
    scanned = hash_lengths(view)
    assert (view.fingerprint().tokens, view.fingerprint().lengths) == (scanned.tokens, scanned.lengths)
    assert view.fingerprint() == view.fingerprint(first=8) == range_of(view, 0, 8).fingerprint()
    assert view.fingerprint(first=5) == source.range_fingerprint(4, 9) != view.fingerprint()
    with pytest.raises(IndexError):
        view.encoded(8, key(8))


def _pixels(source, queue) -> None:
    queue.put([source.encoded(i, key(i)).images[0].pixels for i in (2, 13)])


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_the_same_pixels(pairs, method):
    source = ShardSource(pairs, augment=[{"flip": {"p": 0.5}}])
    here = [source.encoded(i, key(i)).images[0].pixels for i in (2, 13)]  # descriptors are open when it forks
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=_pixels, args=(source, queue))
    process.start()
    there = queue.get()
    process.join()
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


def test_pickling_sends_neither_lengths_nor_tokenizer(pairs):
    source = ShardSource(pairs, policy="mask", augment=["flip"])
    source.encoded(0, key(0))
    sent = pickle.dumps(source)
    assert len(sent) < 2000
    again = pickle.loads(sent)
    assert again.files.num_open == 0 and again.policy == "mask"
    assert same(again.encoded(3, key(3)), source.encoded(3, key(3)))


def open_files() -> list[str]:
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return targets


def test_few_descriptors_are_held_whatever_the_number_of_shards(tmp_path):
    write_shards(tmp_path, [1] * 12)
    prepare_shards([tmp_path / "*.tar"], tmp_path / "pairs", encoder())
    source = ShardSource(tmp_path / "pairs.shards.idx")
    source.files.max_open = 3
    errors: list[Exception] = []

    def read(first: int) -> None:
        try:
            for n in range(60):
                i = (first + 5 * n) % 12
                assert source.record(i).key == f"data/{i:06d}"
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert source.files.num_open == 3
    # Only those of these shards: another test's files may be collected at any moment.
    assert sum(target.endswith(".tar") and target.startswith(str(tmp_path)) for target in open_files()) == 3


def test_a_shard_of_another_size_is_refused_whatever_the_policy(pairs, tmp_path):
    middle = tmp_path / "shards/pairs-000001.tar"
    write_shard(middle, captions(40, 5))
    source = ShardSource(pairs, policy="mask")
    assert same(source.encoded(2, key(2)), expected(2))
    with pytest.raises(CorpusError, match=r"not the shard that the index was made of[\s\S]*expected: +10240 bytes"):
        source.encoded(6, key(6))
    middle.unlink()
    with pytest.raises(CorpusError, match=r"pairs-000001\.tar is missing"):
        ShardSource(pairs, policy="mask").encoded(6, key(6))


@pytest.mark.parametrize("shard", ["pairs-000000.tar", "pairs-000002.tar"])
def test_wrong_paths_show_when_the_source_is_opened(pairs, tmp_path, shard):
    (tmp_path / "shards" / shard).rename(tmp_path / "shards/away")
    with pytest.raises(CorpusError, match=f"{shard} is missing"):
        ShardSource(pairs)


def test_a_shard_that_is_cut_while_it_is_read(pairs, tmp_path):
    source = ShardSource(pairs)
    source.encoded(8, key(8))
    os.truncate(tmp_path / "shards/pairs-000002.tar", 2000)
    with pytest.raises(CorpusError, match="is cut"):
        source.encoded(14, key(14))


def test_shards_at_another_place(pairs, tmp_path):
    (tmp_path / "shards").rename(tmp_path / "moved")
    shards = [str(tmp_path / f"moved/pairs-00000{k}.tar") for k in range(3)]
    assert same(ShardSource(pairs, shards=shards).encoded(9, key(9)), expected(9))


def test_index_and_shards_move_together(pairs, tmp_path):
    assert ShardIndex(pairs).files[0].path == "shards/pairs-000000.tar"
    (tmp_path / "to").mkdir()
    for name in ("shards", "pairs.shards.idx"):
        (tmp_path / name).rename(tmp_path / "to" / name)
    assert same(ShardSource(tmp_path / "to/pairs.shards.idx").encoded(9, key(9)), expected(9))


def test_a_record_that_is_not_where_the_index_says_follows_the_policy(pairs, tmp_path):
    offset = int(ShardIndex(pairs).column("offset")[6])
    damage_record(tmp_path / "shards/pairs-000001.tar", offset + 1024)  # the header of the text
    with pytest.raises(CorpusError, match="is not where the index says"):
        ShardSource(pairs).encoded(6, key(6))
    for policy in ("mask", "truncate"):
        document = ShardSource(pairs, policy=policy).encoded(6, key(6))
        assert len(document.tokens) == ShardSource(pairs).length(6)
        assert not document.trained.any() and not document.images
        assert document.fault.policy == policy and str(tmp_path) not in document.fault.reason
        assert same(ShardSource(pairs, policy=policy).encoded(7, key(7)), expected(7))
    assert "error" in ShardSource(pairs).describe(6)


def test_an_image_that_is_cut_follows_the_policy(tmp_path):
    whole = file(picture(64, 64, seed=3))
    records = captions(3)
    records[1] = ("data/000001", {"png": whole[: len(whole) // 2], "txt": b"cut"})  # the header is whole
    write_shard(tmp_path / "a.tar", records)
    summary = prepare_shards([tmp_path / "a.tar"], tmp_path / "a", encoder())
    assert summary.invalid == 0
    with pytest.raises(CorpusError, match="data/000001"):
        ShardSource(tmp_path / "a.shards.idx").encoded(1, key(1))
    masked = ShardSource(tmp_path / "a.shards.idx", policy="mask").encoded(1, key(1))
    assert len(masked.tokens) == 4 + 3 + 1 and masked.fault.policy == "mask"


def test_too_long_is_refused_cut_or_left_out(pairs):
    lengths = ShardSource(pairs).lengths(np.arange(15))
    limit = int(np.sort(lengths)[-4])
    over = np.flatnonzero(lengths > limit)
    assert 0 < len(over) < 4
    with pytest.raises(CorpusError, match=rf"{len(over)} of 15 above max_tokens: document {over[0]} with"):
        ShardSource(pairs, max_tokens=limit)
    assert ShardSource(pairs, max_tokens=int(lengths.max())).fingerprint() == ShardSource(pairs).fingerprint()
    cut = ShardSource(pairs, max_tokens=limit, too_long="truncate")
    assert cut.longest == limit
    assert cut.lengths(np.arange(15)).tolist() == np.minimum(lengths, limit).tolist()
    dropped = ShardSource(pairs, max_tokens=limit, too_long="drop")
    assert dropped.lengths(np.arange(15)).tolist() == np.where(lengths > limit, 0, lengths).tolist()
    for source in (cut, dropped):
        assert source.fingerprint().lengths == hash_lengths(source).lengths != ShardSource(pairs).fingerprint().lengths
    i = int(over[0])
    document, whole = cut.encoded(i, key(i)), expected(i)
    assert np.array_equal(document.tokens, whole.tokens[:limit])
    assert np.array_equal(document.images[0].pixels, whole.images[0].pixels) and document.fault is None


def test_an_image_that_does_not_fit_whole_is_masked(pairs):
    document = ShardSource(pairs, max_tokens=3, too_long="truncate").encoded(2, key(2))
    assert len(document.tokens) == 3 and not document.images and not document.trained.any()
    assert encoder().image_token_id not in document.tokens


def test_a_damaged_length_is_an_error_not_a_length(pairs):
    data = bytearray(pairs.read_bytes())
    at = ShardIndex.column_places(15)["tokens"] + 4 * 3
    data[at : at + 4] = b"\xff\xff\xff\xff"
    pairs.write_bytes(data)
    source = ShardSource(pairs)
    assert source.length(2) == len(expected(2).tokens)
    with pytest.raises(CorpusError, match="document 3 of -1 tokens"):
        source.lengths(np.array([2, 3]))


def test_where_a_document_comes_from(pairs, tmp_path):
    found = ShardSource(pairs).describe(6)
    assert found["shard"] == str(tmp_path / "shards/pairs-000001.tar")
    assert (found["key"], found["record"], found["images"]) == ("data/000006", 1, {"png": [21, 16]})
    assert found["members"]["txt"] == len(captions(1, 6)[0][1]["txt"])


@pytest.mark.parametrize("policy", ["error", "mask", "truncate"])
def test_another_record_of_the_same_length_is_never_taken_for_the_indexed_one(tmp_path, policy):
    """Shards of pictures of one size, written again in another order: every offset, size and length is as it was."""
    records = [(f"{i}", {"png": picture_bytes(i), "txt": b"digit %d" % i}) for i in range(3)]
    shard = write_shard(tmp_path / "digits.tar", records)
    prepare_shards([shard], tmp_path / "digits", encoder())
    source = ShardSource(tmp_path / "digits.shards.idx", policy=policy)
    whole, before = source.encoded(1, key(1)), source.encoded(0, key(0))
    assert whole.fault is None and len(whole.images) == 1
    size = shard.stat().st_size
    write_shard(shard, [records[0], ("1", records[2][1]), ("2", records[1][1])])
    assert shard.stat().st_size == size
    source = ShardSource(tmp_path / "digits.shards.idx", policy=policy)
    assert same(source.encoded(0, key(0)), before)
    if policy == "error":
        with pytest.raises(CorpusError, match=r"record '1' is not the indexed one[\s\S]*mixed up"):
            source.encoded(1, key(1))
        return
    changed = source.encoded(1, key(1))
    assert (
        changed.fault.reason == "record '1' is not the indexed one; found another content, as long as the indexed one"
    )
    assert not changed.images and not changed.trained.any() and len(changed.tokens) == len(whole.tokens)


def test_other_contents_of_the_same_lengths_are_another_corpus(tmp_path):
    """Edited, and the index made again: every read fits, but it is not what the run was trained on."""
    fingerprints = []
    for words in (b"digit one", b"digit two"):
        shard = write_shard(tmp_path / "digits.tar", [("0", {"png": picture_bytes(0), "txt": words})])
        prepare_shards([shard], tmp_path / "digits", encoder(), overwrite=True)
        fingerprints.append(ShardSource(tmp_path / "digits.shards.idx").fingerprint())
    before, now = fingerprints
    assert (before.documents, before.tokens, before.lengths) == (now.documents, now.tokens, now.lengths)
    with pytest.raises(StateError, match="not the corpus that the state was made with") as error:
        check_fingerprint("digits", before, now)
    assert "documents of the same lengths have other contents" in str(error.value.cause)


def test_shards_that_were_added_do_not_change_what_came_before(tmp_path):
    shards = [write_shard(tmp_path / f"{k}.tar", captions(4, first=4 * k)) for k in range(2)]
    prepare_shards(shards[:1], tmp_path / "one", encoder())
    prepare_shards(shards, tmp_path / "two", encoder())
    one, two = (ShardSource(tmp_path / f"{name}.shards.idx") for name in ("one", "two"))
    assert two.fingerprint(first=4) == one.fingerprint()
    assert two.fingerprint() != one.fingerprint()


def test_a_shard_that_was_only_packed_anew_is_the_same(tmp_path):
    records = captions(4)
    shard = write_shard(tmp_path / "pairs.tar", records)
    prepare_shards([shard], tmp_path / "pairs", encoder())
    index = (tmp_path / "pairs.shards.idx").read_bytes()
    with tarfile.open(shard, "w") as archive:
        for name, members in records:
            for extension, content in members.items():
                add(archive, f"{name}.{extension}", content, mtime=7, uname="other")
    source = ShardSource(tmp_path / "pairs.shards.idx")
    assert all(same(source.encoded(i, key(i)), expected(i)) for i in range(4))
    prepare_shards([shard], tmp_path / "pairs", encoder(), overwrite=True)
    assert (tmp_path / "pairs.shards.idx").read_bytes() == index


def picture_bytes(i: int) -> bytes:
    """Pictures whose files have one size."""
    return file(picture(16, 16, seed=i), "PNG", compress_level=0)


@pytest.mark.parametrize("shuffle", [None, {"block": 3, "window": 2}])
@pytest.mark.parametrize("append", ["now", "next_epoch"])
def test_a_run_goes_on_with_shards_that_were_added(tmp_path, append, shuffle):
    """Every record once an epoch, by its key; those of the new shards in the epochs in which they should."""
    sizes = [5, 3, 7, 6, 2]
    write_shards(tmp_path / "shards", sizes)

    def stream(shards, state=None):
        index = tmp_path / f"pairs{shards}"
        if state is None or not index.with_suffix(".shards.idx").exists():
            prepare_shards([tmp_path / "shards" / f"pairs-{{000000..{shards - 1:06}}}.tar"], index, encoder())
        entry = {"kind": "webdataset", "index": f"{index}.shards.idx", "max_epochs": 2, "append": append}
        entry |= {} if shuffle is None else {"shuffle": shuffle}
        return open_stream({"seed": 2, "seq_length": 64, "packing": "none", "sources": {"pairs": entry}}, state=state)

    def records(stream, first, stop):
        names = [stream.sources[0].describe(int(d))["key"] for d in stream.plan(first, stop).table[:, 2]]
        return list(zip(stream.plan(first, stop).epochs().tolist(), names, strict=True))

    before = stream(3)
    seen = records(before, 0, 6)
    grown = stream(5, before.state_at(6))
    assert "grew from 15 to 23" in grown.accepted[0]
    again = stream(5, grown.state_at(11))
    total = 15 + 23 if append == "next_epoch" else 2 * 23
    seen += records(grown, 6, 11) + records(again, 11, total)
    with pytest.raises(StreamExhausted):
        again.plan(total, total + 1)
    every = {again.sources[0].describe(i)["key"] for i in range(23)}
    old = {again.sources[0].describe(i)["key"] for i in range(15)}
    assert len(every) == 23 and len(set(seen)) == len(seen) == total
    assert {name for epoch, name in seen if epoch == 0} == (every if append == "now" else old)
    assert {name for epoch, name in seen if epoch == 1} == every
