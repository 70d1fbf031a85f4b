"""``megaresume demo``: the main job end to end on this machine, killed and resumed, with proof.

The report is one self-contained HTML page, without scripts or external links.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megaresume
from megaresume.batches.open import open_stream
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.cluster.demo.demo import GLOBAL_BATCH_SIZE, Demo, DemoStart, Extra
from megaresume.cluster.launcher import Kind, Launch
from megaresume.cluster.local import LocalPrograms
from megaresume.cluster.own_directory import own_directory
from megaresume.cluster.pages import done_again, loss_figure, steps_table
from megaresume.cluster.processes import ask
from megaresume.cluster.records import RunComparison, RunRecords, compare_runs, read_records
from megaresume.cluster.scenario import Attempt, Found, Say, Scenario, Stop
from megaresume.command_line import need_packages
from megaresume.render import COLOURS, html_table, page, svg
from megaresume.stream.errors import UsageError
from megaresume.stream.skips import union

if TYPE_CHECKING:
    from megaresume.stream.stream import Stream

#: Marks the directory of a demo, so that --overwrite removes nothing else.
MARK = ".megaresume-demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--out", metavar="DIR", type=Path, help="default: demo-run, demo-sft, demo-vlm or demo-trainer")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--trainer", action="store_true", help="Hugging Face's Trainer and a small Llama")
    kind.add_argument("--sft", action="store_true", help="conversations in one blend with text; masks token by token")
    kind.add_argument("--vlm", action="store_true", help="images of digits with text, and a model that reads them")
    parser.add_argument(
        "--steps", type=int, help="steps of the run (default 100; 300 with --vlm, 60 with --sft, --trainer)"
    )
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier demo left in DIR")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    if args.steps is not None and args.steps < 24:
        raise UsageError(
            "too few steps",
            found=f"--steps {args.steps}",
            expected="at least 24, so that both kills follow a checkpoint",
            action="--steps 24, or more",
        )
    if args.trainer:
        needed = ("torch", "transformers", "accelerate", "matplotlib")
        need_packages("the demo", needed, extra="hugging-face,report")
    else:
        more = ("PIL", "sklearn") if args.vlm else ("tokenizers", "jinja2") if args.sft else ()
        needed = ("torch", "deepspeed", "megatron.core", "matplotlib", *more)
        need_packages("the demo", needed, extra="demo")
    if args.trainer:
        from megaresume.cluster.demo.hugging_face import TRAINER as scenario
    elif args.sft:
        from megaresume.cluster.demo.sft import SFT as scenario
    elif args.vlm:
        from megaresume.cluster.demo.vlm import VLM as scenario
    else:
        from megaresume.cluster.demo.demo import TEXT as scenario
    named = next((name for name in ("trainer", "sft", "vlm") if getattr(args, name)), "run")
    out = args.out or Path(f"demo-{named}")
    result = run_demo(scenario, out, steps=args.steps or scenario.steps, overwrite=args.overwrite, quiet=args.json)
    if args.json:
        print(json.dumps(result))
    return 0 if result["holds"] else 1


def run_demo(demo: Demo, out: Path, *, steps: int, overwrite: bool, quiet: bool) -> dict[str, Any]:
    """Prepare, train, kill, resume, compare, report.

    Args:
        demo: the demo to run.
        out: directory for everything.
        steps: of the run.
        overwrite: remove an earlier demo in ``out``.
        quiet: print nothing on standard output.

    Returns:
        ``holds``, the comparison, and the path of the report.
    """
    say: Say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    start = time.monotonic()
    own_directory(out, mark=MARK, what="demo", overwrite=overwrite)
    say(f"1. Preparing {demo.data}")
    data = demo.prepare(out, say)
    flags = [*demo.flags(out, steps), "--megaresume-data", str(data)]

    say(f"2. Training the uninterrupted twin: {demo.twin}, {steps} steps")
    run = _Run(demo, out, flags, steps, say)
    try:
        run.run_undisturbed()
        say("3. Training the run, and killing it")
        run.run()
    finally:
        run.close()
    starts, problems = run.starts, run.found.problems
    twin, trained = read_records(out / "twin.jsonl"), read_records(out / "run.jsonl")

    say("4. Comparing every step, and planning the whole stream again: megaresume verify")
    comparison = compare_runs(twin, trained, steps=steps)
    verified = ask("verify", str(out / "run"))
    samples, config = steps * GLOBAL_BATCH_SIZE, demo.config(out, data)
    extra = demo.extra(out)
    facts = Facts(
        demo=demo,
        extra=extra,
        holds=not problems
        and comparison.holds
        and bool(verified["holds"])
        and all(s.resumed for s in starts[1:])
        and extra.holds,
        comparison=comparison,
        twin=twin,
        run=trained,
        starts=starts,
        verified=verified,
        summary=ask("stream", str(config), "--samples", f"0:{samples}", "--summary"),
        seconds=time.monotonic() - start,
        versions=f"megaresume {megaresume.__version__}, "
        + ", ".join(f"{name} {version(name)}" for name in demo.packages),
    )
    report = out / "report.html"
    write_report(report, facts, open_stream(config))
    say(_table(facts))
    say(f"\nreport: {report}")
    say(f"look around: megaresume inspect {out / 'run'}    megaresume stream {config} --samples 0:8")
    numbers = {"seconds": round(facts.seconds, 1), "report": str(report)}
    return {**comparison.to_dict(), "holds": facts.holds, **numbers, **facts.extra.result}


class _Run(Scenario):
    """The undisturbed twin, and the run that is killed."""

    undisturbed_name = "twin"

    def __init__(self, demo: Demo, out: Path, flags: list[str], steps: int, say: Say) -> None:
        programs = LocalPrograms(demo.program, most=max(start.processes for start in (demo.twin, *demo.attempts)))
        if programs.devices.warning:
            say(programs.devices.warning)
        kills = [layout.killed_after for layout in demo.attempts if layout.killed_after is not None]
        super().__init__(
            programs,
            Found(),
            layouts=demo.attempts,
            undisturbed=demo.twin,
            stops=[Stop(kind="node-down", step=int(share * steps)) for share in kills],
            steps=steps,
            save_interval=int(flags[flags.index("--save-interval") + 1]),
            patience=600,
        )
        self.out, self.say, self._flags = out, say, flags
        self.starts: list[ReportedStart] = []

    def launch(self, name: str, layout: DemoStart) -> Launch:
        """See `Scenario`."""
        flags = [
            *self._flags,
            *("--save", str(self.out / name), "--load", str(self.out / name)),
            *("--micro-batch-size", str(layout.micro_batch_size), "--num-workers", str(layout.workers)),
            *("--megaresume-log-samples", str(self.records(name))),
            *(("--megaresume-start-method", layout.start_method) if layout.start_method else ()),
        ]
        return Launch(nodes=1, ranks_per_node=layout.processes, flags=tuple(flags), env=(), run_dir=self.out, name=name)

    def records(self, name: str) -> Path:
        """See `Scenario`."""
        return self.out / f"{name}.jsonl"

    def log(self, name: str, number: int) -> Path:
        """See `Scenario`: all starts of a run share one log."""
        return self.out / f"{name}.log"

    def keep_log(self, name: str, number: int, text: str) -> None:
        """Do nothing: the log is already in its final place."""

    def may_stop(self, attempt: Attempt, step: int) -> bool:
        """Whether this start has committed a save; before that, there is nothing to resume from."""
        return committed_since(self.out / "run", self._before())

    def began(self, number: int, layout: DemoStart) -> None:
        """See `Scenario`."""
        self.say(f"   start {number}: {layout}")

    def was_stopped(self, attempt: Attempt, kind: Kind, text: str) -> None:
        """See `Scenario`."""
        self._note(attempt, text, f"killed in step {attempt.last + 1}, with SIGKILL", killed=True)

    def ended(self, attempt: Attempt, text: str) -> None:
        """See `Scenario`."""
        self._note(attempt, text, "finished", killed=False)

    def _before(self) -> int:
        """The last step of the starts before this one."""
        return self.starts[-1].steps[1] if self.starts else 0

    def _note(self, attempt: Attempt, text: str, end: str, *, killed: bool) -> None:
        found = re.search(r"megaresume: resumed at sample .*", text)
        resumed = found[0] if found else None
        steps = (self._before() + 1, attempt.last)
        self.starts.append(
            ReportedStart(layout=str(attempt.layout), steps=steps, killed=killed, end=end, resumed=resumed)
        )
        if resumed:
            self.say(f"     {resumed}")
        self.say(f"     {end}")


def committed_since(root: Path, step: int) -> bool:
    """Whether a checkpoint of a later step is committed."""
    return any(e.kind == "checkpoint" and e.iteration > step for e in read_ledger(ledger_path(root)).entries)


def _table(facts: Facts) -> str:
    rows = [
        *checks(facts),
        *([("packing efficiency", f"{100 * facts.summary['fill']:.2f} %")] if facts.demo.packing else []),
        ("time", f"{facts.seconds:.0f} s"),
    ]
    lines = [f"   {what:<44} {result}" for what, result in rows]
    verdict = "exact: repeated steps were identical, and nothing was skipped"
    if not facts.holds:
        verdict = "NOT EXACT" + (f": {facts.comparison.first}" if facts.comparison.first else "")
    return "\n".join(["", *lines, "", f"   {verdict}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedStart:
    """One start of the run, for the report."""

    layout: str
    #: its first and last step.
    steps: tuple[int, int]
    killed: bool
    #: how it ended, in words.
    end: str
    #: the line that it printed when it resumed.
    resumed: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts in the report."""

    demo: Demo
    extra: Extra
    holds: bool
    comparison: RunComparison
    twin: RunRecords
    run: RunRecords
    starts: Sequence[ReportedStart]
    #: the result of ``megaresume verify``.
    verified: dict[str, Any]
    #: sources and fill of the run's samples: what ``megaresume stream --summary --json`` prints.
    summary: dict[str, Any]
    seconds: float
    versions: str


