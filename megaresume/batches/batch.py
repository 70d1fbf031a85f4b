"""From a plan to torch tensors: what a training step receives.

A blend with image sources has the keys of images in every batch, also in one without an image: with 0 rows, so that
all ranks run the same graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from megaresume.batches.arrays import FIELDS, PAIRS, Arrays, Field
from megaresume.batches.assemble import Assembler
from megaresume.batches.documents import FaultEntry, Images
from megaresume.batches.memory import pixels_of, room_of
from megaresume.images.processors.pixels import Levels, Room
from megaresume.stream.errors import UsageError
from megaresume.stream.planning.plan import Plan


class _Always(TypedDict):
    #: int64[m, S].
    tokens: torch.Tensor
    #: one int32[segments + 1] a sample: where its segments start, first 0, last S; padding is the last segment.
    cu_seqlens: list[torch.Tensor]
    #: int64[m]: numbers of the samples in the stream.
    samples: torch.Tensor
    #: int64[m]: identities of the samples (the bits of `Plan.hashes`).
    hashes: torch.Tensor


class Batch(_Always, total=False):
    """A micro-batch of m samples of S tokens."""

    # Unless a loop does without them.

    #: int64[m, S]: the next token of the same document.
    labels: torch.Tensor
    #: float32[m, S]: 1 where the label counts.
    loss_mask: torch.Tensor
    #: int64[m, S]: from 0 in every segment.
    position_ids: torch.Tensor
    #: bool[m, 1, S, S]: True where attention is not allowed (Megatron's convention); only if asked for.
    attention_mask: torch.Tensor

    #: int64[p, 4], only if asked for: of each preference pair its row, the columns at which the chosen and the rejected
    #: conversation begin, and the one after both.
    pairs: torch.Tensor

    # The rest only where the blend has image sources; n images, in the order of their tokens.

    #: float32[sum of num_tiles, ...]: tiles or patches of all images, one image after another.
    pixel_values: torch.Tensor
    #: int64[n, 3]: frames, rows and columns of each image: of patches, of tiles or of pixels, as its processor says.
    image_grid_thw: torch.Tensor
    #: int64[n, 3]: row of the micro-batch, column of the first image token, image tokens.
    image_positions: torch.Tensor
    #: int32[n]: rows of ``pixel_values`` of each image.
    num_tiles: torch.Tensor
    #: records that were not as the index announced them, and what was done.
    faults: list[FaultEntry]
    #: on the way from a worker process, how ``pixel_values`` in 8 bits become pixels.
    levels: Levels | None


_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}
_NOTHING = {name: torch.empty(0, 0, dtype=dtype).numpy() for name, dtype in _DTYPES.items()}


def document_mask(cu_seqlens: Sequence[torch.Tensor], seq_length: int) -> torch.Tensor:
    """The causal mask in which no document sees another, for models without packed attention.

    Args:
        cu_seqlens: of each sample, int32[segments + 1].
        seq_length: tokens a sample.

    Returns:
        bool[m, 1, S, S], True where attention is not allowed.
    """
    masks = torch.triu(torch.ones(seq_length, seq_length, dtype=torch.bool), diagonal=1)
    masks = masks.repeat(len(cu_seqlens), 1, 1, 1)
    for mask, bounds in zip(masks[:, 0], cu_seqlens, strict=True):
        for start in bounds[1:-1].tolist():
            mask[start:, :start] = True
    return masks


def image_places(batch: Batch) -> torch.Tensor:
    """Where image tokens stand: bool[m, S]. Row by row they are those of ``image_positions``, one image after another.

    Raises:
        UsageError: a text of the batch has the image token too.
    """
    positions = batch["image_positions"]
    if not len(positions):
        return torch.zeros_like(batch["tokens"], dtype=torch.bool)
    token = batch["tokens"][int(positions[0, 0]), int(positions[0, 1])]
    places = batch["tokens"] == token
    if int(places.sum()) != int(positions[:, 2].sum()):
        raise UsageError(
            "a text has the token that stands for images",
            found=f"token {int(token)} {int(places.sum())} times, {int(positions[:, 2].sum())} of them of images",
            expected="the image token only where images are",
            cause="a corpus that was made with a tokenizer that knows the image token, and texts that spell it",
            action="prepare the corpus again without that token, or give the encoder another image_token",
        )
    return places


def make_batch(
    plan: Plan,
    assembler: Assembler,
    *,
    samples: Sequence[int] | None = None,
    fields: Collection[Field] = FIELDS,
    attention_mask: bool = False,
    pin_memory: bool = False,
    levels: bool = False,
) -> Batch:
    """Read the samples of a plan.

    Args:
        plan: the samples.
        assembler: reads them.
        samples: their numbers, where they are not consecutive.
        fields: which of those that a loop can do without.
        attention_mask: add the document-diagonal mask.
        pin_memory: put tensors into page-locked memory.
        levels: of images, 8-bit levels instead of pixels where they have such; `megaresume.batches.memory.shown` makes
            pixels of them.

    Raises:
        CorpusError: a document is damaged, or not as long as the index says.
        UsageError: a loop without a loss mask, and sources that say which tokens are trained; one that did not ask
            for preference pairs, and sources that have them.
    """
    if "loss_mask" not in fields:
        _check_all_trained(assembler)
    shape = (len(plan), assembler.seq_length)
    # A copy to a GPU watches memory that torch locked, under the tensor that it was locked for: never from_numpy.
    names = ("tokens", *(name for name in fields if name != PAIRS))
    tensors = {name: torch.empty(shape, dtype=_DTYPES[name], pin_memory=pin_memory) for name in names}
    arrays = Arrays(**_NOTHING | {name: tensor.numpy() for name, tensor in tensors.items()})
    images = values = None
    if assembler.documents is not None:
        values = room_of(plan, assembler.documents, pin_memory=pin_memory, levels=levels)
        images = Images(room=None if values is None else Room(values.numpy()))
    pairs: list[npt.NDArray[np.int64]] | None = [] if PAIRS in fields else None
    layout = assembler.fill(plan, arrays, images, pairs, samples)
    bounds = torch.from_numpy(layout.bounds)
    batch: Batch = {
        **tensors,  # type: ignore[typeddict-item]
        "cu_seqlens": list(bounds.split(layout.num_bounds.tolist())),
        "samples": torch.from_numpy(np.array(range(plan.first, plan.stop) if samples is None else samples)),
        "hashes": torch.from_numpy(plan.hashes.view(np.int64).copy()),
    }
    if pairs is not None:
        batch["pairs"] = torch.from_numpy(pairs[0])
    if assembler.documents is not None and images is not None:
        batch["pixel_values"] = pixels_of(images, values, assembler.documents, pin_memory=pin_memory)
        if batch["pixel_values"].dtype == torch.uint8:
            batch["levels"] = assembler.documents.levels
        _add_places(batch, images)
    if attention_mask:
        batch["attention_mask"] = document_mask(batch["cu_seqlens"], assembler.seq_length)
    return batch


def make_batches(
    plan: Plan,
    assembler: Assembler,
    samples: Sequence[int],
    *,
    sizes: Sequence[int],
    fields: Collection[Field] = FIELDS,
) -> list[Batch]:
    """Read the samples of several micro-batches of text at once.

    Tensors share memory and nothing else: a storage ends where its tensor does, and each counts its changes by itself,
    as autograd needs it.

    Args:
        plan: of all samples.
        assembler: reads them.
        samples: their numbers.
        sizes: samples of each micro-batch.
        fields: as for `make_batch`, without ``pairs``.

    Raises:
        CorpusError, UsageError: as `make_batch`.
    """
    if "loss_mask" not in fields:
        _check_all_trained(assembler)
    arrays = Arrays.empty(len(plan), assembler.seq_length, fields)
    layout = assembler.fill(plan, arrays, samples=samples)
    rows = {name: getattr(arrays, name) for name in ("tokens", *fields)}
    numbers, hashes = np.array(samples, np.int64), plan.hashes.view(np.int64).copy()
    ends = list(accumulate(layout.num_bounds.tolist(), initial=0))
    bounds = [torch.from_numpy(layout.bounds[a:b]) for a, b in pairwise(ends)]
    return [
        {
            **{name: torch.from_numpy(array[a:b]) for name, array in rows.items()},  # type: ignore[typeddict-item]
            "cu_seqlens": bounds[a:b],
            "samples": torch.from_numpy(numbers[a:b]),
            "hashes": torch.from_numpy(hashes[a:b]),
        }
        for a, b in pairwise(accumulate(sizes, initial=0))
    ]


def _check_all_trained(assembler: Assembler) -> None:
    masked = [assembler.name_of(i) for i in assembler.masked]
    if assembler.documents is not None:
        masked += [assembler.name_of(i) for i in assembler.documents.sources]
    if masked:
        raise UsageError(
            "this loop does without a loss mask, and the blend has sources that say which tokens are trained",
            found=f"{', '.join(masked)}; fields without 'loss_mask'",
            expected="loss_mask among the fields, and a loop that trains by it",
            action="add 'loss_mask' to fields, or leave these sources out",
        )


def _add_places(batch: Batch, images: Images) -> None:
    batch["image_grid_thw"] = torch.tensor(images.grids, dtype=torch.int64).reshape(-1, 3)
    batch["image_positions"] = torch.tensor(images.positions, dtype=torch.int64).reshape(-1, 3)
    batch["num_tiles"] = torch.tensor([len(pixels) for pixels in images.pixels], dtype=torch.int32)
    samples = batch["samples"].tolist()
    batch["faults"] = [fault._replace(sample=samples[fault.sample]) for fault in images.faults]
