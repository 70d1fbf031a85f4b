"""Runs a script of attempts over the real stream and proves, step by step, that the data resumed exactly.

    state.to_json() -> StreamState.from_json -> Stream -> plan of the step -> places_of every data-parallel rank
         ▲                                                                          │ together, in order:
         └── checkpoint ◀── every source: drawn = handed out + in open bins + left out   exactly the next samples

Steps that a kill took are trained again: the same samples, hash by hash. Steps that no kill can take any more are
counted document by document (`DocumentCounts`). At the end an uninterrupted stream gives the same digests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.simulated_cluster import ENDS, Attempt, Layout
from benchmarks.simulated_documents import DocumentCounts, Wrong
from megaresume.stream.batches import BatchSchedule, check_sizes
from megaresume.stream.config import StreamConfig
from megaresume.stream.dealing import in_parts, places_of
from megaresume.stream.kernel import LENGTH, SOURCE
from megaresume.stream.skips import SkipConfig, reached
from megaresume.stream.source import LengthSource
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an attempt."""

    #: steps done when it started, and when it ended.
    first: int
    last: int
    #: of those, lost.
    lost: int
    #: samples that were trained a second time.
    again: int
    global_batch_size: int


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    text: str
    step: int
    sample: int
    digest: str
    #: by source: tokens handed out up to here.
    handed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    sample: int
    table: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]


