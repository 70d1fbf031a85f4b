"""`guarded` runs a data provider under guard; `GuardOrder` is what a checkpoint saves of it.

One rank per host looks at the built indexes and shares the result with all ranks; all hosts must have seen the same.
That suffices to find a cache that differs between nodes; if every rank read its 10^8 entries, it would only burden the
filesystem.

Datasets built without megatron-core's builder, like those of Megatron-DeepSpeed, are recorded and compared but not
pinned, as there is no builder to make reproduce the record: a different order is refused by name. Without collectives,
as such providers run on some ranks only.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from megaresume.checkpoint.host import Data
from megaresume.checkpoint.ranks import broadcast, gather, is_rank_0, on_all_ranks, rank, same_on_all_ranks
from megaresume.checkpoint.records.envelope import OpaqueState
from megaresume.hosts.megatron.guard.compare import Difference, refuse
from megaresume.hosts.megatron.guard.pinned import blend_part, components_of, is_blend, mismatches, part
from megaresume.hosts.megatron.guard.record import (
    SPLITS,
    BuilderRecord,
    ComponentRecord,
    OrderRecord,
    SplitRecord,
    index_arrays,
)
from megaresume.stream.errors import StateError

if TYPE_CHECKING:
    from megaresume.hosts.megatron.host import MegatronHost


T = TypeVar("T")


def agreed(datasets: Iterable[Any], look: Callable[[], T]) -> T:
    """Return on all ranks what ``look`` returns where datasets were built. Collective.

    Raises:
        StateError: two hosts see different things.
    """
    leaders = _leaders(datasets)
    mine = on_all_ranks(lambda: look() if rank() in leaders else None)
    seen = gather(None if mine is None else xxhash.xxh3_64_hexdigest(repr(mine).encode()))
    for leader in leaders:
        if seen[leader] != seen[leaders[0]]:
            raise StateError(
                "the nodes have built different orders",
                found=f"rank {leaders[0]}: {seen[leaders[0]]}; rank {leader}: {seen[leader]}",
                expected="the same index on every node",
                cause="index caches on the nodes' own disks, from different times",
                action="delete the index caches (--data-cache-path) on all nodes, or put them on a shared filesystem",
            )
    value: T = broadcast(mine, leaders[0])
    return value


def from_leaders(datasets: Iterable[Any], look: Callable[[], T]) -> list[T]:
    """Return on all ranks the results of ``look`` from one rank of every host. Collective."""
    leaders = _leaders(datasets)
    found = gather(on_all_ranks(lambda: look() if rank() in leaders else None))
    return [found[leader] for leader in leaders]


def _leaders(datasets: Iterable[Any]) -> list[int]:
    """The lowest rank of every host that built something, in ascending order; rank 0 if none did."""
    built = any(dataset is not None for dataset in datasets)
    first: dict[str, int] = {}
    for number, host in enumerate(gather(socket.gethostname() if built else None)):
        if host is not None:
            first.setdefault(host, number)
    return sorted(first.values()) or [0]


class GuardOrder(Data):
    """The recorded order of Megatron's own datasets. The same on every rank, and enforced while they are built."""

    changed: tuple[str, ...] = ()

    def __init__(
        self, record: OrderRecord, *, refusal: StateError | None = None, changed: tuple[str, ...] = ()
    ) -> None:
        self.record = record
        #: Training-set differences accepted at this start: NAME@SAMPLES.
        self.changed = changed
        #: Found on this rank alone; to be raised on all ranks together.
        self.refusal = refusal

    def snapshot(self, samples: int) -> OpaqueState:
        """The state after ``samples``: the record, which does not depend on them."""
        return self.record.to_state(samples)

    @property
    def digest(self) -> str:
        """16 hex digits over the record, which the ranks compare."""
        return self.record.digest()


