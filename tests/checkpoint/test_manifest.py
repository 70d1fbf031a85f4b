from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from megaresume.checkpoint.records.manifest import FileEntry, Manifest, checksum_files, list_files, read_manifest
from megaresume.checkpoint.records.sealed import seal
from megaresume.stream.errors import CheckpointError, NewerFormatError


@pytest.fixture
def tag_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "global_step10"
    (directory / "mp_rank_00").mkdir(parents=True)
    (directory / "a.pt").write_bytes(b"a" * 1000)
    (directory / "mp_rank_00" / "b.pt").write_bytes(bytes(range(256)) * 40_000)  # more than one chunk
    (directory / ".metadata").write_bytes(b"m")
    return directory


def manifest_of(tag_dir: Path) -> Manifest:
    files = list_files(tag_dir)
    sums = checksum_files(tag_dir, [f.path for f in files])
    entries = tuple(FileEntry(path=f.path, size=f.size, checksum=str(sums[f.path])) for f in files)
    return Manifest(iteration=10, tag=tag_dir.name, save_id="1" * 16, digest="2" * 16, files=entries)


def test_lists_every_file_with_its_size(tag_dir: Path) -> None:
    (tag_dir / ".nfs0001").write_bytes(b"kept by NFS for a deleted open file")
    found = [(f.path, f.size) for f in list_files(tag_dir)]
    assert found == [(".metadata", 1), ("a.pt", 1000), ("mp_rank_00/b.pt", 10_240_000)]


def test_round_trip(tag_dir: Path, tmp_path: Path) -> None:
    manifest = manifest_of(tag_dir)
    path = tmp_path / "step_0000010.manifest.json"
    path.write_bytes(manifest.to_bytes())
    assert read_manifest(path, iteration=10, tag="global_step10") == manifest
    assert manifest.size == 10_241_001
    assert manifest.verify(tag_dir) == manifest.verify(tag_dir, mode="checksums") == []


def test_checksums_are_xxh3_128_of_the_file(tag_dir: Path) -> None:
    seen: list[int] = []
    sums = checksum_files(tag_dir, ["mp_rank_00/b.pt"], progress=seen.append)
    assert sums["mp_rank_00/b.pt"] == xxhash.xxh3_128_hexdigest((tag_dir / "mp_rank_00/b.pt").read_bytes())
    assert sum(seen) == 10_240_000


