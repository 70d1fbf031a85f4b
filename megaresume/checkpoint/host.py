"""`Host` and `Data`: what a `Session` is told by the framework that trains, and by the data that is trained.

`Restored`, `Loaded`, `Resume`: what a load reads, what is made of it, and the line that says so, the same under every
host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.envelope import DataState, Envelope, stream_of
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.system import Topology
from megaresume.render import text_table
from megaresume.stream.changes import outlook
from megaresume.stream.errors import StateError
from megaresume.stream.state import StreamState

if TYPE_CHECKING:
    from megaresume.stream.stream import Stream


class Host(Protocol):
    """What trains: DeepSpeed's engine, Megatron, a plain loop. On every rank. See docs/hosts.md."""

    #: its name and version, for records: ``deepspeed 0.18.2``.
    framework: str
    #: for errors: how a load can have been forgotten, how to load (from ``{directory}``), how to load weights alone.
    forgotten: str
    load: str
    begin_anew: str

    def iteration(self) -> int:
        """Optimizer steps made, since the start of the run."""

    def samples(self) -> int:
        """Samples that those steps have trained, all ranks together."""

    def topology(self) -> Topology:
        """How the run is laid out now."""

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """What this rank writes into a tag directory, relative to it; None if not known beforehand."""
        return None

    def settle(self) -> None:
        """Wait until a save that is written in the background is committed. Collective; raises on every rank."""

    def is_saving(self) -> bool:
        """Whether a save is being written in the background."""

    def committed(self, save_dir: Path) -> None:
        """A checkpoint was committed, and the pointers name it. On rank 0."""
        return


@runtime_checkable
class HasLoggers(Protocol):
    """A host whose trainer has loggers, which are a sink of figures: a further method of a `Host`."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Tell them. On rank 0.

        Args:
            figures: by name: ``megaresume/source/tokens/web``.
            step: optimizer steps made.
        """


@runtime_checkable
class ReadsSome(Protocol):
    """A host whose ranks do not read all files of a checkpoint: a further method of a `Host`."""

    def needed_files(self, choice: Choice) -> Collection[str] | None:
        """Those that this rank reads, relative to the tag directory; None: perhaps any. On every rank; no collective.

        Args:
            choice: what is about to be loaded. Its files are not here yet.
        """


@runtime_checkable
class GivesLosses(Protocol):
    """A host that takes the losses of its trainer by itself, as ``metrics="losses"`` asks: a further method."""

    def take_losses(self, every: int) -> None:
        """Give `Meter.losses` those of every so many micro-batches from now on. On every rank.

        Raises:
            UsageError: they cannot be had in this way of training.
        """


