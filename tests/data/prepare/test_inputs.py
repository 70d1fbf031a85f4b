from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import PIL.Image
import pytest
import zstandard

from megaresume.data.inputs import find_inputs
from megaresume.data.prepare.blocks import BlockReader, Position
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.streams import InputStream
from megaresume.stream.errors import CorpusError, SetupError, UsageError

CONTENT = b"".join(b"line %d\n" % i for i in range(50_000))
COMPRESS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def stream(path, offset=0):
    return InputStream(find_inputs([path], format="text").files[0], offset)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("members", [1, 3])
def test_every_compression_reads_back_from_any_offset(tmp_path, suffix, members):
    path = tmp_path / f"a.jsonl{suffix}"
    third = len(CONTENT) // 3
    pieces = [CONTENT] if members == 1 else [CONTENT[:third], CONTENT[third : 2 * third], CONTENT[2 * third :]]
    path.write_bytes(b"".join(COMPRESS[suffix](piece) for piece in pieces))
    assert stream(path).read(1 << 30) == CONTENT
    for offset in (1, third, 2 * third + 1, len(CONTENT)):
        opened = stream(path, offset)
        first = opened.read(5)
        assert first + opened.readline(100) + opened.read(1 << 30) == CONTENT[offset:]
        assert opened.raw_position() == path.stat().st_size
        opened.close()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_damaged_compression(tmp_path, suffix, damage):
    data = bytearray(COMPRESS[suffix](os.urandom(50_000).hex().encode()))
    if damage == "cut":
        data = data[:-20]
    elif damage == "flip":
        data[4] ^= 0xFF
        data[len(data) // 2] ^= 0xFF
    else:
        data = bytearray(b"this is not compressed at all, whatever its name says\n" * 100)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data)
    with pytest.raises(CorpusError, match="is damaged"):
        stream(path).read(1 << 30)