def write_report(path: Path, facts: Facts, stream: Stream) -> None:
    """Write the page."""
    path.write_text(_page(facts, stream), encoding="utf-8")


def _page(facts: Facts, stream: Stream) -> str:
    verdict = (
        "The run was killed twice and resumed on other processes, workers and micro-batches. It trained on exactly "
        "what the uninterrupted run trained on."
        if facts.holds
        else "The run did not train on what the uninterrupted run trained on."
    )
    parts = [
        f"<h1>{facts.demo.title}</h1><p>{html.escape(facts.versions)}; {facts.seconds:.0f} seconds in all</p>",
        f"<p class='verdict {'holds' if facts.holds else 'fails'}'>{verdict}</p>",
        "<h2>What was checked</h2>",
        html_table(("", "result"), checks(facts)),
        "<p>With other processes or micro-batches the sums of a loss are taken in another order; the difference is "
        "relative to the twin's loss. megaresume verify: "
        f"{len(facts.verified['points'])} recorded points, planned again on a CPU.</p>",
        "<h2>Loss, step by step</h2>",
        loss_figure(
            facts.twin,
            facts.run,
            attempts=[start.layout for start in facts.starts],
            stops=[(start.steps[1], "SIGKILL") for start in facts.starts if start.killed],
        ),
        *facts.extra.parts,
        "<h2>The starts of the run</h2>",
        html_table(("", "layout", "steps", "end"), _starts(facts)),
        "<pre>" + html.escape("\n".join(s.resumed for s in facts.starts if s.resumed)) + "</pre>",
        "<h2>What each source contributed</h2>",
        html_table(
            ("source", "weight", f"share of {facts.demo.unit}", facts.demo.unit, "segments"),
            _sources(facts),
            numbers=True,
        ),
        _shares(facts, stream),
        *(_packing(facts, stream) if facts.demo.packing else ()),
        steps_table(facts.twin, facts.run),
    ]
    return page(facts.demo.title, parts)


