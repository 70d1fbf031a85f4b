"""Turns the flags into launches and stops, and refuses what cannot work, before anything runs.

    --kill sigkill,sigterm  --nodes 2,1          reference  [2 nodes .......................................]
                                                 run        [2 nodes ..x                                      sigkill
                                                                     [1 node .......x                         sigterm
                                                                                    [2 nodes ................]

Attempt k uses entry k of each list, cyclically. A stop comes after a checkpoint, but not at its step, so that a stop
without warning really costs steps.

Our own small models and their data are made from what this machine has; nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaresume.cluster.demo.demo import VISION, as_words, small_gpt, write_config
from megaresume.cluster.launcher import KINDS, Kind, Launch
from megaresume.cluster.local import visible_gpus
from megaresume.cluster.processes import ask
from megaresume.cluster.scenario import Stop
from megaresume.stream.errors import UsageError, counted

#: steps between checkpoints of our own small models.
SAVE_INTERVAL = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeOptions:
    """The options of the command line; None and (): not given."""

    out: Path
    launcher: Literal["local", "slurm"] = "local"
    #: the kind of our launch scripts, for the local launcher.
    launch: Literal["torchrun", "deepspeed"] = "torchrun"
    #: the user's launch script.
    script: Path | None = None
    kinds: tuple[str, ...] = ("sigkill", "sigterm")
    #: the number of nodes of each attempt.
    nodes: tuple[int, ...] = ()
    ranks_per_node: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    #: samples per step; steps of the run; steps between checkpoints.
    global_batch_size: int | None = None
    steps: int | None = None
    save_interval: int | None = None
    zero_stage: int | None = None
    model: Literal["gpt", "vlm"] = "gpt"
    data: Path | None = None
    #: least duration of a step in seconds; None: no limit.
    min_step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLayout:
    """The ranks of a launch, and its batch sizes; None: as in the script."""

    nodes: int
    ranks_per_node: int
    workers: int | None
    #: samples in a micro-batch.
    micro_batch_size: int | None

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        nodes, ranks = counted(self.nodes, "node"), counted(self.ranks_per_node, "rank")
        micro = "" if self.micro_batch_size is None else f", micro-batch {self.micro_batch_size}"
        workers = "" if self.workers is None else f", {counted(self.workers, 'worker')}"
        return f"{nodes} x {ranks}{micro}{workers}"

    @property
    def short(self) -> str:
        """A short form for tables: ``2x1 m4 w0``."""
        micro = "" if self.micro_batch_size is None else f" m{self.micro_batch_size}"
        workers = "" if self.workers is None else f" w{self.workers}"
        return f"{self.nodes}x{self.ranks_per_node}{micro}{workers}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokePlan:
    """The launches and stops of a test."""

    options: SmokeOptions
    #: the layout of each attempt; the reference uses the first.
    layouts: tuple[LaunchLayout, ...]
    #: the stops between the attempts.
    stops: tuple[Stop, ...]
    steps: int
    save_interval: int
    #: samples per step; None: as in the script.
    global_batch_size: int | None

    @property
    def own(self) -> bool:
        """Whether the model is ours rather than the user's."""
        return self.options.script is None

    @property
    def out(self) -> Path:
        """The directory for everything."""
        return self.options.out

    def run_dir(self, name: str) -> Path:
        """The directory of ``reference`` or ``run``: checkpoints, records, logs."""
        return self.out / name

    def records(self, name: str) -> Path:
        """File or directory of the recorded steps."""
        return self.run_dir(name) / "records"

    def launch(self, name: str, layout: LaunchLayout, *, data: Path | None, model: Sequence[str]) -> Launch:
        """A launch of the training.

        Args:
            name: ``reference`` or ``run``.
            layout: of the launch.
            data: data config; None: the script's own data.
            model: flags for the model.
        """
        run_dir = self.run_dir(name)
        flags: dict[str, object] = {
            "save": run_dir / "checkpoints",
            "load": run_dir / "checkpoints",
            "save-interval": self.save_interval,
            "train-iters": self.steps,
            "log-interval": 1,
            "megaresume-log-samples": self.records(name),
            "global-batch-size": self.global_batch_size,
            "micro-batch-size": layout.micro_batch_size,
            "num-workers": layout.workers,
            "zero-stage": self.options.zero_stage,
            "megaresume-data": data,
            # Only this run is stopped in the middle of its steps.
            "megaresume-min-step-seconds": self.options.min_step_seconds if name == "run" else None,
        }
        words = [word for flag, value in flags.items() if value is not None for word in (f"--{flag}", str(value))]
        if self._changes_ranks and (self.own or self.options.zero_stage):
            words.append("--megaresume-elastic")
        env = {"RUN_DIR": run_dir, "PYTHON": sys.executable, "PROCS_PER_NODE": layout.ranks_per_node}
        if data is not None:
            env["DATA"] = data
        return Launch(
            nodes=layout.nodes,
            ranks_per_node=layout.ranks_per_node,
            flags=(*model, *words),
            env=tuple((key, str(value)) for key, value in env.items()),
            run_dir=run_dir,
            name=name,
        )

    @property
    def _changes_ranks(self) -> bool:
        return len({layout.ranks for layout in self.layouts}) > 1


