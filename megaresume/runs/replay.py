"""``megaresume replay RUN --step N -- COMMAND``: repeats a step with the run's own program, and compares it.

choose    the newest complete checkpoint before step N, on the branch that counts
launch    COMMAND, given by the user, with `megaresume.batches.masked.REPLAY_VARIABLE` in its environment: its processes
          load that checkpoint, train to step N, save nothing, and end. They write into a directory outside the run
compare   each step with the run's record: `megaresume.runs.replayed_steps`
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaresume.batches.masked import REPLAY_VARIABLE
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.metrics.record import meter_dir, read_pulse
from megaresume.checkpoint.records.branches import abandoned_checkpoints
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import data_path, ledger_path, split_root
from megaresume.checkpoint.replay import Replay
from megaresume.command_line import at_least, number_range
from megaresume.data.data_config import DataConfig
from megaresume.render import text_table
from megaresume.runs.answer import Answer, told
from megaresume.runs.directory import Run
from megaresume.runs.layout import laid_out
from megaresume.runs.replayed_steps import StepAgain, compare_steps
from megaresume.runs.trace.find import parse_documents
from megaresume.runs.trace.replan import open_corpora
from megaresume.runs.trace.trace import Trace
from megaresume.stream.errors import CheckpointError, MegaresumeError, UsageError, counted

log = logging.getLogger(__name__)

#: Tells the command line that a user's command follows ``--``.
LAUNCHES = True
#: Shown if only the numbers of samples were compared.
NUMBERS = "samples are compared by their numbers: not what they held, nor what was drawn for them (masks, augmentation)"
#: The file with the request, in the directory of the replay.
ASKED = "replay.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "dir",
        metavar="RUN",
        type=Path,
        help="the directory where the run saves its checkpoints; nothing in it is changed",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=at_least(1), metavar="N", help="the step, counted from 1 as training prints it")
    which.add_argument("--steps", metavar="A:B", help="steps A to B-1")
    parser.add_argument("--on", metavar="NODESxRANKS", help="with so many nodes, and processes on each: 1x4")
    parser.add_argument(
        "--skip-documents",
        metavar="SOURCE:DOC[,...]",
        help="take no loss of these documents; the order stays as it was",
    )
    parser.add_argument(
        "--from-start", action="store_true", help="begin as the run began if no checkpoint before that step is left"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the replay writes; without a command: a replay that was made (default: RUN.replay-N)",
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="largest relative difference (default: 0, bitwise)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; the program's output goes to standard error")
    parser.set_defaults(launch=[])
    parser.usage = "megaresume replay [-h] RUN (--step N | --steps A:B) [FLAGS] -- COMMAND"
    parser.epilog = "COMMAND is what the run is started with, unchanged: torchrun ... train.py"


def run(args: argparse.Namespace) -> int:
    """Replay steps of a run, or compare a finished replay."""
    root, _ = split_root(args.dir)
    run = Run(root)
    first, stop = (args.step, args.step + 1) if args.steps is None else number_range("--steps", args.steps, 1)
    skipped = [] if args.skip_documents is None else parse_documents(args.skip_documents, "--skip-documents")
    status = 0
    if args.launch:
        words = args.launch if args.on is None else laid_out(args.launch, args.on)
        check_environment(words)
        check_skipped(run, skipped)
        replay = _prepared(run, first, stop - 1, args, skipped)
        status = _launch(run, replay, words, quiet=args.json)
    else:
        replay = _made(args)
    steps = compare_steps(run, Path(replay.out), first, stop - 1)
    answer = Comparison(
        dir=run.root,
        out=Path(replay.out),
        tag=replay.tag,
        first=first,
        last=stop - 1,
        program_status=status,
        tolerance=args.tolerance,
        skipped=[f"{name}:{document}" for name, documents in replay.masked.items() for document in documents],
        steps=steps,
    )
    return answer.give(_text, as_json=args.json)


# Choose


def checkpoint_before(run: Run, step: int) -> Choice | None:
    """The newest complete checkpoint with fewer steps, on the branch that counts; None if there is none.

    Args:
        run: the run.
        step: counted from 1.
    """
    given_up = abandoned_checkpoints(run.ledger.entries)
    for candidate in run.candidates:
        iteration = candidate.iteration
        if iteration is None or iteration >= step or not candidate.has_dir or (iteration, candidate.tag) in given_up:
            continue
        found = run.examine(candidate)
        if found.status == "complete" and found.record is not None:
            return Choice(
                load_dir=run.root, tag=candidate.tag, iteration=iteration, record=found.record, manifest=found.manifest
            )
    return None


def _prepared(run: Run, first: int, last: int, args: argparse.Namespace, skipped: Sequence[tuple[str, int]]) -> Replay:
    """Prepare a replay and its directory.

    Raises:
        UsageError: the run has not reached that step; or the directory is inside the run's, or not empty.
        CheckpointError: no checkpoint before the step exists.
    """
    entries = run.ledger.entries
    pulse = read_pulse(meter_dir(run.root))
    reached = max([entry.iteration for entry in entries] + ([] if pulse is None else [pulse.step]), default=0)
    if last > reached:
        raise UsageError(
            f"the run has not made step {last}",
            found=f"{reached} steps in {run.root}",
            expected=f"a step up to {reached}",
            action="megaresume inspect shows its checkpoints",
        )
    choice = checkpoint_before(run, first)
    saved = sorted({entry.iteration for entry in entries if entry.kind == "checkpoint"})
    if choice is None and not args.from_start and any(step < first for step in saved):
        left = [step for step in saved if (c := checkpoint_before(run, step + 1)) is not None and c.iteration == step]
        raise CheckpointError(
            f"no complete checkpoint before step {first} is left",
            found=f"checkpoints of steps {', '.join(map(str, left)) or 'none'}",
            expected=f"one of fewer than {first} steps",
            cause="retention has deleted it (keep_last, save_total_limit), or its files are damaged",
            action=(f"--step {left[0] + 1} or later; or " if left else "")
            + f"--from-start, which trains all {last} steps",
        )
    if skipped:
        check_present(run, skipped, 1 + (0 if choice is None else choice.iteration or 0), last)
    place = _directory(run.root, first, args.out)
    masked: dict[str, list[int]] = {}
    for name, document in skipped:
        masked.setdefault(name, []).append(document)
    replay = Replay(
        run=os.fspath(run.root),
        tag=None if choice is None else choice.tag,
        step=0 if choice is None else choice.iteration or 0,
        last=last,
        out=os.fspath(place),
        masked=masked,
    )
    (place / ASKED).write_text(replay.to_text())
    return replay


def _directory(root: Path, step: int, asked: Path | None) -> Path:
    """Create the directory of the replay; it must be empty, and outside the run's."""
    if asked is not None:
        out = Path(os.path.abspath(asked))
        if out.resolve().is_relative_to(root.resolve()):
            raise UsageError(
                "--out lies in the directory of the run",
                found=str(out),
                expected=f"a directory outside of {root}, in which a replay changes nothing",
                action="name another directory, or leave --out out",
            )
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(
                "--out is not empty",
                found=str(out),
                expected="a new directory for each replay",
                action="name another one, or leave --out out",
            )
        return out
    for number in range(1, 10_000):
        out = root.with_name(f"{root.name}.replay-{step}" + (f"-{number}" if number > 1 else ""))
        try:
            out.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                "a replay writes beside the run, and cannot",
                found=f"{out}: {error.strerror}",
                expected="a directory that all processes of the replay can write to",
                action="--out DIR",
            ) from error
        return out
    raise UsageError("there are too many replays of this step", found=f"{out}", action="--out DIR, or delete old ones")


