"""Everything but kills: storage that refuses, files damaged afterwards, directories that ranks see differently.

Each fault makes one trial: it prepares a directory of real checkpoints (steps 2, 4 and 6), damages it with random
choices, and says where a start may go on from. The start is a job of two ranks like any other.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.reliability.harness import Harness, Lost, Outcome, Run
from tests.reliability.job import Fault, Task
from tests.reliability.kills import Chain

SAVES = (2, 4, 6)
NEWEST = SAVES[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a start may do."""

    #: the steps that it may go on from.
    steps: frozenset[int] = frozenset()
    #: or whether it may refuse, in words.
    refuses: bool = False


def at(*steps: int, refuses: bool = False) -> Expected:
    return Expected(steps=frozenset(steps), refuses=refuses)


@dataclass(kw_only=True, slots=True)
class Scene:
    """Checkpoints to be damaged."""

    harness: Harness
    zero: int
    verify: bool
    directory: Path
    #: what was done, for messages.
    story: list[str] = field(default_factory=list)
    #: for rank 1 alone.
    other_directory: Path | None = None
    #: whether the job says where it saves before it loads.
    is_named: bool = True

    @property
    def random(self) -> random.Random:
        return self.harness.random

    def tag(self, step: int) -> Path:
        return self.directory / f"global_step{step}"

    def record(self, step: int, infix: str = "") -> Path:
        return self.directory / "megaresume" / f"step_{step:07d}{infix}.json"

    def some_file(self, step: int) -> Path:
        return self.random.choice(sorted(path for path in self.tag(step).iterdir() if path.is_file()))

    def tell(self, what: str) -> None:
        self.story.append(what)


def checkpoints(harness: Harness, zero: int, *, verify: bool = True, data: int = 0) -> Path:
    """A directory that a job saved; not to be changed."""
    key = f"base-{zero}-{verify}-{data}"
    directory = harness.work / key
    if not directory.exists():
        task = Task(
            zero=zero, data=harness.data(data), directory=directory, saves=SAVES, stop=NEWEST, verify=verify, keep=None
        )
        run = harness.run(task)
        if any(run.ends):
            raise RuntimeError(f"no checkpoints to damage: {run}")
    return directory


def flip(path: Path, rng: random.Random) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


# -- files of the newest checkpoints, damaged after they were saved


def _in_newest(scene: Scene, damage: Callable[[Path, random.Random], object]) -> Expected:
    """One file of each of the newest one, two or all three."""
    number = scene.random.choice((1, 1, 2, 3))
    for step in SAVES[-number:]:
        path = scene.some_file(step)
        damage(path, scene.random)
        scene.tell(f"{path.parent.name}/{path.name}")
    return at(*SAVES[-number - 1 : len(SAVES) - number], refuses=number == len(SAVES))


def removed(scene: Scene) -> Expected:
    return _in_newest(scene, lambda path, rng: path.unlink())


def truncated(scene: Scene) -> Expected:
    def cut(path: Path, rng: random.Random) -> None:
        path.write_bytes(path.read_bytes()[: rng.randrange(1, path.stat().st_size)])

    return _in_newest(scene, cut)


def emptied(scene: Scene) -> Expected:
    return _in_newest(scene, lambda path, rng: path.write_bytes(b""))


def flipped(scene: Scene) -> Expected:
    return _in_newest(scene, flip)


def shard_of_another_run(scene: Scene) -> Expected:
    other = checkpoints(scene.harness, scene.zero, verify=scene.verify, data=1)
    path = scene.some_file(NEWEST)
    shutil.copyfile(other / path.parent.name / path.name, path)
    scene.tell(path.name)
    return at(SAVES[-2])


def directory_gone(scene: Scene) -> Expected:
    number = scene.random.choice((1, 1, 2, 3))
    for step in SAVES[-number:]:
        shutil.rmtree(scene.tag(step))
        scene.tell(scene.tag(step).name)
    return at(*SAVES[-number - 1 : len(SAVES) - number], refuses=number == len(SAVES))


def directory_of_another_run(scene: Scene) -> Expected:
    """With its records, or without them."""
    other = checkpoints(scene.harness, scene.zero, verify=scene.verify, data=1)
    shutil.rmtree(scene.tag(NEWEST))
    shutil.copytree(other / scene.tag(NEWEST).name, scene.tag(NEWEST))
    with_records = scene.random.random() < 0.5
    if with_records:
        for infix in ("", ".manifest"):
            shutil.copyfile(other / "megaresume" / scene.record(NEWEST, infix).name, scene.record(NEWEST, infix))
    scene.tell("with its records" if with_records else "without its records")
    return at(SAVES[-2], refuses=not with_records)


