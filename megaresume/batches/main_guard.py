"""`check_main_guard`: whether the script may start worker processes that are spawned.

A process that is not forked runs the script from its beginning again, up to what stands under
``if __name__ == "__main__":``. Where the loop over the batches does not stand there, each worker begins a training of
its own: it fails where that wants workers, with forty lines in which ours is not seen, or waits in
``init_process_group`` for ranks that are not coming, and the training for the worker, without a word.
"""

from __future__ import annotations

import ast
import multiprocessing
import sys
from pathlib import Path
from types import FrameType

from megaresume.stream.errors import UsageError


def check_main_guard(start_method: str | None) -> None:
    """To be called before worker processes are started.

    Args:
        start_method: how; None: Python's default.

    Raises:
        UsageError: workers would run the statement of the script again that wants them.
    """
    if (start_method or multiprocessing.get_start_method()) == "fork" or (line := _unguarded_line()) is None:
        return
    method = start_method or multiprocessing.get_start_method()
    raise UsageError(
        "worker processes would begin the training again",
        found=f'{sys.modules["__main__"].__file__}, line {line}, is not under if __name__ == "__main__":, and a worker '
        f"that is started by {method} runs the script from its beginning",
        expected="a script that only defines things when it is imported",
        action='put the training into a function, and call it under if __name__ == "__main__":; or read without '
        "workers (num_workers=0)",
    )


def _unguarded_line() -> int | None:
    """The line of the script's own statement that runs now; None if workers do not run it, or nobody can tell."""
    frame = _frame_of_main()
    if frame is None or not _is_run_by_workers():
        return None
    try:
        script = ast.parse(Path(frame.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    # Whatever it asks: an `if` may well be false in a worker, or have ended it before this line.
    before = [node for node in script.body if node.lineno <= frame.f_lineno]
    asks = any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in before)
    return None if not before or asks or isinstance(before[-1], ast.If) else frame.f_lineno


def _frame_of_main() -> FrameType | None:
    """The frame that runs the script's own statements, if they are not over."""
    main, frame = sys.modules["__main__"], sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


def _is_run_by_workers() -> bool:
    """As multiprocessing.spawn.get_preparation_data decides it."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return bool(getattr(main, "__file__", None)) and not getattr(spec, "name", "").endswith("__main__")
