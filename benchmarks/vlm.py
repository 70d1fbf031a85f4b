"""Image-text records: decode and encode against Energon, the index, the first batch after a resume, packing.

Both sides read the same shards, prepared by Energon's own code, in one process without workers, and call the same
encoder on the same bytes; Energon with its own shuffle buffer, packing buffer and a greedy packer, as its users have
it. Processor time, except for the resume.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.packing import best_fit_decreasing
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, ratio, wall
from megaresume.encoding.multimodal.encoder import ImageTextEncoder
from megaresume.encoding.multimodal.prepare import prepare_shards
from megaresume.encoding.multimodal.types import Key, Record
from megaresume.loading.loader import StreamLoader
from megaresume.loading.open import open_stream
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.kernel import LENGTH

__all__ = ["rows"]

SEQ_LENGTH = 8192
SHUFFLE_BUFFER, PACKING_BUFFER = 100, 100
_QWEN = {"kind": "native", "patch_size": 14, "merge": 2, "max_pixels": 4_000_000}


def rows(setup: Setup) -> Iterator[Row]:
    """See the module."""
    quick = setup.sizes.read_samples < 1000
    bench = Shards(setup.directory / "pairs", records=40 if quick else 300)
    records, repetitions = (20, 1) if quick else (60, setup.sizes.slow_repetitions)
    yield from _throughput(bench, records, repetitions)
    seconds = [bench.index(again) for again in range(2 if quick else 4)]
    yield Row(what="index of shards, one worker", ours=bench.records / median(seconds), unit="records/s")
    yield from _resume(bench, repetitions)
    yield from _efficiency(2_000 if quick else setup.sizes.packed_documents)


class Shards:
    """Captioned photographs of many sizes, as a data set of Energon, with an index of ours beside it."""

    def __init__(self, directory: Path, *, records: int) -> None:
        self.directory, self.records = directory, records
        self.encoder = ImageTextEncoder.from_options({"processor": _QWEN})
        directory.mkdir(parents=True)
        rng = np.random.default_rng(7)
        for shard in range(2):
            with tarfile.open(directory / f"s{shard}.tar", "w") as tar:
                for record in range(shard * records // 2, (shard + 1) * records // 2):
                    self._add(tar, record, rng)
        _prepare(directory)
        self.index(0)

    def _add(self, tar: tarfile.TarFile, record: int, rng: np.random.Generator) -> None:
        width, height = (int(side) for side in rng.integers(224, 900, 2))
        small = Image.fromarray(rng.integers(0, 255, (height // 16, width // 16, 3), np.uint8))
        buffer = io.BytesIO()
        small.resize((width, height)).save(buffer, "JPEG", quality=90)
        caption = ("a photograph of something " * int(rng.integers(1, 12))).encode()
        for extension, content in (("jpg", buffer.getvalue()), ("txt", caption)):
            member = tarfile.TarInfo(f"r{record:06d}.{extension}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))

    def index(self, number: int) -> float:
        """Seconds to build the index."""
        begin = cpu()
        prepare_shards([self.directory], self.directory.parent / f"pairs{number}", self.encoder, overwrite=True)
        return cpu() - begin

    def stream(self, packing: object) -> Any:
        """Our stream over them."""
        index = str(self.directory.parent / "pairs0.shards.idx")
        pairs = {"kind": "energon", "path": str(self.directory), "index": index}
        return open_stream({"seed": 1, "seq_length": SEQ_LENGTH, "packing": packing, "sources": {"pairs": pairs}})

    def ours(self, packing: object) -> Iterator[int]:
        """Records of each batch of our loader."""
        stream = self.stream(packing)
        loader = StreamLoader(stream, BatchSchedule.constant(1), micro_batch_size=1, dp_rank=0, dp_size=1, prefetch=0)
        for batch in loader:
            yield len(batch["image_grid_thw"])  # one image a record

    def energon(self, packing: bool) -> Any:
        """Energon's loader over them."""
        from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

        dataset = get_train_dataset(
            str(self.directory),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=1,
            packing_buffer_size=PACKING_BUFFER if packing else None,
            shuffle_buffer_size=SHUFFLE_BUFFER,
            max_samples_per_sequence=100,
            task_encoder=_task_encoder(self.encoder),
        )
        return get_savable_loader(dataset, watchdog_timeout_seconds=None)


