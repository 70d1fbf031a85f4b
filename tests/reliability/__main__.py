"""``python -m tests.reliability``: kill, damage, and see what the next start does. Starts itself anew with the shim."""

from __future__ import annotations

import os
import sys

from tests.reliability import shim

if __name__ == "__main__":
    if "LD_PRELOAD" not in os.environ:
        # One thread in each process: forking must be safe, and there are more processes than cores.
        more = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.reliability", *sys.argv[1:]],
            os.environ | shim.environment() | more,
        )
    from tests.reliability.command import main

    sys.exit(main())
