"""How our own programs end a process that still has a process group of gloo's."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path


def run(main: Callable[[], int]) -> None:
    """Run a program and end the process with its status, as Python does, but for taking the interpreter apart.

    Threads of gloo's drop the tensors of the last collectives of a script, and need Python for that: if it is ending by
    then, torch aborts the process, after a run that went well (pytorch#190489). An exception that the program leaves to
    Python ends as ever.
    """
    try:
        status: object = main()
    except SystemExit as end:
        status = end.code
    if not _has_gloo():
        sys.exit(status)  # type: ignore[arg-type]
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)  # as Python does
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that Python waits for
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit((status or 0) & 0xFF)


def _has_gloo() -> bool:
    tasks = Path("/proc/self/task").glob("*/comm")
    return any(task.read_text().startswith("pt_gloo_runloop") for task in tasks)
