"""How a run was laid out when it wrote a record. Information for people: no part of the data state."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megaresume.stream.batches import Balance


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Counts of processes and of samples; None if the writer does not know."""

    #: processes of the run.
    world_size: int = 1
    #: data-parallel size.
    dp: int = 1
    #: tensor-, pipeline- and context-parallel size.
    tp: int = 1
    pp: int = 1
    cp: int = 1
    #: DataLoader worker processes of each rank.
    num_workers: int = 0
    #: samples of one rank in one forward pass.
    micro_batch_size: int | None = None
    #: samples of one step, all ranks together.
    global_batch_size: int | None = None
    #: DeepSpeed's ZeRO stage.
    zero_stage: int | None = None
    #: machines.
    nodes: int | None = None
    #: how the samples of a step are dealt to the ranks; None: as they come.
    balance: Balance | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without what is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Topology:
        """Read what `to_dict` wrote; members that a later version added are passed over.

        Raises:
            ValueError: a value is not an integer, or ``balance`` is invalid.
        """
        if not isinstance(data, dict):
            raise ValueError(f"topology is {data!r}, not an object")
        try:
            counts = _topology(**{name: data[name] for name in data if name in _NAMES})
        except TypeError as error:  # no key of a cache: a list, an object
            raise ValueError(f"topology: {data!r:.80} holds more than integers") from error
        return replace(counts, balance=Balance.from_dict(data["balance"])) if "balance" in data else counts

    def __str__(self) -> str:
        parts = [f"dp {self.dp}"]
        parts += [f"{name} {size}" for name in ("tp", "pp", "cp") if (size := getattr(self, name)) > 1]
        parts.append(f"workers {self.num_workers}")
        if self.global_batch_size is not None:
            parts.append(f"gbs {self.global_batch_size}")
        if self.balance is not None:
            parts.append(f"balanced by {self.balance.objective}")
        return " ".join(parts)


_NAMES = frozenset(field.name for field in fields(Topology)) - {"balance"}


@functools.lru_cache(maxsize=64, typed=True)  # the lines of a ledger are of the same few
def _topology(**known: Any) -> Topology:
    for name, value in known.items():
        if type(value) is not int:
            raise ValueError(f"topology: {name} is {value!r}, not an integer")
    return Topology(**known)
