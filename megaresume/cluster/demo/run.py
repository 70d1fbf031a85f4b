"""The demo from beginning to end."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaresume.batches.open import open_stream
from megaresume.checkpoint.ledger import read_ledger
from megaresume.checkpoint.paths import ledger_path
from megaresume.cluster.demo.demo import GLOBAL_BATCH_SIZE, Demo, DemoStart
from megaresume.cluster.demo.report import Facts, ReportedStart, checks, write_report
from megaresume.cluster.job import Kind, Launch, own_directory
from megaresume.cluster.local import LocalPrograms, ask
from megaresume.cluster.records import compare_all, read_records
from megaresume.cluster.scenario import Attempt, Found, Say, Scenario, Stop

#: Written into the directory of a demo, so that --overwrite removes nothing else.
MARK = ".megaresume-demo"


def run_demo(demo: Demo, out: Path, *, steps: int, overwrite: bool, quiet: bool) -> dict[str, Any]:
    """Prepare, train, kill, resume, compare, report.

    Args:
        demo: which.
        out: directory for everything.
        steps: of the run.
        overwrite: remove an earlier demo in ``out``.
        quiet: say nothing on standard output.

    Returns:
        ``holds``, the comparison, and where the report lies.
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
    comparison = compare_all(twin, trained)
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
        versions=", ".join(f"{name} {version(name)}" for name in demo.packages),
    )
    report = out / "report.html"
    write_report(report, facts, open_stream(config))
    say(_table(facts))
    say(f"\nreport: {report}")
    say(f"look around: megaresume inspect {out / 'run'}    megaresume stream {config} --samples 0:8")
    numbers = {"seconds": round(facts.seconds, 1), "report": str(report)}
    return {"holds": facts.holds, **asdict(comparison), **numbers, **facts.extra.result}


class _Run(Scenario):
    """The twin, and the run that is killed."""

    undisturbed_name = "twin"

    def __init__(self, demo: Demo, out: Path, flags: list[str], steps: int, say: Say) -> None:
        kills = [layout.killed_after for layout in demo.attempts if layout.killed_after is not None]
        super().__init__(
            LocalPrograms(demo.program),
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
        """See `Scenario`: all starts of a run write to one."""
        return self.out / f"{name}.log"

    def keep_log(self, name: str, number: int, text: str) -> None:
        """It is there."""

    def may_stop(self, attempt: Attempt, step: int) -> bool:
        """Not before a save of this start is committed: there would be nothing to resume from."""
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
    verdict = "exact: what was done again was as before, and nothing was skipped" if facts.holds else "NOT EXACT"
    return "\n".join(["", *lines, "", f"   {verdict}"])
