"""A run over real tar shards and text, as training leaves it: records beside checkpoints, no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megaresume.batches.open import open_stream
from megaresume.checkpoint.save.commit import begin_save, commit_save, write_data_config
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.prepare.shards import prepare_shards
from megaresume.encoding.images.document import Record
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.left_out import FaultRecord
from megaresume.stream.stream import Stream
from tests.batches.pages import page
from tests.data.kit import write_shard

#: samples a step, and the first one after the second stage began: with other augmentation.
BATCH, SECOND = 4, 16
#: record that broke after it was indexed: its first image cannot be decoded.
BROKEN = 7
PROCESSOR = {"kind": "native", "patch_size": 4, "merge": 2, "min_pixels": 64, "max_pixels": 1024}
FLIP, JITTER = [{"flip": 1.0}], [{"crop": {"scale": [0.4, 0.6]}}, {"color_jitter": {"brightness": 0.5}}]


@dataclass(frozen=True)
class VlmRun:
    """Where everything lies, and what went in."""

    data: Path
    save: Path
    #: by document.
    records: list[Record]
    #: of the two stages.
    streams: tuple[Stream, Stream]

    def stream_at(self, sample: int) -> Stream:
        return self.streams[sample >= SECOND]


def vlm_run(directory: Path, **more: Any) -> VlmRun:
    """30 pages in two shards, drawn more than once; text; a new augmentation behind step 4; saved at steps 4 and 8.

    ``more`` goes into the data config.
    """
    encoder = ImageTextEncoder.from_options({"processor": PROCESSOR, "template": "interleaved"})
    records = [page(i) for i in range(30)]
    pairs = [(record.key, dict(record.members)) for record in records]
    paths = [write_shard(directory / "shards" / f"pages-{k}.tar", pairs[15 * k : 15 * k + 15]) for k in range(2)]
    prepare_shards(paths, directory / "pages", encoder)
    picture, content = records[BROKEN].members["0.png"], paths[0].read_bytes()
    damaged = picture[:60] + b"\0" * (len(picture) - 60)
    paths[0].write_bytes(content.replace(picture, damaged))
    records[BROKEN] = Record(
        key=records[BROKEN].key, path="pages.tar", members={**records[BROKEN].members, "0.png": damaged}
    )
    text = directory / "web.txt"
    text.write_text("\n\n".join(f"web {i} " + "x" * (i * 7 % 50) for i in range(200)))
    prepare([text], directory / "web", PrepareOptions(text_unit="paragraph", workers=1))
    data = directory / "data.yaml"
    save = directory / "save"

    def write(augment: Any) -> None:
        pages = {"kind": "webdataset", "index": "pages.shards.idx", "weight": 0.8, "on_fault": "mask"}
        sources = {"web": {"path": "web", "weight": 0.2}, "pages": {**pages, "augment": augment}}
        config = {"seed": 3, "seq_length": 128, "packing": "best_fit", "sources": sources, **more}
        data.write_text(yaml.safe_dump(config, sort_keys=False))

    topology = Topology(dp=2, world_size=2, global_batch_size=BATCH, micro_batch_size=1)

    def saved(stream: Stream, step: int) -> None:
        tag = f"global_step{step}"
        state = stream.state_at(BATCH * step, batches=[(0, BATCH)], faults=faults(stream, BATCH * step))
        pending = begin_save(save, tag=tag, iteration=step, state=state, topology=topology)
        (save / tag).mkdir()
        (save / tag / "weights.pt").write_bytes(b"weights" * step)
        commit_save(pending, expected_files=["weights.pt"])

    write(FLIP)
    first = open_stream(data)
    record_start(save, iteration=0, state=first.state_at(0), topology=topology)
    saved(first, 4)
    state = first.state_at(SECOND, batches=[(0, BATCH)], faults=faults(first, SECOND))
    write(JITTER)
    second = open_stream(data, state=state, on_change="stage")
    record_start(save, iteration=4, state=second.state_at(SECOND), topology=topology)
    saved(second, 8)
    assert second.origin is not None
    write_data_config(save, second.origin)
    return VlmRun(data=data, save=save, records=records, streams=(first, second))


def faults(stream: Stream, stop: int) -> list[FaultRecord]:
    """What the readers of a training run report of the broken record."""
    return [
        FaultRecord(sample, "pages", s.document, s.epoch, "mask", "as training saw it")
        for sample in range(stream.start, stop)
        for s in stream.plan(sample, sample + 1).segments(sample)
        if s.source == 1 and s.document == BROKEN
    ]
