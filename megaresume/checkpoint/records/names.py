"""What lies where in a checkpoint root, names and paths; and the one form of all records that we write there.

    <save>/global_step10/  or  iter_0000010/     tag directory: DeepSpeed's, Megatron's; any other name is allowed too
    <save>/checkpoint-10/, step-10/, global_step_10/  Hugging Face's, torchtitan's, VeRL's
    <save>/latest                                DeepSpeed's pointer: a tag
    <save>/latest_checkpointed_iteration.txt     Megatron's pointer, the tracker: an iteration
    <save>/megaresume/step_0000010.json          data state
    <save>/megaresume/step_0000010.manifest.json
    <save>/megaresume/step_0000010.saving.json   marker: a save of this step has begun and has not ended
    <save>/megaresume/ledger.jsonl
    <save>/megaresume/owner_0000001/             lock: who writes here (`claim`)
    <save>/megaresume/step_0000010.random/       one file of each rank: rank_00000.json (`manifest`)
    <save>/megaresume/step_0000010.loader/       likewise, where the run has a loader of its own: rank_00000.pkl
    <save>/megaresume/step_0000010.synced/       until a checkpoint is durable: one file of each node (`durability`)
    <save>/megaresume/superseded/                states of steps that were saved again with other data
    <save>/.step_0000010@global_step10.older/    an older save of a step that is being saved again (`retention`)

A tag that is not the usual name of its iteration (``best`` at iteration 10) is part of the record's name:
``step_0000010@best.json``, ``step_0000010.manifest@best.json``. Nothing of ours lies inside a tag directory, and
nothing that is not a checkpoint is called ``iter_*``: Megatron refuses the one and deletes the other.

A record is sealed JSON, an object whose last member is the checksum of every byte before it:

    {"format": "megaresume.step", "version": 1, ..., "checksum": "<xxh3_128 of all before this member, 32 hex>"}

The seal is over bytes, not over parsed values: no flipped bit passes, and checking ten thousand ledger lines needs no
second serialisation. **The seal itself is the same in every format version**, so that a damaged file is never
mistaken for one of a newer version: a newer version stops a resume, damage walks back to an older checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import xxhash

from megaresume.files import read_file
from megaresume.stream.errors import MegaresumeError, UsageError, parse_json, visible
from megaresume.stream.state import is_version

RECORDS_DIR = "megaresume"
LATEST: Final = "latest"
TRACKER: Final = "latest_checkpointed_iteration.txt"
#: a file in every mirror of a store, see `mirror`.
MIRROR: Final = ".megaresume-mirror"
#: likewise, while the files of ranks there hold zeros.
STAND_INS: Final = ".megaresume-stand-ins"
LEDGER = "ledger.jsonl"

RecordKind = Literal["state", "manifest", "saving"]
RankFileKind = Literal["loader", "random"]

_INFIX: dict[RecordKind, str] = {"state": "", "manifest": ".manifest", "saving": ".saving"}
_RECORD = re.compile(r"step_([0-9]{7,18})(\.manifest|\.saving)?(?:@(.+))?\.json")
_OLDER = re.compile(r"\.step_([0-9]{7,18})@(.+)\.older")
_RANK_FILE = re.compile(r"step_[0-9]{7,18}(?:@.+)?\.(loader|random)/rank_([0-9]{5,})\.[a-z]+")
_ENDING: dict[RankFileKind, str] = {"loader": "pkl", "random": "json"}

#: Names of tag directories that frameworks give by themselves: what stands before the step, and its digits at least.
#: A host whose trainer has a name of its own adds a row here, and every command knows that name. Without one its
#: directories are custom names: they resume and are inspected alike, and the names of their records carry the tag.
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
class RecordName:
    """What the name of a file in ``<save>/megaresume`` says."""

    kind: RecordKind
    iteration: int
    #: None: a usual tag of the iteration: see `usual_tags`.
    tag: str | None


def usual_tag(framework: str, iteration: int) -> str:
    """The name that a framework of `USUAL_TAGS` gives to the tag directory of an iteration."""
    before, digits = USUAL_TAGS[framework]
    return f"{before}{iteration:0{digits}d}"


def deepspeed_tag(iteration: int) -> str:
    """DeepSpeed's usual name of a tag directory: ``global_step10``."""
    return usual_tag("deepspeed", iteration)


def megatron_tag(iteration: int) -> str:
    """Megatron's name of a tag directory: ``iter_0000010``."""
    return usual_tag("megatron", iteration)


def hugging_face_tag(iteration: int) -> str:
    """Name of a tag directory of Hugging Face's Trainer: ``checkpoint-10``."""
    return usual_tag("hugging_face", iteration)


def torchtitan_tag(iteration: int) -> str:
    """Name of a tag directory of torchtitan: ``step-10``."""
    return usual_tag("torchtitan", iteration)


