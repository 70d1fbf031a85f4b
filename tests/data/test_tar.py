from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

import pytest

from megaresume.data.shard_files import RecordError, ShardFiles
from megaresume.data.tar import parse_record, walk
from megaresume.stream.errors import CorpusError
from tests.data.kit import add, captions, write_shard


def extents(path: Path, **options):
    files = ShardFiles()
    return list(walk(files.scan(str(path), os.path.getsize(path)), path.name, **options))


def records(path: Path):
    data = path.read_bytes()
    return [parse_record(data[e.offset : e.offset + e.nbytes], path.name) for e in extents(path)]


def cut(path: Path, size: int) -> Path:
    os.truncate(path, size)
    return path


def test_records_are_those_of_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    path = tmp_path / "a.tar"
    samples = [
        {"__key__": "b/000", "jpg": b"image", "txt": "a", "json": {"a": 1}},
        {"__key__": "b/001", "0.PNG": b"first", "1.png": b"second", "txt": "b"},
        {"__key__": "a/001", "jpg": b"", "txt": "c"},
    ]
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    theirs = [
        (sample.pop("__key__"), {k: v for k, v in sample.items() if not k.startswith("__")})
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    ours = [(record.key, dict(record.members)) for record in records(path)]
    assert ours == theirs
    assert [key for key, _ in ours] == ["b/000", "b/001", "a/001"]
    assert ours[1][1] == {"0.png": b"first", "1.png": b"second", "txt": b"b"}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_names_longer_than_a_header_and_names_that_are_not_ascii(tmp_path, form):
    names = ["data/" + "n" * 60, "d" * 90 + "/" + "m" * 60, "fotos/größe"]
    if form != tarfile.USTAR_FORMAT:
        names.append("x/" * 80 + "long")
    path = write_shard(tmp_path / "a.tar", [(n, {"txt": n.encode(), "png": b"p" * 700}) for n in names], format=form)
    assert [(r.key, r.members["txt"].decode(), len(r.members["png"])) for r in records(path)] == [
        (n, n, 700) for n in names
    ]


def test_a_key_ends_at_the_first_dot_of_the_base_name_and_members_follow_each_other(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("v1.5/a.left.jpg", "v1.5/a.right.jpg", "v1.5/b.txt", "v1.5/a.left.jpg"):
            add(archive, name, name.encode())
    assert [(r.key, list(r.members)) for r in records(path)] == [
        ("v1.5/a", ["left.jpg", "right.jpg"]),
        ("v1.5/b", ["txt"]),
        ("v1.5/a", ["left.jpg"]),  # a record may come twice
    ]


def test_an_archive_whose_members_are_not_grouped_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("000.jpg", "001.jpg", "000.txt", "001.txt"):
            add(archive, name, name.encode())
    with pytest.raises(CorpusError, match=r"(?s)a key that comes again: '000'.*000\.txt, after.*--sort=name"):
        records(path)


def test_directories_are_passed_over_and_other_files_are_named(tmp_path):
    path, ignored = tmp_path / "a.tar", []
    with tarfile.open(path, "w") as archive:
        add(archive, "data", type=tarfile.DIRTYPE)
        add(archive, "__meta__/info.json", b"{}")
        add(archive, "data/0.txt", b"a")
        add(archive, "data/README", b"b")
        add(archive, "data/.hidden", b"b")
        add(archive, "data/1.txt", b"c")
    assert [e.key for e in extents(path, ignored=ignored.append)] == ["data/0", "data/1"]
    assert ignored == ["__meta__/info.json", "data/README", "data/.hidden"]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda p: p.write_bytes(gzip.compress(p.read_bytes())), "is compressed"),
        (lambda p: cut(p, 0), "is not a whole tar"),
        (lambda p: cut(p, 700), "is not a whole tar"),
        # inside the last member, and between two members: without a look at the end marker both would pass
        (lambda p: cut(p, 512 * 11 + 100), "is not a whole tar"),
        (lambda p: cut(p, 512 * 12), "no end marker"),
        (
            lambda p: p.write_bytes(p.read_bytes()[:2048] + b"\xff" * 512 + p.read_bytes()[2560:]),
            "no header of a member",
        ),
        # one bit of a name
        (lambda p: p.write_bytes(p.read_bytes()[:2048] + b"e" + p.read_bytes()[2049:]), "no header of a member"),
        (lambda p: p.write_bytes(p.read_bytes() * 2), "continues after its end marker"),
        (lambda p: p.write_bytes(b"<html>404</html>" * 100), "is not a whole tar"),
    ],
    ids=[
        "gzip",
        "empty",
        "in the header",
        "in a member",
        "between members",
        "bad header",
        "a bit",
        "two archives",
        "html",
    ],
)
def test_a_damaged_archive_is_refused_and_never_read_in_part(tmp_path, damage, match):
    path = write_shard(tmp_path / "a.tar", captions(3))
    assert extents(path)[-1].offset + extents(path)[-1].nbytes == 512 * 12
    damage(path)
    with pytest.raises(CorpusError, match=match) as error:
        extents(path)
    assert "a.tar" in str(error.value)


