"""What happened to every prompt of reinforcement learning, for `verify`, `trace --find`, `report` and `top`, if there
is a ledger of prompts (`megaresume.Prompts`).

The ledger itself must be consistent: every ordinal is trained at one step, dropped for one reason, or in flight. And
every state of the prompts beside a checkpoint must follow from the ledger.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.prompt_ledger import PROMPTS, STATE, PromptHistory
from megaresume.render import COLOURS, escape, html_table, page, svg
from megaresume.runs.answer import Answer, optional, told
from megaresume.stream.errors import MegaresumeError, StateError, UsageError
from megaresume.stream.in_flight_text import from_runs, unpacked


@dataclass(kw_only=True, slots=True)
class PromptProof(Answer):
    """The result of checking the ledger of prompts and the states beside the checkpoints."""

    dir: Path
    #: where the account ends: at the newest checkpoint, or with the last line of the ledger.
    origin: str
    step: int
    prompts: int
    trained: int
    in_flight: int
    #: the number of prompts dropped, by reason.
    dropped: dict[str, int]
    #: settled before the ledger began; nothing else is known about them.
    before: int
    #: number of trained rollouts, by how many versions newer the weights were than those that made them; only rollouts
    #: with a known version.
    staleness: dict[int, int]
    #: prompts trained, by step.
    steps: dict[int, int]
    #: checkpoints whose state agrees with the ledger; and those whose state was taken without a ledger.
    states: int
    unproved: int
    #: what is wrong, in words; lines torn by a kill do not count.
    problems: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    #: what happened to each prompt that was asked for, by ordinal.
    found: dict[int, str] | None = optional()

    @told
    def holds(self) -> bool:
        """Whether every prompt is accounted for exactly once."""
        return not self.problems


def has_prompts(directory: Path) -> bool:
    """Whether the run in a directory has prompts."""
    return (directory / PROMPTS).is_file()


def prove(directory: Path, find: str | None = None) -> PromptProof:
    """Read the ledger, and every ``*/prompts.json`` beside a checkpoint.

    Args:
        directory: the run's.
        find: ordinals, separated by commas.

    Raises:
        StateError: there is no ledger, or a line is missing.
        UsageError: ``find`` has no ordinals.
    """
    history = PromptHistory.read(directory / PROMPTS)
    found = {path: _state(path) for path in sorted(directory.glob(f"*/{STATE}"))}
    states = {path: state for path, state in found.items() if state["line"] is not None}
    known = [(state["step"], path) for path, state in states.items() if state["line"] in history.lines]
    newest = max(known, default=None)
    line = history.last if newest is None else states[newest[1]]["line"]
    if line is None:
        raise StateError(
            "there is nothing to prove",
            found=f"no line in {directory / PROMPTS}",
            expected="one for each state of the prompts",
            action="save a checkpoint first",
        )
    fates = history.fates(line)
    damaged = [one for one in history.problems if "cut short" not in one]
    problems = [*damaged, *fates.problems]
    for path, state in states.items():
        problems += [f"{path.parent.name}: {problem}" for problem in _differences(state, history)]
    return PromptProof(
        dir=directory,
        origin="the end of the ledger" if newest is None else newest[1].parent.name,
        step=fates.step,
        prompts=fates.next,
        trained=len(fates.trained),
        in_flight=fates.next - len(fates.trained) - len(fates.dropped) - fates.before,
        dropped=dict(Counter(fates.dropped.values())),
        before=fates.before,
        staleness=dict(sorted(fates.staleness.items())),
        steps=dict(sorted(Counter(fates.trained.values()).items())),
        states=len(states),
        unproved=len(found) - len(states),
        problems=problems,
        torn=[one for one in history.problems if "cut short" in one],
        found=None if find is None else {ordinal: fates.of(ordinal) for ordinal in _ordinals(find)},
    )


def _state(path: Path) -> dict[str, Any]:
    """Read a state of prompts. Raises StateError if it is not one."""
    try:
        found = unpacked(json.loads(path.read_bytes())["prompts"])
        found["open"] = from_runs(found["open"])
        return {name: found[name] for name in ("step", "next", "open", "line")}
    except (KeyError, TypeError, ValueError) as error:
        raise StateError.unreadable(
            "a state of prompts",
            error,
            "what was saved with the weights",
            at=path,
            action="restore the file, or move its checkpoint elsewhere, and run it again",
        ) from error


def _differences(state: dict[str, Any], history: PromptHistory) -> list[str]:
    try:
        fates = history.fates(str(state["line"]))
    except MegaresumeError as error:
        return [error.line]
    there = {"step": fates.step, "next": fates.next, "open": list(fates.in_flight())}
    words = {"step": "its step", "next": "the next ordinal", "open": "what is in flight"}
    return [f"{words[name]} is not as the ledger says" for name, value in there.items() if state[name] != value]


def _ordinals(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError as error:
        raise UsageError(
            "bad value of --find",
            found=repr(text),
            expected="ordinals of prompts",
            action="--find 17, or --find 17,18",
        ) from error


def text(proof: PromptProof) -> str:
    """The proof as text, for people."""
    if proof.found is not None:
        return "\n".join(f"prompt {ordinal}: {fate}" for ordinal, fate in proof.found.items())
    lines = [f"prompts of {proof.dir}, up to {proof.origin}, step {proof.step}", f"  {counts_of(proof)}"]
    if proof.staleness:
        lines.append(f"  {staleness_of(proof)}")
    lines += [f"  torn       {one} (a kill; no checkpoint is of it)" for one in proof.torn]
    lines += [f"  WRONG      {problem}" for problem in proof.problems[:20]]
    count = f"{proof.states} states beside checkpoints are as the ledger says"
    if proof.unproved:
        count += f", {proof.unproved} were taken without a ledger"
    lines.append(f"proved: every prompt is accounted for once; {count}" if proof.holds else "not proved")
    return "\n".join(lines)


def counts_of(proof: PromptProof) -> str:
    """The numbers of prompts trained, dropped and in flight, in words."""
    dropped = ", ".join(f"{count:,} dropped ({reason})" for reason, count in sorted(proof.dropped.items()))
    words = f"{proof.prompts:,} issued: {proof.trained:,} trained, {proof.in_flight:,} in flight"
    words += f", {dropped or '0 dropped'}"
    return words + (f", {proof.before:,} settled before the ledger began" if proof.before else "")


def staleness_of(proof: PromptProof) -> str:
    """How stale the trained rollouts were, in words."""
    total = sum(proof.staleness.values())
    shares = ", ".join(f"{100 * count / total:.1f} % by {age}" for age, count in proof.staleness.items())
    return f"of {total:,} rollouts trained, older than the weights: {shares} versions"


def prompts_page(proof: PromptProof) -> str:
    """The HTML page of `report`."""
    ages = [(str(age), f"{count:,}") for age, count in proof.staleness.items()]
    rows = [("trained", f"{proof.trained:,}"), ("in flight", f"{proof.in_flight:,}")]
    rows += [(f"dropped: {reason}", f"{count:,}") for reason, count in sorted(proof.dropped.items())]
    rows += [("settled before the ledger began", f"{proof.before:,}")] if proof.before else []
    parts = [
        f"<h1>{escape(str(proof.dir))}</h1>",
        f"<p>Up to {escape(proof.origin)}, step {proof.step:,}: {proof.prompts:,} prompts were issued. "
        f"{'Every one is accounted for once.' if proof.holds else 'NOT PROVED: see below.'}</p>",
        *[f"<p>{escape(problem)}</p>" for problem in proof.problems[:20]],
        "<h2>Prompts</h2>",
        html_table(("", "prompts"), rows, numbers=True),
    ]
    if len(proof.steps) > 1:
        parts += ["<p>Prompts trained, by step.</p>", _steps(proof)]
    if ages:
        parts += ["<h2>Staleness</h2>", html_table(("versions behind the weights", "rollouts"), ages, numbers=True)]
    return page(f"megaresume: {proof.dir}", parts)


def _steps(proof: PromptProof) -> str:
    def draw(axes: Any) -> None:
        axes.plot(list(proof.steps), list(proof.steps.values()), ".", color=COLOURS[0])
        axes.set_xlabel("step")
        axes.set_ylim(0)

    return svg(draw, height=2.4)
