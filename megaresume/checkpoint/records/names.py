"""Names and paths in a checkpoint root.

    <save>/global_step10/  or  iter_0000010/     tag directory: DeepSpeed's, Megatron's; any other name is allowed too
    <save>/checkpoint-10/, step-10/, global_step_10/  Hugging Face's, torchtitan's, VeRL's
    <save>/latest                                DeepSpeed's pointer: a tag
    <save>/latest_checkpointed_iteration.txt     Megatron's pointer, the tracker: an iteration
    <save>/megaresume/step_0000010.json          data state
    <save>/megaresume/step_0000010.manifest.json
    <save>/megaresume/step_0000010.saving.json   marker: a save of this step has begun and not ended
    <save>/megaresume/ledger.jsonl
    <save>/megaresume/owner_0000001/             lock: who writes here (`claim`)
    <save>/megaresume/step_0000010.random/       one file of each rank: rank_00000.json (`manifest`)
    <save>/megaresume/step_0000010.loader/       likewise, if the run has a third-party loader: rank_00000.pkl
    <save>/megaresume/step_0000010.synced/       until a checkpoint is durable: one file of each node (`durability`)
    <save>/megaresume/superseded/                states of steps that were saved again with other data
    <save>/.step_0000010@global_step10.older/    an older save of a step that is being saved again (`retention`)

A tag that is not the usual name of its iteration (``best`` at iteration 10) is part of the record's name:
``step_0000010@best.json``, ``step_0000010.manifest@best.json``. We write nothing inside a tag directory, and call
nothing ``iter_*`` that is not a checkpoint: Megatron refuses the former and deletes the latter.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

from megaresume.stream.errors import UsageError

RECORDS_DIR = "megaresume"
LATEST: Final = "latest"
TRACKER: Final = "latest_checkpointed_iteration.txt"
#: a file in every mirror of a store, see `mirror`.
MIRROR: Final = ".megaresume-mirror"
#: likewise, while the rank files there are placeholders of zeros.
STAND_INS: Final = ".megaresume-stand-ins"
LEDGER = "ledger.jsonl"

RecordKind = Literal["state", "manifest", "saving"]
RankFileKind = Literal["loader", "random"]

_INFIX: dict[RecordKind, str] = {"state": "", "manifest": ".manifest", "saving": ".saving"}
_RECORD = re.compile(r"step_([0-9]{7,18})(\.manifest|\.saving)?(?:@(.+))?\.json")
_OLDER = re.compile(r"\.step_([0-9]{7,18})@(.+)\.older")
#: a kind of file that each rank adds -> its suffix; its content, for people.
_RANK_FILES: dict[RankFileKind, tuple[str, str]] = {
    "loader": ("pkl", "loader state"),
    "random": ("json", "random state"),
}
_KINDS = "|".join(_RANK_FILES)
_RANK_FILE = re.compile(rf"step_[0-9]{{7,18}}(?:@.+)?\.({_KINDS})/rank_([0-9]{{5,}})\.[a-z]+")
_RANK_DIR = re.compile(rf"step_([0-9]{{7,18}})(?:@(.+))?\.(?:{_KINDS}|synced)")

#: Names that frameworks give to tag directories: the text before the step, and its least number of digits. A host whose
#: trainer has its own name adds a row here, and every command knows it. Without one, its directories have custom names:
#: they resume and are inspected in the same way, and the names of their records include the tag.
USUAL_TAGS = {
    "deepspeed": ("global_step", 1),
    "megatron": ("iter_", 7),
    "hugging_face": ("checkpoint-", 1),
    "torchtitan": ("step-", 1),
    "verl": ("global_step_", 1),
}
_TAG = re.compile("|".join(f"{re.escape(before)}([0-9]{{{digits},18}})" for before, digits in USUAL_TAGS.values()))
#: bytes; a record's temporary file must stay below the 255 bytes that filesystems allow.
_MAX_TAG_BYTES = 160
_RESERVED = frozenset({RECORDS_DIR, LATEST, TRACKER})


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Identifies a save: a step may be saved again, under the same tag."""

    iteration: int
    tag: str
    #: 16 hex digits.
    save_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordName:
    """The parts of a file name in ``<save>/megaresume``."""

    kind: RecordKind
    iteration: int
    #: None: a usual tag for the iteration: see `usual_tags`.
    tag: str | None


