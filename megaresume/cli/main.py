"""The program ``megaresume``: finds the command, and turns errors into messages.

Exit status: 0 when what was asked holds, 1 when it does not, 2 on bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
from types import ModuleType

import megaresume
from megaresume.cli.flags import normalise
from megaresume.render import Visible
from megaresume.stream.errors import MegaresumeError, NoFileError, UsageError, missing_package

#: In the order of a newcomer's first day. Each is a module of this package with HELP, add_arguments and run.
COMMANDS = (
    "demo",
    "prepare",
    "stream",
    "inspect",
    "latest",
    "trace",
    "plan",
    "convert",
    "verify",
    "report",
    "doctor",
    "import-energon",
    "patch",
    "run",
    "smoke",
)

DESCRIPTION = "Exact, elastic, provable data resume for Megatron-LM and DeepSpeed training."


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["run"]:
        # What follows is the script's: its flags stay as they are, its errors go where Python shows them.
        from megaresume.run import main as run_script

        return run_script(argv[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path is bytes: launch scripts get them as they are
    argv = normalise(argv)
    # Only the command that is asked for is imported; the help text needs them all.
    names = [name for name in argv[:1] if name in COMMANDS] or list(COMMANDS)
    parser = argparse.ArgumentParser(prog="megaresume", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"megaresume {megaresume.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules: dict[str, ModuleType] = {}
    for name in names:
        module = modules[name] = importlib.import_module(f"megaresume.cli.{name.replace('-', '_')}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        with contextlib.redirect_stdout(Visible(sys.stdout)):
            status: int = modules[args.command].run(args)
        sys.stdout.flush()
        return status
    except (UsageError, NoFileError) as error:
        return _report(error, 2)
    except MegaresumeError as error:
        return _report(error, 1)
    except ModuleNotFoundError as error:
        explained = missing_package(error, f"megaresume {args.command}")
        if explained is None:
            raise
        return _report(explained, 1)
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # What the system refuses, of a path of the user's: no permission, a name too long, a disk that fails.
        is_path = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        refused = MegaresumeError(f"the system refuses: {error.strerror or error}", found=error.filename)
        return _report(refused, 2 if is_path else 1)
    except Exception as error:
        if os.environ.get("MEGARESUME_TRACEBACK"):
            raise
        return _report(_unexpected(error), 1)
    except KeyboardInterrupt:
        print("megaresume: interrupted", file=sys.stderr)
        return 130


def _unexpected(error: Exception) -> MegaresumeError:
    """An error that nobody foresaw, as a record of a faulty program causes."""
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


if __name__ == "__main__":
    sys.exit(main())