def verl_tag(iteration: int) -> str:
    """Name of a tag directory of VeRL: ``global_step_10``."""
    return usual_tag("verl", iteration)


def usual_tags(iteration: int) -> tuple[str, ...]:
    """The names of a tag directory that frameworks give by themselves."""
    return tuple(usual_tag(framework, iteration) for framework in USUAL_TAGS)


def tag_iteration(tag: str) -> int | None:
    """The iteration that a tag's name tells, or None for a custom name."""
    match = _TAG.fullmatch(tag)
    return int(match[match.lastindex or 0]) if match else None


def is_usual_tag(tag: str, iteration: int) -> bool:
    """Whether a framework names this iteration so by itself."""
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
    """A tag that a record holds. Raises ValueError if `check_tag` would refuse it: it may lead out of the root."""
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
    """Where our own files lie, beside the tag directories."""
    return root / RECORDS_DIR


def data_path(root: Path) -> Path:
    """The data config that a run was last saved with, its paths absolute: for people and for ``megaresume verify``. No
    state depends on it, since corpora may move."""
    return records_dir(root) / "data.yaml"


def ledger_path(root: Path) -> Path:
    """The ledger of a checkpoint root."""
    return records_dir(root) / LEDGER


def _record_path(root: Path, kind: RecordKind, iteration: int, tag: str) -> Path:
    suffix = "" if is_usual_tag(tag, iteration) else f"@{tag}"
    return records_dir(root) / f"step_{iteration:07d}{_INFIX[kind]}{suffix}.json"


def step_path(root: Path, iteration: int, tag: str) -> Path:
    """The file that holds the data state of a checkpoint."""
    return _record_path(root, "state", iteration, tag)


def manifest_path(root: Path, iteration: int, tag: str) -> Path:
    """The file that lists the files of a checkpoint."""
    return _record_path(root, "manifest", iteration, tag)


def marker_path(root: Path, iteration: int, tag: str) -> Path:
    """The file that is there from the beginning of a save to the end of its commit."""
    return _record_path(root, "saving", iteration, tag)


def superseded_path(root: Path, iteration: int, tag: str, digest: str) -> Path:
    """Where the state of a step goes that is saved again with another digest."""
    return records_dir(root) / "superseded" / f"{step_path(root, iteration, tag).stem}.{digest}.json"


def is_mirror(root: Path) -> bool:
    """Whether a directory is the mirror of a store: nothing is to be learned from the disk that it is on."""
    return (root / MIRROR).exists()


def has_stand_ins(root: Path) -> bool:
    """Whether the files of ranks are there by name and size alone, as in the mirror of a store."""
    return (root / STAND_INS).exists()


def rank_file(iteration: int, tag: str, kind: RankFileKind, rank: int) -> str:
    """A file that one rank adds to a checkpoint, relative to ``<save>/megaresume``."""
    directory = step_path(Path(), iteration, tag).with_suffix(f".{kind}").name
    return f"{directory}/rank_{rank:05d}.{_ENDING[kind]}"


def rank_dirs(root: Path, iteration: int, tag: str) -> list[Path]:
    """Where the files of each rank lie."""
    kinds = [(records_dir(root) / rank_file(iteration, tag, kind, 0)).parent for kind in _ENDING]
    return [*kinds, part_path(root, iteration, tag, 0).parent]


def part_path(root: Path, iteration: int, tag: str, node: int) -> Path:
    """Where a node says that its part of a checkpoint is on its disk."""
    return step_path(root, iteration, tag).with_suffix(".synced") / f"node_{node:05d}.json"


def older_dir(root: Path, iteration: int, tag: str) -> Path:
    """Where an older save of a step waits until the newer one counts."""
    return root / f".step_{iteration:07d}@{tag}.older"


def parse_older_name(name: str) -> tuple[int, str] | None:
    """Iteration and tag that `older_dir` was given; None for other names."""
    match = _OLDER.fullmatch(name)
    return (int(match[1]), match[2]) if match is not None and _is_tag(match[2]) else None


def parse_rank_file(path: str) -> tuple[RankFileKind, int] | None:
    """Kind and rank that `rank_file` was given; None for other files."""
    match = _RANK_FILE.fullmatch(path)
    return None if match is None else ("random" if match[1] == "random" else "loader", int(match[2]))


def rank_file_words(path: str) -> str:
    """What `rank_file` is, for people: ``the random state of rank 1``. Other files by their path."""
    found = parse_rank_file(path)
    return (
        path
        if found is None
        else f"the {'random state' if found[0] == 'random' else 'loader state'} of rank {found[1]}"
    )


