"""``megaresume top RUN``: follows a run in training through its directory alone, on any machine that can read it.

meter/figures.jsonl, pulse.json   a measured run (``metrics=``): up to the second
ledger.jsonl, step_*.json         any run: as of its newest checkpoint
prompts.jsonl                     a reinforcement learning run: what happened to its prompts, by its newest state
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaresume.checkpoint.metrics.goodput import CAUSES, all_marks, goodput_of, shows_kills
from megaresume.checkpoint.metrics.record import Mark, marks_of, meter_dir, parsed, read_lines, read_pulse
from megaresume.checkpoint.records.names import is_mirror, split_root
from megaresume.checkpoint.records.position import read_position
from megaresume.checkpoint.records.prompt_ledger import PROMPTS
from megaresume.checkpoint.system import seconds_of
from megaresume.command_line import at_least
from megaresume.render import spell_bytes, spell_seconds, text_table
from megaresume.runs import prompts
from megaresume.runs.answer import Answer, optional
from megaresume.runs.directory import Run
from megaresume.runs.history import Membership, memberships
from megaresume.stream.changes import outlook
from megaresume.stream.errors import MegaresumeError
from megaresume.stream.state import StreamState

#: bytes read at the end of a file of readings to find the newest one.
_TAIL = 1 << 20
#: seconds for which a run counts as alive after a sign of life, and after a state of its prompts, which is taken with a
#: checkpoint; and seconds without news after which `top` says so.
_ALIVE, _ALIVE_PROMPTS, _QUIET = 10.0, 1800.0, 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceNow:
    """The current state of a source."""

    name: str
    #: tokens in the samples trained; None if not counted.
    tokens: int | None
    #: its share of what was drawn since the stage began, and the share by its weight.
    share: float | None
    weight: float
    epoch: float
    #: the moving average of its loss; None if the program reports no losses.
    loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Now(Answer):
    """The current state of a run."""

    dir: str
    run: str | None
    #: runs: a process holds the directory, or has just given a sign of life. ended: all samples are trained. gone:
    #: neither. stored: unknown, for a copy in an object store.
    life: str
    #: whether the program measures itself; otherwise everything is as of the newest checkpoint.
    measured: bool
    step: int
    samples: int
    tokens: int | None
    #: when the newest of these was recorded, in seconds since 1970.
    time: float
    #: seconds per step; None until two steps are known.
    seconds_per_step: float | None
    fill: float | None
    #: step of the newest complete checkpoint, and of the newest durable one, with the time when its save began.
    checkpoint: int | None
    durable: int | None
    durable_time: str | None
    size: int | None
    save_seconds: float | None
    #: the goodput since the first start; None if unknown.
    goodput: float | None
    badput: Mapping[str, float]
    starts: int
    #: samples trained again; None if the run was not measured: the ledger does not show how far a killed process came.
    repeated: int | None
    data_wait: float | None
    #: retried store requests; records found in cache_dir, and not found there. None: unknown.
    store_retries: int | None = None
    cache_hits: int | None = None
    cache_misses: int | None = None
    #: the replicas that train together, newest last; empty if none leave and join.
    memberships: Sequence[Membership] = ()
    sources: Sequence[SourceNow] = ()
    #: upcoming events in words, nearest first.
    next: Sequence[str] = ()
    #: what is counted as tokens: ``items``, one each, for a map-style dataset without packing.
    unit: str = "tokens"
    notes: Sequence[str] = field(default=())
    #: the prompts of a reinforcement learning run.
    prompts: prompts.PromptProof | None = optional()


def newest_reading(directory: Path) -> dict[str, Any] | None:
    """The last line of the readings; None if there is none.

    Args:
        directory: see `meter_dir`.
    """
    path = directory / "figures.jsonl"
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL, 0))
            data = file.read()
        for line in parsed(reversed(data[: data.rfind(b"\n") + 1].splitlines())):
            if isinstance(line.get("figures"), dict):
                return line
    return None


def look(root: Path) -> Now:
    """The current state of a run, from its directory.

    Raises:
        UsageError: no such directory.
        StateError: its ledger cannot be read.
    """
    run, directory = Run(root), meter_dir(root)
    entries, notes = run.ledger.entries, [str(problem) for problem in run.ledger.problems if problem.kind == "damaged"]
    state: StreamState | None = None
    try:
        state = run.history.state
    except MegaresumeError as error:
        notes.append(error.line)
    pulse, reading = read_pulse(directory), newest_reading(directory)
    measured, position = marks_of(read_lines(directory / "run.jsonl"), pulse), read_position(root)
    marks = all_marks(measured, entries, position)
    spent = goodput_of(marks)
    figures: Mapping[str, Any] = {} if reading is None else reading["figures"]
    last = marks[-1] if marks else Mark(event="", time=0.0, step=0, samples=0)
    proof, written = _prompts(run.root, notes)
    if proof is not None and not marks:
        last = Mark(event="", time=written, step=proof.step, samples=0)
        notes.clear()  # the note that megaresume has no checkpoints there
    checkpoints = [entry for entry in entries if entry.kind == "checkpoint"]
    durable = [entry for entry in entries if entry.kind == "durable"]
    details = checkpoints[-1].details if checkpoints else {}
    seconds = _pace(marks) if pulse is None else figures.get("megaresume.step.duration", _pace(marks))
    size = None if state is None else run.history.newest.topology.global_batch_size
    return Now(
        dir=str(run.root),
        run=run.ledger.run,
        life=_life(run, pulse, written),
        measured=pulse is not None,
        step=last.step,
        samples=last.samples,
        tokens=figures.get("megaresume.tokens", None if state is None else state.tokens),
        time=last.time,
        seconds_per_step=seconds,
        fill=figures.get("megaresume.fill"),
        checkpoint=checkpoints[-1].iteration if checkpoints else None,
        durable=durable[-1].iteration if durable else None,
        durable_time=durable[-1].time if durable else None,
        size=details.get("bytes"),
        save_seconds=details.get("save_seconds"),
        goodput=spent.goodput if spent.seconds else None,
        badput=spent.badput,
        starts=spent.starts,
        repeated=spent.repeated if spent.starts < 2 or shows_kills(measured, entries, position) else None,
        data_wait=figures.get("megaresume.data.wait"),
        store_retries=figures.get("megaresume.store.retries"),
        cache_hits=figures.get("megaresume.cache.hits"),
        cache_misses=figures.get("megaresume.cache.misses"),
        memberships=memberships(entries),
        sources=_sources(figures, state),
        unit="tokens" if state is None else state.config_now.unit,
        next=[] if state is None else _next(state, last.samples, seconds, size),
        notes=notes,
        prompts=proof,
    )


def _life(run: Run, pulse: Mark | None, written: float) -> str:
    """The life of the run: see `Now.life`.

    Args:
        run: the run.
        pulse: the last sign of life, if the run is measured.
        written: when the ledger of its prompts was last written; 0: it has none.
    """
    events, now = run.ledger.events, time.time()
    if events and events[-1].kind == "finished":
        return "ended"
    if is_mirror(run.root):
        return "stored"
    if pulse is not None and pulse.event == "now" and now - pulse.time < _ALIVE:
        return "runs"
    holder = run.holder()
    return "runs" if now - written < _ALIVE_PROMPTS or (holder is not None and holder.status == "held") else "gone"


def _prompts(root: Path, notes: list[str]) -> tuple[prompts.PromptProof | None, float]:
    """The account of the prompts, and when it was written; None: there is none, or it cannot be read."""
    if not prompts.has_prompts(root):
        return None, 0.0
    try:
        return prompts.prove(root), (root / PROMPTS).stat().st_mtime
    except MegaresumeError as error:
        notes.append(error.line)
        return None, 0.0


def _pace(marks: Sequence[Mark]) -> float | None:
    """Seconds per step between the last two marks of one process at different steps."""
    for before, after in zip(reversed(marks[:-1]), reversed(marks), strict=False):
        if after.event != "start" and after.step > before.step:
            return (after.time - before.time) / (after.step - before.step)
    return None


def _sources(figures: Mapping[str, Any], state: StreamState | None) -> list[SourceNow]:
    def of(what: str) -> Mapping[str, Any]:
        found = figures.get(f"megaresume.source.{what}", {})
        return found if isinstance(found, dict) else {}

    if weights := of("weight"):
        return [
            SourceNow(
                name=name,
                tokens=of("tokens").get(name),
                share=of("share").get(name),
                weight=weight,
                epoch=of("epoch").get(name, 0.0),
                loss=of("loss").get(name),
            )
            for name, weight in weights.items()
        ]
    if state is None:
        return []
    total = sum(cursor.drawn_in_stage for cursor in state.sources.values())
    return [
        SourceNow(
            name=row.name,
            tokens=row.tokens,
            share=state.sources[row.name].drawn_in_stage / total if total and row.name in state.sources else None,
            weight=row.share,
            epoch=state.sources[row.name].epochs if row.name in state.sources else 0.0,
        )
        for row in outlook(state, state.config_now)
    ]


def _next(state: StreamState, samples: int, seconds: float | None, size: int | None) -> list[str]:
    """Upcoming events: the end of each source's epoch, and declared stages."""
    found: list[tuple[float, str]] = []
    for row in outlook(state, state.config_now):
        if row.samples_left is not None:
            left = state.samples + row.samples_left - samples
            found.append((left, f"epoch {row.epoch} of {row.name} ends {_when(left, seconds, size)}"))
    begun = {record.name for record in state.stages}
    for stage in state.config.get("stages", ()):
        if stage["name"] in begun:
            continue
        [unit] = [name for name in stage if name.startswith("from_")]
        if unit == "from_samples":
            left = stage[unit] - samples
            found.append((left, f"stage '{stage['name']}' begins {_when(left, seconds, size)}"))
        else:
            found.append((float("inf"), f"stage '{stage['name']}' begins at {unit[5:]} {stage[unit]:,}"))
    return [words for _, words in sorted(found)]