def make_plan(options: SmokeOptions) -> SmokePlan:
    """Plan the test.

    Raises:
        UsageError: an unknown kind of stop, sizes that do not divide, too few steps for the stops, a script that is
            missing or does not pass on its arguments.
    """
    kinds = _kinds(options.kinds)
    if options.script is not None:
        _check_script(options.script)
    own = options.script is None
    nodes = options.nodes or ((2, 1) if own else (1,))
    gpus = len(visible_gpus())
    if options.launcher == "local":
        gpus //= max(*nodes, 1)  # all of them are this machine
    lists = {
        "--nodes": nodes,
        "--ranks-per-node": options.ranks_per_node or (gpus or 1,),
        "--workers": options.workers or ((0, 1) if own else ()),
        "--micro-batch-size": options.micro_batch_sizes or ((2, 1) if own else ()),
    }
    for name, values in lists.items():
        lowest = 0 if name == "--workers" else 1
        if any(value < lowest for value in values):
            raise UsageError(
                f"{name} holds an impossible number",
                found=",".join(map(str, values)),
                expected=f"numbers from {lowest}",
                action=f"correct {name}",
            )
    attempts = max(len(kinds) + 1, *map(len, lists.values()))

    def entry(name: str, k: int) -> int | None:
        return lists[name][k % len(lists[name])] if lists[name] else None

    layouts = tuple(
        LaunchLayout(
            nodes=entry("--nodes", k) or 1,
            ranks_per_node=entry("--ranks-per-node", k) or 1,
            workers=entry("--workers", k),
            micro_batch_size=entry("--micro-batch-size", k),
        )
        for k in range(attempts)
    )
    size = _global_batch_size(options, layouts)
    interval = SAVE_INTERVAL if options.save_interval is None else options.save_interval
    steps, at = _stops(options.steps, interval, attempts - 1)
    stops = tuple(Stop(kind=kinds[k % len(kinds)], step=step) for k, step in enumerate(at))
    return SmokePlan(
        options=options, layouts=layouts, stops=stops, steps=steps, save_interval=interval, global_batch_size=size
    )


def _kinds(words: Sequence[str]) -> tuple[Kind, ...]:
    unknown = [word for word in words if word not in KINDS]
    if unknown or not words:
        raise UsageError(
            "there is no such way to stop a run" if unknown else "no way to stop the run was given",
            found=f"--kill {','.join(words)}" + (f": {', '.join(unknown)}" if unknown else ""),
            expected=f"some of {', '.join(KINDS)}",
            action="--kill sigkill,sigterm",
        )
    return tuple(kind for word in words for kind in KINDS if kind == word)


def _check_script(script: Path) -> None:
    try:
        text = script.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UsageError.unreadable(f"--script {script}", error, "a launch script", action="check the path") from error
    if "\r\n" in text:
        raise UsageError(
            "the launch script has the line ends of another system, which bash takes for part of the words",
            found=f"CR LF in {script}",
            expected="LF alone",
            action=f"sed -i 's/\\r$//' {script}",
        )
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    # A sourced file may use them, too.
    if not any(mark in line for line in code for mark in ("$@", "$*", "${@", "${*", "$1", "source ", ". ")):
        raise UsageError(
            "the launch script does not pass its arguments on to the training",
            found=f'no "$@" in {script}',
            expected='a training command that ends with "$@": the test appends --save, --train-iters and others',
            action=f'write "$@" after the last flag of the training command in {script}',
        )


