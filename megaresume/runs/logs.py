"""Finds known symptoms in the logs of launches, and the first error of the rank that failed first.

`log_checks` looks for the symptoms in ``known.yaml``. It streams, as a log may have many gigabytes.

    file (plain, or gzip by its magic bytes)  ->  blocks of whole lines  ->  search for texts  ->  match expressions

`find_first_error` reads the logs of all nodes, because launchers print much after the first error:

    torchrun     "Root Cause (first observed failure)": time, rank, exit status     the earliest of all nodes
    srun         "srun: error: n2: task 3: Exited with exit code 2"                  the first line of srun
    deepspeed    "exits with return code = 2"

The rank's own message is the first traceback, or megaresume error, in the log of its node.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal

import yaml

from megaresume.runs.answer import Check, Status
from megaresume.stream.errors import UsageError
from megaresume.stream.progress import Progress

#: bytes of a block; a line of more is looked at in pieces.
_BLOCK = 4 << 20
#: bytes of a line that an expression is tried on; characters of it that are shown.
_LONGEST, _SHOWN = 20_000, 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """One entry of the table."""

    name: str
    level: Literal["error", "warning", "note"]
    find: tuple[bytes, ...]
    match: re.Pattern[str] | None
    means: str
    do: str
    samples: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Hit:
    """A symptom that a log shows."""

    symptom: Symptom
    #: the number of the first line, counted from 1, and its text.
    line: int
    text: str
    #: number of lines that show it.
    count: int = 1


@cache
def symptoms() -> tuple[Symptom, ...]:
    """The table of known symptoms."""
    entries: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
    return tuple(
        Symptom(
            name=entry["name"],
            level=entry["level"],
            find=tuple(text.encode() for text in entry["find"]),
            match=re.compile(entry["match"]) if "match" in entry else None,
            means=entry["means"],
            do=entry["do"],
            samples=tuple(entry["samples"]),
        )
        for entry in entries
    )


def scan(path: Path, progress: Progress | None = None) -> list[Hit]:
    """Search a log for every known symptom.

    Args:
        path: the log; gzip is recognised.
        progress: called with the number of bytes read since the last call.

    Returns:
        hits in order of their first line.

    Raises:
        UsageError: it cannot be read.
    """
    hits: dict[str, Hit] = {}
    lines = 0
    try:
        with open(path, "rb") as raw:
            is_gzip = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            read = 0
            for block in _blocks(gzip.GzipFile(fileobj=raw) if is_gzip else raw):
                _look(block, lines, hits)
                lines += block.count(b"\n")
                if progress is not None:
                    progress(raw.tell() - read)
                    read = raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError.unreadable(
            "the log", error, "a text file, or one of gzip", at=path, action="check the path"
        ) from error
    return sorted(hits.values(), key=lambda hit: hit.line)


def _blocks(file: BufferedIOBase) -> Iterator[bytes]:
    rest = b""
    while data := file.read(_BLOCK):
        data = rest + data
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) >= 4 * _BLOCK:  # no line is that long: a progress bar, or not text at all
            end = len(data)
        if end:
            yield data[:end]
        rest = data[end:]
    if rest:
        yield rest


def _look(block: bytes, lines: int, hits: dict[str, Hit]) -> None:
    # Keyed by the start of the line, as a line may have several texts of one symptom.
    found: dict[tuple[str, int], Symptom] = {}
    for symptom in symptoms():
        for text in symptom.find:
            at = block.find(text)
            while at >= 0:
                begin = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", 0, at)) + 1
                found[symptom.name, begin] = symptom
                at = block.find(text, at + len(text))
    for (name, begin), symptom in sorted(found.items(), key=lambda item: item[0][1]):
        ends = [end for end in (block.find(b"\n", begin), block.find(b"\r", begin)) if end >= 0]
        stop = min([*ends, begin + _LONGEST, len(block)])
        line = block[begin:stop].decode("utf-8", "replace")
        if symptom.match is not None and not symptom.match.search(line):
            continue
        hit = hits.get(name)
        if hit is None:
            shown = "".join(c if c.isprintable() else " " for c in line).strip()
            number = lines + block.count(b"\n", 0, begin) + 1
            hits[name] = Hit(symptom=symptom, line=number, text=shown[:_SHOWN])
        else:
            hit.count += 1


def log_checks(path: Path, progress: Progress | None = None) -> list[Check]:
    """Check for each symptom that a log shows, in order of their first lines. Raises UsageError."""
    status: dict[str, Status] = {"error": "problem", "warning": "warning", "note": "note"}
    found = []
    for hit in scan(path, progress):
        times = f"line {hit.line:,}" + (f", {hit.count:,} times" if hit.count > 1 else "")
        symptom, text = hit.symptom, f"{path.name} {times}: {hit.text}"
        found.append(Check("log", symptom.name, status[symptom.level], text, symptom.means, symptom.do))
    return found or [Check("log", "known symptoms", "ok", f"none of {len(symptoms())} in {path.name}")]


def first_failure(paths: Sequence[Path]) -> list[Check]:
    """Which rank failed first, from the logs of all nodes of one launch together; [] if none shows an error.

    Args:
        paths: plain text; only the last MiB of each is read.
    """
    error = find_first_error(paths, "")
    if error is None:
        return []
    found = f"{error}: {error.headline or 'it printed no error'}"
    cause = "launchers print their own traceback after it; other ranks only noticed that it was gone"
    return [Check("log", "first failure", "note", found, cause, "fix this one first")]


#: bytes read at the end of a log; lines shown, and characters of each.
_TAIL, _LINES, _WIDTH = 1 << 20, 12, 240

_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?time\s*:\s*(?P<time>\S+).*?rank\s*:\s*(?P<rank>\d+)"
    r".*?exitcode\s*:\s*(?P<exit>-?\d+)",
    re.DOTALL,
)
_SRUN = re.compile(
    r"srun: error: (?P<node>[\w.-]+)(?:\[(?P<number>\d+)[^\]]*\])?: tasks? (?P<task>\d+)[^:]*: (?P<how>.*)"
)
_DEEPSPEED = re.compile(r"exits with return code = (-?\d+)")
_BEGIN = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:Traceback \(most recent call last\)|megaresume: (?:rank \d+: |error: )"
    # from a program called with wrong arguments, in argparse's words
    r"|(?!srun|slurm)[\w.-]+: error: "
    # from Python without its script or module; or from a shell, Slurm or container without its program
    r"|\S+: (?:can't open file |Error while finding module |No module named )"
    r"|\S*\b(?:ba|da)?sh: .*(?:[Nn]ot found|No such file or directory|Permission denied|cannot execute)"
    r"|slurmstepd: error: execve|FATAL: )"
)
#: errors about something that this node lacks, and another may have.
_LACKING = re.compile(
    r"can't open file|No such file|No module named|Error while finding module|[Nn]ot found|cannot (?:execute|open)"
    r"|could not open|Permission denied|Input/output error|Stale file handle"
)
_OF_TORCHRUN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
#: exit codes of ranks that could not print anything: bus error, out of memory, segmentation fault.
_DIED = ("-7", "-9", "-11")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
#: errors of ranks that only noticed that another rank was gone.
_VICTIM = re.compile(r"Connection (?:closed|reset) by peer|Connection refused|remote process exited|recvValue failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstError:
    """Which rank failed first, as far as the logs tell."""

    node: str
    #: the rank that printed it; None if not known.
    rank: int | None
    exit: int | None
    #: the lines that it printed; (): nothing that looks like an error.
    lines: tuple[str, ...]
    #: whether it says that something is missing, as no other node has said.
    is_lacking: bool = False

    @property
    def headline(self) -> str:
        """The error in one line; "" if there is none."""
        if not self.lines:
            return ""
        return self.lines[0] if self.lines[0].startswith("megaresume: ") else self.lines[-1]

    @property
    def is_victim(self) -> bool:
        """Whether the rank only noticed that another one was gone."""
        return any(_VICTIM.search(line) for line in self.lines)

    def __str__(self) -> str:
        rank = "a rank" if self.rank is None else f"rank {self.rank}"
        return f"{rank} on {self.node} failed first"


def shell_status(code: int) -> int:
    """An exit status as a shell has it: -9 is 137."""
    return code if code >= 0 else 128 - code


def find_first_error(logs: Iterable[Path], said: str) -> FirstError | None:
    """Find the first error in the logs of a launch.

    Args:
        logs: of the nodes, ``<node>.log``; only of this attempt.
        said: the output of srun.

    Returns:
        None if no log shows an error.
    """
    texts = {log.stem: _tail(log) for log in logs}
    of_srun = _of_srun(said)
    found = _of_torchrun(texts, of_srun) or _without_torchrun(texts, of_srun)
    if found is None:
        return None
    others = [_error(text) for node, text in texts.items() if node != found.node]
    return replace(found, is_lacking=_lacks(found.lines) and not any(map(_lacks, others)))


def _lacks(lines: tuple[str, ...]) -> bool:
    """Whether an error points to its node. megaresume's errors do not: one rank raises them for all."""
    is_ours = bool(lines) and lines[0].startswith("megaresume: ")
    return not is_ours and any(_LACKING.search(line) for line in lines)


