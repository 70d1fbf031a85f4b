"""The program ``megaresume``: finds the command, and turns errors into messages; without one, suggests what to do next.

Exit status: 0 when the answer holds, 1 when it does not, 2 on bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import sys
import textwrap
import traceback
from pathlib import Path

import megaresume
from megaresume.command_line import Parser, normalise, or_near
from megaresume.render import Visible
from megaresume.stream.errors import MegaresumeError, NoFileError, UsageError, missing_package

#: by task, as listed by ``megaresume --help``: name -> the module in this package, and the help. A module has the
#: functions ``add_arguments`` and ``run``; only `megaresume.run` parses its command line itself.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "try it, and begin": {
        "demo": (
            "cluster.demo.command",
            "train a small GPT, kill -9, resume with other processes, and prove that nothing was repeated or skipped",
        ),
        "new": (
            "cluster.new",
            "write a starting point for your trainer: a short program that trains, and resumes exactly",
        ),
    },
    "data": {
        "prepare": (
            "data.prepare.command",
            "build .bin/.idx from text, or the index of tar shards",
        ),
        "stream": (
            "runs.stream",
            "show what a data config gives: the documents of each sample, how full it is, the sources' shares",
        ),
    },
    "start and resume": {
        "run": (
            "run",
            "run an unmodified Megatron script with exact data resume",
        ),
        "patch": (
            "hosts.megatron.patching.command",
            "edit a Megatron script so that it resumes exactly; show, check or revert the edit",
        ),
        "latest": (
            "runs.latest",
            "print the newest complete checkpoint, also of Megatron-LM, DeepSpeed, VeRL or Hugging Face alone",
        ),
        "plan": (
            "runs.plan.command",
            "tell what a resume with new flags would do: which checkpoint and data, until which step, what stops it",
        ),
        "convert": (
            "hosts.deepspeed.conversion",
            "make a ZeRO checkpoint loadable by a different number of ranks (DeepSpeed's universal checkpoint)",
        ),
    },
    "look and prove": {
        "inspect": (
            "runs.inspect",
            "show a checkpoint's data state, pointers and completeness",
        ),
        "trace": (
            "runs.trace.command",
            "list which documents the steps of a run trained on, or will; or when a document is seen",
        ),
        "verify": (
            "runs.verify",
            "prove what a run was trained on, by planning its stream again on a CPU, or show the first difference",
        ),
        "top": (
            "runs.top",
            "follow a run while it trains: pace, shares, losses, last durable save, goodput, what comes next",
        ),
        "replay": (
            "runs.replay",
            "train a step of a run again by its own program, changing nothing of the run, and say what is different",
        ),
        "report": (
            "runs.report",
            "write one HTML page about a run: sources against their weights, stages, restarts, packing, losses",
        ),
    },
    "find what is wrong": {
        "doctor": (
            "runs.doctor",
            "find what is wrong with a machine, a checkpoint directory or the log of a failed launch, and what to do",
        ),
        "smoke": (
            "cluster.smoke.command",
            "test resuming on your cluster: stop a small run in every way, resume it elsewhere, compare all steps",
        ),
    },
    "the shell": {
        "completion": (
            "completion",
            "print what bash or zsh needs to complete megaresume's commands and flags",
        ),
    },
}
_MODULES = {name: module for group in GROUPS.values() for name, (module, _) in group.items()}
#: name -> help.
COMMANDS = {name: words for group in GROUPS.values() for name, (_, words) in group.items()}

DESCRIPTION = "Exact, elastic, provable data resume for every trainer."


def listed() -> str:
    """Every command with its help, under the name of its group, in 100 columns."""
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, (_, words) in group.items():
            first, *rest = textwrap.wrap(words, 100 - 17)
            lines += [f"    {name:<12} {first}", *(" " * 17 + line for line in rest)]
    return "\n".join(lines[1:])


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as with >&-; without this, errors would go to standard output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if argv[:1] == ["run"]:
        # The rest is the script's: its flags are not changed, and Python reports its errors.
        from megaresume.run import main as run_script

        return run_script(argv[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path is bytes: pass them on to launch scripts unchanged
    argv = normalise(argv)
    asked = next((word for word in argv if word in COMMANDS), None)
    try:
        if not argv:
            print(welcome(Path.cwd()))
            return 0
        return _run(argv, asked)
    except (UsageError, NoFileError) as error:
        return _report(error, 2)
    except MegaresumeError as error:
        return _report(error, 1)
    except ModuleNotFoundError as error:
        explained = missing_package(error, f"megaresume {asked}")
        if explained is None:
            raise
        return _report(explained, 1)
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # The system's refusal of a user's path: no permission, a name too long, a failing disk.
        is_path = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        refused = MegaresumeError(
            f"the system refuses: {error.strerror or error}",
            found=error.filename,
            action="check this path and its permissions" if error.filename else None,
        )
        return _report(refused, 2 if is_path else 1)
    except Exception as error:
        if os.environ.get("MEGARESUME_TRACEBACK"):
            raise
        return _report(_unexpected(error), 1)
    except KeyboardInterrupt:
        print("megaresume: interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str], asked: str | None) -> int:
    """Parse a command line and run its command: ``asked``, the only one imported. Returns the exit status."""
    parser = Parser(
        prog="megaresume",
        usage="megaresume [-h] [--version] COMMAND ...",
        description=DESCRIPTION,
        epilog=listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = next((word for word in argv if not word.startswith("-")), None)
    if named is not None and named not in COMMANDS:
        parser.error(f"there is no command '{named}'{or_near(named, COMMANDS)}; megaresume --help lists them")
    parser.add_argument("--version", action="version", version=f"megaresume {megaresume.__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog="megaresume", help=argparse.SUPPRESS
    )
    parsers = {name: commands.add_parser(name, description=words) for name, words in COMMANDS.items()}
    if asked is not None:
        module = importlib.import_module(module_of(asked))
        module.add_arguments(parsers[asked])
        parsers[asked].words = argv
        if getattr(module, "LAUNCHES", False) and "--" in argv:  # a command of the user's
            cut = argv.index("--")
            argv, launch = argv[:cut], argv[cut + 1 :]
            parsers[asked].set_defaults(launch=launch)
    with contextlib.ExitStack() as stack:
        if asked is not None and any("://" in word for word in argv):
            argv = _with_directory(argv, asked, stack)
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            parsers[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        with contextlib.redirect_stdout(Visible(sys.stdout)):
            status: int = module.run(args)
        sys.stdout.flush()
        return status


def _with_directory(argv: list[str], command: str, stack: contextlib.ExitStack) -> list[str]:
    """The command line with a directory in place of a run's URL."""
    # Only here, as it needs a store's client.
    from megaresume.runs.mirrored import check_command, defaults, mirrored, url_in

    if (number := url_in(argv)) is None or not check_command(command, argv[number]):
        return argv
    directory = stack.enter_context(mirrored(argv[number], whole="--checksums" in argv, ranks=command == "verify"))
    return [*argv[:number], directory, *argv[number + 1 :], *defaults(command, argv)]