def usual_tag(framework: str, iteration: int) -> str:
    """The name that a framework in `USUAL_TAGS` gives to the tag directory of an iteration."""
    before, digits = USUAL_TAGS[framework]
    return f"{before}{iteration:0{digits}d}"


def deepspeed_tag(iteration: int) -> str:
    """DeepSpeed's usual name for a tag directory: ``global_step10``."""
    return usual_tag("deepspeed", iteration)


def megatron_tag(iteration: int) -> str:
    """Megatron's name for a tag directory: ``iter_0000010``."""
    return usual_tag("megatron", iteration)


def hugging_face_tag(iteration: int) -> str:
    """The name of a tag directory of Hugging Face's Trainer: ``checkpoint-10``."""
    return usual_tag("hugging_face", iteration)


def torchtitan_tag(iteration: int) -> str:
    """The name of a tag directory of torchtitan: ``step-10``."""
    return usual_tag("torchtitan", iteration)


def verl_tag(iteration: int) -> str:
    """The name of a tag directory of VeRL: ``global_step_10``."""
    return usual_tag("verl", iteration)


def usual_tags(iteration: int) -> tuple[str, ...]:
    """The names that frameworks give to a tag directory."""
    return tuple(usual_tag(framework, iteration) for framework in USUAL_TAGS)


def tag_iteration(tag: str) -> int | None:
    """The iteration in a tag's name, or None for a custom name."""
    match = _TAG.fullmatch(tag)
    return int(match[match.lastindex or 0]) if match else None


def is_usual_tag(tag: str, iteration: int) -> bool:
    """Whether a framework would give this name to the iteration."""
    return tag in usual_tags(iteration)


def check_tag(tag: str) -> str:
    """Return the tag, or raise UsageError if it cannot be the name of a directory below the checkpoint root."""
    if not _is_tag(tag):
        raise UsageError(
            "a checkpoint tag must be a plain directory name",
            found=repr(tag[:200]),
            expected=f"a name such as global_step10, at most {_MAX_TAG_BYTES} bytes, without '/', control characters "
            f"or a leading dot, and none of {', '.join(sorted(_RESERVED))}",
            action="save under another tag",
        )
    return tag


def recorded_tag(value: object) -> str:
    """A tag in a record. Raises ValueError if `check_tag` would refuse it: it may lead out of the root."""
    if not isinstance(value, str) or not _is_tag(value):
        raise ValueError(f"the tag {value!r:.80} is not a plain directory name")
    return value


def _is_tag(tag: str) -> bool:
    return not (
        not tag
        or tag != tag.strip()
        or tag.startswith(".")
        or "/" in tag
        or os.sep in tag
        or not tag.isprintable()
        or tag in _RESERVED
        or len(tag.encode("utf-8", "surrogatepass")) > _MAX_TAG_BYTES
    )


def records_dir(root: Path) -> Path:
    """The directory of our own files, beside the tag directories."""
    return root / RECORDS_DIR


def data_path(root: Path) -> Path:
    """The data config of a run's last save, with absolute paths: for people and for ``megaresume verify``. No state
    depends on it, since corpora may move.
    """
    return records_dir(root) / "data.yaml"


def ledger_path(root: Path) -> Path:
    """The ledger of a checkpoint root."""
    return records_dir(root) / LEDGER


def _record_path(root: Path, kind: RecordKind, iteration: int, tag: str) -> Path:
    suffix = "" if is_usual_tag(tag, iteration) else f"@{tag}"
    return records_dir(root) / f"step_{iteration:07d}{_INFIX[kind]}{suffix}.json"


def step_path(root: Path, iteration: int, tag: str) -> Path:
    """The file with the data state of a checkpoint."""
    return _record_path(root, "state", iteration, tag)


def manifest_path(root: Path, iteration: int, tag: str) -> Path:
    """The file that lists the files of a checkpoint."""
    return _record_path(root, "manifest", iteration, tag)


def marker_path(root: Path, iteration: int, tag: str) -> Path:
    """The file that exists from the beginning of a save to the end of its commit."""
    return _record_path(root, "saving", iteration, tag)


def superseded_path(root: Path, iteration: int, tag: str, digest: str) -> Path:
    """The copy of the state of a step that is saved again with another digest."""
    return records_dir(root) / "superseded" / f"{step_path(root, iteration, tag).stem}.{digest}.json"


