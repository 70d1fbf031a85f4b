"""Before Megatron loads or builds anything: the directory of ``--save`` is this job's alone, and all nodes see it."""

from __future__ import annotations

from pathlib import Path

from megaresume.integrations.claiming import claim_directory
from megaresume.integrations.clocks import check_clocks
from megaresume.integrations.megatron.records import can_be_written
from megaresume.integrations.megatron.session import Session

__all__ = ["begin_start"]


def begin_start(current: Session) -> None:
    """Compare the clocks, and take the lock of ``args.save``; once a session. Collective.

    Raises, on every rank:
        CheckpointError: another job writes there, or it cannot be written.
        SetupError: a node does not see it; or its clock differs, and the run is to stop before the end of the job.
    """
    if current.begun:
        return
    current.begun = True
    stop = current.settings.stop
    check_clocks(needed=stop is not None and stop.before_end is not None)
    if can_be_written(current.args.save):
        claim_directory(Path(current.args.save))
