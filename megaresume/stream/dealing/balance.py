"""`Balance`: what is to cost the same, and what a sample costs. Plain data: importing it imports nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from megaresume.stream.errors import UsageError

#: step: a rank's samples of a step together, if ranks wait for each other once a step. micro-step: each micro-batch, if
#: they wait for each other in every one: ZeRO 3, FSDP, pipelines.
Objective = Literal["step", "micro-step"]
#: of a model whose hidden states have 4096 numbers.
TOKEN_COST = 6 * 4096
#: more of them would not fit into 64 bits with the longest samples.
MOST_COST = 1 << 30
#: changes if the same samples come to other ranks than before.
ALGORITHM = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How the samples of a global batch are dealt out so that all ranks have as much to do.

    Args:
        objective: what is to cost the same. ``step``: what a rank does in a step; ``micro-step``: every micro-batch.
        token_cost: of a token apart from attention, in units of one token's attention to another one. 6 times the
            hidden size of a dense model; or as measured (docs/balance.md). A sample costs the sum of
            length * (length + token_cost) over its documents.
        algorithm: the version of megaresume's.

    Raises:
        UsageError: another objective, or a cost that is no whole number from 0 to `MOST_COST`.
    """

    objective: Objective = "step"
    token_cost: int = TOKEN_COST
    algorithm: int = ALGORITHM

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise UsageError("bad balance", found=repr(self.objective), expected=" or ".join(get_args(Objective)))
        if type(self.token_cost) is not int or not 0 <= self.token_cost <= MOST_COST:
            raise UsageError(
                "bad cost of a token",
                found=repr(self.token_cost),
                expected=f"a whole number from 0 to {MOST_COST:,}",
                action="give 6 * hidden size, or measure it: docs/balance.md",
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Balance:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            return cls(**{name: data[name] for name in ("objective", "token_cost", "algorithm")})
        except (KeyError, TypeError, UsageError) as error:
            raise ValueError(f"balance: {data!r:.80} is none") from error
