"""Conformance: does a stream over your sources resume exactly? For our tests, and for anyone's sources.

from megaresume.testing import assert_exact_resume

def test_my_source():
    config = StreamConfig.from_dict(yaml.safe_load(open("data.yaml")))
    assert_exact_resume(lambda state: Stream(config, [MySource()], state=state), num_samples=200)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.stream.planner import Plan
from megaresume.stream.source import hash_lengths
from megaresume.stream.state import Fingerprint, StreamState
from megaresume.stream.stream import Stream

__all__ = ["LengthList", "assert_exact_resume", "assert_same_samples"]


class LengthList:
    """A source with lengths but no tokens: enough for planning.

    Args:
        lengths: tokens of each document.
    """

    def __init__(self, lengths: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._lengths = np.asarray(lengths, np.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens of each document: int64[n] to int64[n]."""
        return np.asarray(self._lengths[ids])

    def fingerprint(self, *, first: int | None = None) -> Fingerprint:
        """The fingerprint of the source; with ``first``, of its first documents."""
        return hash_lengths(self if first is None else LengthList(self._lengths[:first]))


def assert_exact_resume(build: Callable[[StreamState | None], Stream], num_samples: int) -> None:
    """Take the state before every sample, resume from each, and compare everything that follows, in order.

    For each sample: the state has the same keys; it equals itself after JSON; it does not depend on how far ahead was
    planned; a stream built from it returns it unchanged, and then all samples up to the last, the same digests, and the
    same final state.

    Quadratic in ``num_samples``: a few hundred are enough, if they reach into the second epoch of a source.

    Args:
        build: makes a stream that resumes from a state (None: from the start), if possible with its own sources.
        num_samples: number of samples to go through; the stream must have as many.

    Raises:
        AssertionError: names the sample at which the state was taken and the first sample that differs.
    """
    whole = build(None)
    first, stop = whole.start, whole.start + num_samples
    plan = whole.plan(first, stop)
    last = whole.state_at(stop).to_json()
    step_by_step = build(None)
    shape = _shape(step_by_step.state_at(first).to_dict())
    for sample in range(first, stop + 1):
        where = f"state before sample {sample}"
        state = step_by_step.state_at(sample)  # nothing after it has been planned yet
        text = state.to_json()
        _equal(whole.state_at(sample).to_json(), text, f"{where}: taken after planning further ahead")
        _equal(_shape(state.to_dict()), shape, f"{where}: its keys")
        _equal(json.loads(json.dumps(state.to_dict())), state.to_dict(), f"{where}: through json")
        read = StreamState.from_json(text)
        _equal(read, state, f"{where}: through to_json and from_json")
        resumed = build(read)
        _equal(resumed.state_at(sample).to_json(), text, f"{where}: given back by the stream built from it")
        assert_same_samples(resumed.plan(sample, stop), plan.slice(sample, stop), where)
        _equal(resumed.state_at(stop).to_json(), last, f"{where}: the state after the last sample")
        if sample < stop:
            step_by_step.plan(sample, sample + 1)


def assert_same_samples(found: Plan, expected: Plan, where: str = "plan") -> None:
    """Compare samples in order: numbers, segments, identities, digests.

    Raises:
        AssertionError: names the first sample that differs.
    """
    _equal((found.first, found.stop), (expected.first, expected.stop), f"{where}: range of samples")
    arrays = ("starts", "table", "hashes", "digests")
    same = all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in arrays)
    if same and np.array_equal(found.epochs(), expected.epochs()):
        return
    for sample in range(found.first, found.stop):
        _equal(found.segments(sample), expected.segments(sample), f"{where}: segments of sample {sample}")
        k = sample - found.first
        _equal(int(found.hashes[k]), int(expected.hashes[k]), f"{where}: hash of sample {sample}")
        _equal(int(found.digests[k]), int(expected.digests[k]), f"{where}: digest after sample {sample}")


def _equal(found: object, expected: object, what: str) -> None:
    # Raised, not asserted: tests may run with optimisation enabled.
    if found != expected:
        raise AssertionError(f"{what}\n  found:    {found}\n  expected: {expected}")


def _shape(value: Any) -> Any:
    """The keys of a state at any depth. Lists may grow and shrink, and values may come and go."""
    return {key: _shape(entry) for key, entry in value.items()} if isinstance(value, dict) else None