def is_mirror(root: Path) -> bool:
    """Whether a directory is the mirror of a store, so that its own disk does not matter."""
    return (root / MIRROR).exists()


def has_stand_ins(root: Path) -> bool:
    """Whether rank files exist only by name and size, as in the mirror of a store."""
    return (root / STAND_INS).exists()


def rank_file(iteration: int, tag: str, kind: RankFileKind, rank: int) -> str:
    """A file that one rank adds to a checkpoint, relative to ``<save>/megaresume``."""
    directory = step_path(Path(), iteration, tag).with_suffix(f".{kind}").name
    return f"{directory}/rank_{rank:05d}.{_RANK_FILES[kind][0]}"


def rank_dirs(root: Path, iteration: int, tag: str) -> list[Path]:
    """The directories of the rank files."""
    kinds = [(records_dir(root) / rank_file(iteration, tag, kind, 0)).parent for kind in _RANK_FILES]
    return [*kinds, part_path(root, iteration, tag, 0).parent]


def part_path(root: Path, iteration: int, tag: str, node: int) -> Path:
    """The file in which a node says that its part of a checkpoint is on its disk."""
    return step_path(root, iteration, tag).with_suffix(".synced") / f"node_{node:05d}.json"


def older_dir(root: Path, iteration: int, tag: str) -> Path:
    """The directory where an older save of a step is kept until the newer one is valid."""
    return root / f".step_{iteration:07d}@{tag}.older"


def parse_older_name(name: str) -> tuple[int, str] | None:
    """Iteration and tag from a name of `older_dir`; None for other names."""
    match = _OLDER.fullmatch(name)
    return (int(match[1]), match[2]) if match is not None and _is_tag(match[2]) else None


def parse_rank_file(path: str) -> tuple[RankFileKind, int] | None:
    """Kind and rank from a path of `rank_file`; None for other files."""
    match = _RANK_FILE.fullmatch(path)
    return None if match is None else (cast(RankFileKind, match[1]), int(match[2]))


def parse_rank_dir(name: str) -> tuple[int, str | None] | None:
    """Iteration and custom tag from a name of `rank_dirs`; None for other names."""
    match = _RANK_DIR.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def rank_file_words(path: str) -> str:
    """A path of `rank_file` for people: ``the random state of rank 1``. Other files by their path."""
    found = parse_rank_file(path)
    return path if found is None else f"the {_RANK_FILES[found[0]][1]} of rank {found[1]}"


def parse_record_name(name: str) -> RecordName | None:
    """Parse a file name in ``<save>/megaresume``; None for files that are not records (ledger, temporary files)."""
    match = _RECORD.fullmatch(name)
    if match is None or not _is_tag(match[3] or "usual"):
        return None
    kinds: dict[str | None, RecordKind] = {None: "state", ".manifest": "manifest", ".saving": "saving"}
    return RecordName(kind=kinds[match[2]], iteration=int(match[1]), tag=match[3])


def split_root(directory: Path) -> tuple[Path, str | None]:
    """Distinguish a checkpoint root from a tag directory.

    Returns:
        ``(root, None)`` for a root, ``(root, tag)`` for a tag directory below one.
    """
    directory = Path(os.path.abspath(directory))
    if _is_recorded(directory):  # Hugging Face's checkpoint-10 may also be a root of DeepSpeed's
        return directory.parent, directory.name
    if any((directory / name).exists() for name in (RECORDS_DIR, LATEST, TRACKER)):
        return directory, None
    if tag_iteration(directory.name) is not None:
        return directory.parent, directory.name
    if directory.name == RECORDS_DIR and (directory / LEDGER).exists():
        return directory.parent, None
    return directory, None


def same_place(first: Path, second: Path) -> bool:
    """Whether two paths lead to one existing directory."""
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _is_recorded(tag_dir: Path) -> bool:
    """Whether the records of the root above it name it."""
    try:
        names = os.listdir(records_dir(tag_dir.parent))
    except OSError:
        return False
    records = [record for name in names if (record := parse_record_name(name)) is not None]
    return any(r.tag == tag_dir.name or (r.tag is None and r.iteration == tag_iteration(tag_dir.name)) for r in records)


# Values must have the type that was written, or the file is not ours: nothing is converted.