def _when(left: float, seconds: float | None, size: int | None) -> str:
    if left <= 0:
        return "about now"
    if not size:
        return f"in about {left:,.0f} samples"
    steps = left / size
    return f"in about {steps:,.0f} steps" + ("" if seconds is None else f", {spell_seconds(steps * seconds)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "dir", metavar="DIR", type=Path, help="the directory where the run saves its checkpoints, or its stage_to"
    )
    parser.add_argument("--once", action="store_true", help="look once; also if the output is no terminal, with --json")
    parser.add_argument("--json", action="store_true", help="print JSON; a line for each look")
    parser.add_argument(
        "--every", type=at_least(1), default=2, metavar="SECONDS", help="seconds between two looks (default: 2)"
    )


def run(args: argparse.Namespace) -> int:
    """Follow a run until it ends or Ctrl-C."""
    root, _ = split_root(args.dir)
    now = look(root)
    if args.once:
        return now.give(_text, as_json=args.json)
    is_screen = sys.stdout.isatty() and not args.json
    shown: Now | None = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if is_screen:
                print(f"\x1b[H\x1b[2J{_text(now)}", flush=True)
            elif shown is None or (now.step, now.life) != (shown.step, shown.life):
                now.give(_line, as_json=args.json)
                sys.stdout.flush()
            shown = now
            if now.life != "runs":
                break
            time.sleep(args.every)
            now = look(root)
    return 0


