"""One training process: which Megatron, its arguments, what was loaded, and the order that it trains.

Megatron keeps its own state in module globals and hands none of it to the functions that we wrap; so the session is
found through ``get_args()``. In-process restart builds a new namespace: then the session is a new one as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megaresume.integrations.megatron.arguments import Settings
from megaresume.integrations.megatron.state import Kind, SavedState

if TYPE_CHECKING:
    from megaresume.integrations.megatron.calls import Counted
    from megaresume.integrations.megatron.project import Project
    from megaresume.integrations.resume import Resume
    from megaresume.integrations.stopping import Stopper
    from megaresume.stream.state import StreamState

__all__ = ["Loaded", "Order", "Session", "latest", "session"]


class Order(Protocol):
    """The order of the samples, as the thing that a checkpoint saves. The same on every rank."""

    @property
    def kind(self) -> Kind:
        """Whose order it is."""

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """A data config that opens the same corpora again, for the file beside the checkpoint."""

    def payload(self, samples: int) -> dict[str, Any]:
        """Plain JSON: the state after ``samples`` samples."""

    def stream_state(self, samples: int) -> StreamState | None:
        """The same for the records beside the checkpoint; None: this order keeps records of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The checkpoint that Megatron loaded to go on from."""

    #: the checkpoint root that was asked for (``--load``).
    load_dir: Path
    #: what ``load_checkpoint`` returned.
    iteration: int
    #: the namespace in the checkpoint, which holds the counters and how the run was laid out.
    args: Any


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """What the hooks of one training run share."""

    project: Project
    #: Megatron's namespace.
    args: Any
    settings: Settings
    #: the data state of the checkpoint that was loaded; None: nothing was loaded, or it has none.
    loaded: SavedState | None = None
    loaded_from: Loaded | None = None
    #: set as soon as the data is built.
    order: Order | None = None
    #: what a resume found, once the data is built.
    resume: Resume | None = None
    #: the same number on every rank, greater at every start of the run.
    launch: int = 0
    #: chunks of a virtual pipeline that have their data.
    chunks: int = 0
    #: whether our hook is building the data just now.
    building: bool = False
    #: whether the data was built through our hook.
    built: bool = False
    #: the training iterators of this rank, one for every chunk; empty: none, or such as cannot be counted.
    taken: list[Counted] = field(default_factory=list)
    #: iterations that were saved through our hook, as Megatron's tracker names them.
    saved: set[str] = field(default_factory=set)
    #: samples trained before this process.
    first_samples: int = 0
    #: what Megatron's tracker in ``--save`` said when the data was built.
    tracker_at_start: str | None = None
    #: listens for reasons to stop; None: none are asked for.
    stopper: Stopper | None = None
    #: how long the last save took; None: none was made.
    save_seconds: float | None = None
    #: whether the start was let through: `starting`.
    begun: bool = False
    #: checkpoint roots whose ledger knows of this start.
    start_recorded_in: set[Path] = field(default_factory=set)


_current: Session | None = None


def session() -> Session:
    """The session of the current ``get_args()``.

    Raises:
        UsageError: our flags contradict each other.
        SetupError: the Megatron that is being imported is none that we know.
    """
    global _current
    # Deferred: finding out which Megatron this is reads its files.
    from megaresume.integrations.megatron.project import current_project

    project = current_project()
    args = importlib.import_module(project.modules["global_vars"]).get_args()
    if _current is None or _current.args is not args:
        first = int(getattr(args, "consumed_train_samples", 0) or 0)
        if _current is not None:  # a copy of the arguments in the middle of a run begins where the run did
            first = min(first, _current.first_samples)
        _current = Session(project=project, args=args, settings=Settings.from_args(args), first_samples=first)
    return _current


def latest() -> Session | None:
    """The session that was last asked for; None: nobody has."""
    return _current
