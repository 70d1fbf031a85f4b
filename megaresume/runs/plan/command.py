"""``megaresume plan DIR``: a dry run of a resume with new flags, before a GPU is used.

Answers in well under a second: it imports neither torch nor DeepSpeed nor Megatron, and never unpickles.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megaresume.checkpoint.flags import add_settings
from megaresume.checkpoint.settings import DataOptions, LaunchOptions, LoaderOptions
from megaresume.checkpoint.system import Topology
from megaresume.command_line import at_least
from megaresume.data.split import split_ranges
from megaresume.render import text_table
from megaresume.runs.plan import DryRun, Flags, dry_run
from megaresume.runs.plan import interval as plan_interval
from megaresume.stream.errors import ConfigError, UsageError
from megaresume.stream.skips import SkipConfig, parse_range, parse_steps, union


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command: those of a training program, with the same meaning."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="the directory where the run saves its checkpoints")
    parser.add_argument("--json", action="store_true", help="print JSON")
    data = parser.add_argument_group("data (default: as the run was last saved)")
    data.add_argument("--data", metavar="NEW.yaml", type=Path, help="the data config of the launch")
    data.add_argument("--split", help="split of corpora without their own")
    data.add_argument("--seed", type=int, help="if the data config does not set it")
    data.add_argument("--seq-length", type=at_least(1), metavar="S", help="tokens per sample")
    add_settings(data, DataOptions, "plan")
    data.add_argument(
        "--skip-train-iteration-range",
        nargs="+",
        metavar="FIRST-LAST",
        default=(),
        help="steps to leave out, counted from 1",
    )
    layout = parser.add_argument_group("ranks and batches (default: as the checkpoint was saved)")
    layout.add_argument("--dp", type=at_least(1), metavar="D", help="data-parallel size")
    layout.add_argument("--nodes", type=at_least(1), metavar="N", help="machines, with as many ranks each as before")
    layout.add_argument(
        "--micro-batch-size", type=at_least(1), metavar="M", help="samples per rank in one forward pass"
    )
    layout.add_argument("--global-batch-size", type=at_least(1), metavar="B", help="samples per step")
    layout.add_argument(
        "--rampup-batch-size",
        type=at_least(1),
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="batch ramp-up",
    )
    layout.add_argument("--num-workers", type=at_least(0), metavar="W", help="worker processes per rank")
    layout.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), metavar="Z", help="DeepSpeed's ZeRO")
    add_settings(layout, LaunchOptions, "plan")
    add_settings(layout, LoaderOptions, "plan")
    layout.add_argument("--universal-checkpoint", action="store_true", help="load what ds_to_universal wrote")
    length = parser.add_argument_group("the run (not recorded: give what the launch gives)")
    length.add_argument("--ckpt-step", type=int, metavar="N", help="load exactly this iteration")
    length.add_argument("--train-iters", type=at_least(1), metavar="N", help="steps of the run")
    length.add_argument("--train-samples", type=at_least(1), metavar="N", help="samples of the run")
    plan_interval.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan a resume. Returns 1 if the launch would be refused, else 0."""
    flags = _flags(args)
    if plan_interval.is_asked(args):
        return plan_interval.run(args, flags)
    return dry_run(args.dir, flags).give(_text, as_json=args.json)


def _flags(args: argparse.Namespace) -> Flags:
    given = {name: value for name, value in vars(args).items() if name in Flags.__dataclass_fields__}
    if args.rampup_batch_size is not None:
        given["rampup_batch_size"] = tuple(args.rampup_batch_size)
    try:
        if args.split is not None:
            split_ranges(args.split, 1)
        given["skip"] = SkipConfig(
            samples=union(parse_range(word, "--skip-samples") for word in args.skip_samples or ()),
            steps=tuple(parse_steps(word, "--skip-train-iteration-range") for word in args.skip_train_iteration_range),
        )
    except ConfigError as error:
        raise UsageError(error.headline, found=error.found, expected=error.expected, action=error.action) from error
    return Flags(**given)


def _text(result: DryRun) -> str:
    word = {"refused": "REFUSED", "finished": "FINISHED", "fresh": "NOTHING TO RESUME"}.get(result.verdict, "OK")
    blocks = [f"{word}: {result.headline}", _problems(result, "refused"), _problems(result, "warning")]
    blocks += [_checkpoint(result), _data(result), _sources(result), _run(result), _guard(result)]
    blocks += [_problems(result, "note")]
    return "\n\n".join(block for block in blocks if block)


def _problems(result: DryRun, kind: str) -> str:
    title = {"refused": "in the way", "warning": "warnings", "note": "notes"}[kind]
    lines = [f"  {line}" for finding in result.findings if finding.kind == kind for line in finding.lines()]
    return "\n".join([title, *lines]) if lines else ""


