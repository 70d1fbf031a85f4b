"""Captioned photographs in tar shards, read by our loader and by Energon's, which call the same encoder.

    shards --+-- our index --> stream --> StreamLoader                          records of each batch
             `-- .nv-meta  --> get_train_dataset(task encoder) --> loader       records of each batch

Both in one process without workers. Energon has its own shuffle buffer and, with packing, its packing buffer and a
greedy packer; it decodes what was selected for a pack (``postencode_sample``), so that its buffer holds files and no
pixels.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from benchmarks.timing import cpu
from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data.prepare.shards import prepare_shards
from megaresume.encoding.images.document import Key, Record
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.encoding.images.pixels import Backend
from megaresume.stream.batches import BatchSchedule

SEQ_LENGTH = 8192
SHUFFLE_BUFFER, PACKING_BUFFER = 100, 100
#: no image is scaled down to fit.
_MAX_PIXELS = 4_000_000
_QWEN = {"kind": "native", "patch_size": 14, "merge": 2, "max_pixels": _MAX_PIXELS}

#: what Energon's task encoder does with a record: our encoder; transformers' processor of a back-end; nothing.
Work = Literal["ours", "pillow", "torchvision", "nothing"]
#: back-ends of ours, each with an index of its own.
BACKENDS: tuple[Backend, ...] = ("pillow", "torchvision")


class Shards:
    """Shards as a data set of Energon, with an index of ours beside it.

    Args:
        directory: is made.
        records: in all of them.
        shards: how many.
    """

    def __init__(self, directory: Path, *, records: int, shards: int = 2) -> None:
        self.directory, self.records = directory, records
        self.encoders = {b: ImageTextEncoder.from_options({"processor": {**_QWEN, "backend": b}}) for b in BACKENDS}
        directory.mkdir(parents=True)
        rng = np.random.default_rng(7)
        for shard in range(shards):
            with tarfile.open(directory / f"s{shard}.tar", "w") as tar:
                for record in range(shard * records // shards, (shard + 1) * records // shards):
                    _add(tar, record, rng)
        _prepare(directory)
        for backend in BACKENDS:
            self.index(backend)

    def index(self, backend: Backend) -> float:
        """Seconds of processor time to build the index."""
        begin = cpu()
        prepare_shards([self.directory], self.directory.parent / backend, self.encoders[backend], overwrite=True)
        return cpu() - begin

    def stream(self, packing: str, backend: Backend = "pillow") -> Any:
        """Our stream over them."""
        index = str(self.directory.parent / f"{backend}.shards.idx")
        pairs = {"kind": "energon", "path": str(self.directory), "index": index}
        return open_stream({"seed": 1, "seq_length": SEQ_LENGTH, "packing": packing, "sources": {"pairs": pairs}})

    def loader(self, packing: str, backend: Backend = "pillow", **how: Any) -> StreamLoader:
        """Our loader over them, batches of one sample."""
        stream, schedule = self.stream(packing, backend), BatchSchedule.constant(1)
        return StreamLoader(stream, schedule, micro_batch_size=1, dp_rank=0, dp_size=1, **how)

    def ours(self, packing: str, backend: Backend = "pillow") -> Iterator[int]:
        """Records of each batch of our loader, in this process."""
        for batch in self.loader(packing, backend, prefetch=0):
            yield len(batch["image_grid_thw"])  # one image a record

    def energon(self, *, packing: bool, work: Work = "ours") -> Any:
        """Energon's loader over them."""
        from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

        dataset = get_train_dataset(
            str(self.directory),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=1,
            packing_buffer_size=PACKING_BUFFER if packing else None,
            shuffle_buffer_size=SHUFFLE_BUFFER,
            max_samples_per_sequence=100,
            task_encoder=_task_encoder(self.encoders["pillow"], work),
        )
        return get_savable_loader(dataset, watchdog_timeout_seconds=None)

    def theirs(self, *, packing: bool, work: Work = "ours") -> Iterator[int]:
        """Records of each batch of Energon's."""
        for batch in self.energon(packing=packing, work=work):
            yield sum(key.count(",") + 1 for key in batch["keys"])