def _packing(facts: Facts, stream: Stream) -> tuple[str, ...]:
    return (
        "<h2>Packing</h2>",
        f"<p>{100 * facts.summary['fill']:.2f} % of all positions hold a token "
        f"({html.escape(facts.summary['packing'])}, samples of {facts.summary['seq_length']} tokens). "
        f"{facts.demo.packing}</p>",
        _fill(facts, stream),
    )


def checks(facts: Facts) -> list[tuple[str, str]]:
    """The checks, and their results."""
    c, losses = facts.comparison, facts.comparison.losses

    def identical(different: Sequence[int]) -> str:
        found = f"{c.steps - len(different)} of {c.steps} identical"
        return found + (f": DIFFERENT in steps {', '.join(map(str, different))}" if different else "")

    return [
        ("steps compared", f"{c.steps}"),
        ("steps lost to a kill, and done again", _ranges([record["step"] for record in facts.run.lost])),
        ("samples of every step", identical(c.different_samples)),
        (facts.demo.content, identical(c.different_content)),
        ("steps missing", ", ".join(map(str, c.missing)) or "none"),
        (
            "losses, bit for bit",
            f"{losses.equal} of {losses.compared}, the others within {losses.largest:.1e}",
        ),
        ("megaresume verify", "proved" if facts.verified["holds"] else "NOT PROVED"),
        *facts.extra.rows,
    ]


