"""The first error of the rank that failed first, from the logs of the nodes: launchers hide it below their own.

    torchrun     "Root Cause (first observed failure)": time, rank, exit status     the earliest of all nodes
    srun         "srun: error: n2: task 3: Exited with exit code 2"                  the first line of srun
    deepspeed    "exits with return code = 2"

What the rank itself printed is the first traceback, or error of megaresume, in the log of its node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

#: bytes at the end of a log that are looked at; lines that are shown, and characters of each.
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
    # of a program that was called in a wrong way, as argparse says it
    r"|(?!srun|slurm)[\w.-]+: error: "
    # of Python that has no script or module, a shell, Slurm or a container that has no program
    r"|\S+: (?:can't open file |Error while finding module |No module named )"
    r"|\S*\b(?:ba|da)?sh: .*(?:[Nn]ot found|No such file or directory|Permission denied|cannot execute)"
    r"|slurmstepd: error: execve|FATAL: )"
)
#: errors of something that a node does not have, and another one may.
_LACKING = re.compile(
    r"can't open file|No such file|No module named|Error while finding module|[Nn]ot found|cannot (?:execute|open)"
    r"|could not open|Permission denied|Input/output error|Stale file handle"
)
_OF_TORCHRUN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
#: exit codes of ranks that had no time to print anything: bus error, out of memory, segmentation fault.
_DIED = ("-7", "-9", "-11")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
#: errors of ranks that only noticed that another one is gone.
_VICTIM = re.compile(r"Connection (?:closed|reset) by peer|Connection refused|remote process exited|recvValue failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstError:
    """Which rank failed first, as far as the logs tell."""

    node: str
    #: None if not known.
    rank: int | None
    exit: int | None
    #: what it printed; (): nothing that looks like an error.
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
        """Whether it only noticed that another rank is gone."""
        return any(_VICTIM.search(line) for line in self.lines)

    def __str__(self) -> str:
        rank = "a rank" if self.rank is None else f"rank {self.rank}"
        return f"{rank} on {self.node} failed first"


def shell_status(code: int) -> int:
    """An exit status as a shell has it: -9 is 137."""
    return code if code >= 0 else 128 - code


def find_first_error(logs: Iterable[Path], said: str) -> FirstError | None:
    """Look for it.

    Args:
        logs: of the nodes, ``<node>.log``; of this attempt alone.
        said: what srun printed.

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
    """Whether it is an error of a node. Of one of megaresume nobody can tell: one rank says it for all."""
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
    """The first error of a log; of a traceback its end."""
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
    """What a log ends with, if nothing in it looks like an error."""
    return tuple(line[:_WIDTH] for line in _tail(log).splitlines()[-_LINES:])


def _tail(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