class Data(Protocol):
    """What is trained, as the thing whose state a checkpoint carries: a stream, a recorded order, a loader.

    A class made from this one has what most have: nothing to prepare, to write, to restore later or to describe.
    """

    #: what `next_sample` goes by, if not by the position of whatever reads: for the line of a resume.
    counts_by: str = ""

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """A data config that opens the same corpora again; None if megaresume does not open them."""
        return None

    @property
    def changed(self) -> tuple[str, ...]:
        """Why another order begins at this start, as it was accepted: NAME@SAMPLES."""
        return ()

    def prepare(self) -> None:
        """Before a snapshot of what is trained now: what the ranks have to tell each other. Collective.

        Raises, on every rank:
            StateError: what was handed out and what was trained do not fit, or a step is not over.
        """
        return

    def snapshot(self, samples: int) -> DataState:
        """The state after so many samples, the same on every rank: those trained at the last `prepare`, or those at
        which this process began. No collective; raises on its own."""

    def read_back(self, state: DataState) -> None:
        """Open a state that is to be saved as a resume would, and drop it. On rank 0; raises on its own.

        Raises:
            StateError: no run could resume from it.
        """
        return

    def write_files(self, save_dir: Path, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """Write what this rank adds to the checkpoint of that snapshot. On every rank; raises on its own."""
        return ()

    def restore(self, state: DataState, choice: Choice) -> None:
        """Resume from a state. On every rank; raises on its own.

        Raises:
            StateError: it is of another kind, or of other data.
        """
        return

    def next_sample(self) -> int | None:
        """The sample that is handed out next, counted from the start of the run, all ranks together: after a `restore`,
        the position of whatever reads, and not what the state says. On every rank; no collective.

        Returns:
            None: nothing is read on this rank, or by sample numbers that the trainer gives.
        """
        return None

    def describe(self) -> list[str]:
        """What was changed and accepted at the resume, in lines for people."""
        return []


class StreamData(Data, Protocol):
    """`Data` in the order of a stream."""

    stream: Stream

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """See `Data`."""
        return self.stream.origin

    def read_back(self, state: DataState) -> None:
        """See `Data`."""
        self.stream.read_back(stream_of(state))


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a host has read of a checkpoint."""

    #: what is stored with the weights; None if megaresume stored nothing.
    envelope: Envelope | None
    #: optimizer steps that the weights have trained, by the framework's own count.
    iteration: int
    #: samples that they have trained, by a count that is stored with them and is not the data state's. None: the
    #: framework counts steps alone.
    samples: int | None
    #: the name of that count, for people.
    counter: str = "the count of samples in the checkpoint"
    #: what was read in place of what was chosen: a conversion of it.
    choice: Choice | None = None
    #: how the run was laid out when it saved; None: as it says beside the checkpoint.
    topology: Topology | None = None
    #: handed back to the program.
    result: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The checkpoint that the run resumes from."""

    choice: Choice
    envelope: Envelope
    #: how the run was laid out when it saved.
    topology: Topology | None
    #: see `Restored`.
    samples: int | None = None
    counter: str = ""


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
    #: samples that the weights have seen and that come again; that they have not seen and that do not come: the sample
    #: that the data hands out next (`Data.next_sample`), against ``counter``. None: nothing says which comes next.
    repeated: int | None
    skipped: int | None
    #: what counted the samples that the weights have trained, in words.
    counter: str
    #: what became of the random state, in words; None if it is the framework's business.
    random: str | None = None
    #: why another order begins here, as it was accepted: NAME@SAMPLES. What it repeats and skips is unknown.
    order_changed: tuple[str, ...] = ()

    def line(self) -> str:
        """One line, to be searched for in logs."""
        before = self.before or self.now
        pairs = [("dp", "dp"), ("workers", "num_workers"), ("mbs", "micro_batch_size"), ("gbs", "global_batch_size")]
        layout = " ".join(f"{word} {getattr(before, name)}->{getattr(self.now, name)}" for word, name in pairs)
        counts = f"repeated {_or_unknown(self.repeated)} skipped {_or_unknown(self.skipped)}"
        if self.order_changed:
            counts = f"repeated unknown skipped unknown (order changed: {', '.join(self.order_changed)})"
        return (
            f"megaresume: resumed at sample {self.samples} | digest {self.digest} | {layout} | "
            f"{counts} | step {self.step} from {self.tag}"
            + (f" | {self.random}" if self.random else "")
            + f" | position checked with {self.counter}"
        )


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def change_lines(stream: Stream, global_batch_size: int) -> list[str]:
    """What was accepted at the resume, and what is ahead of every source; nothing if nothing changed."""
    if not stream.accepted:
        return []
    state = stream.state_at(stream.start)
    rows = [["source", "share", "seen", "epoch", "remaining", "epoch lasts until"]]
    for row in outlook(state, stream.config_at(stream.start)):
        until = "not drawn"
        if row.samples_left is not None:
            sample = state.samples + row.samples_left
            until = f"about sample {sample:,}, {row.samples_left // global_batch_size:,} steps from here"
        rows.append([row.name, f"{row.share:.4f}", f"{row.documents:,}", f"{row.epoch}", f"{row.remaining:,}", until])
    return [f"megaresume: {line}" for line in (*stream.accepted, *text_table(rows).splitlines())]


def check_same(envelope: Envelope, read: Restored, beside: StepFile | None, choice: Choice) -> None:
    """Raise a StateError unless the state that is stored with the weights is of their step, and the one beside them."""
    if envelope.iteration != read.iteration or read.samples not in (None, envelope.samples):
        trained = "" if read.samples is None else f" and {read.samples} samples"
        raise StateError(
            "the weights and the data state are from different steps",
            found=f"weights of iteration {read.iteration}{trained}; data state of iteration "
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


def check_place(data: Data, trained: int, counter: str) -> int | None:
    """Raise a StateError unless restored data hands out next what the weights have not trained yet.

    Args:
        data: restored.
        trained: samples that they have trained.
        counter: what says so, in words.

    Returns:
        the sample; None if the data does not know it.
    """
    sample = data.next_sample()
    if sample not in (None, trained):
        raise StateError(
            "the data did not come back to the place where it was saved",
            found=f"it hands out sample {sample} next",
            expected=f"sample {trained}, by {counter}",
            cause="the loader, or a class made from one, does not put back what its load_state_dict or restore is "
            "given; or something read from it meanwhile",
            action="compare what the loader hands out after a save with what it hands out after it was restored; a "
            "loader of megaresume's alone never does this: report it",
        )
    return sample


def seed_of(state: DataState) -> int:
    """The seed of a stream; 0 if the order is not megaresume's."""
    return int(state.config.get("seed", 0)) if isinstance(state, StreamState) else 0


def without_state(choice: Choice, begin_anew: str) -> StateError:
    """The error for a checkpoint whose data is unknown.

    Args:
        begin_anew: how to load it anyway.
    """
    return StateError(
        "the checkpoint has no data state",
        found=f"{choice.tag_dir}, written without megaresume",
        expected=f"the records of it in {choice.load_dir}/megaresume",
        cause="it was saved before megaresume was added, or the directory megaresume was not copied along",
        action=f"copy the directory megaresume as well; or continue without it: {begin_anew}",
    )
