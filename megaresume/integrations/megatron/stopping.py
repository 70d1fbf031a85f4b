"""Stopping in time under Megatron: its own question at every step boundary, with more reasons to say yes.

    DistributedSignalHandler.signals_received()      asked by Megatron's loop behind every step, on all ranks
        -> has this rank a reason of ours? then it answers as if its signal had come
        -> Megatron's own all-gather: any rank's yes is everybody's; it saves and exits with status 0

So ``--megaresume-stop-file`` and ``--megaresume-stop-before-end`` switch ``--exit-signal-handler`` on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megaresume.integrations.megatron.arguments import Settings
from megaresume.integrations.megatron.host import megatron_host
from megaresume.integrations.megatron.project import Project
from megaresume.stream.errors import UsageError

__all__ = ["around_signals_received", "switch_on"]


def switch_on(args: Any, settings: Settings, project: Project) -> None:
    """Let Megatron ask, where one of our flags needs it to. Before it sets up its signal handler.

    Raises:
        UsageError: this Megatron never asks.
    """
    if settings.mode == "off" or settings.stop is None:
        return
    if "signals" not in project.modules:
        raise UsageError(
            "this Megatron cannot be asked to stop",
            found=f"{project}, and --megaresume-stop-file or --megaresume-stop-before-end",
            expected="a Megatron with --exit-signal-handler",
            action="--exit-duration-in-mins MINUTES, or --exit-interval N",
        )
    args.exit_signal_handler = True


def around_signals_received(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DistributedSignalHandler.signals_received() -> [bool of every rank]``, with our reasons. Collective."""

    @functools.wraps(original)
    def signals_received(self: Any, *args: Any, **kwargs: Any) -> Any:
        stopper = megatron_host().session.stopper
        if stopper is None:
            return original(self, *args, **kwargs)
        mine = stopper.look()
        if mine is not None:
            self._signal_received = True
        received = original(self, *args, **kwargs)
        if stopper.stops(any(received)) and mine is not None:
            print(f"megaresume: {mine}: all ranks save and exit", flush=True)
        return received

    return signals_received
