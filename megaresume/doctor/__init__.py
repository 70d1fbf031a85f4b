"""What may be wrong: with this machine, with a directory of checkpoints, with a launch that failed.

    environment   versions, CUDA, apex, shared memory              nothing is imported
    filesystem    kind, locks, space against a checkpoint's size
    directory     pointers, completeness, ranks                    checkpoint.layouts, ledger; nothing is unpickled
    log           ``known.yaml``: what users' logs say, what it means, what to do

Each gives `Check`s; ``megaresume doctor`` prints them.
"""

from megaresume.doctor.check import Check

__all__ = ["Check"]
