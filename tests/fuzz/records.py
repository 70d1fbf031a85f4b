"""Records of a checkpoint root: read one by one, and a whole root of which one file is damaged."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.copies.stager import read_staging
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records import manifest as manifests
from megaresume.checkpoint.records.ledger import LedgerEntry, read_ledger, read_run
from megaresume.checkpoint.records.manifest import read_manifest
from megaresume.checkpoint.records.marker import Marker, read_marker
from megaresume.checkpoint.records.pointers import read_pointers
from megaresume.checkpoint.records.sealed import unseal
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.checkpoint.starts import record_start
from megaresume.program import main
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError
from megaresume.stream.state import StreamState
from megaresume.stream.state_text import checksum
from tests.checkpoint.conftest import MODEL, make_state, save_checkpoint
from tests.fuzz.mutate import damage, json_file, reseal, sealed_file, sealed_lines
from tests.fuzz.target import Target, scratch

manifests.MOST_THREADS = 1  # of tiny files, thousands of times

Fields = Mapping[str, Any]
#: Nested deeper than any parser goes.
DEEP = b"[" * 100_000


@functools.cache
def root() -> Path:
    """Checkpoints 10 to 30, a start, and a save of 40 that was killed behind its manifest."""
    directory = scratch() / "root"
    for iteration in (10, 20, 30):
        save_checkpoint(directory, iteration, checksums=True)
    chosen = choose(directory)
    assert chosen is not None and chosen.state is not None
    record_start(directory, iteration=30, state=chosen.state, choice=chosen)
    save_checkpoint(directory, 40, checksums=True)
    (directory / "megaresume/step_0000040.saving.json").write_bytes(_marker_of(directory, 40))
    return directory


def _marker_of(directory: Path, iteration: int) -> bytes:
    record = read_step_file(directory / f"megaresume/step_{iteration:07d}.json")
    return Marker(
        iteration=iteration,
        tag=record.tag,
        save_id=record.save_id,
        run=record.run,
        began_at=record.saved_at,
        latest=True,
        tracker=True,
    ).to_bytes()


def _file(data: bytes, name: str = "file") -> Path:
    path = scratch() / name
    path.write_bytes(data)
    return path


def _strict(value: object) -> str:
    """JSON text: unlike ``==``, it tells 1 from 1.0 and from true."""
    return json.dumps(value, sort_keys=True)


def _same(read: Fields, written: Fields, what: str) -> None:
    """What an object says is what the file said; members of later versions may be passed over."""
    for name in read:
        if name == "checksum":
            continue
        found, expected = read[name], written.get(name)
        if name in ("topology", "skips", "faults") and isinstance(expected, dict):
            found, expected = ({k: v[k] for k in v.keys() & expected.keys() & found.keys()} for v in (found, expected))
        if name in written and _strict(found) != _strict(expected):
            raise AssertionError(f"{what}: {name} was {expected!r} and was read as {found!r}")


def _records(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root() / "megaresume").glob(pattern))]


# The data state


def _states() -> list[bytes]:
    golden = Path(__file__).parents[1] / "stream/states"
    kept = [path.read_bytes() for path in sorted(golden.rglob("*.json"))][:12]
    return [make_state(80).to_json().encode(), b"", b"{}", b'{"a": NaN}', DEEP, *kept]


def check_state(data: bytes) -> None:
    """The state that rides inside the weights, and inside the step file."""
    try:
        state = StreamState.from_json(data)
    except StateError:
        return
    written = json.loads(data)
    if StreamState.from_json(state.to_json()) != state:
        raise AssertionError("a state does not read back equal")
    if written["version"] == state.to_dict()["version"]:
        _same(state.to_dict(), written, "state")


def _with_checksum(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    body = {k: v for k, v in value.items() if k != "checksum"}
    with contextlib.suppress(ValueError):
        body["checksum"] = checksum(body)
    return body


# The step file, the manifest, the marker


def check_step(data: bytes) -> None:
    try:
        record = read_step_file(_file(data))
    except StateError:
        return
    _same({k: v for k, v in record.to_fields().items() if k != "state"}, unseal(data), "step file")


def check_manifest(data: bytes) -> None:
    try:
        manifest = read_manifest(_file(data))
    except (CheckpointError, StateError):
        return
    fields = unseal(data)
    _same({k: v for k, v in unseal(manifest.to_bytes()).items() if k != "version"}, fields, "manifest")
    manifest.verify(root() / "global_step30", mode="checksums")


def check_marker(data: bytes) -> None:
    try:
        marker = read_marker(_file(data))
    except (CheckpointError, StateError):
        return
    if marker is not None:
        _same(unseal(marker.to_bytes()), unseal(data), "marker")


def _mutate_step(data: bytes, rng: Any) -> bytes | None:
    """Also the state inside gets a checksum that fits."""
    changed = sealed_file(data, rng)
    if changed is None or rng.randrange(3) == 0:
        return changed
    fields = json.loads(changed)
    return reseal({**fields, "state": _with_checksum(fields.get("state"))})


def check_staging(data: bytes) -> None:
    """The note of where copies go: it can be read, or there is none."""
    path = root().parent / "staged/megaresume/staging.json"
    if not path.parent.exists():
        shutil.copytree(root() / "megaresume", path.parent)
        (path.parents[1] / "global_step10").mkdir()
    path.write_bytes(data)
    staging = read_staging(path.parents[1])
    if staging is not None and str(staging.to) != str(Path(unseal(data)["to"])):
        raise AssertionError(f"{staging} is not what was written")


# The ledger


def check_ledger(data: bytes) -> None:
    path = _file(data, "ledger")
    try:
        reading = read_ledger(path)
    except StateError:
        return
    if read_run(path) != reading.run:
        raise AssertionError(f"the run is {reading.run}, read quickly {read_run(path)}")
    good: list[Fields] = []
    bad = {problem.line for problem in reading.problems}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line and number not in bad:
            good.append(unseal(line))
    if len(good) != len(reading.entries):
        raise AssertionError(f"{len(reading.entries)} entries of {len(good)} good lines")
    for entry, fields in zip(reading.entries, good, strict=True):
        _same(unseal(entry.to_bytes()), fields, "ledger")


def check_ledger_damage(script: bytes) -> None:
    """No damage makes a line say something that no line said, or a run of another."""
    _, data = damage(_records("ledger.jsonl"), script)
    known = [LedgerEntry.to_bytes(entry) for entry in read_ledger(root() / "megaresume/ledger.jsonl").entries]
    try:
        reading = read_ledger(_file(data, "ledger"))
    except StateError:
        return
    for entry in reading.entries:
        if entry.to_bytes() not in known:
            raise AssertionError(f"a line that nobody wrote: {entry}")


# The pointers


def check_pointers(data: bytes) -> None:
    directory = root().parent / "pointers"
    for tag in ("global_step10", "iter_0000020", "best", "release"):
        (directory / tag).mkdir(parents=True, exist_ok=True)
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        (directory / name).write_bytes(data)
    for pointer in read_pointers(directory):
        str(pointer.problem).encode()
        if pointer.status not in ("ok", "release"):
            continue
        named = data.decode().strip()
        usual = (f"global_step{int(named)}", f"iter_{int(named):07d}") if named.isdigit() else (named,)
        if pointer.tag not in usual or not (directory / pointer.tag).is_dir():
            raise AssertionError(f"{data!r} is read as {pointer}")


# A whole root


def check_root(script: bytes) -> None:
    """One file of a root is damaged: what a start takes is a checkpoint as it was saved, or it refuses."""
    _check_root(script, inspects=len(script) % 8 == 0)


@functools.cache
def _written() -> dict[str, StepFile]:
    directory = root() / "megaresume"
    records = [read_step_file(directory / f"step_{n:07d}.json") for n in (10, 20, 30, 40)]
    return {record.tag: record for record in records}


@functools.cache
def _intact() -> tuple[list[Path], list[bytes]]:
    files = sorted(p for p in root().rglob("*") if p.is_file())
    return files, [path.read_bytes() for path in files]


def _check_root(script: bytes, *, inspects: bool) -> None:
    files, originals = _intact()
    which, data = damage(originals, script)
    files[which].write_bytes(data)
    try:
        try:
            choice = choose(root(), checksums=True)
        except MegaresumeError:
            pass
        else:
            if choice is None:
                raise AssertionError(f"a silent fresh start after damage to {files[which].name}")
            if choice.record != _written()[choice.tag]:
                raise AssertionError(f"{choice.tag} is not as it was written after damage to {files[which].name}")
            if files[which].name == MODEL and files[which].parent.name == choice.tag and data != originals[which]:
                raise AssertionError("a damaged model file was accepted")
        if inspects:
            _inspect()
    finally:
        files[which].write_bytes(originals[which])


def _inspect() -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = main(["inspect", str(root())])
    if status not in (0, 1):
        raise AssertionError(f"inspect exits with {status}")


def _scripts() -> list[bytes]:
    return [bytes([k, 2, 3 * k, 0, 0, 0]) for k in range(40)] + [bytes([k, 0, 9, 1, 0, k]) for k in range(40)]


def check_damage(script: bytes) -> None:
    """State, manifest and marker: what is damaged is refused, whatever the damage; what is accepted is the original."""
    originals = _records("step_*.json")
    _, data = damage(originals, script)
    for read in (read_step_file, read_manifest, read_marker):
        try:
            found = read(_file(data))
        except (CheckpointError, StateError):
            continue
        if found is not None and unseal(data) not in [unseal(original) for original in originals]:
            raise AssertionError(f"{read.__name__} accepts what was never written")


TARGETS: dict[str, Target] = {
    "state": Target(
        seeds=_states, check=check_state, mutate=lambda data, rng: json_file(data, rng, finish=_with_checksum)
    ),
    "step": Target(
        seeds=lambda: [f for f in _records("step_*.json") if b"megaresume.step" in f],
        check=check_step,
        mutate=_mutate_step,
    ),
    "manifest": Target(seeds=lambda: _records("*.manifest.json"), check=check_manifest, mutate=sealed_file),
    "marker": Target(seeds=lambda: _records("*.saving.json"), check=check_marker, mutate=sealed_file),
    "ledger": Target(seeds=lambda: [*_records("ledger.jsonl"), b"\n", DEEP], check=check_ledger, mutate=sealed_lines),
    "ledger-damage": Target(seeds=_scripts, check=check_ledger_damage),
    "pointers": Target(
        seeds=lambda: [b"global_step10", b"10", b"20\n", b"best", b"release", b"", b"\0", b"1" * 19, "１０".encode()],
        check=check_pointers,
    ),
    "staging": Target(
        seeds=lambda: [reseal({"format": "megaresume.staging", "version": 1, "to": to}) for to in ("/a/b", "\0", "a")],
        check=check_staging,
        mutate=sealed_file,
    ),
    "damage": Target(seeds=_scripts, check=check_damage),
    "root": Target(seeds=_scripts, check=check_root),
}
