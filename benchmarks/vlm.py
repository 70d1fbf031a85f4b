"""Image-text records: decode and encode against Energon, reading, the index, the first batch after a resume, packing.

Both sides read the same shards (`benchmarks.pairs`), in turn. Processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.packing import best_fit_decreasing
from benchmarks.pairs import SEQ_LENGTH, Shards, Work
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import children, cpu, interleaved, median, ratio
from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.encoding.images.pixels import Backend
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.kernel import DOCUMENT, LENGTH
from megaresume.stream.state import StreamState

#: records that one side reads before it is the other's turn.
TURN = 20


def rows(setup: Setup) -> Iterator[Row]:
    """See the module."""
    quick = setup.sizes.read_samples < 1000
    shards = Shards(setup.directory / "pairs", records=24 if quick else 200)
    repetitions = setup.sizes.slow_repetitions
    yield from _throughput(shards, repetitions)
    yield from _workers(shards, repetitions)
    yield from _reading(shards, repetitions)
    # The first one compiled loops and imported.
    seconds = [shards.index("pillow") for _ in range(1 + repetitions)]
    yield Row(what="index of image-text shards, one process", ours=shards.records / median(seconds), unit="records/s")
    yield from _resume(shards, repetitions)
    yield from _efficiency(2_000 if quick else setup.sizes.packed_documents)


#: what of Energon's is compared with which back-end of ours: its name, what its task encoder does, the least ratio
#: without and with packing.
AGAINST: tuple[tuple[Backend, str, Work, float, float], ...] = (
    ("pillow", "same encoder", "ours", 1, 1),
    ("pillow", "transformers' Pil processor", "pillow", 1.2, 1.2),
    ("torchvision", "transformers' default processor", "torchvision", 1.2, 2),
)


def _throughput(shards: Shards, repetitions: int) -> Iterator[Row]:
    against = [row for row in AGAINST if row[2] != "torchvision" or find_spec("torchvision")]
    for packing, mode, words in ((False, "none", "no packing"), (True, "best_fit", f"packed into {SEQ_LENGTH}")):
        counts: dict[str, Iterator[int]] = {backend: shards.ours(mode, backend) for backend, *_ in against}
        counts |= {name: shards.theirs(packing=packing, work=work) for _, name, work, *_ in against}
        seconds = _per_record(counts, shards.records, repetitions)
        for backend, name, _, *least in against:
            faster = ratio(seconds[backend], seconds[name])
            yield Row(
                what=f"image-text records, decoded and encoded ({backend}), {words}",
                ours=1 / median(seconds[backend]),
                unit="records/s",
                baseline=1 / median(seconds[name]),
                against=f"Energon, {name}",
                ratio=faster,
                must=f">= {least[packing]:g} x",
                holds=faster >= least[packing],
            )


def _workers(shards: Shards, repetitions: int) -> Iterator[Row]:
    """Processor time of the busiest of three processes, their start not counted; and what a worker sends."""
    few, many = (2, 4) if repetitions < 2 else (6, 36)
    batches = list(shards.loader("best_fit", stop=many, prefetch=0))
    records = sum(len(batch["num_tiles"]) for batch in batches[few:])
    pixels = batches[0]["pixel_values"].nbytes / 2**20
    del batches
    spent: dict[int, list[float]] = {0: [], 2: []}

    def used(workers: int, stop: int) -> tuple[float, float]:
        begin = cpu(), children()
        for _ in shards.loader("best_fit", stop=stop, num_workers=workers, prefetch=2 if workers else 0):
            pass
        return cpu() - begin[0], (children() - begin[1]) / max(workers, 1)

    def read(workers: int) -> None:
        less, more = used(workers, few), used(workers, many)
        spent[workers].append(max(more[0] - less[0], more[1] - less[1]) / records)

    interleaved({"none": lambda _: read(0), "two": lambda _: read(2)}, repetitions, warm_up=True)
    one, busiest = spent[0][1:], spent[2][1:]
    faster = ratio(busiest, one)
    yield Row(
        what="image-text record, packed: the busiest process of two workers and the one that trains",
        ours=1000 * median(busiest),
        unit="ms",
        baseline=1000 * median(one),
        against="one process, without workers",
        ratio=faster,
        must=">= 1.8 x",
        holds=faster >= 1.8,
    )
    sent = shards.loader("best_fit").dataset.read([0], levels=True)["pixel_values"].nbytes / 2**20
    yield Row(
        what="image-text sample, packed, on its way from a worker",
        ours=sent,
        unit="MiB",
        baseline=pixels,
        against="its pixels in float32",
        ratio=pixels / sent,
        must=">= 4 x",
        holds=pixels >= 4 * sent,
    )


def _reading(shards: Shards, repetitions: int) -> Iterator[Row]:
    """Members of records, nothing decoded: ours by its number in the order of the stream."""

    def read() -> Iterator[int]:
        stream = shards.stream("none")
        sample = 0
        while True:
            for document in stream.plan(sample, sample + 64).table[:, DOCUMENT].tolist():
                assert stream.sources[0].record(document).members
                yield 1
            sample += 64

    counts = {"ours": read(), "energon": shards.theirs(packing=False, work="nothing")}
    seconds = _per_record(counts, 5 * shards.records, repetitions)
    faster = ratio(seconds["ours"], seconds["energon"])
    yield Row(
        what="image-text record, read and not decoded",
        ours=1000 * median(seconds["ours"]),
        unit="ms",
        baseline=1000 * median(seconds["energon"]),
        against="Energon's loader",
        ratio=faster,
        must=">= 1 x",
        holds=faster >= 1,
    )


def _per_record(counts: Mapping[str, Iterator[int]], records: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds a record, of every epoch but the first, which warms up and fills buffers.

    Those compared take turns of a few records: what other programs do to the caches changes in seconds, and an epoch
    takes longer.
    """
    turns: dict[str, list[tuple[float, int]]] = {name: [] for name in counts}

    def reader(name: str) -> Callable[[int], None]:
        def read(_: int) -> None:
            begin, done = cpu(), 0
            while done < TURN:
                done += next(counts[name])
            turns[name].append((cpu() - begin, done))

        return read

    per_epoch = -(-records // TURN)
    interleaved({name: reader(name) for name in counts}, per_epoch * (1 + repetitions), warm_up=False)
    found: dict[str, list[float]] = {}
    for name, taken in turns.items():
        epochs = [taken[first : first + per_epoch] for first in range(per_epoch, len(taken), per_epoch)]
        found[name] = [sum(seconds for seconds, _ in e) / sum(done for _, done in e) for e in epochs]
    return found


def _resume(shards: Shards, repetitions: int) -> Iterator[Row]:
    """From a state to the first packed batch: reading it, refilling buffers, decoding."""
    stream = shards.stream("best_fit")
    stream.plan(0, 20)
    ours = stream.state_at(20).to_json()
    loader = shards.energon(packing=True)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    theirs = loader.save_state_rank()

    def resume(_: int) -> None:
        again = shards.stream("best_fit")
        again.restore(StreamState.from_json(ours))
        schedule = BatchSchedule.constant(1)
        next(iter(StreamLoader(again, schedule, micro_batch_size=1, dp_rank=0, dp_size=1, start=20, prefetch=0)))

    def restore(_: int) -> None:
        again = shards.energon(packing=True)
        again.restore_state_rank(theirs)
        next(iter(again))

    seconds = interleaved({"ours": resume, "energon": restore}, repetitions)
    faster = ratio(seconds["ours"], seconds["energon"])
    yield Row(
        what="image-text data, resume to the first packed batch",
        ours=1000 * median(seconds["ours"]),
        unit="ms",
        baseline=1000 * median(seconds["energon"]),
        against="Energon, restored",
        ratio=faster,
        must=">= 1 x",
        holds=faster >= 1,
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
        config: dict[str, Any] = {"seed": 1, "seq_length": SEQ_LENGTH, "packing": mode}
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