@pytest.mark.process
def test_checksums_as_a_program_ends(tag_dir: Path) -> None:
    """Python waits for the thread that makes the last checkpoint durable, and lets it start no others."""
    program = (
        "import atexit, sys, concurrent.futures.thread; from pathlib import Path;"
        "from megaresume.checkpoint.records.manifest import checksum_files;"
        "atexit.register(lambda: print(*checksum_files(Path(sys.argv[1]), ['mp_rank_00/b.pt']).values()))"
    )
    done = subprocess.run([sys.executable, "-c", program, tag_dir], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == xxhash.xxh3_128_hexdigest((tag_dir / "mp_rank_00/b.pt").read_bytes()), done.stderr


def test_problems_are_precise_and_in_order(tag_dir: Path) -> None:
    manifest = manifest_of(tag_dir)
    (tag_dir / ".metadata").unlink()
    with open(tag_dir / "a.pt", "r+b") as file:
        file.truncate(990)
    data = bytearray((tag_dir / "mp_rank_00/b.pt").read_bytes())
    data[5_000_000] ^= 4
    (tag_dir / "mp_rank_00/b.pt").write_bytes(data)

    assert [str(p) for p in manifest.verify(tag_dir)] == [
        ".metadata: is missing, had 1 bytes",
        "a.pt: has 990 bytes, had 1000 when it was saved",
    ]
    problems = manifest.verify(tag_dir, mode="checksums")
    assert [(p.path, p.kind) for p in problems] == [
        (".metadata", "missing"),
        ("a.pt", "size"),
        ("mp_rank_00/b.pt", "checksum"),
    ]
    assert manifest.files[2].checksum is not None
    assert manifest.files[2].checksum in problems[2].detail


def test_files_added_later_are_no_problem(tag_dir: Path) -> None:
    manifest = manifest_of(tag_dir)
    (tag_dir / "config.yml").write_text("added after the save")
    assert manifest.verify(tag_dir, mode="checksums") == []


def test_a_missing_directory_is_every_file_missing(tag_dir: Path, tmp_path: Path) -> None:
    problems = manifest_of(tag_dir).verify(tmp_path / "elsewhere", mode="checksums")
    assert [p.kind for p in problems] == ["missing"] * 3


def test_an_unreadable_file_is_a_problem(tag_dir: Path) -> None:
    manifest = manifest_of(tag_dir)
    (tag_dir / "a.pt").unlink()
    (tag_dir / "a.pt").symlink_to("a.pt")
    assert [p.kind for p in manifest.verify(tag_dir)] == ["unreadable"]


def test_damaged_manifests_are_refused(tag_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(CheckpointError, match="the manifest is missing"):
        read_manifest(path)
    data = manifest_of(tag_dir).to_bytes()
    path.write_bytes(data[:-40])
    with pytest.raises(CheckpointError, match="the manifest is cut short"):
        read_manifest(path)
    path.write_bytes(data.replace(b"a.pt", b"c.pt"))
    with pytest.raises(CheckpointError, match="the manifest is damaged"):
        read_manifest(path)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        read_manifest(path, iteration=20)
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        read_manifest(path, tag="best")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("files", [["../up", 1, None]]),
        ("files", [["/etc/passwd", 1, None]]),
        ("files", [["a", -1, None]]),
        ("files", [["a", 1]]),
        ("files", [["a", 1, 5]]),
        ("files", None),
        ("iteration", "10"),
        ("tag", ".."),
    ],
)
def test_wrong_fields_are_refused(tag_dir: Path, tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "manifest.json"
    fields = json.loads(manifest_of(tag_dir).to_bytes())
    del fields["checksum"]
    path.write_bytes(seal(fields | {field: value}))
    with pytest.raises(CheckpointError, match="lacks a field or has one of the wrong kind"):
        read_manifest(path)


def test_newer_version(tag_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    fields = json.loads(manifest_of(tag_dir).to_bytes())
    del fields["checksum"]
    path.write_bytes(seal(fields | {"version": 3}))
    with pytest.raises(NewerFormatError):
        read_manifest(path)


def test_a_file_that_has_grown_is_not_the_one_that_was_saved(tag_dir: Path) -> None:
    manifest = manifest_of(tag_dir)
    with (tag_dir / "a.pt").open("ab") as file:
        file.write(b"more")
    assert [str(problem) for problem in manifest.verify(tag_dir)] == [
        "a.pt: has 1004 bytes, had 1000 when it was saved"
    ]


def test_model_files_that_it_does_not_name(tag_dir: Path) -> None:
    """Frameworks find them by their names; notes of a program's own are nobody's business."""
    manifest = manifest_of(tag_dir)
    (tag_dir / "notes.txt").write_text("mine")
    (tag_dir / "mp_rank_01_model_states.pt").write_bytes(b"other")
    (tag_dir / "mp_rank_01").mkdir()
    (tag_dir / "mp_rank_01" / "b.pt").write_bytes(b"other")
    found = [(problem.path, problem.kind) for problem in manifest.verify(tag_dir)]
    assert found == [("mp_rank_01/b.pt", "unlisted"), ("mp_rank_01_model_states.pt", "unlisted")]


def test_files_of_ranks_are_read_whatever_the_mode(tag_dir: Path) -> None:
    records = tag_dir.parent / "megaresume"
    records.mkdir()
    (records / "rank_0.json").write_bytes(b"content")
    entry = FileEntry(path="rank_0.json", size=7, checksum=xxhash.xxh3_128_hexdigest(b"content"))
    manifest = dataclasses.replace(manifest_of(tag_dir), beside=(entry,))
    assert manifest.verify(tag_dir) == []
    (records / "rank_0.json").write_bytes(b"damaged")
    assert [(problem.path, problem.kind) for problem in manifest.verify(tag_dir)] == [
        ("megaresume/rank_0.json", "checksum")
    ]


def test_checksums_of_some_files_are_not_those_of_all(tag_dir: Path) -> None:
    manifest = manifest_of(tag_dir)
    first, *others = manifest.files
    assert manifest.has_checksums
    partly = dataclasses.replace(manifest, files=(dataclasses.replace(first, checksum=None), *others))
    assert not partly.has_checksums