# -- records


def _garble(path: Path, rng: random.Random) -> str:
    how = rng.choice(("removed", "emptied", "cut", "flipped", "noise"))
    if how == "removed":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: rng.randrange(1, path.stat().st_size)])
    elif how == "flipped":
        flip(path, rng)
    else:
        path.write_bytes(rng.randbytes(rng.randrange(1, 200)))
    return how


def state_or_manifest(scene: Scene) -> Expected:
    path = scene.record(NEWEST, scene.random.choice(("", ".manifest")))
    scene.tell(f"{path.name} {_garble(path, scene.random)}")
    # A bit in the white space around the checksum changes nothing.
    return at(SAVES[-2], NEWEST)


def ledger(scene: Scene) -> Expected:
    scene.tell(_garble(scene.directory / "megaresume" / "ledger.jsonl", scene.random))
    return at(NEWEST)


def all_records_gone(scene: Scene) -> Expected:
    shutil.rmtree(scene.directory / "megaresume")
    return at(refuses=True)


# -- pointers


def pointers_garbled(scene: Scene) -> Expected:
    names = ("latest", "latest_checkpointed_iteration.txt")
    for name in scene.random.choice((names, names[:1], names[1:])):
        path = scene.directory / name
        how = scene.random.choice(("removed", "empty", "zeros", "noise", "nothing of that name"))
        if how == "removed":
            path.unlink()
        else:
            content = {"empty": b"", "zeros": b"\0" * 12, "noise": scene.random.randbytes(20)}
            path.write_bytes(content.get(how, b"global_step99" if name == "latest" else b"99"))
        scene.tell(f"{name}: {how}")
    return at(NEWEST)


def pointers_disagree(scene: Scene) -> Expected:
    latest, tracker = scene.random.sample(SAVES, 2)
    (scene.directory / "latest").write_text(f"global_step{latest}")
    (scene.directory / "latest_checkpointed_iteration.txt").write_text(str(tracker))
    scene.tell(f"latest {latest}, tracker {tracker}")
    return at(NEWEST)


# -- ranks


def ranks_see_different_directories(scene: Scene) -> Expected:
    """Rank 1 lacks what rank 0 sees, or sees more. Refused before anything is loaded where the job says where it saves;
    otherwise by what the ranks see of the checkpoint that rank 0 chose.
    """
    how = scene.random.choice(("nothing", "no newest", "no records", "another run", "more"))
    scene.is_named = scene.random.random() < 0.4
    scene.tell(f"rank 1 sees {how}, the directory is {'' if scene.is_named else 'not '}named")
    other = scene.other_directory = scene.harness.new_directory()
    if how == "nothing":
        other.mkdir()
        return at(refuses=True)
    if how == "another run":
        shutil.copytree(checkpoints(scene.harness, scene.zero, verify=scene.verify, data=1), other)
        return at(refuses=True)
    shutil.copytree(scene.directory, other)
    if how == "no newest":
        shutil.rmtree(other / scene.tag(NEWEST).name)
    elif how == "no records":
        scene_record = other / "megaresume" / scene.record(NEWEST).name
        scene_record.unlink()
    else:
        shutil.rmtree(scene.tag(NEWEST))
        return at(refuses=True) if scene.is_named else at(SAVES[-2])
    return at(refuses=True)


#: name -> (what damages, whether the job was saved and is loaded with checksums).
_DAMAGE: dict[str, tuple[Callable[[Scene], Expected], bool]] = {
    "a file removed": (removed, False),
    "a file cut short": (truncated, False),
    "a shard of 0 bytes": (emptied, False),
    "a bit flipped (with checksums)": (flipped, True),
    "a shard of another run (with checksums)": (shard_of_another_run, True),
    "a tag directory removed": (directory_gone, False),
    "a tag directory of another run": (directory_of_another_run, False),
    "data state or manifest garbled or removed": (state_or_manifest, False),
    "ledger garbled or removed": (ledger, False),
    "all records removed": (all_records_gone, False),
    "`latest`, tracker or both empty, garbled or removed": (pointers_garbled, False),
    "pointers that disagree": (pointers_disagree, False),
    "rank 1 sees another directory": (ranks_see_different_directories, False),
}


