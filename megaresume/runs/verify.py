"""``megaresume verify DIR``: plans the stream of a run again on a CPU and compares it with all records.

verify DIR                              every data state and every line of the ledger
verify DIR --from 1000 --to 2000        those between two recorded steps, starting at the nearest state
verify DIR --log-samples PATH           also what every rank recorded in every step
verify DIR --content                    also the contents of the documents
verify --loss A B                       the losses of two runs

For a reinforcement learning run with a ledger of its prompts, see prompts.py.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.ledger import LedgerProblem
from megaresume.runs import prompts
from megaresume.runs.answer import Answer, live, optional, told
from megaresume.runs.directory import Run
from megaresume.runs.losses import LossComparison, compare_losses, read_losses
from megaresume.runs.rank_steps import RankSteps, read_rank_steps
from megaresume.runs.trace.points import CheckedPoint, between, check_all, check_between, corpus_problems, read_points
from megaresume.runs.trace.ranks import Contents, RankCheck, check_ranks
from megaresume.runs.trace.replan import Past, open_corpora
from megaresume.runs.trace.trace import Trace
from megaresume.stream.errors import UsageError
from megaresume.stream.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "dir", metavar="DIR", type=Path, nargs="?", help="the directory where the run saves its checkpoints"
    )
    parser.add_argument("--from", dest="first", metavar="STEP", type=int, help="a recorded step (default: 0)")
    parser.add_argument("--to", dest="last", metavar="STEP", type=int, help="a recorded step (default: the newest)")
    parser.add_argument(
        "--log-samples",
        metavar="PATH",
        type=Path,
        help="what --megaresume-log-samples (log_samples) wrote: compare every step of every rank",
    )
    parser.add_argument(
        "--content",
        action="store_true",
        help="read the documents too: compare them with the log of samples, or print a digest of each source",
    )
    parser.add_argument(
        "--loss", nargs=2, metavar=("RUN_A", "RUN_B"), type=Path, help="compare the losses in the logs of two runs"
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="with --loss: largest difference allowed (default: 0, bitwise)"
    )
    parser.add_argument("--data", metavar="DATA.yaml", help="where the corpora are now (default: as recorded in DIR)")
    parser.add_argument("--split", help="the run's split, if neither DATA.yaml nor DIR has it: 969,30,1")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Verify a run, or compare two."""
    if args.loss is not None:
        return _losses(args)
    if args.dir is None or args.tolerance is not None:
        raise UsageError(
            "what should be verified?" if args.dir is None else "--tolerance is of --loss",
            found="no directory" if args.dir is None else "--tolerance without --loss",
            expected="verify DIR, or verify --loss RUN_A RUN_B",
            action="name the directory of the run" if args.dir is None else "leave --tolerance out",
        )
    if prompts.has_prompts(args.dir):
        return prompts.prove(args.dir).give(prompts.text, as_json=args.json)
    return _verify(args, Run(args.dir)).give(_text, as_json=args.json)


@dataclass(kw_only=True, slots=True)
class Proof(Answer):
    """The result of planning the stream of a run again."""

    dir: Path
    #: what is wrong with the corpora, in words.
    corpora: list[str]
    #: what is missing from checkpoints whose weights exist, in words.
    lost: tuple[str, ...]
    #: problems in lines of the ledger.
    problems: tuple[LedgerProblem, ...] = live()
    checked: list[CheckedPoint] = live()
    #: branches of the run, in words.
    given_up: list[str]
    #: the verdict on the ranks' records.
    log: dict[str, Any] | None = optional()
    #: the digests of the documents' contents, by source.
    content: dict[str, Any] | None = optional()

    @told
    def holds(self) -> bool:
        """Whether everything recorded agrees with one stream."""
        # A line truncated by a kill was never a record; one damaged later may have had other content.
        damaged = any(problem.kind == "damaged" for problem in self.problems)
        whole = bool(self.checked) and all(point.holds for point in self.checked)
        return whole and not (self.corpora or self.lost or damaged) and (self.log is None or self.log["holds"])

    @told
    def unreadable(self) -> list[str]:
        """Lines of the ledger that cannot be read."""
        return [str(problem) for problem in self.problems]

    @told
    def points(self) -> list[dict[str, Any]]:
        """Every recorded point."""
        return [
            {"origin": p.recorded.origin, "samples": p.recorded.sample, "digest": p.recorded.digest, "holds": p.holds}
            for p in self.checked
        ]

    @told
    def first_difference(self) -> dict[str, Any] | None:
        """The first difference: between the last point that agrees and the first that does not."""
        difference = next((point for point in self.checked if not point.holds), None)
        if difference is None:
            return None
        agreeing = [point.recorded.sample for point in self.checked if point.holds]
        before = max((sample for sample in agreeing if sample <= difference.recorded.sample), default=0)
        return {
            "origin": difference.recorded.origin,
            "samples": [before, difference.recorded.sample],
            "recorded": difference.recorded.digest,
            "recomputed": difference.digest,
            "fields": list(difference.fields),
            "error": str(difference.error) if difference.error else None,
        }


