"""What may be wrong: with this machine, with a directory of checkpoints, with a launch that failed.

    machine.py    versions, CUDA, apex, shared memory; the kind of filesystem, locks, space; nothing is imported
    directory.py  pointers, completeness, ranks                    checkpoint.foreign, ledger; nothing is unpickled
    log.py        ``known.yaml``: what users' logs say, what it means, what to do

Each gives `Check`s (check.py); ``megaresume doctor`` prints them.
"""

from megaresume.doctor.check import Check

__all__ = ["Check"]
