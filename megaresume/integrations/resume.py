"""What a load reads, what is made of it, and the line that says so: the same under every host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.data_state import DataState, Envelope
from megaresume.checkpoint.step_file import StepFile
from megaresume.checkpoint.topology import Topology
from megaresume.stream.errors import StateError
from megaresume.stream.outlook import outlook_lines
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

__all__ = ["Loaded", "Reading", "Resume", "change_lines", "check_same", "seed_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a host has read of a checkpoint."""

    #: what rides with the weights; None: nothing of megaresume's.
    envelope: Envelope | None
    #: optimizer steps and samples that the weights have trained, by the framework's own count.
    iteration: int
    samples: int
    #: what was read in place of what was chosen: a conversion of it.
    choice: Choice | None = None
    #: how the run was laid out when it saved; None: as it says beside the checkpoint.
    topology: Topology | None = None
    #: handed back to the program.
    result: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The checkpoint that the run goes on from."""

    choice: Choice
    envelope: Envelope
    #: how the run was laid out when it saved.
    topology: Topology | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """What a resume found and did."""

    #: optimizer steps done, and samples that they trained.
    step: int
    samples: int
    #: of those samples, 16 hex digits.
    digest: str
    tag: str
    #: how the run was laid out when it saved, and is now.
    before: Topology | None
    now: Topology
    #: samples that the weights have seen and that would come again; that they have not seen and would not come.
    #: Counted against the framework's own count of trained samples, which rides in the same file as the weights.
    repeated: int
    skipped: int
    #: what became of the random state, in words; None: it is the framework's business.
    random: str | None = None
    #: why another order begins here, as it was accepted: NAME@SAMPLES. What it repeats and skips nobody has counted.
    order_changed: tuple[str, ...] = ()

    def line(self) -> str:
        """One line, to be searched for in logs."""
        before = self.before or self.now
        pairs = [("dp", "dp"), ("workers", "num_workers"), ("mbs", "micro_batch_size"), ("gbs", "global_batch_size")]
        layout = " ".join(f"{word} {getattr(before, name)}->{getattr(self.now, name)}" for word, name in pairs)
        counts = f"repeated {self.repeated} skipped {self.skipped}"
        if self.order_changed:
            counts = f"repeated unknown skipped unknown (order changed: {', '.join(self.order_changed)})"
        return (
            f"megaresume: resumed at sample {self.samples} | digest {self.digest} | {layout} | "
            f"{counts} | step {self.step} from {self.tag}" + (f" | {self.random}" if self.random else "")
        )


def change_lines(stream: Stream, global_batch_size: int) -> list[str]:
    """What was accepted at the resume, and what is ahead of every source; nothing where nothing changed."""
    if not stream.accepted:
        return []
    state = stream.state_at(stream.start)
    table = outlook_lines(state, stream.config_at(stream.start), global_batch_size)
    return [f"megaresume: {line}" for line in (*stream.accepted, *table)]


def check_same(envelope: Envelope, read: Reading, beside: StepFile | None, choice: Choice) -> None:
    """Raise a StateError unless the state that rides with the weights is of their step, and the one beside them."""
    if (envelope.iteration, envelope.samples) != (read.iteration, read.samples):
        raise StateError(
            "the weights and the data state are of different steps",
            found=f"weights of iteration {read.iteration} and {read.samples} samples; data state of iteration "
            f"{envelope.iteration} and {envelope.samples} samples",
            expected="the same",
            cause="files of two checkpoints were mixed in one directory, a part of the run was trained without "
            "megaresume, or the counters were changed by hand",
            action=f"megaresume inspect {choice.load_dir} shows which checkpoints are whole; load one of those",
        )
    if beside is not None and beside.state != envelope.state:
        raise StateError(
            "the data state in the checkpoint is not the one beside it",
            found=f"within: sample {envelope.samples}, digest {envelope.state.digest}",
            expected=f"beside: sample {beside.state.samples}, digest {beside.state.digest}",
            cause="a tag directory was copied over another one, or its records were",
            action=f"megaresume inspect {choice.load_dir}; load a checkpoint that is whole",
        )


def seed_of(state: DataState) -> int:
    """The seed of a stream; 0 where the order is somebody else's."""
    return int(state.config.get("seed", 0)) if isinstance(state, StreamState) else 0