def _verify(args: argparse.Namespace, run: Run) -> Proof:
    points = read_points(run)
    state = points.newest
    sources = open_corpora(run.root, state, data=args.data, split=args.split, need_all=True)
    ranged = args.first is not None or args.last is not None
    problems = corpus_problems(sources, state, recompute=not ranged)
    records = None if args.log_samples is None else read_rank_steps(args.log_samples)
    checked: list[CheckedPoint] = []
    given_up: list[str] = []
    trace: Trace | None = None
    if ranged or ((records is not None or args.content) and not problems):
        # Without comparing: this command reports the differences.
        trace = Trace(run, sources, compare=False)
        first, stop = between(run.history, args.first, args.last)
    if ranged and trace is not None:
        with progress("planning the stream again", stop - first, "samples") as advance:
            checked = list(check_between(points.recorded, trace.replan, first, stop, advance))
    else:
        with progress("planning the stream again", state.samples, "samples") as advance:
            checked, given_up = check_all(points.recorded, state, sources, advance)
    proof = Proof(
        dir=args.dir,
        corpora=problems,
        lost=points.lost,
        problems=points.unreadable,
        checked=checked,
        given_up=given_up,
    )
    if trace is not None and not problems:
        if records is not None:
            newest = max(*records.steps, run.history.newest.iteration)
            steps = (args.first or 0) + 1, (newest if args.last is None else args.last) + 1
            proof.log = _check(trace, records, *steps, content=args.content)
        elif args.content:
            proof.content = _read(trace, first, stop)
    return proof


def _check(trace: Trace, records: RankSteps, first: int, stop: int, *, content: bool) -> dict[str, Any]:
    """Compare the ranks' records of these steps with the stream."""
    with progress("checking what the ranks wrote", len(records.steps), "steps") as advance:
        check = check_ranks(trace, records, first=first, stop=stop, content=content, progress=advance)
    return _log_report(check, records)


def _read(trace: Trace, first: int, stop: int) -> dict[str, Any]:
    """Hash the contents of the documents in these samples, by source."""
    contents, past = Contents(trace.names, trace.replan.sources), Past(trace.replan)
    stride = 4096
    with progress("reading the documents", stop - first, "samples") as advance:
        for sample in range(first, stop, stride):
            contents.documents(past.blocks(sample, min(sample + stride, stop)))
            advance(min(stride, stop - sample))
    return {name: {"documents": d.documents, "digest": d.digest} for name, d in sorted(contents.digests.items())}


def _log_report(check: RankCheck, records: RankSteps) -> dict[str, Any]:
    counts = ("steps", "lines", "contents", "seen", "lost", "given_up")
    return {name: getattr(check, name) for name in counts} | {
        "holds": check.holds and not records.damaged,
        "missing": [{"step": step, "ranks": list(ranks)} for step, ranks in check.missing],
        "unlogged": [list(steps) for steps in check.unlogged],
        "unseen": check.unseen and {"step": check.unseen[0], "rank": check.unseen[1]},
        "unreadable": list(records.problems),
        "different_steps": len({d.step for d in check.differences}),
        "first_difference": asdict(check.differences[0]) if check.differences else None,
        "error": None if check.error is None else str(check.error),
    }