def _prepare(directory: Path) -> None:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    names = sorted(path.name for path in directory.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(EPath(directory), names, split_parts_ratio=[("train", 1.0)], workers=1)
    (directory / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
        "field_map: {image: jpg, caption: txt}\n"
    )


def _task_encoder(encoder: ImageTextEncoder) -> Any:
    """Our encoder as the task encoder of Energon: the same bytes in, the same tokens and pixels out."""
    import torch
    from megatron.energon import CaptioningSample, DefaultTaskEncoder, stateless

    class Task(DefaultTaskEncoder):  # type: ignore[type-arg]
        decoder = None  # raw bytes: the encoder decodes

        @stateless
        def encode_sample(self, sample: Any) -> Any:
            members = {"jpg": bytes(sample.image), "txt": _as_bytes(sample.caption)}
            found = encoder.encode(
                Record(key=sample.__key__, path="s.tar", members=members),
                Key(seed=1, source="pairs", document=int(sample.__key__[1:]), epoch=0),
            )
            sample.image, sample.caption = torch.from_numpy(found.images[0].pixels), torch.from_numpy(found.tokens)
            return sample

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            packs: list[list[Any]] = []
            room: list[int] = []
            for sample in sorted(samples, key=lambda s: -len(s.caption)):
                at = next((i for i, left in enumerate(room) if left >= len(sample.caption)), None)
                if at is None:
                    packs.append([])
                    room.append(SEQ_LENGTH)
                    at = -1
                packs[at].append(sample)
                room[at] -= len(sample.caption)
            return packs

        @stateless
        def pack_selected_samples(self, samples: list[Any]) -> Any:
            return CaptioningSample(
                __key__=",".join(s.__key__ for s in samples),
                __restore_key__=(),
                image=torch.cat([s.image for s in samples]),
                caption=torch.cat([s.caption for s in samples]),
            )

        @stateless
        def batch(self, samples: list[Any]) -> dict[str, Any]:
            return {"keys": [s.__key__ for s in samples], "pixels": [s.image for s in samples]}

    return Task()


def _as_bytes(text: Any) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _throughput(bench: Shards, records: int, repetitions: int) -> Iterator[Row]:
    for packing, mode, words in ((False, "none", "no packing"), (True, "best_fit", f"packed into {SEQ_LENGTH}")):
        counts = {"ours": bench.ours(mode), "energon": _energon_counts(bench, packing)}

        rates: dict[str, list[float]] = {"ours": [], "energon": []}
        interleaved({n: _reader(counts[n], records, rates[n]) for n in counts}, repetitions, clock=cpu)
        best = ratio(rates["energon"][1:], rates["ours"][1:])  # the first calls warm up
        yield Row(
            what=f"image-text records, decode and encode, {words}",
            ours=median(rates["ours"][1:]),
            unit="records/s",
            baseline=median(rates["energon"][1:]),
            against="Energon, same encoder",
            ratio=best,
            must=">= 1x" if not packing else "",
            holds=best >= 1 if not packing else None,
        )


def _energon_counts(bench: Shards, packing: bool) -> Iterator[int]:
    for batch in bench.energon(packing):
        yield sum(key.count(",") + 1 for key in batch["keys"])


def _reader(counts: Iterator[int], records: int, rates: list[float]) -> Callable[[int], None]:
    def read(_: int) -> None:
        begin, done = cpu(), 0
        while done < records:
            done += next(counts)
        rates.append(done / (cpu() - begin))

    return read


def _resume(bench: Shards, repetitions: int) -> Iterator[Row]:
    """From a state to the first packed batch: reading it, refilling buffers, decoding."""
    stream = bench.stream("best_fit")
    stream.plan(0, 20)
    ours = stream.state_at(20).to_json()
    loader = bench.energon(True)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    theirs = loader.save_state_rank()

    def resume(_: int) -> None:
        again = bench.stream("best_fit")
        from megaresume.stream.state import StreamState

        again.restore(StreamState.from_json(ours))
        schedule = BatchSchedule.constant(1)
        next(iter(StreamLoader(again, schedule, micro_batch_size=1, dp_rank=0, dp_size=1, start=20, prefetch=0)))

    def restore(_: int) -> None:
        again = bench.energon(True)
        again.restore_state_rank(theirs)
        next(iter(again))

    seconds = interleaved({"ours": resume, "energon": restore}, repetitions, clock=wall)
    yield Row(
        what="resume to the first packed batch",
        ours=1000 * median(seconds["ours"]),
        unit="ms",
        baseline=1000 * median(seconds["energon"]),
        against="Energon",
        ratio=ratio(seconds["ours"], seconds["energon"]),
    )


class Lengths:
    """Documents of one image of 100 to 4000 tokens and a caption: lengths alone."""

    def __init__(self, documents: int) -> None:
        rng = np.random.default_rng(3)
        images = np.exp(rng.uniform(np.log(100), np.log(4000), documents))
        self.tokens = (images + rng.integers(20, 300, documents)).astype(np.int64)

    def __len__(self) -> int:
        return len(self.tokens)

    def length(self, i: int) -> int:
        """Tokens of document i."""
        return int(self.tokens[i])

    def lengths(self, ids: Any) -> Any:
        """Tokens of each."""
        return self.tokens[ids]

    def get(self, i: int) -> Any:
        """There are none to read."""
        raise NotImplementedError


def _efficiency(documents: int) -> Iterator[Row]:
    source = Lengths(documents)
    for mode in ("best_fit", "knapsack"):
        config = {"seed": 1, "seq_length": SEQ_LENGTH, "packing": mode}
        config["sources"] = {"pairs": {"kind": "python", "object": "pairs"}}
        stream = open_stream(config, objects={"pairs": source})
        samples = int(source.tokens.sum() * 0.95) // SEQ_LENGTH
        lengths = stream.plan(0, samples).table[:, LENGTH]
        ours, offline = (
            100 * int(lengths.sum()) / (bins * SEQ_LENGTH)
            for bins in (samples, best_fit_decreasing(lengths, SEQ_LENGTH))
        )
        within = offline - ours <= 0.5
        yield Row(
            what=f"tokens in a sample of {SEQ_LENGTH}, images of 100 to 4000 tokens, {mode}",
            ours=ours,
            unit="%",
            baseline=offline,
            against="best-fit-decreasing, offline",
            must=">= offline - 0.5 points" if mode == "knapsack" else "",
            holds=within if mode == "knapsack" else None,
        )
