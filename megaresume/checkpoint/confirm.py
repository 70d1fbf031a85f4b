"""Rank 0 chooses and broadcasts; every other rank makes sure that it sees the same.

On shared filesystems ranks may disagree about what exists: attribute caches lag, a mount is missing on one node. A
rank that quietly started from something else would be worse than a stop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.candidates import list_candidates
from megaresume.checkpoint.layout import step_path
from megaresume.checkpoint.sealed import NewerFormatError
from megaresume.checkpoint.state_file import StepFile, read_step_file
from megaresume.stream.errors import CheckpointError, StateError

__all__ = ["confirm_choice"]


def confirm_choice(
    load_dir: str | os.PathLike[str],
    broadcast: Mapping[str, Any] | None,
    *,
    timeout_seconds: float = 30.0,
    poll_seconds: float = 0.5,
) -> StepFile | None:
    """Check on this rank what rank 0 chose.

    Args:
        load_dir: the checkpoint root, as this rank sees it.
        broadcast: `Choice.to_broadcast` of rank 0, or None where it found nothing.
        timeout_seconds: how long to wait for a filesystem whose cache lags behind.
        poll_seconds: how often to look meanwhile.

    Returns:
        the state that this rank read, the same as rank 0's; None where rank 0 has none.

    Raises:
        CheckpointError: "this rank sees ...", after the timeout.
        NewerFormatError: this rank runs an older megaresume than the one that wrote the state.
    """
    root = Path(os.path.abspath(load_dir))
    deadline = time.monotonic() + timeout_seconds
    while True:
        seen, step = _look(root, broadcast)
        if seen is None:
            return step
        if time.monotonic() >= deadline:
            chosen = "no checkpoint" if broadcast is None else _words(broadcast)
            raise CheckpointError(
                f"this rank sees {seen}",
                found=f"on {os.uname().nodename}, in {root}",
                expected=f"what rank 0 chose: {chosen}",
                cause="the directory is not on a filesystem that all nodes share, or a cache lags behind",
                action="mount the same directory on every node; then start again",
            )
        time.sleep(poll_seconds)


def _words(broadcast: Mapping[str, Any]) -> str:
    if broadcast["digest"] is None:
        return f"{broadcast['tag']}, without a data state"
    return f"{broadcast['tag']}, {broadcast['samples']} samples, digest {broadcast['digest']}"


def _look(root: Path, broadcast: Mapping[str, Any] | None) -> tuple[str | None, StepFile | None]:
    """What this rank sees that differs, or None; and the state."""
    if broadcast is None:
        there = [c.tag for c in list_candidates(root) if c.has_dir and not c.unfinished]
        return (f"{there[0]}, where rank 0 sees no checkpoint" if there else None), None
    tag = str(broadcast["tag"])
    if not (root / tag).is_dir():
        return f"no directory {tag}", None
    if broadcast["digest"] is None:
        return None, None
    iteration = int(broadcast["iteration"])
    own_tag = tag.removesuffix("_universal") if not step_path(root, iteration, tag).exists() else tag
    try:
        step = read_step_file(step_path(root, iteration, own_tag), iteration=iteration, tag=own_tag)
    except NewerFormatError:
        raise
    except StateError as error:
        return f"no usable data state of {tag}: {error.headline}", None
    if (step.state.digest, step.save_id) != (broadcast["digest"], broadcast["save_id"]):
        return f"digest {step.state.digest} at {step.state.samples} samples (save {step.save_id})", None
    return None, step
