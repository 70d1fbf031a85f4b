from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

import megaresume.data.indexed_documents as index
from megaresume.data.sidecar import cache_path, sidecar_path, write_tokenizer
from megaresume.data.split import IndexedSource, range_of
from megaresume.stream.errors import CorpusError
from tests.corpora import simple_corpus


@pytest.fixture
def prefix(tmp_path):
    return simple_corpus(tmp_path / "web", [3, 4, 5])


@pytest.fixture
def no_scan(monkeypatch):
    """Any scan of the index from here on fails the test."""

    def arm() -> None:
        def scan(*_: object) -> None:
            raise AssertionError("the index was scanned")

        monkeypatch.setattr(index.IndexedDocuments, "_scan", scan)

    return arm


def test_second_fingerprint_does_not_scan(prefix, no_scan):
    whole = IndexedSource(prefix).fingerprint()
    part = range_of(IndexedSource(prefix), 1, 3).fingerprint()
    no_scan()
    assert IndexedSource(prefix).fingerprint() == whole
    assert range_of(IndexedSource(prefix), 1, 3).fingerprint() == part
    assert (part.documents, part.tokens) == (2, 9)
    assert part.lengths != whole.lengths
    with pytest.raises(AssertionError, match="scanned"):
        IndexedSource(prefix).fingerprint(recompute=True)


def test_a_changed_length_is_noticed(prefix):
    before = IndexedSource(prefix).fingerprint()
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    content[34:42] = struct.pack("<ii", 4, 3)  # 3, 4, 5 tokens become 4, 3, 5
    content[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", 16)
    path.write_bytes(bytes(content))
    after = IndexedSource(prefix).fingerprint()
    assert after.lengths != before.lengths
    assert (after.documents, after.tokens) == (before.documents, before.tokens)
    # The old entry is of no use to anybody.
    assert len(json.loads(sidecar_path(prefix).read_text())["fingerprints"]) == 1


@pytest.mark.parametrize("change", ["mtime", "inode"])
def test_a_touched_or_copied_index_is_scanned_again(prefix, no_scan, change):
    IndexedSource(prefix).fingerprint()
    path = Path(f"{prefix}.idx")
    if change == "mtime":
        os.utime(path, ns=(1, 1))
    else:
        shutil.copy2(path, path.with_name("copy"))
        os.replace(path.with_name("copy"), path)
    no_scan()
    with pytest.raises(AssertionError, match="scanned"):
        IndexedSource(prefix).fingerprint()


def test_index_replaced_while_it_is_open(prefix):
    source = IndexedSource(prefix)
    os.utime(f"{prefix}.idx", ns=(1, 1))
    assert source.fingerprint().documents == 3
    shutil.copy(f"{prefix}.idx", f"{prefix}.new")
    os.replace(f"{prefix}.new", f"{prefix}.idx")
    with pytest.raises(CorpusError, match=r"web.idx changed after the corpus was opened"):
        source.fingerprint()


def unwritable(monkeypatch, *directories: Path) -> None:
    """Like a read-only file system; permissions do not stop root, who runs CI."""
    real = index.sidecar.write_json_atomically

    def write(path: Path, data: object) -> None:
        if path.parent in directories:
            raise PermissionError(13, "Permission denied", str(path))
        real(path, data)

    monkeypatch.setattr(index.sidecar, "write_json_atomically", write)


def test_read_only_corpus_is_cached_for_the_user(prefix, monkeypatch, no_scan, cache_directory):
    unwritable(monkeypatch, prefix.parent)
    known = IndexedSource(prefix).fingerprint()
    assert not sidecar_path(prefix).exists()
    assert cache_path(prefix).parent == cache_directory
    assert cache_path(prefix).exists()
    no_scan()
    assert IndexedSource(prefix).fingerprint() == known


def test_nowhere_to_write_is_no_error(prefix, monkeypatch, cache_directory):
    unwritable(monkeypatch, prefix.parent, cache_directory)
    assert IndexedSource(prefix).fingerprint().documents == 3
    assert list(cache_directory.iterdir()) == []


def test_a_user_without_a_home(prefix, monkeypatch):
    """Containers run under numbers that no user has; the cache is no reason to stop."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MEGARESUME_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert IndexedSource(prefix).fingerprint().documents == 3
    assert sidecar_path(prefix).exists()
    sidecar_path(prefix).unlink()
    unwritable(monkeypatch, prefix.parent)
    assert IndexedSource(prefix).fingerprint().documents == 3


def test_damaged_user_cache_is_computed_again(prefix, monkeypatch):
    unwritable(monkeypatch, prefix.parent)
    known = IndexedSource(prefix).fingerprint()
    cache_path(prefix).write_text("{")
    assert IndexedSource(prefix).fingerprint() == known
    assert json.loads(cache_path(prefix).read_text())["fingerprints"]


def test_xdg_cache_directory(prefix, monkeypatch, tmp_path):
    monkeypatch.delenv("MEGARESUME_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_path(prefix).parent == tmp_path / "xdg" / "megaresume"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": "other"}', b"\xff\xfe", '{"format": "megaresume.corpus", "fingerprints": 3}']
)
def test_damaged_sidecar_is_refused(prefix, content):
    sidecar_path(prefix).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CorpusError, match=r"web\.megaresume\.json is damaged"):
        IndexedSource(prefix).fingerprint()


def test_a_tokenizer_without_its_fingerprint_is_refused(prefix):
    sizes = {"idx_bytes": Path(f"{prefix}.idx").stat().st_size, "bin_bytes": Path(f"{prefix}.bin").stat().st_size}
    write_tokenizer(prefix, {"fingerprinp": "ab" * 16}, **sizes)
    with pytest.raises(CorpusError, match=r"web\.megaresume\.json is damaged"):
        IndexedSource(prefix).fingerprint()


@pytest.mark.parametrize("version", ["0", "-1", "null", "true", "1.0", '"2"'])
def test_what_is_no_version_is_damage(prefix, version):
    sidecar_path(prefix).write_text(f'{{"format": "megaresume.corpus", "version": {version}}}')
    with pytest.raises(CorpusError, match="is damaged"):
        IndexedSource(prefix).fingerprint()


def test_newer_sidecar_is_refused(prefix):
    sidecar_path(prefix).write_text('{"format": "megaresume.corpus", "version": 2}')
    with pytest.raises(CorpusError, match="a version that this release cannot read"):
        IndexedSource(prefix).fingerprint()


def test_tokenizer_is_kept_beside_fingerprints_and_dropped_with_another_corpus(prefix):
    sizes = {"idx_bytes": Path(f"{prefix}.idx").stat().st_size, "bin_bytes": Path(f"{prefix}.bin").stat().st_size}
    write_tokenizer(prefix, {"fingerprint": "ab" * 16}, **sizes)
    assert IndexedSource(prefix).fingerprint().tokenizer == "ab" * 16
    assert IndexedSource(prefix).fingerprint(recompute=True).tokenizer == "ab" * 16
    assert range_of(IndexedSource(prefix), 0, 2).fingerprint().tokenizer == "ab" * 16
    simple_corpus(prefix, [3, 4, 6])
    assert IndexedSource(prefix).fingerprint().tokenizer is None


def test_no_temporary_files_stay(prefix):
    IndexedSource(prefix).fingerprint()
    assert sorted(p.name for p in prefix.parent.iterdir()) == ["web.bin", "web.idx", "web.megaresume.json"]
