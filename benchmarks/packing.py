"""How full samples are when no document that fits into one is cut, or only those that fill what the others leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import gpt
from benchmarks.corpora import SEQ_LENGTH, WEIGHTS, config, document_lengths
from benchmarks.lengths import LengthsOnDisk, open_lengths
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import median, wall
from megaresume.batches.assemble import Assembler, make_batch
from megaresume.stream.config import StreamConfig
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan
from megaresume.stream.stream import Stream

LEAST = 99.7
#: the same of conversations and text that fills: a gap shorter than the shortest part of a piece stays open.
LEAST_FILLED = 99.5
#: packers of others, which see all lengths before the first batch: where a Python that has them is named, and how they
#: are called with ``lengths`` and ``seq_length``; a list of bins.
OTHERS = {
    "TRL's best-fit-decreasing": (
        "MEGARESUME_BENCH_TRL",
        "import pyarrow as pa\nfrom trl.data_utils import _pack_bfd\n"
        "offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)\n"
        "column = pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))\n"
        "bins = lambda: _pack_bfd(pa.table({'input_ids': column}), seq_length)['seq_lengths'].to_pylist()",
    ),
    "Bridge's first-fit-decreasing": (
        "MEGARESUME_BENCH_BRIDGE",
        # Its file alone: the package needs libraries of GPUs.
        "import megatron, os, runpy, sys, types\n"
        "names = ['megatron.bridge' + rest for rest in ('', '.utils', '.utils.safe_pickle')]\n"
        "sys.modules |= {name: types.ModuleType(name) for name in names}\n"
        "sys.modules[names[-1]].safe_load_npy = None\n"
        "files = [os.path.join(path, 'bridge/data/packing/algorithms.py') for path in megatron.__path__]\n"
        "first_fit_decreasing = runpy.run_path(next(filter(os.path.exists, files)))['first_fit_decreasing']\n"
        "bins = lambda: first_fit_decreasing(lengths.tolist(), seq_length)",
    ),
    "Megatron's MFFD": (
        "MEGARESUME_BENCH_MFFD",  # of the branch of Megatron-LM#5017
        "from megatron.core.datasets.sft_dataset import pack_samples\n"
        "bins = lambda: [lengths[pack] for pack in pack_samples(lengths.tolist(), seq_length)]",
    ),
}
#: Documents far shorter than a sample: tokens of a sample, mean tokens of a document.
SHORT = ((8192, 100), (32768, 300), (131072, 600), (131072, 20))
LEAST_SHORT = 99.0
#: Tokens of a conversation: log-normal, within these bounds.
CHAT_MEDIAN, CHAT_SIGMA, CHAT_LEAST = 1800, 0.5, 600
MOST_SECONDS = 0.05


def rows(setup: Setup) -> Iterator[Row]:
    """``best_fit`` on the fly, against packing the same segments offline, against closing a bin that is too full."""
    num_samples = setup.sizes.packed_documents * 600 // SEQ_LENGTH
    sources = setup.sources(setup.index_corpora)
    plan = Stream(config("best_fit"), sources).plan(0, num_samples)
    lengths = plan.table[:, LENGTH]
    ours = _efficiency(lengths, num_samples)
    for against, bins in (
        ("best-fit-decreasing, offline", best_fit_decreasing(lengths)),
        ("next-fit", next_fit(_as_drawn(plan))),
    ):
        other = _efficiency(lengths, bins)
        yield Row(
            what="tokens in a sample, best_fit",
            ours=ours,
            unit="%",
            baseline=other,
            against=against,
            must=f">= {LEAST} %" if against.startswith("best") else "",
            holds=ours >= LEAST if against.startswith("best") else None,
        )
    cut = _cut(plan, sources)
    yield Row(
        what="documents cut that fit into a sample",
        ours=cut,
        unit="%",
        baseline=_cut_by_megatron(setup),
        against="GPTDataset",
        must="0 %",
        holds=cut == 0,
    )
    for seq_length, mean in SHORT:
        yield _short(setup, seq_length, mean)
    yield from _filled(setup)
    yield _first_batch(setup)


def _filled(setup: Setup) -> Iterator[Row]:
    """Four parts of conversations and one of text that fills, against what packs the same conversations alone."""
    num_samples = max(setup.sizes.packed_documents * 600 // SEQ_LENGTH // 4, 64)
    rng = np.random.default_rng(18)
    chats = np.clip(rng.lognormal(np.log(CHAT_MEDIAN), CHAT_SIGMA, 1 << 18), CHAT_LEAST, SEQ_LENGTH).astype(np.int32)
    sources = [LengthsOnDisk(document_lengths(1 << 18, seed=18)), LengthsOnDisk(chats)]
    entries = {"text": {"weight": 1, "packing": "split"}, "chat": {"weight": 4}}
    data = {"seq_length": SEQ_LENGTH, "packing": "best_fit", "sources": entries}
    plan = Stream(StreamConfig.from_dict(data), sources).plan(0, num_samples)
    ours = _efficiency(plan.table[:, LENGTH], num_samples)
    mine = plan.table[plan.table[:, SOURCE] == 1, LENGTH]
    assert (mine == chats[plan.table[plan.table[:, SOURCE] == 1, DOCUMENT]]).all()  # none is cut
    alone = {"best-fit-decreasing, offline, conversations alone": best_fit_decreasing(mine)}
    alone["next-fit, conversations alone"] = next_fit(np.random.default_rng(1).permutation(mine))
    for mode in ("best_fit", "knapsack"):
        data = {"seq_length": SEQ_LENGTH, "packing": mode, "sources": {"chat": {}}}
        packed = Stream(StreamConfig.from_dict(data), sources[1:]).plan(0, num_samples)
        share = int(packed.tokens().sum()) / (num_samples * SEQ_LENGTH)
        alone[f"{mode}, conversations alone"] = round(int(mine.sum()) / (share * SEQ_LENGTH))
    for name, (variable, call) in OTHERS.items():
        if python := os.environ.get(variable):
            found = _packed_by(python, call, mine, setup)
            alone[f"{name}, conversations alone"] = found["bins"]
            assert found["tokens"] == int(mine.sum()), "it cut conversations"
            yield Row(
                what=f"before the first batch, {len(mine):,} conversations: {name}",
                ours=found["seconds"] * 1e3,
                unit="ms",
            )
        else:
            print(f"benchmarks: packing without {name}: {variable}=PYTHON", file=sys.stderr)
    for against, bins in alone.items():
        yield Row(
            what="tokens in a sample, whole conversations filled with text",
            ours=ours,
            unit="%",
            baseline=_efficiency(mine, bins),
            against=against,
            must=f">= {LEAST_FILLED} %",
            holds=ours >= LEAST_FILLED,
        )


def _packed_by(python: str, call: str, lengths: npt.NDArray[np.int64], setup: Setup) -> dict[str, Any]:
    """``bins``, ``tokens`` in them, and processor ``seconds`` of packing alone, in another Python."""
    path = setup.directory / "lengths.npy"
    np.save(path, lengths)
    code = (
        f"import json, time\nimport numpy as np\nlengths, seq_length = np.load({str(path)!r}), {SEQ_LENGTH}\n{call}\n"
        "begin = time.process_time()\nmade = bins()\nseconds = time.process_time() - begin\n"
        "print(json.dumps({'bins': len(made), 'tokens': int(sum(map(sum, made))), 'seconds': seconds}))"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code], check=True, env=env, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _first_batch(setup: Setup) -> Row:
    """From the data config to the first sample, over half of all lengths as text and half as conversations."""
    entries = {name: {"weight": weight} for name, weight in WEIGHTS.items()}
    entries["web"]["packing"] = "split"  # type: ignore[assignment]
    data = StreamConfig.from_dict({"seq_length": SEQ_LENGTH, "sources": entries})

    def start() -> float:
        begin = wall()
        sources = open_lengths(setup.lengths)
        make_batch(Stream(data, sources).plan(0, 1), Assembler(sources, seq_length=SEQ_LENGTH))
        return wall() - begin

    start()
    seconds = median([start() for _ in range(setup.sizes.repetitions)])
    return Row(
        what=f"first batch, {setup.sizes.most_documents:,} documents, half of them whole, filled with the other half",
        ours=seconds * 1e3,
        unit="ms",
        must="< 50 ms",
        holds=seconds < MOST_SECONDS,
    )


def _short(setup: Setup, seq_length: int, mean: int) -> Row:
    """``knapsack`` with documents of exponentially distributed lengths, against closing a sample that is too full."""
    num_samples = max(setup.sizes.packed_documents * mean // seq_length // 4, 4)
    lengths = np.random.default_rng(mean).exponential(mean, 1 << 18).astype(np.int32) + 1
    data = {"seq_length": seq_length, "packing": "knapsack", "sources": {"short": {}}}
    plan = Stream(StreamConfig.from_dict(data), [LengthsOnDisk(lengths)]).plan(0, num_samples)
    ours = 100 * int(plan.tokens().sum()) / (num_samples * seq_length)
    drawn = _as_drawn(plan)
    return Row(
        what=f"tokens in a sample of {seq_length:,}, knapsack, documents of {mean}",
        ours=ours,
        unit="%",
        baseline=100 * int(drawn.sum()) / (next_fit(drawn, seq_length) * seq_length),
        against="next-fit",
        must=f">= {LEAST_SHORT:.0f} %",
        holds=ours >= LEAST_SHORT,
    )


def best_fit_decreasing(lengths: npt.NDArray[np.int64], seq_length: int = SEQ_LENGTH) -> int:
    """Samples that the offline algorithm needs: it sees all segments at once, the longest first."""
    bins, room = 0, [0]  # room left in every sample, ascending; a sentinel keeps the list from being empty
    for length in np.sort(lengths)[::-1].tolist():
        at = bisect_left(room, length)
        if at == len(room):
            bins += 1
            left = seq_length - length
        else:
            left = room.pop(at) - length
        insort(room, left)
    return bins


def next_fit(lengths: npt.NDArray[np.int64], seq_length: int = SEQ_LENGTH) -> int:
    """Samples when one is open at a time, and closed by the first document that does not fit."""
    bins, room = 0, 0
    for length in lengths.tolist():
        if length > room:
            bins += 1
            room = seq_length
        room -= length
    return bins


def _as_drawn(plan: Plan) -> npt.NDArray[np.int64]:
    """Lengths of the segments in an order that is not that of the bins: any random one will do."""
    return np.random.default_rng(1).permutation(plan.table[:, LENGTH])


def _efficiency(lengths: npt.NDArray[np.int64], num_samples: int) -> float:
    return 100 * int(lengths.sum()) / (num_samples * SEQ_LENGTH)


def _cut(plan: Plan, sources: list) -> float:
    """Per cent of the documents of at most a sample that do not lie whole in one."""
    cut = fits = 0
    for i, source in enumerate(sources):
        table = plan.table[plan.table[:, SOURCE] == i]
        total = source.lengths(table[:, DOCUMENT])
        short = total <= SEQ_LENGTH
        fits += int(short.sum())
        cut += int((short & ((table[:, OFFSET] > 0) | (table[:, LENGTH] < total))).sum())
    return 100 * cut / fits


def _cut_by_megatron(setup: Setup) -> float:
    """The same of `GPTDataset`: of its samples' boundaries, those inside a document that would fit."""
    num_samples = setup.sizes.packed_documents * 600 // SEQ_LENGTH
    blend = gpt.build(setup.index_corpora, num_samples)
    gpt.forget_index(setup.index_corpora)
    cut = fits = 0
    for part in blend.datasets:
        last = int(part.sample_index[-1, 0])
        total = part.dataset.sequence_lengths[part.document_index[:last]]
        inside = part.sample_index[part.sample_index[:, 1] > 0, 0]
        short = total <= SEQ_LENGTH
        fits += int(short.sum())
        cut += int(short[np.unique(inside[inside < last])].sum())
    return 100 * cut / fits