def _starts(facts: Facts) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("twin", "never disturbed", f"1 to {facts.comparison.steps}", "finished")]
    for number, start in enumerate(facts.starts, 1):
        again = [step for attempt, step in done_again(facts.run) if attempt == number]
        steps = f"{start.steps[0]} to {start.steps[1]}" + (f" ({_ranges(again)} again)" if again else "")
        rows.append((f"start {number}", start.layout, steps, start.end))
    return rows


def _ranges(steps: Sequence[int]) -> str:
    """Numbers as ranges, in words: ``3: 7 to 9``."""
    runs = union((step, step + 1) for step in steps)
    words = [f"{first}" if stop == first + 1 else f"{first} to {stop - 1}" for first, stop in runs]
    return f"{len(steps)}: {', '.join(words)}" if words else "none"


def _sources(facts: Facts) -> list[tuple[str, ...]]:
    return [
        (name, f"{s['weight']:.3f}", f"{s['share']:.3f}", f"{s['tokens']:,}", f"{s['segments']:,}")
        for name, s in facts.summary["sources"].items()
    ]


def _shares(facts: Facts, stream: Stream) -> str:
    """Each source's share of all tokens so far, compared with the weights."""
    import numpy as np

    plan = stream.plan(facts.summary["first"], facts.summary["stop"])
    sample = np.repeat(np.arange(plan.first, plan.stop), np.diff(plan.starts))
    total = np.cumsum(plan.table[:, 4])

    def draw(axes: Any) -> None:
        for i, (name, s) in enumerate(facts.summary["sources"].items()):
            colour = COLOURS[i % len(COLOURS)]
            mine = np.cumsum(np.where(plan.table[:, 0] == i, plan.table[:, 4], 0))
            axes.plot(sample, mine / total, color=colour, lw=1.6, label=name)
            axes.axhline(s["weight"], color=colour, lw=0.8, ls=":")
        axes.set_xlabel("sample")
        axes.set_ylabel(f"share of {facts.demo.unit} so far")
        axes.legend(frameon=False, fontsize=9, loc="upper right")

    return svg(draw, height=3)


def _fill(facts: Facts, stream: Stream) -> str:
    plan = stream.plan(facts.summary["first"], facts.summary["stop"])
    padding = facts.summary["seq_length"] - plan.tokens()

    def draw(axes: Any) -> None:
        axes.bar(range(plan.first, plan.stop), padding, width=1.0, color="#c2571a")
        axes.set_xlabel("sample")
        axes.set_ylabel("padding, tokens")

    return svg(draw, height=2.2)
