"""Flipped bits, cuts and noise in every kind of file: never a wrong answer, never anything but our own errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.pointers import read_pointers
from megaresume.checkpoint.save.commit import Commit, begin_save
from megaresume.stream.errors import MegaresumeError
from megaresume.stream.state import StreamState

RECORDS = ("step_0000030.json", "step_0000030.manifest.json")
FLIPS = 200

Save = Callable[..., Commit]
MakeState = Callable[..., StreamState]


def answer(root: Path) -> tuple[int | None, StreamState | None]:
    choice = choose(root)
    assert choice is not None
    return choice.iteration, choice.state


def flips(path: Path, seed: str) -> list[bytes]:
    """Two hundred copies with one random bit flipped, every tenth with several."""
    generator = random.Random(seed)
    data = path.read_bytes()
    copies = []
    for n in range(FLIPS):
        copy = bytearray(data)
        for _ in range(1 if n % 10 else generator.randint(2, 16)):
            copy[generator.randrange(len(copy))] ^= 1 << generator.randrange(8)
        copies.append(bytes(copy))
    return copies


def mutilations(path: Path, seed: str) -> list[bytes]:
    """Cuts, insertions, repetitions, zeros and noise."""
    generator = random.Random(seed)
    data = path.read_bytes()
    results = [b"", b"\0" * len(data), data + data, data[::-1], b"{}", b"null", b"[]", b"{" * 10_000]
    for _ in range(40):
        a, b = sorted(generator.randrange(len(data) + 1) for _ in range(2))
        results += [data[:a], data[a:], data[:a] + data[b:], data[:a] + generator.randbytes(7) + data[a:]]
        results += [data[:a] + b"\0" * (b - a) + data[b:]]
    return [r for r in results if r != data]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("damage", [flips, mutilations])
def test_damaged_records(root: Path, state: MakeState, name: str, damage: Callable[[Path, str], list[bytes]]) -> None:
    path = root / "megaresume" / name
    right = [(30, state(240)), (20, state(160))]
    walked_back = 0
    for data in damage(path, name):
        path.write_bytes(data)
        found = answer(root)
        assert found in right
        walked_back += found[0] == 20
    assert walked_back >= 190  # a bit in the white space around the checksum may be harmless


@pytest.mark.parametrize("damage", [flips, mutilations])
def test_a_damaged_ledger(root: Path, state: MakeState, damage: Callable[[Path, str], list[bytes]]) -> None:
    path = root / "megaresume" / "ledger.jsonl"
    good = read_ledger(path).entries
    for data in damage(path, "ledger"):
        path.write_bytes(data)
        reading = read_ledger(path)
        assert all(entry in good for entry in reading.entries)
        if damage is flips:
            assert bool(reading.problems) == (reading.entries != good)
        assert answer(root) == (30, state(240))


@pytest.mark.parametrize("name", ["latest", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("damage", [flips, mutilations])
def test_a_damaged_pointer(root: Path, state: MakeState, name: str, damage: Callable[[Path, str], list[bytes]]) -> None:
    """Also when a flipped bit makes it name an older checkpoint: then the pointers disagree, the newest is right."""
    for data in damage(root / name, name):
        (root / name).write_bytes(data)
        read_pointers(root)
        assert answer(root) == (30, state(240))


@pytest.mark.parametrize("damage", [flips, mutilations])
def test_a_damaged_marker_of_a_killed_save(
    root: Path, state: MakeState, damage: Callable[[Path, str], list[bytes]]
) -> None:
    """A second save of step 30 was killed; whatever its marker looks like, step 30 must not count."""
    begin_save(root, tag="global_step30", iteration=30, state=state(240, salt=1))
    path = root / "megaresume" / "step_0000030.saving.json"
    for data in damage(path, "marker"):
        path.write_bytes(data)
        assert answer(root) == (20, state(160))


def test_damage_everywhere_at_once(root: Path, state: MakeState) -> None:
    """Several files at a time: a right answer or our own error, whatever is damaged."""
    generator = random.Random(7)
    right = [(10, state(80)), (20, state(160)), (30, state(240))]
    files = {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.suffix != ".pt"}
    refused = 0
    for _ in range(FLIPS):
        for path, data in files.items():
            copy = bytearray(data)
            if generator.random() < 0.4:
                copy[generator.randrange(len(copy))] ^= 1 << generator.randrange(8)
            path.write_bytes(copy[: generator.randrange(len(copy))] if generator.random() < 0.1 else copy)
        try:
            assert answer(root) in right
        except MegaresumeError as error:
            assert "none of the 3 checkpoints" in str(error)
            refused += 1
    assert 0 < refused < FLIPS
