"""Power cuts: what was announced as durable is loaded after them, on every file system that `storage` models.

First that the recorder misses nothing and that the models leave what such file systems leave: else the cuts would prove
nothing. `python -m tests.reliability --cuts 4000` makes many more cuts, in real jobs too.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.release import release
from tests.reliability import shim
from tests.reliability.cuts import CHOICE, START, Cuts
from tests.reliability.recording import Entry, Node, Recording, Step, read
from tests.reliability.saves import SCENARIOS, record
from tests.reliability.storage import MODELS, STYLES, Choices, Model, Storage

ORDERED, XFS, WRITEBACK, POSIX, NODES = MODELS
SEED = 5


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory if there is one: these tests force thousands of files to the disk."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="megaresume-cuts-", dir=place) as directory:
        yield Path(directory)


# -- the recorder

#: writes as Python, torch's two writers, and copying do.
SCRIPT = """
import os, shutil, sys
from pathlib import Path
import torch
from megaresume.files import write_atomic
from tests.reliability.shim import Shim
root = Path(sys.argv[1])
with Shim().armed(root, mode="record", log=os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
    torch.save({"a": torch.arange(9000.0)}, root / "zip.pt")
    torch.save({"a": torch.arange(9000.0)}, root / "plain.pt", _use_new_zipfile_serialization=False)
    write_atomic(root / "record.json", b"1234")
    (root / "tag").mkdir()
    shutil.copyfile(root / "zip.pt", root / "tag" / "copy.pt")
    os.link(root / "zip.pt", root / "again.pt")
    descriptor = os.open(root / "again.pt", os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    os.truncate(root / "again.pt", 100)
    os.sync()
    shutil.rmtree(root / "tag")
    with open(root / "record.json", "w") as file:
        file.write("56")
"""


def test_the_recorder_misses_nothing(memory: Path) -> None:
    """`read` compares the bytes of every file; here, that syncs and names are there, in order."""
    root, log = memory / "root", memory / "log"
    root.mkdir()
    environment = os.environ | shim.environment() | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", SCRIPT, root, log], env=environment, cwd=Path(__file__).parents[2], check=True
    )
    words = [step.words for step in read(log, root).steps if step.kind != "close"]
    temporary = words[next(i for i, word in enumerate(words) if "record.json" in word)].removeprefix("open ")
    assert [word for word, _ in itertools.groupby(words)] == [
        *("open zip.pt", "write zip.pt", "open plain.pt", "write plain.pt"),
        *(f"open {temporary}", f"write {temporary}", f"fsync {temporary}", f"rename {temporary} record.json", "fsync "),
        *("mkdir tag", "open tag/copy.pt", "write tag/copy.pt", "link zip.pt again.pt", "fsync zip.pt"),
        *("truncate zip.pt", "sync", "unlink tag/copy.pt", "rmdir tag", "open record.json", f"write {temporary}"),
    ]
    (root / "plain.pt").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"misses something: \['plain.pt'\]"):
        read(log, root)


# -- the models, on recordings of a few steps

OLD, NEW = b"o" * 5000, b"n" * 9000


class Script:
    """Steps in one directory ``d``, whose own name is on the disk."""

    def __init__(self) -> None:
        self.root, self.d, self.steps = Node("", is_directory=True), Node("d", is_directory=True), list[Step]()
        self.step(kind="names", entries=(Entry(directory=self.root, name="d", node=self.d),))
        self.step(kind="sync", node=self.root)

    def step(self, **values: Any) -> None:
        self.steps.append(Step(process=values.pop("process", 1), words="", **values))

    def create(self, name: str, data: bytes) -> Node:
        node = Node(name, is_directory=False)
        self.step(kind="names", entries=(Entry(directory=self.d, name=name, node=node),))
        self.step(kind="write", node=node, data=data)
        self.step(kind="close", node=node)
        return node

    def rename(self, node: Node, old: str, new: str, *, replaces: bool) -> None:
        entries = (Entry(directory=self.d, name=new, node=node), Entry(directory=self.d, name=old, node=None))
        self.step(kind="names", entries=entries, replaces=replaces)

    def left(self, name: str, model: Model) -> Counter[str]:
        """What a file may be after a cut at the end, and how often it was."""
        storage = Storage(Recording(root=self.root, steps=tuple(self.steps)))
        found: Counter[str] = Counter()
        for style, n in itertools.product(STYLES, range(150)):
            choices = Choices(style, random.Random(f"{model.name} {n}"))
            found[_word(storage.after_cut(len(self.steps), model, choices).get(f"d/{name}"))] += 1
        return found


def _word(content: bytes | None) -> str:
    whole = {None: "absent", b"": "empty", OLD: "old", NEW: "new", OLD + NEW: "old and new"}
    if content in whole:
        return whole[content]
    assert content is not None
    if not content.strip(b"\0"):
        return "zeros"
    return "torn" if b"\0" in content else "cut short"


def written(script: Script, *, synced: bool) -> None:
    node = script.create("new", NEW)
    if synced:
        script.step(kind="sync", node=node)


def replaced(script: Script, *, synced: bool) -> None:
    """As `write_atomic` does, with or without forcing the file."""
    first = script.create("file", OLD)
    script.step(kind="sync", node=first)
    script.step(kind="sync", node=script.d)
    node = script.create("new", NEW)
    if synced:
        script.step(kind="sync", node=node)
    script.rename(node, "new", "file", replaces=True)


def test_a_file_that_was_forced_is_whole_or_has_no_name() -> None:
    for model in MODELS:
        script = Script()
        written(script, synced=True)
        assert set(script.left("new", model)) == ({"new"} if model.journal else {"absent", "new"}), model.name
        script.step(kind="sync", node=script.d)
        assert set(script.left("new", model)) == {"new"}, model.name


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (ORDERED, {"absent", "empty", "cut short", "new"}),
        (XFS, {"absent", "empty", "cut short", "torn", "new"}),
        (WRITEBACK, {"absent", "empty", "cut short", "torn", "zeros", "new"}),
        (POSIX, {"absent", "empty", "cut short", "torn", "zeros", "new"}),
    ],
)
def test_a_file_that_was_not_forced(model: Model, left: set[str]) -> None:
    script = Script()
    written(script, synced=False)
    assert set(script.left("new", model)) == left
    script.step(kind="sync", node=script.d)
    assert set(script.left("new", model)) == left - {"absent"}
    script.step(kind="sync all")
    assert set(script.left("new", model)) == {"new"}


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (ORDERED, {"old", "new"}),  # replacing forces
        (XFS, {"old", "empty", "cut short", "torn", "new"}),
        (WRITEBACK, {"old", "empty", "cut short", "torn", "zeros", "new"}),
        (POSIX, {"old", "empty", "cut short", "torn", "zeros", "new"}),
    ],
)
def test_a_file_that_is_replaced(model: Model, left: set[str]) -> None:
    script = Script()
    replaced(script, synced=False)
    assert set(script.left("file", model)) == left
    script = Script()
    replaced(script, synced=True)
    assert set(script.left("file", model)) == {"old", "new"}
    script.step(kind="sync", node=script.d)
    assert set(script.left("file", model)) == {"new"}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_file_that_is_appended_to_keeps_what_was_forced(model: Model) -> None:
    script = Script()
    node = script.create("file", OLD)
    script.step(kind="sync", node=node)
    script.step(kind="sync", node=script.d)
    script.step(kind="write", node=node, offset=len(OLD), data=NEW)
    storage = Storage(Recording(root=script.root, steps=tuple(script.steps)))
    for style in STYLES:
        content = storage.after_cut(len(script.steps), model, Choices(style, random.Random(1)))["d/file"]
        assert content is not None and content.startswith(OLD)
    assert {"old", "old and new"} <= set(script.left("file", model))


def test_names_persist_in_their_order_in_a_journal_alone() -> None:
    for model in MODELS:
        script = Script()
        script.create("first", b"")
        script.create("second", b"")
        storage = Storage(Recording(root=script.root, steps=tuple(script.steps)))
        found = set()
        for n in range(100):
            tree = storage.after_cut(len(script.steps), model, Choices("anything", random.Random(n)))
            found.add(("d/first" in tree, "d/second" in tree))
        expected = {(False, False), (True, False), (True, True)}
        assert found == (expected if model.journal else expected | {(False, True)}), model.name


def test_nothing_is_forced_by_another_node() -> None:
    script = Script()
    node = script.create("new", NEW)
    script.step(kind="sync", node=script.d)
    script.step(kind="sync", node=node, process=2)
    assert set(script.left("new", POSIX)) == {"new"}
    assert "empty" in script.left("new", NODES)
    script.step(kind="sync", node=node, process=1)
    assert set(script.left("new", NODES)) == {"new"}


# -- saves


def lost(recording: Recording, work: Path, number: int) -> dict[str, list[str]]:
    """By model: what should not have been."""
    cuts = Cuts(recording, work)
    assert sum(version.announced is not None for version in cuts.versions) >= 3
    found: dict[str, list[str]] = {}
    for model in MODELS:
        for cut in cuts.sample(model, number, SEED):
            verdict, words = cuts.judge(cut)
            if verdict in ("lost", "other bytes"):
                found.setdefault(model.name, []).append(f"{verdict}: {words} ({cut}: {cuts.words(cut)})")
    assert cuts.distinct > number
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_is_announced_outlasts_power_cuts(scenario: str, memory: Path) -> None:
    found = lost(record(scenario, memory / "saves"), memory, 300)
    assert {name: (len(lines), lines[:3]) for name, lines in found.items()} == {}


def test_a_save_that_forgets_to_sync_is_noticed(memory: Path) -> None:
    """On every file system: what was lost, and bytes that are not as they were."""
    found = lost(record("one kept", memory / "saves", forgetful=True), memory, 200)
    assert set(found) == {model.name for model in MODELS}
    for lines in found.values():
        assert sum(line.startswith("lost") for line in lines) > 20


@release(
    "4,000 power cuts on every file system, in real jobs too",
    "`::test_what_is_announced_outlasts_power_cuts`: 300, in saves without a job",
)
@pytest.mark.timeout(1800)
def test_thousands_of_power_cuts(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.reliability", "--kills", "0", "--trials", "0", "--cuts", "4000"]
    done = subprocess.run(
        [*command, "--results", path], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    results = json.loads(path.read_text())
    assert {START, *(CHOICE.format(model.name) for model in MODELS)} == results["counts"].keys()
    assert (results["lost"][:10], done.returncode) == ([], 0), done.stdout[-3000:]