class SimulatedRun:
    """A run over many attempts.

    Args:
        config: of the stream.
        sources: lengths.
    """

    def __init__(self, config: StreamConfig, sources: Sequence[LengthSource]) -> None:
        self.config, self.sources = config, list(sources)
        lengths = [source.lengths(np.arange(len(source))) for source in sources]
        self.documents = DocumentCounts(lengths, [source.name for source in config.sources], config.seq_length)
        self.step = self.num_micro_batches = 0
        self.schedule = BatchSchedule.constant(1)
        # What was asked for: batch sizes from a sample on, a stage from a sample on, samples to leave out.
        self._sizes: tuple[tuple[int, int], ...] = ()
        self._sizes_from = self._stage_from = 0
        self._skips: list[SkipConfig] = []
        #: digests to be found again by an uninterrupted stream: (sample, digest) of every start.
        self.digests: list[tuple[int, str]] = []
        fresh = (0,) * len(self.sources)
        #: newest last: that of the last save, and the one before, in case the last turns out to be damaged.
        self._checkpoints = [_Checkpoint("", 0, 0, "", fresh)]
        #: trained behind the older of them.
        self._recent: list[_Step] = []
        #: what was lost, hash by sample, for comparison.
        self._lost_from, self._lost = 0, np.zeros(0, np.uint64)

    @property
    def position(self) -> int:
        """Samples trained for good, up to the last checkpoint."""
        return self._checkpoints[-1].sample

    def attempt(self, attempt: Attempt, *, most: int) -> Outcome:
        """Start, train, end. ``most``: steps at which the run is over.

        Raises:
            Wrong: the data did not resume exactly.
        """
        stream, sample = self._start(attempt)
        first, size = self.step, self.schedule.size_at(sample)
        while self.step < min(first + attempt.steps, most):
            size = self.schedule.size_at(sample)
            self._train(stream, sample, size, attempt.layout)
            sample += size
            self.step += 1
            if self.step % attempt.save_interval == 0:
                self._save(stream, sample)
        last = self.step
        again = self._end(attempt, stream, sample) if last < most else 0
        if last == most:
            self._save(stream, sample)
        return Outcome(first=first, last=last, lost=last - self.step, again=again, global_batch_size=size)

    def _start(self, attempt: Attempt) -> tuple[Stream, int]:
        checkpoint = self._checkpoints[-1]
        state = StreamState.from_json(checkpoint.text) if checkpoint.text else None
        sample = checkpoint.sample
        if attempt.weights is not None:
            weights = zip(self.config.sources, attempt.weights, strict=True)
            again = {"sources": {source.name: {"weight": weight} for source, weight in weights}}
            self.config = StreamConfig.from_dict(self.config.to_dict() | again)
        # Asked for until a checkpoint has it: a kill may have come before.
        changed = state is not None and state.config["sources"] != self.config.to_dict()["sources"]
        stream = Stream(self.config, self.sources, state=state, on_change="stage" if changed else "refuse")
        if attempt.sizes is not None:
            self._sizes, self._sizes_from = attempt.sizes, sample
        self._sizes_from = min(self._sizes_from, sample)
        begin = [(self._sizes_from + after, size) for after, size in self._sizes]
        self.schedule = BatchSchedule(tuple(begin if begin[0][0] == 0 else [(0, begin[0][1]), *begin]))
        if state is not None:
            self.schedule = self.schedule.resumed(state.batches, sample)
        check_sizes(self.schedule, sample, micro_batch_size=attempt.layout.micro_batch_size, dp_size=attempt.layout.dp)
        stream.schedule = self.schedule
        if attempt.skip is not None:
            after, length = attempt.skip
            where = reached(stream.skips.ranges, sample) + after
            self._skips.append(SkipConfig(samples=((where, where + length),)))
        stream.skip(*self._skips)
        if attempt.skip is not None or (changed and self._stage_from != sample):
            self._lost = self._lost[:0]  # what comes now is another order, because it was asked for
        if changed:
            self._stage_from = sample
        if stream.digest_at(sample) != (checkpoint.digest or stream.digest_at(0)):
            raise Wrong(f"sample {sample}: the digest is not that of the checkpoint")
        self.digests.append((sample, stream.digest_at(sample)))
        return stream, sample

    def _train(self, stream: Stream, sample: int, size: int, layout: Layout) -> None:
        plan = stream.plan(sample, sample + size)
        self._check_slices(sample, size, layout)
        if plan.first != sample or len(plan) != size:
            raise Wrong(f"step {self.step}: {len(plan)} samples from {plan.first}, not {size} from {sample}")
        if len(self._lost):
            before = self._lost[sample - self._lost_from :][:size]
            if not np.array_equal(before, plan.hashes[: len(before)]):
                raise Wrong(f"step {self.step}: what was lost and trained again are not the same samples")
            if len(before) < size:
                self._lost = self._lost[:0]
        self._recent.append(_Step(sample, plan.table, plan.hashes))

    def _check_slices(self, sample: int, size: int, layout: Layout) -> None:
        """What all data-parallel ranks are handed, micro-step by micro-step, is exactly the next samples."""
        dp, micro = layout.dp, layout.micro_batch_size
        sizes, samples = in_parts(size, micro_batch_size=micro, dp_size=dp), range(sample, sample + size)
        slices = [[samples[place] for place in places_of(sizes, dp_rank=r, dp_size=dp)] for r in range(dp)]
        expected = sample
        for micro_step in zip(*slices, strict=True):
            for rank, handed in enumerate(micro_step):
                if handed.start != expected or handed.stop != expected + micro:
                    raise Wrong(
                        f"step {self.step}, data-parallel rank {rank} of {dp}: handed samples {handed.start} to "
                        f"{handed.stop - 1}, where {expected} to {expected + micro - 1} come next"
                    )
                expected += micro
        if expected != sample + size:
            raise Wrong(f"step {self.step}: {expected - sample} samples handed out of {size}")
        self.num_micro_batches += size // micro

    def _save(self, stream: Stream, sample: int) -> None:
        """Take the state, as a checkpoint does, and check what it says against what was handed out."""
        before = self._checkpoints[-1]
        if sample == before.sample:
            return
        state = stream.state_at(sample, batches=self.schedule.until(sample))
        new = [step for step in self._recent if step.sample >= before.sample]
        handed = tuple((np.array(before.handed) + self._tokens(new)).tolist())
        for i, (name, source) in enumerate(state.sources.items()):
            held = sum(s.length for b in state.bins for s in b.segments if s.source == i)
            held += sum(s.length for s in state.pending if s.source == i)
            if source.tokens != handed[i] + held + source.left_out_tokens:
                raise Wrong(
                    f"step {self.step}, source {name}: {source.tokens} tokens drawn, {handed[i]} handed out, {held} "
                    f"in open bins, {source.left_out_tokens} left out"
                )
            if self.documents.missing[i] > source.left_out_tokens:
                raise Wrong(f"step {self.step}, source {name}: {self.documents.missing[i]} tokens never came")
        self._checkpoints = [before, _Checkpoint(state.to_json(), self.step, sample, state.digest, handed)]
        self._settle(before.sample)

    def _tokens(self, steps: Sequence[_Step]) -> npt.NDArray[np.int64]:
        """By source."""
        total = np.zeros(len(self.sources), np.int64)
        for step in steps:
            np.add.at(total, step.table[:, SOURCE], step.table[:, LENGTH])
        return total

    def _settle(self, sample: int) -> None:
        """Count what lies before the older checkpoint: nothing goes back behind it."""
        settled = [step for step in self._recent if step.sample < sample]
        self._recent = self._recent[len(settled) :]
        if settled:
            self.documents.add(np.concatenate([step.table for step in settled]))

    def _end(self, attempt: Attempt, stream: Stream, sample: int) -> int:
        """Returns samples that are to be trained again."""
        loses = ENDS[attempt.end][1]
        if loses == "nothing":
            self._save(stream, sample)
            return 0
        if attempt.end == "killed while saving":
            stream.state_at(sample, batches=self.schedule.until(sample)).to_json()  # never committed
        if loses == "a checkpoint" and len(self._checkpoints) > 1:
            self._checkpoints.pop()
        back = self._checkpoints[-1]
        gone = [step for step in self._recent if step.sample >= back.sample]
        self._recent = self._recent[: len(self._recent) - len(gone)]
        still = self._lost[sample - self._lost_from :] if len(self._lost) else self._lost
        self._lost_from = back.sample
        self._lost = np.concatenate([*(step.hashes for step in gone), still])
        self.step = back.step
        # What was asked for anew may change what comes behind.
        self.digests = [(where, digest) for where, digest in self.digests if where <= back.sample]
        return sample - back.sample

    def finish(self, update: Callable[[int], object]) -> None:
        """The proofs over the whole run.

        Args:
            update: told how many samples an uninterrupted stream has planned.

        Raises:
            Wrong: as above.
        """
        last = self._checkpoints[-1]
        state = StreamState.from_json(last.text)
        self.digests.append((last.sample, state.digest))
        self._uninterrupted(state, update)
        # On to where every epoch that was begun has ended: then each document of it was due.
        stream = Stream(self.config, self.sources, state=state)
        self._settle(last.sample)
        ends = [source.epoch for source in state.sources.values()]
        sample, chunk = last.sample, 1 << 12
        while any(closed <= end for closed, end in zip(self.documents.epochs, ends, strict=True)):
            self.documents.add(stream.plan(sample, sample + chunk).table)
            sample += chunk
        after = stream.state_at(sample)
        for missing, (name, source) in zip(self.documents.missing, after.sources.items(), strict=True):
            if missing != source.left_out_tokens:
                raise Wrong(f"source {name}: {missing} tokens never came, {source.left_out_tokens} were left out")

    def _uninterrupted(self, state: StreamState, update: Callable[[int], object]) -> None:
        twin = Stream(self.config, self.sources, past=state)
        position = 0
        for sample, digest in sorted(set(self.digests)):
            while position < sample:
                stop = min(position + 128, sample)
                twin.plan(position, stop)
                update(stop - position)
                position = stop
            if twin.digest_at(sample) != digest:
                raise Wrong(f"sample {sample}: digest {digest}, an uninterrupted stream has {twin.digest_at(sample)}")