def _of_torchrun(texts: Mapping[str, str], of_srun: tuple[str, int, int | None] | None) -> FirstError | None:
    causes = []
    for node, text in texts.items():
        if found := _ROOT_CAUSE.search(text):
            lines = _error(text)
            says_nothing = not lines and found["exit"] not in _DIED
            error = FirstError(node=node, rank=int(found["rank"]), exit=shell_status(int(found["exit"])), lines=lines)
            at = (error.is_victim or says_nothing, found["time"], of_srun is not None and of_srun[0] != node)
            causes.append((at, node, error))
    return min(causes, key=lambda cause: cause[:2])[2] if causes else None


def _without_torchrun(texts: Mapping[str, str], of_srun: tuple[str, int, int | None] | None) -> FirstError | None:
    for node, text in texts.items():
        if found := _DEEPSPEED.search(text):
            if of_srun is not None and of_srun[0] in texts:
                node, text = of_srun[0], texts[of_srun[0]]
            return FirstError(node=node, rank=None, exit=shell_status(int(found[1])), lines=_error(text))
    if of_srun is not None:
        node, task, status = of_srun
        return FirstError(node=node, rank=task, exit=status, lines=_error(texts.get(node, "")))
    for node, text in texts.items():
        if lines := _error(text):
            return FirstError(node=node, rank=None, exit=None, lines=lines)
    return None


def _of_srun(said: str) -> tuple[str, int, int | None] | None:
    """Node, task and exit status of the first task that srun names."""
    for found in _SRUN.finditer(said):
        how = re.search(r"exit code (\d+)", found["how"])
        return found["node"] + (found["number"] or ""), int(found["task"]), None if how is None else int(how[1])
    return None


def _error(text: str) -> tuple[str, ...]:
    """The first error of a log, in lines; of a traceback, how it ends."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not _BEGIN.match(line):
            continue
        is_traceback = "Traceback" in line
        block = [line]
        for following in lines[at + 1 :]:
            following = _PREFIX.sub("", following)
            is_inside = following.startswith(" ")
            if is_inside or is_traceback:
                block.append(following)
            if not is_inside:
                break
        if _OF_TORCHRUN in block[-1]:
            continue  # what a rank has printed is before it, if it could: one that was killed could not
        return tuple(line[:_WIDTH] for line in (block[-_LINES:] if is_traceback else block[:_LINES]))
    return ()


def last_lines(log: Path) -> tuple[str, ...]:
    """The last lines of a log, for one in which nothing looks like an error."""
    return tuple(line[:_WIDTH] for line in _tail(log).splitlines()[-_LINES:])


def _tail(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
