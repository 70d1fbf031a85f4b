"""Real shards, real loaders: what the tests of this folder share."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

RECORDS = 96
_SHARDS = 4


def key_of(record: int) -> str:
    return f"rec{record:04d}"


def write_shards(directory: Path) -> Path:
    """Image-caption records in tar shards, made an Energon dataset by its own ``prepare``."""
    directory.mkdir(parents=True)
    per_shard = -(-RECORDS // _SHARDS)
    for shard in range(_SHARDS):
        with tarfile.open(directory / f"shard-{shard:03d}.tar", "w") as tar:
            for record in range(shard * per_shard, min((shard + 1) * per_shard, RECORDS)):
                rng = np.random.default_rng(record)
                height, width = (int(side) for side in rng.integers(8, 24, 2))
                image = Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8))
                buffer = io.BytesIO()
                image.save(buffer, "PNG")
                words = " ".join(str(word) for word in rng.integers(0, 50, int(rng.integers(2, 9))))
                for extension, content in (("png", buffer.getvalue()), ("txt", f"{record}: {words}".encode())):
                    member = tarfile.TarInfo(f"{key_of(record)}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    _prepare(directory)
    return directory


def _prepare(directory: Path) -> None:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

    names = sorted(path.name for path in directory.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(
        EPath(directory), names, split_parts_ratio=[("train", 1.0)], progress_fn=lambda it, _: it, workers=2
    )
    (directory / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
        "field_map: {image: png, caption: txt}\n"
    )


def digest(*parts: Any) -> str:
    """Of texts and tensors, in order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return found.hexdigest()[:16]


def energon_loader(
    dataset: Path,
    *,
    rank: int = 0,
    world: int = 1,
    workers: int = 2,
    batch_size: int | None = 2,
    packing: int | None = None,
    shuffle: int | None = 10,
    every: float = 0,
    **options: Any,
) -> Any:
    """Energon's own training loader, over its own dataset, with its own shuffling."""
    from energon_task import Encoder
    from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

    config = WorkerConfig(rank=rank, world_size=world, num_workers=workers)
    train = get_train_dataset(
        str(dataset),
        worker_config=config,
        batch_size=batch_size,
        packing_buffer_size=packing,
        shuffle_buffer_size=shuffle,
        max_samples_per_sequence=options.pop("max_samples_per_sequence", 4),
        task_encoder=Encoder(),
        **options,
    )
    # A state at every sample unless told otherwise: small tests see many.
    return get_savable_loader(
        train, checkpoint_every_sec=every, checkpoint_every_min_n_samples=1, watchdog_timeout_seconds=None
    )


class Captions(torch.utils.data.IterableDataset[Any]):
    """An iterable with a packing buffer and a state. Sharded by rank and worker."""

    def __init__(self, *, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.position, self.buffer = 0, []
        self.buffer: list[int]

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = list(range(self.rank * workers + worker, RECORDS, self.world * workers))
        while self.position < len(mine) or self.buffer:
            while self.position < len(mine) and len(self.buffer) < 5:
                self.buffer.append(mine[self.position])
                self.position += 1
            # The middle of the buffer: what is left in it matters.
            yield torch.tensor([float(self.buffer.pop(len(self.buffer) // 2))])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.buffer = state["position"], list(state["buffer"])


def torchdata_loader(kind: str, *, rank: int = 0, world: int = 1, workers: int = 0, batch_size: int = 2) -> Any:
    """Torchdata's own loader: ``iterable`` over `Captions`, ``map`` with its distributed sampler, ``shuffle`` alone;
    ``drawn`` shuffles by a seed that it draws when it is made."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    if kind == "iterable":
        return StatefulDataLoader(Captions(rank=rank, world=world), batch_size=batch_size, num_workers=workers)
    dataset = torch.arange(30.0)[:, None]
    if kind == "map":
        sampler = StatefulDistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=3)
        return StatefulDataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=workers, drop_last=True)
    generator = None if kind == "drawn" else torch.Generator().manual_seed(5)
    return StatefulDataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator, num_workers=workers)


def seen(batch: Any) -> Any:
    """What a batch of these loaders holds, as JSON: keys and pixels, in order."""
    if isinstance(batch, torch.Tensor):
        return batch.flatten().tolist()
    return [[key, digest(pixels)] for key, pixels in zip(batch["keys"], batch["pixels"], strict=True)]
