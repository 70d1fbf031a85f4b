"""The samples of a run, planned again from any recorded point, read from front to back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megaresume.stream.config import StreamConfig
from megaresume.stream.plan import Plan, concatenate
from megaresume.trace.replan import Planned, Replan

__all__ = ["Part", "Past"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Consecutive samples of one stage."""

    plan: Plan
    config: StreamConfig


class Past:
    """Plans forward; what was asked for is not kept.

    Args:
        replan: the run.
        first: nothing before this sample will be asked for.
        progress: called with the samples planned since the last call.
    """

    def __init__(self, replan: Replan, first: int, progress: Callable[[int], object] = lambda samples: None) -> None:
        self._blocks: Iterator[Planned] = replan.plans(first, None, progress=progress)
        self._kept: list[Planned] = []

    def parts(self, first: int, stop: int) -> list[Part]:
        """Samples ``first .. stop``, cut where a stage begins. ``first`` never goes back.

        Raises:
            StreamExhausted: the stream ends before ``stop``.
        """
        self._kept = [block for block in self._kept if block.plan.stop > first]
        while not self._kept or self._kept[-1].plan.stop < stop:
            block = next(self._blocks)
            if block.plan.stop > first:
                self._kept.append(block)
        return [
            Part(plan=block.plan.slice(max(first, block.plan.first), min(stop, block.plan.stop)), config=block.config)
            for block in self._kept
            if block.plan.first < stop
        ]

    def plan(self, first: int, stop: int) -> Plan:
        """Samples ``first .. stop`` as one plan."""
        return concatenate([part.plan for part in self.parts(first, stop)])