class Pass:
    """One call of the data provider, whose builders are recorded or must reproduce the record."""

    def __init__(self, host: MegatronHost, recorded: OrderRecord | None) -> None:
        self.host = host
        #: Samples trained when the data is built.
        self.samples = int(getattr(host.args, "consumed_train_samples", 0) or 0)
        #: What this run must rebuild; None if nothing is recorded yet.
        self.recorded = recorded
        self.builders: list[BuilderRecord] = []
        self.accepted: list[str] = []
        self._changed: list[str] = []
        #: A builder was left alone.
        self.left_alone = False
        self._said: set[str] = set()
        self._accept: tuple[str, ...] = tuple(getattr(host.settings, "accept", None) or ())

    def pin(self, ordinal: int) -> BuilderRecord | None:
        """The record of the builder with this number."""
        if self.recorded is None or ordinal >= len(self.recorded.builders):
            return None
        return self.recorded.builders[ordinal]

    @property
    def resumes(self) -> bool:
        """Whether the record is from a checkpoint, and not just from another virtual-pipeline chunk of this start."""
        return self.host.loaded is not None and self.host.loaded.kind == "order"

    @property
    def digest(self) -> str:
        """12 hex digits over the record."""
        return "" if self.recorded is None else self.recorded.digest()[:12]

    def accepts(self, name: str) -> bool:
        """Whether the user accepts this difference: as ``NAME``, or ``NAME@SAMPLES`` for this position only."""
        return name in self._accept or f"{name}@{self.samples}" in self._accept

    def accept(self, difference: Difference) -> str:
        """Note a difference that the user accepts. Returns it in the record's words."""
        words = f"sample {self.samples}: {difference.name}: {difference.recorded} -> {difference.found}"
        self.accepted.append(words)
        if difference.split in (None, 0):
            self._changed.append(f"{difference.name}@{self.samples}")
        return words

    @property
    def changed(self) -> tuple[str, ...]:
        """Accepted differences that change the order of the training samples, each once, with the position."""
        return tuple(dict.fromkeys(self._changed))

    def note(self, words: str) -> None:
        """Print something that the user should know, once, on the rank that prints."""
        if words not in self._said and is_rank_0():
            print(f"megaresume: guard: {words}", flush=True)
        self._said.add(words)


_current: Pass | None = None


def current_pass() -> Pass | None:
    """The provider call in progress; None if no provider of ours is running, in which case builders are left alone."""
    return _current