def parse_record_name(name: str) -> RecordName | None:
    """Read a file name of ``<save>/megaresume``; None for files that are not records (ledger, temporary files)."""
    match = _RECORD.fullmatch(name)
    if match is None or not _is_tag(match[3] or "usual"):
        return None
    kinds: dict[str | None, RecordKind] = {None: "state", ".manifest": "manifest", ".saving": "saving"}
    return RecordName(kind=kinds[match[2]], iteration=int(match[1]), tag=match[3])


def split_root(directory: Path) -> tuple[Path, str | None]:
    """Tell a checkpoint root from a tag directory.

    Returns:
        ``(root, None)`` for a root, ``(root, tag)`` for a tag directory below one.
    """
    directory = Path(os.path.abspath(directory))
    if _is_recorded(directory):  # Hugging Face's checkpoint-10 may be a root of DeepSpeed's as well
        return directory.parent, directory.name
    if any((directory / name).exists() for name in (RECORDS_DIR, LATEST, TRACKER)):
        return directory, None
    if tag_iteration(directory.name) is not None:
        return directory.parent, directory.name
    if directory.name == RECORDS_DIR and (directory / LEDGER).exists():
        return directory.parent, None
    return directory, None


def same_place(first: Path, second: Path) -> bool:
    """Whether two paths are of one directory, which exists."""
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


T = TypeVar("T")

#: The tail is matched from its start, so that the search is linear whatever the file holds.
_SEAL = re.compile(rb',\s*"checksum":\s*"([0-9a-f]{32})"\s*\}\s*')
#: How a sealed object ends, whatever became of its checksum.
_END = re.compile(rb'"\s*\}\s*\Z')
_SEAL_START = b'"checksum"'


class SealError(ValueError):
    """Bytes that are not an intact sealed object; the message is the rest of a sentence about the file."""

    def __init__(self, message: str, *, cut: bool = False) -> None:
        super().__init__(message)
        #: the end is missing, as a killed writer leaves it.
        self.cut = cut


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(", ", ": "))