def _global_batch_size(options: SmokeOptions, layouts: Sequence[LaunchLayout]) -> int | None:
    """The given batch size, or one that every layout divides.

    Raises:
        UsageError: a layout does not divide it.
    """
    own = options.script is None
    micros = {layout.micro_batch_size for layout in layouts}
    units: dict[str, int] = {}
    for layout in layouts:
        # A job requeued by Slurm keeps its flags, and may get the nodes of the next attempt.
        for micro in micros if options.launcher == "slurm" else {layout.micro_batch_size}:
            # For a user's model, the number of ranks per replica is not known here.
            if micro is not None:
                ranks = layout.ranks if own else 1
                units[f"{ranks} x {micro} = {ranks * micro} ({layout.nodes} x {layout.ranks_per_node} ranks)"] = (
                    ranks * micro
                )
    common = math.lcm(*units.values()) if units else 1
    size = options.global_batch_size
    if size is None:
        return common * max(1, 8 // common) if own else None
    failing = [unit for unit, value in units.items() if size < 1 or size % value]
    if failing:
        above = -(-max(size, 1) // common) * common
        below = above - common
        raise UsageError(
            "the global batch size does not divide over data-parallel ranks x micro-batch size",
            found=f"--global-batch-size {size}; {'; '.join(failing)}",
            expected=f"a multiple of {common}, which all layouts divide",
            action=f"--global-batch-size {above}" + (f" or {below}" if below else ""),
        )
    return size


def _stops(steps: int | None, interval: int, number: int) -> tuple[int, list[int]]:
    """The steps of the run, and those after which it is stopped: not at a checkpoint, with one since the last stop."""
    if interval < 2:
        raise UsageError(
            "with a checkpoint at every step a stop cannot cost one",
            found=f"--save-interval {interval}",
            expected="2 or more",
            action="--save-interval 4",
        )
    if steps is None:
        steps = 2 * interval * (number + 1)
    # checkpoints between stops
    slot = steps // interval // (number + 1)
    off = interval // 2
    if slot < 1 or steps - (slot * interval * number + off) < 2:
        least = interval * (number + 1)
        raise UsageError(
            "too few steps for the stops",
            found=f"--steps {steps}, --save-interval {interval}, {number} stops",
            expected=f"{least} or more: a checkpoint before every stop, and steps after the last one",
            action=f"--steps {max(least, 2 * least if steps >= least else least)}, or fewer kinds in --kill",
        )
    return steps, [slot * interval * k + off for k in range(1, number + 1)]


SEQ_LENGTH = 128
#: The number of documents of text.
NUM_TEXTS = 1500


def prepare_data(model: Literal["gpt", "vlm"], directory: Path) -> Path:
    """Make a small corpus.

    Returns:
        its data config.
    """
    directory.mkdir(parents=True)
    sources = {"text": _text(directory)}
    if model == "vlm":
        sources["text"]["weight"] = 0.3
        from megaresume.cluster.demo.vlm import Pictures, prepare_pictures

        _, digits = prepare_pictures(directory, Pictures(name="digits", records=900, shards=3, held_out=False))
        sources["digits"] = digits | {"weight": 0.7}
    return write_config(directory / "data.yaml", sources, seq_length=SEQ_LENGTH)


def _text(directory: Path) -> dict[str, Any]:
    from megaresume.cluster.demo.demo import SOURCES

    texts, _ = SOURCES["docstrings"]
    path = directory / "text.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in itertools.islice(texts(), NUM_TEXTS))
    ask("prepare", str(path), "--output", str(directory / "text"))
    return {"path": "text"}


def model_flags(model: Literal["gpt", "vlm"], steps: int) -> list[str]:
    """Flags of a model that trains anywhere.

    Raises:
        UsageError: there is no such model.
    """
    flags = small_gpt(steps)
    if model == "vlm":
        flags |= VISION
    elif model != "gpt":
        raise UsageError(
            "there is no such model", found=f"--model {model}", expected="gpt or vlm", action="--model gpt"
        )
    # ZeRO 3 cannot share them, and a launch script may ask for it.
    return [*as_words(flags), "--untie-embeddings-and-output-weights"]
