"""`Mirror`: the contents of an object store as a directory, so that every reader of a checkpoint root can read it.

    in the store                                          in the mirror
    ------------                                          -------------
    megaresume/heads/0000000007.json  (`lease`)           latest, latest_checkpointed_iteration.txt
    megaresume/ledger/0000003.jsonl   of each writer      megaresume/ledger.jsonl
    megaresume/position/0000003.json  likewise            megaresume/position.json, that of the last writer
    megaresume/<save>/step_0000010.json, .manifest.json   megaresume/step_0000010.json, ...   if a head names the save
    megaresume/<save>/step_0000010.saving.json            likewise, if no head names a save of this step
    megaresume/<save>/node_00001.json                     nothing: the upload of one of several machines without a
                                                          shared directory, until a head names the save
    megaresume/pruned/step_0000010.json, ...              likewise, if there is nothing else of this step
    global_step10/<save>/mp_rank_00_model_states.pt       global_step10/mp_rank_00_model_states.pt, a **placeholder**:
                                                          a file of the same size that takes no space and reads as
                                                          zeros
    megaresume/<save>/step_0000010.random/rank_00000.json likewise: for a thousand ranks, reading them would take
                                                          longer than all the rest

A root that was copied to a store by hand has no heads: its objects are shown under their names.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from megaresume.checkpoint.records.ledger import append_lines, merge_lines
from megaresume.checkpoint.records.names import (
    LATEST,
    MIRROR,
    RECORDS_DIR,
    STAND_INS,
    TRACKER,
    Saved,
    deepspeed_tag,
    is_usual_tag,
    ledger_path,
    parse_rank_file,
    parse_record_name,
    records_dir,
)
from megaresume.checkpoint.records.position import position_path
from megaresume.checkpoint.store.lease import Head, newest_head, newest_name
from megaresume.checkpoint.store.store import REQUESTS, Store
from megaresume.files import make_dir, write_atomic
from megaresume.stream.errors import CheckpointError, MegaresumeError

LEDGERS, PRUNED, POSITIONS = (f"{RECORDS_DIR}/{name}/" for name in ("ledger", "pruned", "position"))
_SAVE = re.compile(r"(.+)/([0-9a-f]{16})/(.+)")
#: what is uploaded in parts: files of a tag directory, and of a rank.
UPLOADED = re.compile(r"[^/]+/[0-9a-f]{16}/.+")
_PART = "node_"
#: attempts to read a store while a writer is active.
_TRIES = 20


def record_name(save_id: str, path: str) -> str:
    """The name of the object for a record, or a file of a rank, of one save."""
    return f"{RECORDS_DIR}/{save_id}/{path}"


def file_name(tag: str, save_id: str, path: str) -> str:
    """The name of the object for a file of a tag directory."""
    return f"{tag}/{save_id}/{path}"


def part_name(save_id: str, node: int) -> str:
    """The name of the object by which a node says that its files of a save are complete: the manifest of its part."""
    return record_name(save_id, f"{_PART}{node:05d}.json")


def is_part(name: str) -> bool:
    """Whether a name is from `part_name`."""
    return name.startswith(f"{RECORDS_DIR}/") and name.rpartition("/")[2].startswith(_PART)


@contextlib.contextmanager
def by_name(directory: Path, name: str) -> Iterator[None]:
    """A context in which errors name the URL, not the directory of its mirror."""
    try:
        yield
    except MegaresumeError as error:
        for field in ("headline", "found", "expected", "cause", "action"):
            if (value := getattr(error, field)) is not None:
                setattr(error, field, str(value).replace(str(directory), name))
        raise


class Mirror:
    """Shows a store as a directory.

    Args:
        store: the root.
        root: an empty directory for the mirror.
    """

    def __init__(self, store: Store, root: Path) -> None:
        self.store, self.root = store, root
        self.sizes: Mapping[str, int] = {}

    def refresh(self) -> Head | None:
        """Read the store.

        Returns:
            the head in force; None if nobody has written there by this protocol.

        Raises:
            CheckpointError: the head in force cannot be read, or changes all the time.
            SetupError: the store does not answer, or refuses.
        """
        for _ in range(_TRIES):
            # Names become paths: ignore those that would lead out of the mirror.
            self.sizes = {name: size for name, size in self.store.sizes().items() if _is_path(name)}
            head = newest_head(self.store, self.sizes)
            # Nothing was removed in the meantime, and no listing was damaged: stores give no checksums for them.
            if self._fill(head) and _counting(self.store.sizes(), head) == _counting(self.sizes, head):
                return head
        raise CheckpointError(
            "what is in the store changes faster than it can be looked at",
            found=f"{self.store}: another state at each of {_TRIES} looks",
            expected="two looks alike",
            action="try again",
        )

    def _fill(self, head: Head | None) -> bool:
        """Fill the mirror; returns whether every object still existed."""
        shutil.rmtree(self.root, ignore_errors=True)
        make_dir(records_dir(self.root))
        for name in (MIRROR, STAND_INS):
            (self.root / name).touch()
        #: object name -> path below the records.
        wanted = dict(self._plain() if head is None else self._of_saves(head))
        from concurrent.futures import ThreadPoolExecutor  # only here: half of `inspect`'s import time

        with ThreadPoolExecutor(REQUESTS, "megaresume-mirror") as pool:
            content = dict(zip(wanted, pool.map(self.store.read, wanted), strict=True))
        for name, data in content.items():
            if data is None:
                return False
            place = Path(os.path.normpath(records_dir(self.root) / wanted[name]))
            make_dir(place.parent)
            place.write_bytes(data)
        if head is not None:
            self._write_ledger(head)
            self.point(head)
        return True

    def _plain(self) -> Iterator[tuple[str, str]]:
        for name, size in self.sizes.items():
            if name.startswith(f"{RECORDS_DIR}/") or name in (LATEST, TRACKER):
                yield name, f"../{name}"
            else:
                self.stand_in(name, size)

    def _of_saves(self, head: Head) -> Iterator[tuple[str, str]]:
        shown = {saved.save_id for saved in head.saves}
        gone = {saved.save_id for saved in head.removed}
        taken = {(s.iteration, None if is_usual_tag(s.tag, s.iteration) else s.tag) for s in head.saves}
        others: list[tuple[str, str]] = []
        for name in self.sizes:
            match = _SAVE.fullmatch(name)
            if match is not None and match[1] == RECORDS_DIR and match[2] in shown:
                record = parse_record_name(match[3])
                is_left = is_part(name) or (record is not None and record.kind == "saving")
                if parse_rank_file(match[3]) is not None:
                    self.stand_in(f"{RECORDS_DIR}/{match[3]}", self.sizes[name])
                elif not is_left:  # left by a kill, next to valid ones
                    yield name, match[3]
            elif match is not None and match[1] == RECORDS_DIR and match[2] not in gone:
                others.append((name, match[3]))
            elif name.startswith(PRUNED):
                others.append((name, name.removeprefix(PRUNED)))
        for name, path in others:
            record = parse_record_name(path)
            if record is None or (record.iteration, record.tag) in taken:
                continue
            if name.startswith(PRUNED):
                yield name, path
            elif record.kind == "saving":
                shown.add(name.split("/")[1])
                yield name, path
        if (newest := max((name for name in self.sizes if name.startswith(POSITIONS)), default=None)) is not None:
            yield newest, position_path(Path()).name
        for name in self.sizes:
            if name == f"{RECORDS_DIR}/data.yaml" or name.startswith(f"{RECORDS_DIR}/superseded/"):
                yield name, name.removeprefix(f"{RECORDS_DIR}/")
        for name, size in self.sizes.items():
            if (match := _SAVE.fullmatch(name)) is not None and match[1] != RECORDS_DIR and match[2] in shown:
                self.stand_in(f"{match[1]}/{match[3]}", size)

    def _write_ledger(self, head: Head) -> None:
        lines: list[bytes] = []
        for name in sorted(name for name in self.sizes if name.startswith(LEDGERS)):
            lines = merge_lines(lines, (self.store.read(name) or b"").splitlines(keepends=True))
        append_lines(ledger_path(self.root), lines)

    def stand_in(self, path: str, size: int) -> None:
        """Create a file of this size in the mirror that takes no space."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "wb") as file:
            os.truncate(file.fileno(), size)

    def point(self, head: Head) -> None:
        """Write the pointers."""
        for name, text in ((LATEST, head.latest), (TRACKER, head.tracker)):
            if text is None:
                (self.root / name).unlink(missing_ok=True)
            else:
                write_atomic(self.root / name, str(text).encode())

    def unfinished(self, head: Head) -> dict[Saved, list[str]]:
        """Copies that began and are not committed, with their objects."""
        known = {saved.save_id for saved in (*head.saves, *head.removed)}
        objects: dict[str, list[str]] = {}
        for name in self.sizes:
            if (match := _SAVE.fullmatch(name)) is not None and match[2] not in known:
                objects.setdefault(match[2], []).append(name)
        found: dict[Saved, list[str]] = {}
        for save_id, names in objects.items():
            records = [parse_record_name(name.rpartition("/")[2]) for name in names if name.startswith(RECORDS_DIR)]
            marker = next((record for record in records if record is not None and record.kind == "saving"), None)
            if marker is not None:
                tags = [name.split("/")[0] for name in names if not name.startswith(f"{RECORDS_DIR}/")]
                tag = marker.tag or (tags or [deepspeed_tag(marker.iteration)])[0]
                found[Saved(iteration=marker.iteration, tag=tag, save_id=save_id)] = names
        return found

    def has_objects(self, saved: Saved) -> bool:
        """Whether a save had any object at the last look."""
        return any(f"/{saved.save_id}/" in name for name in self.sizes)

    def objects_of(self, tag: str, save_id: str) -> dict[str, int]:
        """All objects of a save in the store now: name -> bytes."""
        return self.store.sizes(file_name(tag, save_id, "")) | self.store.sizes(record_name(save_id, ""))


def _counting(sizes: Mapping[str, int], head: Head | None) -> tuple[str | None, dict[str, int]]:
    """The valid part of a listing: the newest head, and the objects of the saves that it names."""
    saves = set() if head is None else {saved.save_id for saved in head.saves}
    found = ((name, _SAVE.fullmatch(name)) for name in sizes)
    return newest_name(sizes), {name: sizes[name] for name, match in found if match is not None and match[2] in saves}


def _is_path(name: str) -> bool:
    return not any(part in ("", ".", "..") for part in name.split("/")) and "\0" not in name