def _text(proof: Proof) -> str:
    lines = [f"verify {proof.dir}"]
    for problem in proof.corpora:
        lines += ["", *(f"  {line}" for line in problem.splitlines())]
    if proof.corpora:
        lines.append("")
    for point in proof.points:
        mark = "same     " if point["holds"] else "DIFFERENT"
        lines.append(f"  {mark}  sample {point['samples']:>10}  digest {point['digest']}  {point['origin']}")
    lines += [f"  NOT READ   {problem}" for problem in proof.unreadable]
    lines += [f"  LOST       {problem}" for problem in proof.lost]
    lines += [f"  given up   {branch}" for branch in proof.given_up]
    difference = proof.first_difference
    if difference:
        first, stop = difference["samples"]
        lines += ["", f"first difference: in samples {first} to {stop - 1} ({difference['origin']})"]
        lines.append(f"  recorded digest   {difference['recorded']}")
        lines.append(f"  recomputed        {difference['recomputed'] or 'not possible'}")
        if difference["fields"]:
            lines.append(f"  fields that differ: {', '.join(difference['fields'])}")
        if difference["error"]:
            lines += [f"  {line}" for line in difference["error"].splitlines()]
    if proof.log is not None:
        lines += _log_text(proof.log)
    for name, read in (proof.content or {}).items():
        lines.append(f"  read       {read['documents']:>10} documents of {name}, digest {read['digest']}")
    if proof.holds:
        first, last = (f(point["samples"] for point in proof.points) for f in (min, max))
        span = f"{last} samples" if not first else f"samples {first} to {last - 1}"
        lines.append(f"proved: all {len(proof.points)} recorded points are those of one stream of {span}")
    else:
        lines += ["", "not proved: the corpora or the records are not those of the run"]
    return "\n".join(lines)


def _log_text(log: dict[str, Any]) -> list[str]:
    content = f", and the content of {log['contents']}" if log["contents"] else ""
    lines = [f"  log        {log['steps']} steps: {log['lines']} lines of ranks are as planned{content}"]
    if log["seen"]:
        lines.append(f"  log        {log['seen']} of them say what the model was given, not only what was handed out")
        if log["unseen"]:
            step, rank = log["unseen"]["step"], log["unseen"]["rank"]
            lines.append(
                f"  log        the first that does not: step {step}, {rank}; its forward had other tokens, or none"
            )
    if log["lost"]:
        lines.append(f"  log        {log['lost']} lines of steps that were lost and done again are as planned, too")
    if log["given_up"]:
        lines.append(f"  given up   {log['given_up']} lines of the log: another branch of the run")
    lines += [f"  NOT READ   {problem}" for problem in log["unreadable"]]
    for first, stop in log["unlogged"]:
        lines.append(f"  NO LINES   steps {first} to {stop - 1}: that launch wrote down nothing of what it trained")
    for entry in log["missing"][:5]:
        who = f"data-parallel rank {entry['ranks']}" if entry["ranks"] else "any rank"
        lines.append(f"  MISSING    step {entry['step']}: no line of {who}")
    difference = log["first_difference"]
    if difference:
        lines += ["", f"first difference in the log: step {difference['step']}, {difference['rank']}"]
        lines.append(f"  {difference['field']} recorded   {difference['recorded']}")
        lines.append(f"  {difference['field']} planned    {difference['planned']}")
        lines.append(f"  {log['different_steps']} steps differ in all")
    if log["error"]:
        lines += ["", *(f"  {line}" for line in log["error"].splitlines())]
    return lines


def _losses(args: argparse.Namespace) -> int:
    others = ("dir", "first", "last", "log_samples", "data", "split")
    extra = [name for name in others if getattr(args, name) is not None]
    if extra or args.content:
        raise UsageError(
            "--loss compares two logs and nothing else",
            found="--loss together with a directory or its flags",
            expected="verify --loss RUN_A RUN_B, and verify DIR",
            action="one command for each",
        )
    tolerance = args.tolerance or 0.0
    if not tolerance >= 0:
        raise UsageError(
            "bad value of --tolerance",
            found=str(tolerance),
            expected="0 or more",
            action="--tolerance 0 for equal losses",
        )
    first, second = map(read_losses, args.loss)
    return compare_losses(first, second, tolerance=tolerance).give(_loss_text, as_json=args.json)


def _loss_text(c: LossComparison) -> str:
    logs = c.logs
    how = "bit for bit" if c.exact else "as printed (a printed log rounds)"
    lines = [f"{logs[0].path} and {logs[1].path}: {c.steps} steps in both, {c.equal} with the same loss {how}"]
    for log, only in zip(logs, (c.only_first, c.only_second), strict=True):
        if only:
            lines.append(f"  {only} more steps in {log.path}")
    for what, at in (("first", c.first_difference), ("largest", c.largest_difference)):
        if at is not None:
            lines.append(f"  {what} difference: step {at.step}, {at.first!r} and {at.second!r}, {at.size:.3e} apart")
    verdict = "the same" if not c.first_difference else f"within {c.tolerance:g}" if c.holds else "DIFFERENT"
    return "\n".join([*lines, verdict if c.steps else "NOTHING TO COMPARE: no step is in both"])
