"""Live figures of a session: its meter, and figures of checkpoints, disk and time from its directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaresume.checkpoint.host import GivesLosses, HasLoggers, Host
from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.checkpoint.metrics.figures import Value
from megaresume.checkpoint.metrics.goodput import all_marks, goodput_of, has_gaps
from megaresume.checkpoint.metrics.meter import Meter
from megaresume.checkpoint.metrics.record import Mark
from megaresume.checkpoint.metrics.words import parse
from megaresume.checkpoint.ranks import rank
from megaresume.checkpoint.records.ledger import LedgerEntry, newest_entries, read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.system import seconds_of
from megaresume.stream.errors import UsageError


def make_meter(metrics: Any, clocks: Clocks, host: Host) -> Meter | None:
    """The meter of a session; None if no figures are requested.

    Args:
        metrics: sinks and options: see `megaresume.checkpoint.metrics.words`.
        clocks: of this process.
        host: of the session.

    Raises:
        UsageError: an unknown word; or ``trainer``, and this trainer has no loggers.
        SetupError: a package is missing.
    """
    if not metrics:
        return None
    options = parse(metrics)
    if options.trainer and not isinstance(host, HasLoggers):
        raise UsageError(
            "metrics: this trainer has no loggers",
            found="metrics: trainer",
            expected="Hugging Face's Trainer, an Accelerator, Lightning's Trainer or a DeepSpeed engine",
            action="name another sink: metrics='tensorboard'",
        )
    if options.losses:
        if not isinstance(host, GivesLosses):
            raise UsageError(
                "metrics: this trainer's losses are not taken by themselves",
                found="metrics: losses",
                expected="Hugging Face's Trainer, a DeepSpeed engine or Megatron-LM",
                action="leave losses out, and call meter.losses(batch, token_loss): docs/metrics.md",
            )
        host.take_losses(options.losses)
    return Meter(options, clocks, rank())


def figures_of_run(root: Path | None, marks: Sequence[Mark]) -> dict[str, Value]:
    """Figures of checkpoints and of the time of a run. On rank 0, or any process that can read the directory.

    Args:
        root: where it saves; None: nowhere.
        marks: see `megaresume.checkpoint.metrics.record`; the last one is for the current moment.
    """
    found: dict[str, Value] = {}
    if root is not None:
        path = ledger_path(root)
        found |= _of_checkpoints(newest_entries(path))
        if has_gaps(marks):
            marks = all_marks(marks, read_ledger(path).entries)
    spent = goodput_of(marks)
    found["megaresume.run.starts"] = spent.starts
    found["megaresume.run.repeated"] = spent.repeated
    found["megaresume.goodput"] = spent.goodput
    found["megaresume.badput"] = {cause: round(seconds, 3) for cause, seconds in spent.badput.items()}
    return found


def _of_checkpoints(entries: Sequence[LedgerEntry]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for entry in entries:
        if entry.kind == "checkpoint":
            found["megaresume.checkpoint.step"] = entry.iteration
            for name, detail in (("size", "bytes"), ("duration", "save_seconds")):
                if isinstance(value := entry.details.get(detail), int | float):
                    found[f"megaresume.checkpoint.{name}"] = value
        elif entry.kind == "durable":
            found["megaresume.checkpoint.durable"] = entry.iteration
            began = seconds_of(entry.time)
            found["megaresume.checkpoint.age"] = max(time.time() - began, 0.0)
    return found