def _line(now: Now) -> str:
    pace = "" if now.seconds_per_step is None else f"  {now.seconds_per_step:.3f} s a step"
    goodput = "" if now.goodput is None else f"  goodput {100 * now.goodput:.1f} %"
    shares = "  ".join(f"{s.name} {s.share:.4f}/{s.weight:.4f}" for s in now.sources if s.share is not None)
    durable = "-" if now.durable is None else f"{now.durable:,}"
    if now.prompts is not None:
        shares += f"  prompts: {prompts.counts_of(now.prompts)}"
    return f"step {now.step:,}  samples {now.samples:,}{pace}  durable {durable}{goodput}  {shares}".rstrip()


def _text(now: Now) -> str:
    age = spell_seconds(time.time() - now.time) + " ago" if now.time else "never"
    head = f"{now.dir}  {now.life}" + (f"  (run {now.run})" if now.run else "")
    rows = [["step", f"{now.step:,}, {age}" + ("" if now.measured else ": as of its newest record; not measured")]]
    if now.seconds_per_step:
        rows.append(["pace", f"{now.seconds_per_step:.3f} s a step"])
    tokens = "" if now.tokens is None or now.unit == "items" else f", {now.tokens:,} tokens"
    fill = "" if now.fill is None else f", {100 * now.fill:.2f} % full"
    rows.append(["samples", f"{now.samples:,}{tokens}{fill}"])
    rows.append(["checkpoint", _checkpoint(now)])
    if now.data_wait is not None:
        rows.append(["data wait", f"{now.data_wait:.1f} s in this process"])
    if now.store_retries:
        rows.append(["store", f"{now.store_retries:,} requests tried again"])
    if now.cache_hits is not None and now.cache_misses is not None:
        read = now.cache_hits + now.cache_misses
        rows.append(["cache", f"has {100 * now.cache_hits / max(read, 1):.1f} % of {read:,} records read"])
    if now.goodput is not None:
        lost = ", ".join(f"{cause} {spell_seconds(now.badput[cause])}" for cause in CAUSES if now.badput.get(cause))
        rows.append(["goodput", f"{100 * now.goodput:.2f} %" + (f"; {lost}" if lost else "")])
    again = "" if now.repeated is None else f", {now.repeated:,} samples trained again"
    rows.append(["starts", f"{now.starts:,}{again}"])
    if now.memberships:
        rows.append(["replicas", _replicas(now.memberships)])
    if now.prompts is not None:
        rows.append(["prompts", prompts.counts_of(now.prompts)])
        if now.prompts.staleness:
            rows.append(["staleness", prompts.staleness_of(now.prompts)])
    parts = [head, text_table(rows)]
    if now.sources:
        table = [["source", now.unit, "share", "weight", "epoch", "loss"]]
        for source in now.sources:
            numbers = [source.share, source.weight, source.epoch, source.loss]
            cells = ["-" if number is None else f"{number:.4f}" for number in numbers]
            table.append([source.name, "-" if source.tokens is None else f"{source.tokens:,}", *cells])
        parts.append(text_table(table))
    if now.next:
        parts.append("next\n" + "\n".join(f"  {words}" for words in now.next[:6]))
    problems = () if now.prompts is None else now.prompts.problems[:5]
    parts += [f"note: {note}" for note in (*now.notes, *problems)]
    if now.life == "runs" and now.measured and time.time() - now.time > _QUIET:
        parts.append(f"note: no news for {spell_seconds(time.time() - now.time)}, though a process holds the directory")
    return "\n\n".join(parts)


def _replicas(members: Sequence[Membership]) -> str:
    words = f"{members[-1].replicas:,} since step {members[-1].step:,}"
    if len(members) == 1:
        return words
    return f"{words}, {members[-2].replicas:,} before; changes so far: {len(members) - 1:,}"


def _checkpoint(now: Now) -> str:
    if now.checkpoint is None:
        return "none yet"
    words = f"step {now.checkpoint:,}"
    if now.size is not None:
        words += f", {spell_bytes(now.size)}"
    if now.save_seconds is not None:
        words += f" in {now.save_seconds:.1f} s"
    if now.durable is None:
        return f"{words}; none is on the disk yet"
    began = seconds_of(str(now.durable_time))
    return f"{words}; on the disk: step {now.durable:,}, {spell_seconds(time.time() - began)} ago"