def _checkpoint(result: DryRun) -> str:
    choice, state = result.found.choice, result.state
    if choice is None:
        return ""
    lines = ["checkpoint", f"  {choice.tag_dir}"]
    if state is not None:
        lines.append(f"  sample {state.samples:,}, digest {state.digest}")
    lines += [f"  passed over {rejected}" for rejected in choice.rejected]
    return "\n".join([*lines, *(f"  {note}" for note in choice.notes)])


def _data(result: DryRun) -> str:
    data = result.data
    if data is None:
        return ""
    what = {
        "nothing": "the order continues as it was",
        "new stage": f"a new stage begins at sample {0 if result.state is None else result.state.samples:,}",
        "refused": "refused",
    }[data.outcome]
    lines = [f"data: {what}"]
    for name, then, now in data.changes:
        lines.append(f"  {name}  {json.dumps(then)} -> {json.dumps(now)}")
    lines += [f"  {line}" for line in data.grown]
    if not data.changes and not data.grown:
        lines.append(f"  nothing changed in {'the recorded config' if data.path is None else data.path}")
    lines += [f"  to come: stage '{stage.name}' from {stage.unit} {stage.at:,}" for stage in data.to_come]
    if data.with_stage:
        lines.append("  with --megaresume-on-change stage a new stage would begin here, nothing repeated or skipped")
    return "\n".join(lines)


def _sources(result: DryRun) -> str:
    if not result.sources:
        return ""
    rows = [["source", "share", "seen", "epoch", "remaining", "epoch lasts until", "epochs left", "at the end"]]
    for source in result.sources:
        now = source.now
        until, last = _until(source.sample, source.step), ""
        if source.epochs_left is not None:
            last = f"{source.epochs_left}, {_until(source.last_sample, source.last_step)}"
        at_end = "" if source.epochs_at_end is None else f"epoch {source.epochs_at_end:.2f}"
        epoch = [f"{now.documents:,}", f"{now.epoch}", f"{now.remaining:,}"]
        rows.append([now.name, f"{now.share:.4f}", *epoch, until, last or "no end", at_end])
    return "sources, from here on\n" + text_table(rows)


def _until(sample: int | None, step: int | None) -> str:
    if sample is None:
        return "not drawn"
    return f"about step {step:,}" if step is not None else f"about sample {sample:,}"


def _run(result: DryRun) -> str:
    lines = []
    if result.before is not None and result.now is not None:
        lines.append(_change(result.before, result.now))
    if result.schedule is not None and result.state is not None:
        future = [s for s in result.schedule.segments if s[0] > result.state.samples]
        sizes = [f"{result.schedule.size_at(result.state.samples):,} samples a step"]
        lines.append("  " + ", ".join([*sizes, *(f"{size:,} from sample {first:,}" for first, size in future)]))
    if result.balance is not None:
        lines.append(f"  {result.balance}")
    if result.last is not None:
        step, sample = result.last
        lines.append(f"  last step {step:,}" + ("" if result.state is None else f", last sample {sample - 1:,}"))
    if result.ending is not None and result.ending.before is not None:
        step, sample = result.ending.before
        lines.append(f"  with the batch size as before it would be step {step:,}, sample {sample - 1:,}")
    if result.ending is None and result.state is not None:
        lines.append("  where it ends is not known: give megaresume plan --train-iters N or --train-samples N")
    return "\n".join(["run", *lines]) if lines else ""


def _change(before: Topology, now: Topology) -> str:
    pairs = [("nodes", "nodes"), ("dp", "dp"), ("workers", "num_workers"), ("mbs", "micro_batch_size")]
    pairs += [("gbs", "global_batch_size"), ("zero", "zero_stage")]
    words = []
    for word, name in pairs:
        old, new = getattr(before, name), getattr(now, name)
        if old is None and new is None:
            continue
        shown = ["not known" if value is None else str(value) for value in (old, new)]
        words.append(f"{word} {old}" if old == new else f"{word} {'->'.join(shown)}")
    return "  " + "  ".join(words)


def _guard(result: DryRun) -> str:
    guarded, kind = result.guard, result.found.kind
    if kind == "adopt":
        return "guard\n  nothing is recorded yet: the order is recorded from here on, as Megatron builds it"
    if guarded is None:
        return ""
    sizes = (
        f"{guarded.recorded_samples} samples recorded, {guarded.samples} asked for"
        if guarded.recorded_samples
        else "one epoch"
    )
    lines = [f"guard: {sizes}"]
    for component in guarded.components or ():
        then, now = component.before, component.now
        if then is None or now is None:
            lines.append(f"  {component.path}: what stock Megatron would do is not known")
        elif component.is_reshuffled:
            lines.append(f"  {component.path}: stock Megatron would go from {then} to {now}")
        else:
            lines.append(f"  {component.path}: {now}")
    if guarded.stock_reshuffles:
        lines.append("  stock Megatron would reshuffle: every sample from the first on another one, samples repeated")
        lines.append("  and skipped without a word. The guard keeps the recorded order")
    elif guarded.stock_reshuffles is False:
        lines.append("  stock Megatron would keep this order as well. The guard checks it")
    return "\n".join(lines)
