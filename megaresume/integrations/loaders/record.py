"""What a checkpoint says about the states of a loader: a `DataState` of kind ``loader``, nothing of it pickled.

content = {"kind": "energon", "library": "megatron-energon 7.4.1", "dp": 2, "workers": 2, "batch_size": 4,
           "batches": 40,                            trained, by each data-parallel rank
           "sizes": [[0, 16]],                       (first sample, global batch size) up to here
           "ranks": [[31022, "<xxh3_128>", 0], ...]}  by data-parallel rank: bytes, checksum, batches to pass over
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import xxhash

from megaresume.checkpoint.data_state import DataState, OpaqueState
from megaresume.checkpoint.layout import rank_file
from megaresume.checkpoint.manifest import FileEntry
from megaresume.integrations.loaders.adapters import Facts
from megaresume.stream.errors import StateError

__all__ = ["NO_LOADER", "LoaderRecord", "RankState", "check_fits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """The state of one data-parallel rank."""

    #: bytes.
    size: int
    #: xxh3_128, 32 hex digits.
    checksum: str
    #: batches to read and drop behind the state.
    skip: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderRecord:
    """The states of all data-parallel ranks at one step."""

    facts: Facts
    #: batches that optimizer steps have trained, of each data-parallel rank.
    batches: int
    #: by data-parallel rank.
    ranks: tuple[RankState, ...]
    #: (first sample, global batch size in samples) up to here.
    sizes: tuple[tuple[int, int], ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return len(self.ranks)

    def entries(self, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """The files of the states, by data-parallel rank: paths relative to ``<save>/megaresume``."""
        return tuple(
            FileEntry(path=rank_file(iteration, tag, "loader", dp_rank), size=rank.size, checksum=rank.checksum)
            for dp_rank, rank in enumerate(self.ranks)
        )

    def to_state(self, samples: int) -> OpaqueState:
        """The state of the data, after so many trained samples of all ranks together."""
        facts = self.facts
        content: dict[str, Any] = {
            "kind": facts.kind,
            "library": facts.library,
            "dp": self.dp,
            "workers": facts.workers,
            "batch_size": facts.batch_size,
            "batches": self.batches,
            "sizes": [list(size) for size in self.sizes],
            "ranks": [[rank.size, rank.checksum, rank.skip] for rank in self.ranks],
        }
        identity = "|".join([str(samples), *(rank.checksum for rank in self.ranks)])
        digest = xxhash.xxh3_64_hexdigest(identity.encode())
        return OpaqueState(kind="loader", samples=samples, digest=digest, content=content)

    @classmethod
    def from_state(cls, state: DataState) -> LoaderRecord:
        """Read what `to_state` made.

        Raises:
            StateError: the state is of another kind, or lacks a field.
        """
        if not isinstance(state, OpaqueState) or state.kind != "loader":
            raise StateError(
                "the checkpoint was not trained on a loader, and this run has one of its own",
                found="Megatron's own datasets" if state.kind == "order" else "a megaresume stream",
                expected="the states of a loader",
                cause="megaresume.attach was replaced by megaresume.attach_loader between save and resume",
                action="go on with megaresume.attach(engine, 'data.yaml'); or load the weights alone and begin the "
                "data anew",
            )
        fields = state.content
        try:
            size = fields["batch_size"]
            return cls(
                facts=Facts(
                    kind=str(fields["kind"]),
                    library=str(fields["library"]),
                    workers=int(fields["workers"]),
                    batch_size=None if size is None else int(size),
                ),
                batches=int(fields["batches"]),
                ranks=tuple(
                    RankState(size=int(size), checksum=str(checksum_), skip=int(skip))
                    for size, checksum_, skip in fields["ranks"]
                ),
                sizes=tuple((int(first), int(size)) for first, size in fields["sizes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                "the record of the loader's states lacks a field or has one of the wrong kind",
                found=f"{type(error).__name__}: {error}",
                expected="the fields that megaresume writes",
                cause="it was written by a faulty program: its checksum is right",
            ) from error


#: of a run that has not saved yet.
NO_LOADER = LoaderRecord(facts=Facts(kind="none", library="none", workers=0, batch_size=None), batches=0, ranks=())


def check_fits(record: LoaderRecord, now: Facts, dp: int) -> None:
    """Raise a StateError where the states cannot be restored exactly into this run's loaders.

    Args:
        record: of the checkpoint.
        now: what this run's loader is.
        dp: data-parallel size now.
    """
    then = record.facts
    if then.kind != now.kind:
        raise StateError(
            "the checkpoint was trained with another kind of loader",
            found=f"{now.kind}: {now.library}",
            expected=f"{then.kind}: {then.library}",
            cause="the loader was replaced between save and resume",
            action="use the same loader; or load the weights alone and begin the data anew",
        )
    if (record.dp, then.workers) != (dp, now.workers):
        what = "data-parallel size" if record.dp != dp else "number of worker processes"
        raise StateError(
            f"the {what} changed, and the states of this loader belong to the ranks and workers that saved them",
            found=f"{dp} data-parallel ranks with {now.workers} workers each",
            expected=f"{record.dp} data-parallel ranks with {then.workers} workers each",
            cause="samples are dealt out to ranks and workers before they are shuffled and packed; loaded into others, "
            "they would be repeated and skipped",
            action=_way_out(record, dp),
        )
    if then.batch_size != now.batch_size:
        raise StateError(
            "the batch size of the loader changed, and its state counts in batches",
            found=f"{now.batch_size} samples in a batch",
            expected=f"{then.batch_size} samples in a batch",
            cause="the micro-batch size was changed between save and resume",
            action=f"go on with a micro-batch size of {then.batch_size}; the number of gradient accumulation steps may "
            "change",
        )


def _way_out(record: LoaderRecord, dp: int) -> str:
    workers = record.facts.workers
    same = f"start with {record.dp} data-parallel ranks and {workers} workers"
    if record.dp == dp:
        same = f"num_workers={workers}"
    if record.facts.kind != "energon":
        return f"{same}; or a stream of megaresume's, which may change both: megaresume.attach(engine, 'data.yaml')"
    return f"{same}; or go over to a stream of megaresume's, which may change both: megaresume import-energon."
