"""Common to the drivers of all launch scripts: settings, the training command, and output."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megaresume.stream.errors import MegaresumeError, UsageError

#: The words that run a script or a module with the hooks.
_RUN = ("-m", "megaresume.run")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """The settings that every script has and explains, as given."""

    run_dir: str
    data: str
    python: str
    procs_per_node: str
    max_restarts: str
    script: str
    train: tuple[str, ...]
    #: the flags given to the script.
    flags: tuple[str, ...]

    def check_numbers(self, names: Iterable[str]) -> None:
        """Raise UsageError if one of these settings is not a number."""
        for name in names:
            if not (value := getattr(self, name.lower())).isdecimal():
                raise UsageError(f"{name}={value} is not a number")

    def no_data(self, where: str = "") -> UsageError:
        """The error for a missing data config; ``where``: the place, in words."""
        return UsageError(
            f"there is no DATA={self.data}{where}", action="set DATA to your data.yaml, with its whole path"
        )

    @property
    def data_config(self) -> str:
        """DATA, if the command uses it; otherwise "": Megatron's own datasets need none."""
        named = any(self.data in (word, word.partition("=")[2]) for word in (*self.train, *self.flags))
        return self.data if named else ""

    def check_data(self, where: str = "") -> None:
        """Raise `no_data` if the command uses a data config that is missing."""
        if self.data_config and not Path(self.data).is_file():
            raise self.no_data(where)

    def no_script(self, where: str = "") -> UsageError:
        """The error for a missing script of TRAIN; ``where``: the place, in words."""
        return UsageError(
            f"there is no script {script_of(self.train)}{where}", action="give it in TRAIN with its whole path"
        )

    def check_script(self, where: str = "") -> None:
        """Raise `no_script` if the script of TRAIN is missing."""
        if (script := script_of(self.train)) and not Path(script).is_file():
            raise self.no_script(where)

    def check_python(self, where: str = "") -> None:
        """Raise UsageError if PYTHON is not on the PATH; ``where``: the place, in words."""
        if shutil.which(self.python) is None:
            action = "set PYTHON to the one of your environment, the whole path"
            raise UsageError(f"there is no PYTHON={self.python}{where}", action=action)

    def ranks_per_node(self, auto: Callable[[], str]) -> int:
        """PROCS_PER_NODE; by default from ``auto``. Raises UsageError if it is not a positive number."""
        words = auto() if self.procs_per_node == "auto" else self.procs_per_node
        if not words.isdecimal() or int(words) < 1:
            raise UsageError(f"PROCS_PER_NODE={words} is not a number of ranks")
        return int(words)


class LaunchDriver:
    """One start of a launch script.

    Args:
        settings: of the script.
        run_dir: RUN_DIR.
    """

    def __init__(self, settings: LaunchSettings, run_dir: Path) -> None:
        self.run_dir, self.stop_file = run_dir, run_dir / "stop"
        checkpoints = str(run_dir / "checkpoints")
        ours = ["--save", checkpoints, "--load", checkpoints, "--exit-signal-handler"]
        ours += ["--megaresume-stop-file", str(self.stop_file), "--megaresume-elastic"]
        if knows_samples((*settings.train, *settings.flags)):
            ours += ["--megaresume-log-samples", str(run_dir / "samples.jsonl")]
        #: the words after PYTHON.
        self.training = (*settings.train, *ours, *settings.flags)
        #: the first signal received.
        self.signal: str | None = None

    def say(self, words: str) -> None:
        """Write a line to the log."""
        raise NotImplementedError

    def say_refused(self, what: str, error: MegaresumeError) -> None:
        """Log that nothing is started, and what to do."""
        self.say(f"{what}: {error.line}")
        if error.action:
            self.say(f"  action: {error.action}")

    def make_run_dir(self, directory: Path, action: str | None = None) -> None:
        """Create RUN_DIR, or a directory in it. Raises UsageError if that fails."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"RUN_DIR={self.run_dir} cannot be created: {error.strerror}", action=action) from error

    def touch_stop_file(self) -> None:
        """Ask the run to stop by a file, for ranks that signals cannot reach: on other nodes, in containers.

        The run removes the file.
        """
        try:
            self.stop_file.touch()
        except OSError as error:
            words = f"the stop file {self.stop_file} cannot be created: {error.strerror}"
            self.say(f"{words}; ranks that are still starting continue")


def script_of(training: Sequence[str]) -> str:
    """The script that a training command starts, also by ``-m megaresume.run``; "" if none is known."""
    words = training[2:] if tuple(training[:2]) == _RUN else training
    return words[0] if words and not words[0].startswith("-") else ""


def knows_samples(training: Sequence[str]) -> bool:
    """Whether it can log the samples that it trains: not with Megatron's own datasets or the script's own loader."""
    words = [part.replace("_", "-") for word in training for part in word.split("=", 1)]
    is_stream = "--megaresume-data" in words or ("--megaresume-mode", "stream") in pairwise(words)
    return is_stream or _RUN not in pairwise(words)


def modules_of(training: Sequence[str]) -> list[str]:
    """The modules that it starts by ``-m``, directly or by ``-m megaresume.run``."""
    words, found = training, []
    while tuple(words[:1]) == ("-m",) and len(words) > 1:
        found.append(words[1])
        words = words[2:] if tuple(words[:2]) == _RUN else ()
    return found


def count_gpus() -> int:
    """The number of GPUs visible to this process, by nvidia-smi."""
    with suppress(OSError):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        return gpus_listed(done.stdout)
    return 0


def gpus_listed(text: str) -> int:
    """The number of GPUs in the output of ``nvidia-smi -L``."""
    return sum(line.startswith("GPU ") for line in text.splitlines())