def _add(tar: tarfile.TarFile, record: int, rng: np.random.Generator) -> None:
    width, height = (int(side) for side in rng.integers(224, 900, 2))
    small = Image.fromarray(rng.integers(0, 255, (height // 16, width // 16, 3), np.uint8))
    buffer = io.BytesIO()
    small.resize((width, height)).save(buffer, "JPEG", quality=90)
    caption = ("a photograph of something " * int(rng.integers(1, 12))).encode()
    for extension, content in (("jpg", buffer.getvalue()), ("txt", caption)):
        member = tarfile.TarInfo(f"r{record:06d}.{extension}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def _prepare(directory: Path) -> None:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    names = sorted(path.name for path in directory.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(EPath(directory), names, split_parts_ratio=[("train", 1.0)], workers=1)
    (directory / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
        "field_map: {image: jpg, caption: txt}\n"
    )


def _task_encoder(encoder: ImageTextEncoder, work: Work) -> Any:
    """The same bytes in, the same tokens and pixels out."""
    import torch
    from megatron.energon import CaptioningSample, DefaultTaskEncoder, stateless

    encoded = None
    if work != "nothing":
        encoded = _by_ours(encoder) if work == "ours" else _by_transformers(encoder, work)

    class Task(DefaultTaskEncoder):
        decoder = None  # raw bytes: who encodes decodes

        @stateless
        def postencode_sample(self, sample: Any) -> Any:
            if encoded is not None:
                sample.image, sample.caption = map(torch.from_numpy, encoded(sample))
            return sample

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            lengths = {sample.__key__: encoder.measures(_record(sample))[0].tokens for sample in samples}
            packs: list[list[Any]] = []
            room: list[int] = []
            for sample in sorted(samples, key=lambda sample: -lengths[sample.__key__]):
                length = lengths[sample.__key__]
                at = next((i for i, left in enumerate(room) if left >= length), None)
                if at is None:
                    packs.append([])
                    room.append(SEQ_LENGTH)
                    at = -1
                packs[at].append(sample)
                room[at] -= length
            return packs

        @stateless
        def pack_selected_samples(self, samples: list[Any]) -> Any:
            return CaptioningSample(
                __key__=",".join(sample.__key__ for sample in samples),
                __restore_key__=(),
                image=torch.cat([sample.image for sample in samples]),
                caption=torch.cat([sample.caption for sample in samples]),
            )

        @stateless
        def batch(self, samples: list[Any]) -> dict[str, Any]:
            return {"keys": [s.__key__ for s in samples], "pixels": [s.image for s in samples]}

    return Task()


def _by_ours(encoder: ImageTextEncoder) -> Any:
    def encoded(sample: Any) -> tuple[Any, Any]:
        key = Key(seed=1, source="pairs", document=int(sample.__key__[1:]), epoch=0)
        document = encoder.encode(_record(sample), key)
        return document.images[0].pixels, document.tokens

    return encoded


def _by_transformers(encoder: ImageTextEncoder, backend: Backend) -> Any:
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl, image_processing_qwen2_vl

    of_pillow = backend == "pillow"
    found = image_processing_pil_qwen2_vl if of_pillow else image_processing_qwen2_vl
    cls = getattr(found, "Qwen2VLImageProcessorPil" if of_pillow else "Qwen2VLImageProcessor")
    processor = cls(min_pixels=56 * 56, max_pixels=_MAX_PIXELS)

    def encoded(sample: Any) -> tuple[Any, Any]:
        image = Image.open(io.BytesIO(bytes(sample.image))).convert("RGB")
        made = processor(image, return_tensors="np" if of_pillow else "pt")
        tokens = [encoder.image_token_id] * int(made["image_grid_thw"][0].prod() // 4)
        tokens += [*encoder.tokenizer.encode(_text(sample).decode(), special=False), encoder.filler]
        return np.asarray(made["pixel_values"]), np.array(tokens, np.int64)

    return encoded


def _record(sample: Any) -> Record:
    return Record(key=sample.__key__, path="s.tar", members={"jpg": bytes(sample.image), "txt": _text(sample)})


def _text(sample: Any) -> bytes:
    caption = sample.caption
    return caption.encode() if isinstance(caption, str) else bytes(caption)
