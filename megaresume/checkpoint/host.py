"""`Host` and `Data`: what the training framework, and the data being trained on, provide to a `Session`.

`Restored`, `Loaded`, `Resume`: the results of a load, from reading to the line that is printed, the same for every
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
    """The trainer: DeepSpeed's engine, Megatron, a plain loop. On every rank. See docs/hosts.md."""

    #: its name and version, for records: ``deepspeed 0.18.2``.
    framework: str
    #: for errors: how a load can be forgotten, how to load (from ``{directory}``), how to load only the weights.
    forgotten: str
    load: str
    begin_anew: str

    def iteration(self) -> int:
        """Optimizer steps since the start of the run."""

    def samples(self) -> int:
        """Samples trained in these steps, by all ranks together."""

    def topology(self) -> Topology:
        """The current layout of the run."""

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """The files that this rank writes into a tag directory, relative to it; None if unknown in advance."""
        return None

    def settle(self) -> None:
        """Wait until a save in the background is committed. Collective; raises on every rank."""

    def is_saving(self) -> bool:
        """Whether a save is being written in the background."""

    def committed(self, save_dir: Path) -> None:
        """Called when a checkpoint was committed, and the pointers name it. On rank 0."""
        return


@runtime_checkable
class HasLoggers(Protocol):
    """A host whose trainer has loggers, as a sink for figures: an optional method of a `Host`."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures to the loggers. On rank 0.

        Args:
            figures: by name: ``megaresume/source/tokens/web``.
            step: optimizer steps done.
        """


@runtime_checkable
class ReadsSome(Protocol):
    """A host whose ranks do not read all files of a checkpoint: an optional method of a `Host`."""

    def needed_files(self, choice: Choice) -> Collection[str] | None:
        """The files that this rank reads, relative to the tag directory; None: maybe all. On every rank; no collective.

        Args:
            choice: about to be loaded; its files may not be here yet.
        """


@runtime_checkable
class LeavesOut(Protocol):
    """A host whose checkpoints may lack weights: an optional method of a `Host`."""

    def check_frozen(self, recorded: Mapping[str, Any]) -> None:
        """Compare them with what the loaded checkpoint records, before the first step. Collective.

        Raises, on every rank:
            StateError: they are others.
        """


@runtime_checkable
class GivesLosses(Protocol):
    """A host that collects the losses of its trainer, for ``metrics="losses"``: an optional method."""

    def take_losses(self, every: int) -> None:
        """Pass the losses of every ``every``-th micro-batch to `Meter.losses` from now on. On every rank.

        Raises:
            UsageError: they are not available in this kind of training.
        """


class Data(Protocol):
    """The data being trained on, whose state is part of a checkpoint: a stream, a recorded order, a loader.

    Subclasses inherit what most need: nothing to prepare, to write, to restore later or to describe.
    """

    #: what `next_sample` is based on, if not on the reader's position: shown in the resume line.
    counts_by: str = ""

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """A data config that opens the same corpora again; None if megaresume does not open them."""
        return None

    @property
    def changed(self) -> tuple[str, ...]:
        """Reasons why a new order begins at this start, as they were accepted: NAME@SAMPLES."""
        return ()

    def prepare(self) -> None:
        """Exchange what the ranks must know before a snapshot of what is trained now. Collective.

        Raises, on every rank:
            StateError: what was handed out does not match what was trained, or a step is not finished.
        """
        return

    def snapshot(self, samples: int) -> DataState:
        """The state after this many samples, the same on every rank: those trained at the last `prepare`, or those at
        which this process began. No collective; raises on one rank.
        """

    def read_back(self, state: DataState) -> None:
        """Open a state that is about to be saved as a resume would, and discard it. On rank 0; raises there only.

        Raises:
            StateError: no run could resume from it.
        """
        return

    def write_files(self, save_dir: Path, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """Write this rank's files for the checkpoint of that snapshot. On every rank; raises on one rank."""
        return ()

    def restore(self, state: DataState, choice: Choice) -> None:
        """Resume from a state. On every rank; raises on one rank.

        Raises:
            StateError: it is of another kind, or for other data.
        """
        return

    def next_sample(self) -> int | None:
        """The sample that is handed out next, counted from the start of the run over all ranks: after a `restore`, from
        the reader's position rather than from the state. On every rank; no collective.

        Returns:
            None: nothing is read on this rank, or the trainer gives the sample numbers.
        """
        return None

    def describe(self) -> list[str]:
        """Changes that were accepted at the resume, as lines for people."""
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
    """What a host read from a checkpoint."""

    #: what is stored with the weights; None if megaresume stored nothing.
    envelope: Envelope | None
    #: optimizer steps that trained the weights, by the framework's own count.
    iteration: int
    #: samples that trained them, by a count that is stored with them and is not the data state's. None: the framework
    #: only counts steps.
    samples: int | None
    #: the name of this count, for people.
    counter: str = "the count of samples in the checkpoint"
    #: what was read instead of the choice: a conversion of it.
    choice: Choice | None = None
    #: the layout of the run when it saved; None: as recorded beside the checkpoint.
    topology: Topology | None = None
    #: returned to the program.
    result: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The checkpoint that the run resumes from."""

    choice: Choice
    envelope: Envelope
    #: the layout of the run when it saved.
    topology: Topology | None
    #: see `Restored`.
    samples: int | None = None
    counter: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """What a resume found and did."""

    #: optimizer steps done, and the samples trained in them.
    step: int
    samples: int
    #: digest of these samples, 16 hex digits.
    digest: str
    tag: str
    #: the layout of the run when it saved, and now.
    before: Topology | None
    now: Topology
    #: samples that the weights have seen and that will repeat; that they have not seen and that will be skipped: from
    #: the sample that the data hands out next (`Data.next_sample`), and ``counter``. None: the next one is unknown.
    repeated: int | None
    skipped: int | None
    #: what counted the samples that trained the weights, in words.
    counter: str
    #: what happened to the random state, in words; None if the framework handles it.
    random: str | None = None
    #: why a new order begins here, as it was accepted: NAME@SAMPLES. What it repeats and skips is unknown.
    order_changed: tuple[str, ...] = ()

    def line(self) -> str:
        """One line, easy to find in logs."""
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
    """Changes accepted at the resume, and the outlook for every source; empty if nothing changed."""
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
    """Raise a StateError unless the state stored with the weights is of their step, and equals the one beside them."""
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
    """Raise a StateError unless restored data hands out next what the weights have not been trained on yet.

    Args:
        data: restored.
        trained: samples that the weights were trained on.
        counter: the source of this number, in words.

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
    """The error for a checkpoint whose data state is unknown.

    Args:
        begin_anew: how to load it without one.
    """
    return StateError(
        "the checkpoint has no data state",
        found=f"{choice.tag_dir}, written without megaresume",
        expected=f"the records of it in {choice.load_dir}/megaresume",
        cause="it was saved before megaresume was added, or the directory megaresume was not copied along",
        action=f"copy the directory megaresume as well; or continue without it: {begin_anew}",
    )