@pytest.mark.parametrize("name", ["../../etc/passwd.txt", "/etc/passwd.txt", "a/../../b.txt"])
def test_a_member_outside_the_archive_is_refused(tmp_path, name):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "0.txt", b"a")
        add(archive, name, b"b")
    with pytest.raises(CorpusError, match="points outside it"):
        extents(path)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "a link"),
        ({"type": tarfile.LNKTYPE, "linkname": "0.txt"}, "a link"),
        ({"type": tarfile.FIFOTYPE}, "no file"),
        ({"type": tarfile.CHRTYPE, "devmajor": 1}, "no file"),
    ],
    ids=["symlink", "hard link", "fifo", "device"],
)
def test_what_is_no_file_is_refused(tmp_path, fields, match):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "0.txt", b"a")
        add(archive, "1.txt", **fields)
    with pytest.raises(CorpusError, match=match):
        extents(path)


def test_an_archive_without_a_record_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "README", b"a")
    with pytest.raises(CorpusError, match="has no record"):
        extents(path)


def test_bytes_that_are_not_the_record_are_an_error_of_the_record(tmp_path):
    path = write_shard(tmp_path / "a.tar", captions(3))
    data, (first, second, _) = path.read_bytes(), extents(path)
    assert parse_record(data[second.offset : second.offset + second.nbytes], "a.tar").key == "data/000001"
    whole = data[: first.nbytes]
    for damaged in (
        whole[:1100],  # cut in the header of the second member
        whole[:1536],  # nothing of the second member
        b"\0" * len(whole),
        data[512 : 512 + first.nbytes],  # starts in the middle
        whole[:1024] + b"\xff" * 512 + whole[1536:],  # second header damaged
        whole[:1024] + b"\0" * 1024,  # an end marker in the middle
        data[: first.nbytes + second.nbytes],  # two records
        b"",
    ):
        with pytest.raises(RecordError):
            parse_record(damaged, "a.tar")


def test_two_members_of_one_name_are_an_error_of_the_record(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "0.jpg", b"a")
        add(archive, "0.JPG", b"b")
    with pytest.raises(RecordError, match="does not hold together"):
        records(path)


def test_a_name_that_is_not_utf8_is_refused_by_name(tmp_path):
    path = write_shard(
        tmp_path / "a.tar", [("gr\xf6\xdfe", {"txt": b"a"})], format=tarfile.GNU_FORMAT, encoding="latin-1"
    )
    with pytest.raises(CorpusError, match=r"whose name is not UTF-8[\s\S]*'gr\\udcf6\\udcdfe.txt'") as caught:
        records(path)
    str(caught.value).encode()
