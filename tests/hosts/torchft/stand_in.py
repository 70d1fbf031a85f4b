"""A stand-in for torchft's Manager, whose other replicas are what a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megaresume.hosts.torchft_dealing import OF_MANAGER


class StandIn(SimpleNamespace):
    """Replica 0. A subclass has the quorums, the all-reduces and the commits."""

    def __init__(self) -> None:
        super().__init__(**dict.fromkeys(name for name in OF_MANAGER if not hasattr(type(self), name)))
        self._replica_id, self._healing, self._quorum_id = "a", False, 0
        self._pg = SimpleNamespace(getBackendName=lambda: "gloo")
        #: of the quorum, with this one; steps that were committed.
        self.replicas, self.committed = 1, 0
        self.error: Exception | None = None

    def num_participants(self) -> int:
        return self.replicas

    def participating_rank(self) -> int:
        return 0

    def is_participating(self) -> bool:
        return True

    def errored(self) -> Any:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def current_step(self) -> int:
        return self.committed

    def register_state_dict_fn(self, *_: Any) -> None:
        return
