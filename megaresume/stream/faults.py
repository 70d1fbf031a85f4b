"""Documents that could not be trained as their index says, as a state records them.

What a fault policy did (masked, cut) belongs to the report of a run and never to its order: faults are carried from
state to state, but are no part of a digest or of any comparison, since a state that is planned again has none.

Imports neither numpy nor numba, as `megaresume.stream.state`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megaresume.stream.text import as_count

#: Records that a state keeps, the newest: it has to stay small.
MAX_FAULTS = 1000


@dataclass(frozen=True, slots=True, order=True)
class FaultRecord:
    """One document that a policy was applied to. In order: by sample, source, document."""

    #: number of the sample that holds it.
    sample: int
    #: name of the source.
    source: str
    document: int
    epoch: int
    #: what was done: ``mask``, ``truncate``, ...
    policy: str
    #: why, in words.
    reason: str


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a run up to a sample."""

    #: all of them, also those that are not kept.
    total: int = 0
    #: at most `MAX_FAULTS`, the newest, ascending.
    kept: tuple[FaultRecord, ...] = ()

    def with_new(self, faults: Iterable[FaultRecord | tuple[Any, ...]], first: int, stop: int) -> Faults:
        """These and those that came with samples ``first .. stop``.

        Args:
            faults: `FaultRecord`, or its fields in order; those of other samples, and repeated ones, are passed over.
            first: number of the first sample that these faults know nothing of.
            stop: one after the last.
        """
        records = {f if isinstance(f, FaultRecord) else FaultRecord(*f) for f in faults}
        new = sorted(f for f in records if first <= f.sample < stop)
        return Faults(self.total + len(new), (*self.kept, *new)[-MAX_FAULTS:]) if new else self

    def to_plain(self) -> dict[str, Any]:
        """Plain JSON."""
        kept = [[f.sample, f.source, f.document, f.epoch, f.policy, f.reason] for f in self.kept]
        return {"total": self.total, "kept": kept}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Faults:
        """What `to_plain` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not.
        """
        kept = tuple(_record(fields) for fields in plain["kept"])
        total = as_count(plain["total"])
        if (
            not isinstance(plain["kept"], list)
            or total < len(kept)
            or len(kept) > MAX_FAULTS
            or list(kept) != sorted(set(kept))
        ):
            raise ValueError(f"{len(kept)} faults kept of {total}, or out of order")
        return cls(total, kept)


def _record(fields: list[Any]) -> FaultRecord:
    sample, source, document, epoch, policy, reason = fields
    if not all(isinstance(text, str) for text in (source, policy, reason)):
        raise ValueError(f"a fault {fields!r:.100}")
    return FaultRecord(as_count(sample), source, as_count(document), as_count(epoch), policy, reason)


NO_FAULTS = Faults()