def _spread(value: object, depth: int, indent: str = "") -> str:
    """JSON with one member per line down to ``depth``, compact below: readable, yet not a line per integer."""
    if depth == 0 or not isinstance(value, (dict, list)) or not value:
        return _dumps(value)
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{_dumps(str(key))}: {_spread(item, depth - 1, inner)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        parts = [_spread(item, depth - 1, inner) for item in value]
        opening, closing = "[", "]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"


def seal(fields: Mapping[str, Any], *, depth: int = 0) -> bytes:
    """Serialise an object and append its checksum.

    Args:
        fields: plain JSON values, not empty, without a member ``checksum``.
        depth: levels that are written one member a line; 0 gives a single line. Ends with a newline.
    """
    if not fields or "checksum" in fields:
        raise ValueError("sealed fields must not be empty or have a member named checksum")
    text = _spread(dict(fields), depth)
    body = text[: -(2 if depth else 1)].encode("ascii")
    opening, closing = (b",\n  ", b"\n}\n") if depth else (b", ", b"}\n")
    return body + opening + f'"checksum": "{xxhash.xxh3_128_hexdigest(body)}"'.encode("ascii") + closing


def unseal(data: bytes) -> dict[str, Any]:
    """Check and parse a sealed object.

    Returns:
        its members, ``checksum`` included.

    Raises:
        SealError: empty, cut short, or damaged.
    """
    if not data.strip():
        raise SealError("is empty" if not data else "holds nothing but white space")
    start = data.rfind(_SEAL_START)
    comma = data.rfind(b",", 0, start) if start >= 0 else -1
    match = _SEAL.fullmatch(data, comma) if comma >= 0 else None
    if match is None:
        if _END.search(data[-16:]):
            raise SealError("has no checksum at its end")
        raise SealError(f"is cut short after {len(data)} bytes", cut=True)
    actual = xxhash.xxh3_128_hexdigest(data[:comma])
    recorded = match[1].decode("ascii")
    if actual != recorded:
        raise SealError(f"is damaged: its content has checksum {actual}, recorded was {recorded}")
    try:
        fields = parse_json(data.decode("ascii"))
    except ValueError as error:
        raise SealError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SealError("is not a JSON object")
    return fields


def read_sealed(
    path: Path, *, what: str, format_name: str, version: int, error: type[MegaresumeError]
) -> dict[str, Any]:
    """Read a sealed file of one of our formats.

    Args:
        path: the file.
        what: the words for it in errors: "the data state", "the manifest".
        format_name: the ``format`` member that it must have.
        version: the newest version that this code reads.
        error: the class to raise.

    Raises:
        error: missing, unreadable, empty, cut short, damaged, or another kind of file; each says so.
        NewerFormatError: intact, and of a later version.
    """
    try:
        data = read_file(path)
    except FileNotFoundError as problem:
        raise error(f"{what} is missing", found="no such file", expected=str(path)) from problem
    except OSError as problem:
        raise error.unreadable(what, problem, "a readable file", at=path) from problem
    try:
        fields = unseal(data)
    except SealError as problem:
        raise error(
            f"{what} {problem}",
            found=f"{path}, {len(data)} bytes",
            expected="the bytes that were written, which end with their checksum",
            cause="the disk was full, the file was copied in part or edited, or the storage is failing",
        ) from problem
    if fields.get("format") != format_name:
        raise error(
            f"{what} is another kind of file",
            found=f"{path}: format {fields.get('format')!r}",
            expected=f"format {format_name!r}",
            cause="a file was renamed or copied over another one",
        )
    found_version = fields.get("version")
    if not is_version(found_version, version, what, path):
        raise error(f"{what} has no version", found=f"{path}: version {found_version!r}", expected="an integer")
    return fields


def read_record(
    path: Path,
    make: Callable[[dict[str, Any]], T],
    *,
    what: str,
    format_name: str,
    version: int,
    error: type[MegaresumeError],
) -> T:
    """What ``make`` builds of the members of a sealed file: see `read_sealed`.

    Raises:
        error: also if a member is missing or of the wrong kind, for which ``make`` raises KeyError, TypeError,
            ValueError or AttributeError.
    """
    fields = read_sealed(path, what=what, format_name=format_name, version=version, error=error)
    try:
        return make(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise error(
            f"{what} lacks a field or has one of the wrong kind",
            found=f"{path}: {type(problem).__name__}: {problem}",
            expected=f"the fields of version {version}",
            cause="it was written by a faulty program: its checksum is right",
        ) from problem


# Members are of the kind that was written, or the file was not written by us: nothing is converted.


def count(value: object) -> int:
    """The value, if it is an integer from 0 on, of 64 bits at most; else ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def text(value: object) -> str:
    """The value, if it is text without control characters; else ValueError."""
    if not isinstance(value, str) or not (value.isprintable() or visible(value) == value):
        raise ValueError(f"{value!r:.80} is not text")
    return value


def rows(value: object) -> list[Any]:
    """The value, if it is a list; else ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list")
    return value


def flag(value: object) -> bool:
    """The value, if it is true or false; else ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def members(value: object) -> dict[str, Any]:
    """The value, if it is an object; else ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is not an object")
    return value


def texts(value: object) -> tuple[str, ...]:
    """The value, if it is a list of texts; else ValueError."""
    return tuple(map(text, rows(value)))


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": count,
    "str": text,
    "bool": flag,
    "tuple[str, ...]": texts,
}


def from_members(cls: type[T], found: Mapping[str, Any], /, **readers: Callable[[Any], Any]) -> T:
    """A dataclass of the members of a record that have the names of its fields.

    Args:
        cls: a field is a count, a text, a flag or a tuple of texts, as its type says, or has one of ``readers``. One
            that is added later needs a default, or older records cannot be read.
        found: members that a later version added are passed over.
        readers: by name of the field. Its member may not be missing, even if the field has a default: a caller that
            reads older records passes ``{"name": default, **found}``. They raise ValueError or TypeError.

    Raises:
        KeyError, ValueError, TypeError: one is missing that has no default and may not be None, or of another kind.
        NotImplementedError: a fault of the class: nothing reads a field of this type, or a reader has no field.
    """
    _check_readers(cls, tuple(readers))  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, kind, is_optional, has_default in _fields(cls):  # type: ignore[arg-type]
        read = readers.get(name)
        if read is None and name not in found and has_default:
            continue
        value = found.get(name) if is_optional and read is None else found[name]
        if is_optional and value is None:
            values[name] = None
        elif read is not None:
            values[name] = read(value)
        else:
            try:
                values[name] = _READERS[kind](value)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
    return cls(**values)


@functools.lru_cache(maxsize=64)
def _check_readers(cls: Any, readers: tuple[str, ...]) -> None:
    """Raise NotImplementedError for a fault of the class: it is not one of the errors that blame the file."""
    fields = _fields(cls)
    unread = [f"{name}: {kind}" for name, kind, *_ in fields if name not in readers and kind not in _READERS]
    unread += [f"a reader of {name}" for name in readers if name not in [field[0] for field in fields]]
    if unread:
        raise NotImplementedError(
            f"{cls.__name__} has {', '.join(unread)}: give from_members a reader for each field whose type is not one "
            f"of {', '.join(_READERS)}, or one of them | None"
        )


@functools.lru_cache(maxsize=64)
def _fields(cls: Any) -> tuple[tuple[str, str, bool, bool], ...]:
    """Of every field: name, type, whether it may be None, whether it has a default."""
    missing = dataclasses.MISSING
    parts = [(field, *str(field.type).partition(" | ")) for field in dataclasses.fields(cls)]
    return tuple(
        (field.name, kind, bool(optional), (field.default, field.default_factory) != (missing, missing))
        for field, kind, optional, _ in parts
    )