def guarded(host: MegatronHost, provider: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a provider so that what its builders build is recorded and pinned. Its call sets ``host.order``.

    Keeps the signature (``vp_stage``) and attributes (``is_distributed``). Collective where the provider is.
    """

    @functools.wraps(provider)
    def build(*args: Any, **kwargs: Any) -> Any:
        global _current
        guard = Pass(host, _recorded(host))
        outer, _current = _current, guard
        try:
            datasets = provider(*args, **kwargs)
        finally:
            _current = outer
        if guard.builders or guard.left_alone:
            host.order = GuardOrder(_finished(guard), changed=guard.changed)
        else:
            _without_builder(host, guard, datasets)
        return datasets

    return build


def _recorded(host: MegatronHost) -> OrderRecord | None:
    # A later virtual-pipeline chunk of this process must match what the first one recorded.
    if isinstance(host.order, GuardOrder):
        return host.order.record
    loaded = host.loaded
    return None if loaded is None or loaded.kind != "order" else OrderRecord.from_state(loaded.state)


def _without_builder(host: MegatronHost, guard: Pass, datasets: Any) -> None:
    """Compare datasets that no megatron-core builder made. No collective here; `shared` raises on all ranks."""
    if not looks():
        return
    recorded, now = guard.recorded, observe_foreign(host.args, datasets)
    if recorded is not None and recorded.builders:
        found = differences(recorded.builders[0], now, datasets)
        open_ = [difference for difference in found if not guard.accepts(difference.name)]
        host.order = GuardOrder(recorded, refusal=refuse(open_, guard.samples) if open_ else None)
        if not found:
            return
        for difference in found:
            guard.accept(difference)
    if now is None:
        guard.note("the data provider builds no index that is known here: its order is NOT guarded")
    else:
        guard.note("these datasets are not built by megatron-core: their order is recorded and checked, not pinned")
        guard.builders.append(now)
    if host.order is None or host.order.refusal is None:  # type: ignore[attr-defined]
        host.order = GuardOrder(_finished(guard), changed=guard.changed)


def _finished(guard: Pass) -> OrderRecord:
    recorded, builders, accepted = guard.recorded, tuple(guard.builders), tuple(guard.accepted)
    if recorded is None or not recorded.builders:
        if guard.samples and builders:
            guard.note(
                f"order before sample {guard.samples} is not proven: nothing was recorded of it. "
                "It is recorded from here on, as Megatron builds it now"
            )
        return OrderRecord(megatron=_core_version(), since=guard.samples, builders=builders, accepted=accepted)
    if len(builders) < len(recorded.builders) and not guard.accepts("dataset"):
        raise StateError(
            "the data provider builds fewer datasets than it did when the checkpoint was saved",
            found=f"{len(builders)} dataset builder(s) of megatron-core",
            expected=f"{len(recorded.builders)}",
            cause="another script, or a flag that makes it take its data from elsewhere",
            action=f"start the run as before; or, if it is meant: --megaresume-accept dataset@{guard.samples}",
        )
    if not accepted and guard.host.order is None:
        guard.note(f"the order of Megatron's datasets is as recorded, at sample {guard.samples}: {recorded.digest()}")
    return replace(recorded, builders=builders, accepted=recorded.accepted + accepted)


def _core_version() -> str:
    try:
        import megatron.core
    except ImportError:  # bigscience's Megatron-DeepSpeed predates megatron-core
        return "none"
    return str(getattr(megatron.core, "__version__", "unknown"))


def shared(host: MegatronHost) -> None:
    """Give the order to ranks whose provider did not run. Collective over all ranks; raises on all of them.

    Raises:
        StateError: two ranks have different orders, or one has another order than recorded.
    """

    def agree() -> None:
        if isinstance(host.order, GuardOrder) and host.order.refusal is not None:
            raise host.order.refusal

    on_all_ranks(agree)
    mine = host.order.digest if isinstance(host.order, GuardOrder) else None
    held = gather(mine)
    owner = next((rank for rank, digest in enumerate(held) if digest is not None), None)
    if owner is None:
        return
    held_here = host.order if isinstance(host.order, GuardOrder) else None
    record, changed = broadcast(None if held_here is None else (held_here.record, held_here.changed), owner)
    if mine is None:
        host.order = GuardOrder(record, changed=changed)
    same_on_all_ranks(
        host.order.digest,  # type: ignore[union-attr]
        "the order of Megatron's datasets",
        cause="the index caches of the nodes differ",
        action="delete the index caches (--data-cache-path) on all nodes and start again",
    )


#: Arguments that affect the order, and their flags.
_ARGUMENTS = {
    "seed": "--seed",
    "seq_length": "--seq-length",
    "split": "--split",
    "data_path": "--data-path",
    "train_data_path": "--train-data-path",
    "valid_data_path": "--valid-data-path",
    "test_data_path": "--test-data-path",
    "train_weighted_split_paths": "--train-weighted-split-paths",
    "valid_weighted_split_paths": "--valid-weighted-split-paths",
    "data_impl": "--data-impl",
    "train_iters": "--train-iters",
    "train_samples": "--train-samples",
    "global_batch_size": "--global-batch-size",
}


def looks() -> bool:
    """Whether this rank looks at the indexes: one per node, as far as the launcher tells."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def observe_foreign(args: Any, datasets: Any) -> BuilderRecord | None:
    """The record of what a provider returned; None if nothing in it has an index that we know."""
    if not isinstance(datasets, list | tuple) or len(datasets) != 3:
        return None
    splits = tuple(_split(dataset) for dataset in datasets)
    if not any(splits):
        return None
    settings = {name: str(value) for name in _ARGUMENTS if (value := getattr(args, name, None)) is not None}
    name = next(type(c).__name__ for dataset in datasets for c in components_of(dataset))
    return BuilderRecord(
        dataset=name, settings=settings, blend=None, blend_per_split=None, sizes=(None,) * 3, splits=splits
    )


def _split(dataset: Any) -> SplitRecord | None:
    components = components_of(dataset)
    if not any(index_arrays(component) for component in components):
        return None
    names = [str(getattr(component, "name", f"corpus {i}")) for i, component in enumerate(components)]
    return SplitRecord(
        components=tuple(
            ComponentRecord(
                path=name,
                documents=(0, 0),
                total=0,
                requested=None,
                built=part(component, name),
                lengths=None,
                tokens=None,
            )
            for name, component in zip(names, components, strict=True)
        ),
        blend=(blend_part(dataset),) if is_blend(dataset) else (),
    )


def differences(record: BuilderRecord, now: BuilderRecord | None, datasets: Any) -> list[Difference]:
    """Differences between the datasets and the recorded order; empty if there are none."""
    changed = [] if now is None else _changed(record, now)
    found = []
    for i, (name, split) in enumerate(zip(SPLITS, record.splits, strict=True)):
        wrong = [] if split is None else mismatches(split, None if now is None else datasets[i], name)
        if wrong:
            found.append(
                Difference(
                    name=f"{name}-order",
                    recorded=f"the {name} set with the recorded hashes",
                    found="; ".join(wrong[:4]) + (f" ({'; '.join(now for _, now in changed)})" if changed else ""),
                    restore="; ".join(old for old, _ in changed)
                    or "the corpora and index caches of the run that saved the checkpoint",
                    split=i,
                )
            )
    return found


def _changed(record: BuilderRecord, now: BuilderRecord) -> list[tuple[str, str]]:
    """(flag as recorded, flag as found) of every argument that differs."""
    return [
        (f"{flag} {record.settings.get(name, '(left out)')}", f"{flag} {now.settings.get(name, '(left out)')}")
        for name, flag in _ARGUMENTS.items()
        if record.settings.get(name) != now.settings.get(name)
    ]
