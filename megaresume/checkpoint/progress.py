"""Relaunches that make no progress: a job that dies before its first save is started again, and again, for nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from megaresume.checkpoint.layout import ledger_path
from megaresume.checkpoint.ledger import LedgerEntry, read_ledger
from megaresume.stream.errors import CheckpointError

__all__ = ["MAX_STARTS", "NOTHING_TO_TRAIN", "check_progress", "starts_from"]

#: starts from one place without a save in between that are let through.
MAX_STARTS = 5
#: among the details of a start: the run was over, and was launched again. Such a start does not count.
NOTHING_TO_TRAIN = "nothing_to_train"


def check_progress(
    save_dir: str | os.PathLike[str],
    *,
    iteration: int,
    save_interval: int | None = None,
    max_starts: int = MAX_STARTS,
) -> None:
    """Stop a run that starts from the same place again and again and never gets to its next save. On rank 0, behind
    `record_start`, once it is clear that there is something left to train.

    Args:
        save_dir: the checkpoint root.
        iteration: optimizer steps done at this start.
        save_interval: steps between saves, if that is known: the number to change.
        max_starts: starts that are let through; 0: any number.

    Raises:
        CheckpointError: more starts than that, with when they were and how long they can have lived.
        StateError: the ledger cannot be read.
    """
    if max_starts < 1:
        return
    starts = starts_from(read_ledger(ledger_path(Path(os.path.abspath(save_dir)))).entries, iteration)
    failed = starts[:-1]  # the last one is this start
    if len(failed) < max_starts:
        return
    next_save = "the next save" if save_interval is None else f"the save at iteration {_next(iteration, save_interval)}"
    lived = _lived(starts)
    number = "--save-interval" if save_interval is None else f"--save-interval (now {save_interval})"
    raise CheckpointError(
        f"this run makes no progress: {len(failed)} starts from iteration {iteration}, and none of them saved anything",
        found=f"the first began {failed[0].time}, the last {failed[-1].time}"
        + (f"; they lived at most {lived}" if lived else ""),
        expected=f"that one of them reaches {next_save}",
        cause="the same failure every time before that: look at the end of the last log, "
        f"megaresume doctor --log LOG; or the job is given less time than it needs to get to {next_save}",
        action=f"lower {number} so that a save comes sooner; to try {max_starts} times more without a change: "
        f"--megaresume-max-starts {len(failed) + max_starts} (of attach: max_starts=); 0 counts no starts",
    )


def starts_from(entries: Sequence[LedgerEntry], iteration: int) -> list[LedgerEntry]:
    """The starts from an iteration at the end of a ledger, which had something to train and saved nothing."""
    starts: list[LedgerEntry] = []
    for entry in reversed(entries):
        if entry.kind != "start" or entry.iteration != iteration:
            break
        if not entry.details.get(NOTHING_TO_TRAIN):
            starts.append(entry)
    return starts[::-1]


def _next(iteration: int, interval: int) -> int:
    return (iteration // interval + 1) * interval


def _lived(starts: list[LedgerEntry]) -> str | None:
    """The longest time from one start to the next, which none of them outlived."""
    try:
        times = [datetime.fromisoformat(entry.time.replace("Z", "+00:00")) for entry in starts]
    except ValueError:
        return None
    longest = max((after - before).total_seconds() for before, after in pairwise(times))
    return f"{longest / 60:.0f} minutes" if longest >= 120 else f"{longest:.0f} s"