# Launch


def check_environment(words: Sequence[str]) -> None:
    """Refuse a launcher that starts processes on other nodes without our variable: they would continue the run.

    Args:
        words: the command.

    Raises:
        UsageError: it is such a launcher.
    """
    is_mpi = any(os.path.basename(word) in ("mpirun", "orterun") for word in words)
    if is_mpi and "-genvall" not in words and not any(REPLAY_VARIABLE in word for word in words):
        raise UsageError(
            "mpirun does not hand the environment on to other nodes",
            found=" ".join(words[:6]),
            expected=f"-x {REPLAY_VARIABLE}: processes without it would train the run itself on",
            action=f"megaresume replay RUN --step N -- mpirun -x {REPLAY_VARIABLE} ...; with MPICH -genvall",
        )


def check_skipped(run: Run, skipped: Sequence[tuple[str, int]]) -> None:
    """Refuse documents that the run does not have, or that cannot be masked.

    Args:
        run: the run.
        skipped: (source, document) of each.

    Raises:
        UsageError: names the first one.
    """
    if not skipped:
        return
    state, config = run.history.state, data_path(run.root)
    sources = DataConfig.of(config).mapping["sources"].values() if config.is_file() else ()
    if not sources or any(source.get("kind") == "items" for source in sources):
        raise UsageError(
            "--skip-documents is for packed text",
            found="a run over items of a dataset, whose batches your collate_fn makes, or over a Python object",
            expected="a run over corpora of a data.yaml, whose batches have a loss_mask of megaresume's",
            action="leave the items out of the loss in your collate_fn, for this replay",
        )
    for name, document in skipped:
        known = state.fingerprints[name].documents if name in state.fingerprints else 0
        if document >= known:
            raise UsageError(
                "the run has no such document",
                found=f"--skip-documents {name}:{document}",
                expected=", ".join(f"{one}:0 to {of.documents - 1}" for one, of in state.fingerprints.items()),
                action=f"megaresume trace {run.root} --steps N --by-loss names documents",
            )