def test_missing_zstandard(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(COMPRESS[".zst"](b"x"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(SetupError, match="'zstandard' is missing"):
        stream(path)


def test_order_and_formats(tmp_path):
    for name in ("b/2.py", "b/1.py", "b/10.txt", "b/.hidden.py", "b/.git/x.py", "b/c/0.jsonl.gz", "a.txt", "z.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([tmp_path / "z.json", tmp_path / "b", tmp_path / "a.txt"]).files
    assert [(f.path.relative_to(tmp_path).as_posix(), f.format) for f in found] == [
        ("z.json", "jsonl"),
        ("b/1.py", "text"),
        ("b/10.txt", "text"),
        ("b/2.py", "text"),
        ("b/c/0.jsonl.gz", "jsonl"),
        ("a.txt", "text"),
    ]
    assert [f.path.name for f in find_inputs([tmp_path], glob="**/*.py").files] == ["1.py", "2.py"]
    assert {f.format for f in find_inputs([tmp_path / "b"], format="jsonl").files} == {"jsonl"}


def tar(**members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def image(kind):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (8, 8)).save(buffer, kind)
    return buffer.getvalue()


def zipped():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "text")
    return buffer.getvalue()


BINARY = {
    "a tar archive": tar(a=b"only text, as records of captions are"),
    "a zip archive": zipped(),
    "a Parquet table": b"PAR1\x15\x04\x15\x20\x15\x24L\x15\x04" + b"text" * 100,
    **{f"a {kind} image": image(kind) for kind in ("PNG", "JPEG", "GIF", "WebP", "TIFF", "BMP")},
    **{name: COMPRESS[suffix](CONTENT) for name, suffix in {"gzip": ".gz", "bzip2": ".bz2", "xz": ".xz"}.items()},
    "zstd": COMPRESS[".zst"](CONTENT),
    "a NUL byte at 4": b"text\0\0\0\0more",
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", BINARY)
def test_what_is_no_text_is_refused(tmp_path, kind, suffix):
    (tmp_path / f"a{suffix}").write_bytes(COMPRESS[suffix](BINARY[kind]))
    with pytest.raises(UsageError, match="is not text") as error:
        InputStream(find_inputs([tmp_path]).files[0])
    assert error.value.found == kind and error.value.expected and error.value.action


def test_a_directory_of_shards_makes_no_corpus(tmp_path):
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        (tmp_path / "shards" / f"pairs-{shard}.tar").write_bytes(BINARY["a tar archive"])
    with pytest.raises(UsageError, match=r"pairs-0.tar is not text") as error:
        prepare([tmp_path / "shards"], tmp_path / "corpus", PrepareOptions(workers=1))
    assert "shards/*.tar --processor" in error.value.action
    assert not {*tmp_path.glob("corpus.bin"), *tmp_path.glob("corpus.idx")}


@pytest.mark.parametrize(
    "text",
    [
        "PAR1 is a gene",
        "GIF89a is a format",
        "BM",
        "BZh",
        "%PDF-1.4",
        "",
        "tabs\t\f\x1b[31mred",
        "日本" * 5000,
        "ustar" * 100,
    ],
)
def test_text_is_text_whatever_it_begins_with(tmp_path, text):
    (tmp_path / "a").write_text(text)
    assert stream(tmp_path / "a").read(1 << 30) == text.encode()


def test_text_in_another_encoding_is_left_to_its_flag(tmp_path):
    (tmp_path / "a").write_bytes("caf\xe9 ".encode("latin-1") * 5000)
    assert stream(tmp_path / "a").read(4) == b"caf\xe9"


def test_links_are_followed_and_each_directory_is_read_once(tmp_path):
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for path in (corpus / "b/1.txt", corpus / "c/2.txt", elsewhere / "deep/3.txt", elsewhere / "4.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (corpus / "a").symlink_to(elsewhere)  # a directory at another place
    (corpus / "again").symlink_to(elsewhere)  # the same one once more
    (corpus / "0b").symlink_to("b")  # one that is read without it
    (elsewhere / "deep/up").symlink_to(corpus)  # round and round
    (elsewhere / "self").symlink_to("self")
    (corpus / "5.txt").symlink_to(elsewhere / "4.txt")  # a file that is read as a/4.txt
    (corpus / "6.txt").symlink_to(tmp_path / "6.txt")  # one at another place
    (tmp_path / "6.txt").write_text("6")
    (elsewhere / "self").unlink()
    found = find_inputs([corpus])
    names = [f.path.relative_to(corpus).as_posix() for f in found.files]
    assert names == ["6.txt", "a/4.txt", "a/deep/3.txt", "b/1.txt", "c/2.txt"]
    assert {p.relative_to(corpus).as_posix() for p in found.linked_twice} == {"0b", "again", "a/deep/up", "5.txt"}
    assert [f.path.name for f in find_inputs([corpus], glob="*/deep/*.txt").files] == ["3.txt"]
    assert [f.path.name for f in find_inputs([corpus], glob="a/**/*.txt").files] == ["4.txt", "3.txt"]


@pytest.mark.parametrize("target", ["nowhere", "broken.txt"])
def test_a_link_that_leads_nowhere_is_no_file_less(tmp_path, target):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "broken.txt").symlink_to(target)
    with pytest.raises(CorpusError, match=r"broken\.txt is a broken link"):
        find_inputs([tmp_path])
    assert len(find_inputs([tmp_path], glob="a*").files) == 1


@pytest.mark.parametrize("glob", ["*", "**", "**/*", "b/*", "**/b/**/*.txt", "?/*.txt", "**/[12].txt", "b/**/1.txt"])
def test_patterns_are_those_of_pathlib(tmp_path, glob):
    for name in ("1.txt", "b/1.txt", "b/2.md", "b/b/1.txt", "b/c/d/2.txt", ".x/1.txt", "c/.1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    matching = [f for f in tmp_path.glob("**/*" if glob == "**" else glob) if f.is_file()]
    # Python 3.13 gives a file once for each way in which a pattern matches it.
    expected = sorted({n for f in matching if "/." not in (n := "/" + f.relative_to(tmp_path).as_posix())})
    found = ["/" + f.path.relative_to(tmp_path).as_posix() for f in find_inputs([tmp_path], glob=glob).files]
    assert found == expected


def test_bad_inputs(tmp_path):
    (tmp_path / "a.avro").write_text("x")
    (tmp_path / "noname").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, text in (
        (tmp_path / "a.avro", "has an unknown suffix"),
        (tmp_path / "noname", "has an unknown suffix"),
        (tmp_path / "empty", "matches"),
        (tmp_path / "none", "does not exist"),
    ):
        with pytest.raises(UsageError, match=text):
            find_inputs([path])


@pytest.mark.parametrize("glob", ["/tmp/**", "", "**.py"])
def test_bad_glob(tmp_path, glob):
    with pytest.raises(UsageError, match="bad --glob"):
        find_inputs([tmp_path], glob=glob)


def test_file_changed_or_gone_since_it_was_found(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    file = find_inputs([path]).files[0]
    path.write_text("three")
    with pytest.raises(CorpusError, match="changed while it was being prepared"):
        InputStream(file)
    path.unlink()
    with pytest.raises(CorpusError, match="cannot be read"):
        InputStream(file)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_file_that_is_written_again_while_it_is_read(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    old, new = ((b'{"text": "%s"}\n' % text) * 9 for text in (b"old", b"new"))
    path.write_bytes(COMPRESS[suffix](old))
    files = find_inputs([path]).files
    reader = BlockReader(files, "file", 20)
    first = reader.read(Position())
    with open(path, "r+b") as file:
        file.write(COMPRESS[suffix](new))
    with pytest.raises(CorpusError, match="changed while it was being prepared"):
        reader.read(first.end)
    reader.close()


def test_compressed_file_that_became_shorter(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"abc"))
    with pytest.raises(CorpusError, match="is shorter than it was"):
        stream(path, 10)


def test_a_file_that_is_named_twice_is_refused(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("a.txt", "b.txt"):
        (corpus / name).write_text("the same words")
    (tmp_path / "link.txt").symlink_to("corpus/a.txt")
    (tmp_path / "linked").symlink_to("corpus")
    os.link(corpus / "a.txt", tmp_path / "hard.txt")
    monkeypatch.chdir(tmp_path)
    a = corpus / "a.txt"
    for other in (a, "corpus/a.txt", "corpus/../corpus/a.txt", "link.txt", "linked/a.txt", corpus, "linked"):
        with pytest.raises(UsageError, match=r"(?s)a\.txt would be read twice.*--repeat-inputs"):
            find_inputs([a, other])
        assert len(find_inputs([a, other], repeats=True).files) == (3 if Path(other).is_dir() else 2)
    assert len(find_inputs([a, corpus / "b.txt", "hard.txt"]).files) == 3


def test_a_link_to_a_file_that_is_read_is_left_out(tmp_path):
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / "a.txt").symlink_to("b.txt")
    found = find_inputs([tmp_path])
    assert [file.path.name for file in found.files] == ["b.txt"]
    assert [path.name for path in found.linked_twice] == ["a.txt"]