def module_of(command: str) -> str:
    """The module of a command."""
    return f"megaresume.{_MODULES[command]}"


def _unexpected(error: Exception) -> MegaresumeError:
    """An unforeseen error, such as one caused by a faulty program's record."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return MegaresumeError(
        "an error that megaresume did not foresee",
        found=f"{type(error).__name__}: {error}, in {os.path.basename(place.filename)}, line {place.lineno}",
        expected="an answer, or an error that says what is wrong with the input",
        cause="a record that a faulty program wrote, though its checksum is right; or a fault of megaresume",
        action="report it with what this prints: MEGARESUME_TRACEBACK=1 megaresume ...",
    )


def _report(error: MegaresumeError, status: int) -> int:
    sys.stdout.flush()
    print(f"megaresume: error: {error}", file=sys.stderr)
    return status


#: training packages -> the starting point of `megaresume new`.
STARTING_POINTS = {
    "transformers": "trainer",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "torch": "torch",
}


def welcome(directory: Path) -> str:
    """Suggestions for this directory: read its checkpoints, or start.

    Args:
        directory: searched, with its subdirectories.
    """
    lines = [
        f"megaresume {megaresume.__version__}: after a kill, training continues with exactly the data that comes next"
    ]
    if found := _checkpoints(directory):
        lines += ["", f"There are checkpoints in {found}:"]
        lines += _rows(
            {
                f"megaresume latest {found}": "the newest one that is complete",
                f"megaresume inspect {found}": "what they hold of the data",
                f"megaresume doctor {found}": "what is wrong, if anything",
            }
        )
    if (directory / "data.yaml").is_file():
        lines += ["", "There is a data.yaml:"]
        lines += _rows({"megaresume stream data.yaml --samples 0:8": "the first samples that it gives"})
    begin = {"megaresume demo": "see a small run killed and resumed (needs the extra demo)"}
    installed = [start for package, start in STARTING_POINTS.items() if importlib.util.find_spec(package) is not None]
    begin |= {f"megaresume new {installed[0] if installed else 'TRAINER'}": _starts(installed)}
    lines += ["", "To begin:", *_rows(begin)]
    return "\n".join([*lines, "", "megaresume --help lists all commands."])


def _starts(installed: list[str]) -> str:
    others = ", ".join(installed[1:])
    return "a short program that trains and resumes" + (f"; also installed here: {others}" if others else "")


def _rows(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"  {command:<{width}}  {what}" for command, what in rows.items()]


def _checkpoints(directory: Path) -> str | None:
    """The directory whose checkpoints changed last, as written on a command line."""
    from megaresume.checkpoint.records.names import tag_iteration

    found, places = [], [directory]
    with contextlib.suppress(OSError):  # it may be entered and not listed
        places += directory.iterdir()
    for place in places:
        try:
            if place.is_dir() and any(tag_iteration(one.name) is not None for one in place.iterdir()):
                found.append((place.stat().st_mtime, str(place.relative_to(directory))))
        except OSError:  # an unreadable directory is not what the user is asking about
            continue
    return max(found)[1] if found else None
