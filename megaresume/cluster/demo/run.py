"""The demo from beginning to end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaresume.batches.open import open_stream
from megaresume.checkpoint.ledger import read_ledger
from megaresume.checkpoint.paths import ledger_path
from megaresume.cluster.demo.report import Facts, Start, checks, write_report
from megaresume.cluster.demo.scenario import GLOBAL_BATCH_SIZE, Attempt, Say, Scenario
from megaresume.cluster.jobs import LocalJob, Watch, own_directory
from megaresume.cluster.records import compare_all, read_records
from megaresume.stream.errors import SetupError


def ask(*words: str) -> dict[str, Any]:
    """What a command of the program prints with --json; its exit status is in there too.

    Raises:
        SetupError: it printed nothing.
    """
    done = subprocess.run([sys.executable, "-m", "megaresume", *words, "--json"], stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        raise SetupError(
            f"megaresume {words[0]} failed",
            found=f"exit status {done.returncode}",
            expected="a result",
            action=f"run it by hand: megaresume {' '.join(words)}",
        )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


#: Written into the directory of a demo, so that --overwrite removes nothing else.
MARK = ".megaresume-demo"


def run_demo(scenario: Scenario, out: Path, *, steps: int, overwrite: bool, quiet: bool) -> dict[str, Any]:
    """Prepare, train, kill, resume, compare, report.

    Args:
        scenario: which demo.
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
    say(f"1. Preparing {scenario.data}")
    data = scenario.prepare(out, say)
    flags = [*scenario.flags(out, steps), "--megaresume-data", str(data)]

    say(f"2. Training the uninterrupted twin: {scenario.twin.layout}, {steps} steps")
    _train(out, "twin", scenario, scenario.twin, flags, steps)
    twin = read_records(out / "twin.jsonl")

    say("3. Training the run, and killing it")
    starts: list[Start] = []
    for number, attempt in enumerate(scenario.attempts, start=1):
        say(f"   start {number}: {attempt.layout}")
        starts.append(_train(out, "run", scenario, attempt, flags, steps))
        if starts[-1].resumed:
            say(f"     {starts[-1].resumed}")
        say(f"     {starts[-1].end}")
    run = read_records(out / "run.jsonl")

    say("4. Comparing every step, and planning the whole stream again: megaresume verify")
    comparison = compare_all(twin, run)
    verified = ask("verify", str(out / "run"))
    samples, config = steps * GLOBAL_BATCH_SIZE, scenario.config(out, data)
    extra = scenario.extra(out)
    facts = Facts(
        scenario=scenario,
        extra=extra,
        holds=comparison.holds and bool(verified["holds"]) and all(s.resumed for s in starts[1:]) and extra.holds,
        comparison=comparison,
        twin=twin,
        run=run,
        starts=starts,
        verified=verified,
        summary=ask("stream", str(config), "--samples", f"0:{samples}", "--summary"),
        seconds=time.monotonic() - start,
        versions=", ".join(f"{name} {version(name)}" for name in scenario.packages),
    )
    report = out / "report.html"
    write_report(report, facts, open_stream(config))
    say(_table(facts))
    say(f"\nreport: {report}")
    say(f"look around: megaresume inspect {out / 'run'}    megaresume stream {config} --samples 0:8")
    numbers = {"seconds": round(facts.seconds, 1), "report": str(report)}
    return {"holds": facts.holds, **asdict(comparison), **numbers, **facts.extra.result}


def _train(out: Path, name: str, scenario: Scenario, attempt: Attempt, common: list[str], steps: int) -> Start:
    """One start of the twin or the run, to its end or its kill."""
    records, output = out / f"{name}.jsonl", out / f"{name}.log"
    flags = [
        *common,
        *("--save", str(out / name), "--load", str(out / name)),
        *("--micro-batch-size", str(attempt.micro_batch_size), "--num-workers", str(attempt.workers)),
        *("--megaresume-log-samples", str(records)),
        *(("--megaresume-start-method", attempt.start_method) if attempt.start_method else ()),
    ]
    watch = Watch(records, steps, f"     {name}")
    first = watch.step
    with LocalJob(scenario.program, flags, num_processes=attempt.processes, output=output) as job:
        fatal_step = None if attempt.killed_after is None else int(attempt.killed_after * steps)
        # Not before a save of this start is committed: there would be nothing to resume from.
        killed = job.wait_until(lambda: watch.reached(fatal_step) and committed_since(out / name, first))
        if killed:
            # In the middle of the next step: its samples are read, its gradients half computed.
            time.sleep(0.4 * watch.step_seconds)
            job.kill()
        status = job.wait()
        text = job.text()
    watch.close()
    if status and not killed:
        raise SetupError(
            "a training job of the demo failed",
            found=f"exit status {status}; the end of {output}:\n{text[-2000:]}",
            expected="a job that trains to its end",
            action=f"read {output}",
        )
    resumed = re.search(r"megaresume: resumed at sample .*", text)
    return Start(
        layout=attempt.layout,
        steps=(first + 1, watch.step),
        killed=killed,
        end=f"killed in step {watch.step + 1}, with SIGKILL" if killed else "finished",
        resumed=resumed[0] if resumed else None,
    )


def committed_since(root: Path, step: int) -> bool:
    """Whether a checkpoint of a later step is committed."""
    return any(e.kind == "checkpoint" and e.iteration > step for e in read_ledger(ledger_path(root)).entries)


def _table(facts: Facts) -> str:
    rows = [
        *checks(facts),
        *([("packing efficiency", f"{100 * facts.summary['fill']:.2f} %")] if facts.scenario.packing else []),
        ("time", f"{facts.seconds:.0f} s"),
    ]
    lines = [f"   {what:<44} {result}" for what, result in rows]
    verdict = "exact: what was done again was as before, and nothing was skipped" if facts.holds else "NOT EXACT"
    return "\n".join(["", *lines, "", f"   {verdict}"])