def _damaged(harness: Harness, zero: int, name: str) -> Outcome:
    damage, verify = _DAMAGE[name]
    scene = Scene(harness=harness, zero=zero, verify=verify, directory=harness.new_directory())
    shutil.copytree(checkpoints(harness, zero, verify=verify), scene.directory)
    expected = damage(scene)
    before = _names(scene.directory)
    task = Task(
        zero=zero,
        data=harness.data(),
        directory=scene.directory,
        other_directory=scene.other_directory,
        is_named=scene.is_named,
        stop=NEWEST + 2,
        verify=verify,
    )
    run = harness.run(task)
    try:
        outcome = _judge(harness, run, zero, expected)
        if gone := [name for name in before if name not in _names(scene.directory)]:
            raise Lost(f"the start has deleted {gone}")
    except Lost as error:
        raise Lost(f"seed {harness.seed}, ZeRO {zero}, {name} ({', '.join(scene.story)}): {error}") from None
    shutil.rmtree(scene.directory)
    return outcome


def _names(directory: Path) -> list[str]:
    """Everything but what writers leave behind, and the lock, which goes from one start to the next."""
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.suffix != ".tmp")
    return [name for name in names if not name.startswith("megaresume/owner_")]


def _judge(harness: Harness, run: Run, zero: int, expected: Expected) -> Outcome:
    if run.restored is not None:
        if run.restored not in expected.steps:
            raise Lost(f"it went on from step {run.restored}, expected one of {sorted(expected.steps)}")
        harness.check_resumed(run, harness.twin(zero, NEWEST + 2), run.restored, complete=True)
        return "resumed exactly"
    check_words(run)
    if not expected.refuses:
        raise Lost(f"it refused: {run.errors[0]['text']}")
    return "refused correctly"


def check_words(run: Run) -> None:
    """A job that ended by itself says why in megaresume's words, on every rank that was not only left alone."""
    raw = [e["text"] for e in run.errors if e["what"] == "failed" and "gloo" not in e["text"]]
    if raw or not any(e["what"] == "refused" for e in run.errors):
        raise Lost(f"it failed without saying why: {run.ends} {raw}")


# -- storage that refuses


def _refusing(harness: Harness, zero: int, mode: str) -> Outcome:
    """A save, or a start, on storage that refuses from some operation on; then a start when it is well again."""
    rank = harness.random.choice((0, 0, 1))
    while_it = "starts" if rank == 0 and harness.random.random() < 0.15 else "saves"
    error = errno.ENOSPC if mode == "full" else harness.random.choice((errno.EROFS, errno.EACCES))
    highest = {("starts", 0): 4, ("saves", 0): 60, ("saves", 1): 8}[while_it, rank]
    fault = Fault(rank=rank, at=harness.random.randint(1, highest), mode=mode, error=error, while_it=while_it)  # type: ignore[arg-type]
    chain = Chain(harness, zero)
    for _ in range(harness.random.randrange(2)):
        chain.link(None)
    run = chain.link(fault)
    try:
        if not run.said(rank, "saved"):
            check_words(run)
    except Lost as problem:
        raise Lost(f"{chain.name}, {fault}: {problem}") from None
    chain.finish()
    return "resumed exactly"


def disk_full(harness: Harness, zero: int, name: str) -> Outcome:
    return _refusing(harness, zero, "full")


def read_only(harness: Harness, zero: int, name: str) -> Outcome:
    return _refusing(harness, zero, "read_only")


FAULTS: dict[str, Callable[[Harness, int, str], Outcome]] = {
    "disk full in a save or at a start": disk_full,
    "directory that has become read-only": read_only,
    **dict.fromkeys(_DAMAGE, _damaged),
}


def trial(harness: Harness, zero: int, name: str) -> Outcome:
    """One trial of one of `FAULTS`. Raises Lost."""
    return FAULTS[name](harness, zero, name)


def silent_flip(harness: Harness, zero: int) -> str:
    """Flip a bit of a file that was saved without checksums; what a start does that compares sizes.

    Returns:
        ``harmless``: resumed exactly. ``refused``: in words. ``unnoticed``: other weights, moments or losses.
    """
    scene = Scene(harness=harness, zero=zero, verify=False, directory=harness.new_directory())
    shutil.copytree(checkpoints(harness, zero, verify=False), scene.directory)
    flip(scene.some_file(NEWEST), scene.random)
    task = Task(zero=zero, data=harness.data(), directory=scene.directory, stop=NEWEST + 2, verify=False)
    run = harness.run(task)
    shutil.rmtree(scene.directory)
    try:
        if run.restored is None:
            check_words(run)
            return "refused"
        harness.check_resumed(run, harness.twin(zero, NEWEST + 2), NEWEST, complete=True)
    except Lost:
        return "unnoticed"
    return "harmless"
