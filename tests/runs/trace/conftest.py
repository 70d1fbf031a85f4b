"""Runs on disk without any training: streams that hand out batches, and the records that a program would write."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.checkpoint.records.names import deepspeed_tag
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

#: documents of three sources, some empty, some longer than a sample.
LENGTHS = {
    "web": [5 + 37 * i % 61 for i in range(90)],
    "code": [0 if i % 9 == 4 else 3 + 53 * i % 150 for i in range(40)],
    "wiki": [8 + 11 * i % 30 for i in range(25)],
}


def config(weights: str = "web 3 code 1", *, seq_length: int = 64, packing: Any = None, **more: Any) -> dict[str, Any]:
    """A data config; ``weights`` are names and numbers."""
    words = weights.split()
    sources = {name: {"weight": float(weight)} for name, weight in zip(words[::2], words[1::2], strict=True)}
    packing = packing or {"mode": "best_fit", "open_bins": 4, "max_age": 20, "align": 4}
    return {"seed": 5, "seq_length": seq_length, "packing": packing, "sources": sources, **more}


@dataclass
class Trained:
    """A sample as an attempt trained it."""

    step: int
    rank: int
    micro_batch: int
    segments: list[dict[str, Any]]


@dataclass
class ToyRun:
    """A run in a directory: `attempt` after `attempt`."""

    root: Path
    tag: Any = deepspeed_tag
    lengths: dict[str, list[int]] = field(default_factory=lambda: dict(LENGTHS))
    #: by sample, as the last attempt trained it.
    trained: dict[int, Trained] = field(default_factory=dict)
    states: dict[int, StreamState] = field(default_factory=dict)

    @property
    def sources(self) -> dict[str, LengthList]:
        return {name: LengthList(lengths) for name, lengths in self.lengths.items()}

    def stream(self, data: dict[str, Any], state: StreamState | None = None) -> Stream:
        conf = StreamConfig.from_dict(data)
        sources = [self.sources[s.name] for s in conf.sources]
        return Stream(conf, sources, state=state, on_change="stage")

    def attempt(
        self,
        data: dict[str, Any],
        *,
        start: int = 0,
        stop: int,
        saves: tuple[int, ...] = (),
        dp: int = 2,
        micro: int = 1,
        batch: int = 4,
    ) -> None:
        """Start behind a step, train up to one, save at some."""
        state = self.states[start] if start else None
        stream = self.stream(data, state)
        sample = stream.start
        schedule = BatchSchedule.constant(batch).resumed(state.batches if state is not None else (), sample)
        stream.schedule = schedule
        topology = Topology(world_size=dp, dp=dp, micro_batch_size=micro, global_batch_size=batch)
        record_start(self.root, iteration=start, state=stream.state_at(sample), topology=topology)
        for later in [s for s in self.trained if s >= sample]:
            del self.trained[later]
        for step in range(start + 1, stop + 1):
            size = schedule.size_at(sample)
            for rank in range(dp):
                for k, first in enumerate(range(sample + rank * micro, sample + size, dp * micro)):
                    for one in range(first, first + micro):
                        self.trained[one] = Trained(step, rank, k, segments_of(stream, one))
            sample += size
            if step in saves:
                tag = self.tag(step)
                state = self.states[step] = stream.state_at(sample, batches=schedule.until(sample))
                pending = begin_save(self.root, tag=tag, iteration=step, state=state, topology=topology)
                (self.root / tag).mkdir(exist_ok=True)
                (self.root / tag / "weights.pt").write_bytes(b"weights")
                commit_save(pending, expected_files=["weights.pt"])


def segments_of(stream: Stream, sample: int) -> list[dict[str, Any]]:
    """The segments of a sample as plain JSON, one by one."""
    place, result = 0, []
    align = stream.config_at(sample).packing.align
    for s in stream.plan(sample, sample + 1).segments(sample):
        name = stream.config.sources[s.source].name
        result.append(
            {
                "source": name,
                "epoch": s.epoch,
                "document": s.document,
                "offset": s.offset,
                "length": s.length,
                "place": place,
            }
        )
        place += int(np.ceil(s.length / align)) * align
    return result


@pytest.fixture
def toy(tmp_path: Path) -> ToyRun:
    return ToyRun(tmp_path / "save")