def check_present(run: Run, skipped: Sequence[tuple[str, int]], first: int, last: int) -> None:
    """Refuse documents that occur in none of the steps to replay: leaving them out would change nothing.

    Args:
        run: the run.
        skipped: (source, document) of each.
        first, last: the steps, both included.

    Raises:
        UsageError: names them.
    """
    absent = dict.fromkeys(skipped)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    try:
        trace = Trace(run, open_corpora(run.root, run.history.state, data=None, split=None), compare=False)
        for piece in trace.pieces(*trace.steps.samples(first, last + 1)):
            if not piece.left_out:
                found = zip(piece.column("source").tolist(), piece.column("document").tolist(), strict=True)
                for place in {(piece.names[source], document) for source, document in found}.intersection(absent):
                    del absent[place]
    except (MegaresumeError, OSError) as error:  # the corpora may only be on other nodes
        words = error.headline if isinstance(error, MegaresumeError) else error
        log.warning("megaresume: it is not known whether the documents are in %s: %s", steps, words)
        return
    if absent:
        names = ", ".join(f"{name}:{document}" for name, document in absent)
        none = "not in" if first == last else "in none of"
        raise UsageError(
            "--skip-documents names documents that are not trained",
            found=f"{names} {'is' if len(absent) == 1 else 'are'} {none} {steps}: nothing would be left out",
            expected="documents of these steps",
            action=f"megaresume trace {run.root} --steps {first}:{last + 1} names them, with --by-loss the worst ones",
        )


def _environment(replay: Replay, words: Sequence[str]) -> dict[str, str]:
    """The command's environment with the variable, also for processes that deepspeed starts on other nodes."""
    out = Path(replay.out)
    found = {**os.environ, REPLAY_VARIABLE: os.fspath(out / ASKED)}
    if any(os.path.basename(word) == "deepspeed" for word in words):
        name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")  # read by deepspeed/launcher/runner.py
        files = [directory / name for directory in (Path.home(), Path.cwd())]
        lines = [line for file in dict.fromkeys(files) if file.is_file() for line in file.read_text().splitlines()]
        found["DS_ENV_FILE"] = os.fspath(out / "environment")
        (out / "environment").write_text("\n".join([*lines, f"{REPLAY_VARIABLE}={out / ASKED}"]) + "\n")
    return found


