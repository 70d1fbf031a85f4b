"""Reads the ranks' own records: files of `megaresume.checkpoint.records.rank_log`, or the reference program's file.

A run that went back to a checkpoint also has lines of lost steps; the next launch repeats these, and its lines count.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.rank_log import VERSION
from megaresume.checkpoint.records.sealed import SealError, unseal
from megaresume.files import read_file
from megaresume.stream.batches import Balance
from megaresume.stream.errors import UsageError
from megaresume.stream.state import is_version

#: limit on missing steps listed for one launch: a faulty writer may number steps at will.
_MOST_GAPS = 10_000

_NAME = re.compile(r"rank_\d+(_chunk_\d+)?\.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """What one process recorded about one step."""

    step: int
    #: the rank of the process in the job; None if the line covers all ranks.
    rank: int | None
    #: data-parallel rank and size, and samples in a micro-batch; None if the line does not say.
    dp_rank: int | None
    dp: int | None
    micro_batch_size: int | None
    #: [first, stop) samples, in the order in which they were handed out; or all samples of the step, of which this rank
    #: had a part (``part``).
    samples: tuple[tuple[int, int], ...]
    #: hash of the samples' identities; of their tokens (None if not recorded). 16 hex digits.
    order: str
    content: str | None
    #: whether ``content`` includes the loss masks.
    masks: bool = False
    #: token at positions without a document.
    pad_id: int = 0
    #: the rule that dealt the samples of the step to the ranks; None: in order.
    balance: Balance | None = None
    part: bool = False
    #: whether the model's forward was seen to get these samples; otherwise they are those handed out.
    seen: bool = False
    #: whether `in_even_parts` dealt out the step, as when replicas leave and join.
    evenly: bool = False

    @property
    def who(self) -> str:
        """The name of the process, in words."""
        if self.rank is None:
            return "all ranks" if self.dp_rank is None else f"data-parallel rank {self.dp_rank}"
        return f"rank {self.rank}" + ("" if self.rank == self.dp_rank else f" (data-parallel rank {self.dp_rank})")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSteps:
    """The log of a run, over all of its launches."""

    #: the lines of each step that counts.
    steps: dict[int, tuple[RankStep, ...]]
    #: (lines of a lost step, first sample of the launch that went back before it).
    lost: tuple[tuple[RankStep, int], ...]
    #: unusable lines, described in words; damaged ones first.
    problems: tuple[str, ...] = ()
    #: the number of lines that were altered after they were written.
    damaged: int = 0
    #: the last step of each launch: after a kill, not every rank has a line for it.
    last_steps: frozenset[int] = frozenset()
    #: steps without a line of any rank, although the same launch has lines of later steps.
    gaps: tuple[int, ...] = ()


def read_rank_steps(path: str | Path) -> RankSteps:
    """Read a directory of ranks' files, or the file of the reference pretraining program.

    Raises:
        UsageError: no such file or directory, or it has no steps.
        NewerFormatError: it was written by a newer megaresume.
    """
    path = Path(path)
    files = sorted(p for p in path.iterdir() if _NAME.fullmatch(p.name)) if path.is_dir() else [path]
    problems: list[tuple[bool, str]] = []
    launches: dict[Key, _Launch] = {}
    try:
        for file in files:
            read = _read_file if path.is_dir() else _read_gathered
            read(file, launches, problems)
    except OSError as error:
        raise UsageError.unreadable(
            path, error, "what --megaresume-log-samples (log_samples) named", action="check the path"
        ) from error
    steps: dict[int, list[RankStep]] = {}
    lost: list[tuple[RankStep, int]] = []
    last_steps: set[int] = set()
    gaps: set[int] = set()
    keys = _path(launches)
    for key in sorted(launches.keys() - set(keys)):
        lost += [(line, launches[key].samples) for line in launches[key].lines]
    for key, following in itertools.zip_longest(keys, keys[1:]):
        launch = launches[key]
        launch.count_votes(launches[following].step if following else 0)
        for step in sorted(s for s in steps if s > launch.step):
            lost += [(line, launch.samples) for line in steps.pop(step)]
        last_steps = {step for step in last_steps if step <= launch.step}
        gaps = {step for step in gaps if step <= launch.step}
        written = {line.step for line in launch.lines}
        gaps.update(itertools.islice(_between(launch.step, written), _MOST_GAPS))
        for line in launch.lines:
            steps.setdefault(line.step, []).append(line)
        last_steps.add(max((line.step for line in launch.lines), default=launch.step))
    if not steps:
        raise UsageError(
            f"{path} holds no steps",
            found=f"{len(files)} files" if path.is_dir() else "no line of a step",
            expected="rank_00000.jsonl and the like, or a file of JSON lines with a step each",
            cause="the run ended before its first step, or this is another directory",
            action="give what --megaresume-log-samples (log_samples) named",
        )
    return RankSteps(
        steps={step: tuple(lines) for step, lines in sorted(steps.items())},
        lost=tuple(lost),
        problems=tuple(text for _, text in sorted(problems, key=lambda p: not p[0])),
        damaged=sum(damaged for damaged, _ in problems),
        last_steps=frozenset(last_steps),
        gaps=tuple(sorted(gaps)),
    )


def _between(first: int, written: set[int]) -> Iterator[int]:
    """The steps after ``first`` that are missing, although later ones were written."""
    for before, after in itertools.pairwise([first, *sorted(step for step in written if step > first)]):
        yield from range(before + 1, after)


@dataclass
class _Launch:
    """A start of all ranks together."""

    step: int
    samples: int
    lines: list[RankStep]
    #: lines of steps not yet known to count.
    votes: list[RankStep] = field(default_factory=list)
    #: with replicas that leave and join: for each process that was in another launch before, which one, and its last
    #: step.
    came_from: list[tuple[Key, int]] = field(default_factory=list)

    def count_votes(self, reached: int) -> None:
        """Decide which of the steps with votes count: those that one replica says were committed.

        The gradients then include what the others had computed, although a replica that died in between, or was not
        told, has no other line.

        Args:
            reached: the step after which the next launch continues. Steps up to it count too: all replicas that had
                trained the last one may have died after a replica that was being healed committed it.
        """
        decided, known = {line.step for line in self.lines}, {(line.step, line.rank) for line in self.lines}
        last = {(line.step, line.rank): line for line in self.votes}  # a step may be retried
        self.lines += [
            line for key, line in last.items() if key not in known and (line.step in decided or line.step <= reached)
        ]


#: (launch, number of restarts of its process within it).
Key = tuple[int, int]


def _path(launches: Mapping[Key, _Launch]) -> list[Key]:
    """The launches whose steps count, in order: all of them, unless replicas leave and join.

    In that case, a launch has the members of one quorum, and two may run at a time: a restarted lighthouse knows of
    nobody, and the first replica that asks may continue alone. Its steps are lost when it joins the others. A launch
    continues the one in which a member had made exactly the previous steps; if there is none, the last one.
    """
    keys = sorted(launches)
    path: list[Key] = []
    at = len(keys) - 1
    while at >= 0:
        path.append(keys[at])
        launch = launches[keys[at]]
        origins = [key for key, made in launch.came_from if key < keys[at] and made == launch.step]
        at = bisect.bisect_left(keys, max(origins)) if origins else at - 1
    return path[::-1]


def lines_of(
    path: Path, problems: list[tuple[bool, str]]
) -> Iterator[tuple[Key, Mapping[str, Any], Mapping[str, Any] | None]]:
    """Read the lines of a rank: its launch, the fields of its start line, and those of a step (None for a start line).

    Args:
        path: the rank's file.
        problems: gets every unusable line: whether it was altered after it was written, and a description.

    Raises:
        NewerFormatError: it was written by a newer megaresume.
        OSError: it cannot be read.
    """
    start: Mapping[str, Any] | None = None
    again = 0
    for number, line in enumerate(read_file(path).split(b"\n"), start=1):
        if not line:
            continue
        try:
            fields = unseal(line)
        except SealError as error:
            problems.append((not error.cut, f"{path.name} line {number} {error}"))
            continue
        if fields["event"] == "start":
            is_version(fields.get("version"), VERSION, "the log of samples", path)  # raises for a newer version
            # A process that loads another checkpoint writes a start line again without being restarted.
            again = again + 1 if start is not None and start["launch"] == fields["launch"] else 0
            start = fields
            yield (int(fields["launch"]), again), start, None
        elif start is not None:
            yield (int(start["launch"]), again), start, fields
        else:
            problems.append((True, f"{path.name} line {number} is of a step, and no start is before it"))


def _read_file(path: Path, launches: dict[Key, _Launch], problems: list[tuple[bool, str]]) -> None:
    before: tuple[Key, int] | None = None
    for key, start, fields in lines_of(path, problems):
        launch = launches.setdefault(key, _Launch(int(start["step"]), int(start["samples"]), []))
        if fields is None:
            if before is not None and start.get("dealt") == "evenly":
                launch.came_from.append(before)
            before = key, int(start["step"])
        else:
            if fields["event"] == "vote":
                lines = launch.votes
            else:
                lines, before = launch.lines, (key, int(fields["step"]))
            content = fields.get("content")
            lines.append(
                RankStep(
                    step=int(fields["step"]),
                    rank=int(start["rank"]),
                    dp_rank=int(start["dp_rank"]),
                    dp=int(start["dp"]),
                    micro_batch_size=int(start["micro_batch_size"]),
                    samples=tuple((int(a), int(b)) for a, b in fields["samples"]),
                    order=str(fields["order"]),
                    content=None if content is None else str(content),
                    evenly=start.get("dealt") == "evenly",
                    masks=bool(fields.get("masks", False)),
                    pad_id=int(start["pad_id"]),
                    balance=Balance.from_dict(start["balance"]) if "balance" in start else None,
                    seen=bool(fields["seen"]),
                )
            )


def _read_gathered(path: Path, launches: dict[Key, _Launch], problems: list[tuple[bool, str]]) -> None:
    """Rank 0 of the reference program writes for all ranks: one line per step, with each rank's hashes."""
    number = 0
    lines = path.read_bytes().split(b"\n")
    for at, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            event, step = record["event"], int(record["step"])
        except (ValueError, KeyError, TypeError):
            problems.append((at < len(lines), f"{path.name} line {at} is not a record"))
            continue
        if event == "start":
            number += 1
            launches[number, 0] = _Launch(step, int(record["samples"]), [])
        elif event == "step":
            launch = launches.setdefault((number, 0), _Launch(step - 1, 0, []))
            launch.lines += _gathered(record)


def _gathered(record: dict[str, Any]) -> Iterable[RankStep]:
    first, stop = record["samples"]
    step, dp, micro = int(record["step"]), int(record.get("dp", 1)), int(record.get("micro_batch_size") or 1)
    everything = ((int(first), int(stop)),)
    balance = Balance.from_dict(record["balance"]) if "balance" in record else None
    if record["order"] is not None:
        yield RankStep(
            step=step,
            rank=None,
            dp_rank=None,
            dp=None,
            micro_batch_size=None,
            samples=everything,
            order=str(record["order"]),
            content=None,
        )
    ranks: Sequence[Any] = record.get("ranks") or ()
    for rank, (order, content) in enumerate(ranks):
        yield RankStep(
            step=step,
            rank=None,
            dp_rank=rank,
            dp=dp,
            micro_batch_size=micro,
            samples=everything,
            part=True,
            balance=balance,
            order=str(order),
            content=str(content),
        )