def _launch(run: Run, replay: Replay, words: Sequence[str], *, quiet: bool) -> int:
    """Run the user's command, and return its exit status.

    Raises:
        UsageError: it cannot be started.
        CheckpointError: none of its processes noticed that it was a replay.
    """
    starts = _starts(run.root)
    print(replay.line(), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(words, env=_environment(replay, words), stdout=2 if quiet else None, check=False)
    except OSError as error:
        raise UsageError(
            "the command cannot be started",
            found=f"{words[0]}: {error.strerror}",
            expected="the command that the run is started with",
            action="megaresume replay RUN --step N -- torchrun --nproc-per-node 8 train.py",
        ) from error
    if ledger_path(Path(replay.out)).exists():
        return done.returncode
    began = _starts(run.root) - starts
    raise CheckpointError(
        "the command did not replay anything",
        found=f"it ended with status {done.returncode}, and wrote nothing to {replay.out}"
        + (f"; {began} starts of the run itself meanwhile" if began else ""),
        expected=f"training with megaresume, by processes that inherit ${REPLAY_VARIABLE}",
        cause="it failed before it trained; or it only submits a job; or its launcher does not hand the environment on",
        action=f"see its output, and let its launcher hand {REPLAY_VARIABLE} on. After a job that was submitted: "
        f"megaresume replay {run.root} --step {replay.last} --out {replay.out}",
    )


def _starts(root: Path) -> int:
    return sum(entry.kind == "start" for entry in read_ledger(ledger_path(root)).entries)


def _made(args: argparse.Namespace) -> Replay:
    """A finished replay."""
    path = None if args.out is None else args.out / ASKED
    if path is None or not path.is_file():
        raise UsageError(
            "what should be replayed?",
            found="no command" if path is None else f"no command, and no {path}",
            expected="the command that the run is started with, or --out DIR of a replay that was made",
            action=f"megaresume replay {args.dir} --step N -- torchrun ... train.py",
        )
    return Replay.read(path)


# Compare


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Answer):
    """A comparison of steps of a run with their replay."""

    dir: Path
    #: the directory where the replay recorded its steps.
    out: Path
    #: the loaded checkpoint; None: the replay started from the beginning.
    tag: str | None
    #: the requested steps, both included.
    first: int
    last: int
    #: the exit status of the user's command.
    program_status: int
    #: largest allowed relative difference.
    tolerance: float
    #: documents left out of the loss: then losses differ, and samples do not.
    skipped: Sequence[str]
    steps: Sequence[StepAgain]

    @told
    def holds(self) -> bool:
        """Whether every step was repeated and agrees with the run's record, as far as there is one."""
        is_all = [one.step for one in self.steps] == [*range(self.first, self.last + 1)]
        return is_all and not self.program_status and self.first_difference is None

    @told
    def first_difference(self) -> int | None:
        """The first step that differs; None if there is none."""
        return next((one.step for one in self.steps if not self._same(one)), None)

    @told
    def compared(self) -> Mapping[str, int]:
        """The number of steps for which the run recorded the samples, the loss, and the gradient norm."""
        return {
            "samples": sum(one.same_samples is not None for one in self.steps),
            "losses": sum(one.loss_difference is not None for one in self.steps),
            "norms": sum(one.norm_difference is not None for one in self.steps),
        }

    def _same(self, one: StepAgain) -> bool:
        if one.same_samples is False:
            return False
        if self.skipped or one.bitwise is not False:
            return True
        found = [difference for difference in (one.loss_difference, one.norm_difference) if difference is not None]
        return self.tolerance > 0 and all(difference <= self.tolerance for difference in found)


def _text(c: Comparison) -> str:
    begin = "from the beginning" if c.tag is None else f"from {c.tag}"
    steps = f"step {c.first}" if c.first == c.last else f"steps {c.first} to {c.last}"
    lines = [f"replay of {c.dir}, {steps}, {begin}; records: {c.out}", ""]
    table = [["step", "samples", "loss", "recorded", "difference", "gradient norm", "recorded", "difference"]]
    for one in c.steps:
        samples = "not recorded" if one.same_samples is None else "same" if one.same_samples else "DIFFERENT"
        row = [str(one.step), samples]
        for number, recorded, difference in (
            (one.loss, one.recorded_loss, one.loss_difference),
            (one.norm, one.recorded_norm, one.norm_difference),
        ):
            row += [*("-" if n is None else f"{n:.9g}" for n in (number, recorded)), _difference(difference)]
        table.append(row)
    lines += [text_table(table), ""]
    if c.skipped:
        lines.append(f"without the loss of {', '.join(c.skipped)}")
    missing = c.last - c.first + 1 - len(c.steps)
    if c.program_status or missing:
        lines.append(f"the command ended with status {c.program_status}; {missing} steps were not trained again")
    if not c.compared["losses"] and not c.compared["norms"]:
        lines.append("the run recorded neither losses nor gradient norms: metrics= makes it (docs/metrics.md)")
    if c.compared["samples"]:
        lines.append(NUMBERS)
    lines.append(_verdict(c))
    return "\n".join(lines)


def _difference(value: float | None) -> str:
    return "-" if value is None else "none" if value == 0 else f"{value:.2e}"


def _verdict(c: Comparison) -> str:
    if c.first_difference is not None:
        return f"DIFFERENT from step {c.first_difference} on"
    if not c.steps:
        return "NOTHING was trained again"
    steps = counted(len(c.steps), "step")
    what = [name if number == len(c.steps) else f"{name} of {number}" for name, number in c.compared.items() if number]
    how = "identical" if c.tolerance == 0 else f"within {c.tolerance:g}"
    if c.skipped:
        return f"{steps}: samples of {c.compared['samples']} identical"
    return f"{steps}: " + (f"{', '.join(what)} {how}" if what else "nothing to compare")
