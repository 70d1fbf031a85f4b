"""Balanced ranks under Megatron's sampler: who gets what, against our own loader and against what the tokens say."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.batches.loader import StreamLoader
from megaresume.hosts.megatron.provider import MicroBatches
from megaresume.hosts.megatron.samples import HASH_KEY, SAMPLE_KEY, RankDeal, SampleDataset, SampleForm
from megaresume.hosts.megatron.streams import StreamOrder, open_streams
from megaresume.stream.batches import Balance, BatchSchedule
from megaresume.stream.errors import StateError, StreamExhausted, UsageError
from megaresume.stream.skips import SkipConfig
from megaresume.stream.state import StreamState

SEQ = 64
FORM = SampleForm(across=False, cu_seqlens="padded", logged=True)
RAMP = BatchSchedule(((0, 8), (24, 16), (72, 32)))
BALANCE = Balance()
LAYOUTS = [(2, 2), (1, 4), (1, 8), (2, 4), (4, 1)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many short documents and a few long ones, in two sources; a stage changes their weights after step 4."""
    directory = tmp_path_factory.mktemp("balance")
    kit.write_corpus(directory / "short", kit.documents(1, 3000, low=2, high=12))
    kit.write_corpus(directory / "long", kit.documents(2, 300, low=40, high=64))
    (directory / "data.yaml").write_text(
        "packing: {mode: best_fit}\n"
        'sources:\n  short: {path: short, weight: 0.6, split: "1,0,0"}\n'
        '  long: {path: long, weight: 0.4, split: "1,0,0"}\n'
        "stages: [{name: later, from_step: 4, weights: {short: 0.3, long: 0.7}}]\n"
    )
    return directory / "data.yaml"


def begin(
    data: Path, state: StreamState | None = None, schedule: BatchSchedule = RAMP, balance: Balance | None = BALANCE
) -> StreamOrder:
    streams = open_streams(kit.arguments(seq_length=SEQ, eval_iters=0), str(data), state=state)
    position = 0 if state is None else state.samples
    skip = SkipConfig(samples=((3, 5),))
    return StreamOrder(
        streams,
        saved=state,
        position=position,
        iteration=position // 8,
        schedule=schedule,
        skip=skip,
        balance=balance,
    )


def dataset_of(order: StreamOrder, micro: int, rank: int, dp: int, **more: Any) -> SampleDataset:
    deal = order.balance and RankDeal(order.balance, micro_batch_size=micro, dp_rank=rank, dp_size=dp)
    return SampleDataset(order.stream, FORM, num_samples=more.pop("num_samples", 400), deal=deal or None, **more)


Micro = tuple[list[int], list[int], int]


def handed_out(order: StreamOrder, micro: int, dp: int, start: int, stop: int) -> list[list[Micro]]:
    """By rank: of every micro-batch of Megatron's sampler the samples, their identities, and what they cost."""
    found = []
    for rank in range(dp):
        dataset = pickle.loads(pickle.dumps(dataset_of(order, micro, rank, dp)))  # as in a spawned worker
        mine = []
        for places in kit.Sampler(stop, start, micro, rank, dp):
            items = dataset.__getitems__(places)
            cost = 0
            for item in items:
                lengths = np.diff(np.unique(item["cu_seqlens"].numpy())).tolist()
                padding = SEQ - np.flatnonzero(item["tokens"].numpy() | item["loss_mask"].numpy().astype(int))[-1] - 1
                cost += sum(n * n for n in (lengths[:-1] if padding > 0 else lengths))
            mine.append(([int(i[SAMPLE_KEY]) for i in items], [int(i[HASH_KEY]) for i in items], cost))
        found.append(mine)
    return found


def steps_of(schedule: BatchSchedule, start: int, stop: int) -> list[tuple[int, int]]:
    steps = []
    while start < stop:
        steps.append(schedule.step_of(start))
        start = steps[-1][1]
    return steps


def by_step(found: Sequence[Sequence[Micro]], steps: Sequence[tuple[int, int]], micro: int) -> list[list[list[Micro]]]:
    """By step and rank: its micro-batches, as Megatron's loop takes them one after the other."""
    taken, at = [], 0
    for first, stop in steps:
        num = (stop - first) // (micro * len(found))
        taken.append([list(mine[at : at + num]) for mine in found])
        at += num
    assert all(len(mine) == at for mine in found)
    return taken


@pytest.mark.parametrize("objective", ["step", "micro-step"])
@pytest.mark.parametrize(("micro", "dp"), LAYOUTS)
def test_the_same_samples_in_the_same_step_and_ranks_alike(data: Path, micro: int, dp: int, objective: Any) -> None:
    balance = Balance(objective=objective, token_cost=0)
    order, plain = begin(data, balance=balance), begin(data, balance=None)
    steps = steps_of(RAMP, 0, 168)
    identities = plain.stream.plan(0, 168).hashes.view(np.int64).tolist()
    waited = []
    for source in (order, plain):
        taken = by_step(handed_out(source, micro, dp, 0, 168), steps, micro)
        spent = total = 0
        for (first, stop), ranks in zip(steps, taken, strict=True):
            flat = [
                (s, h) for mine in ranks for samples, hashes, _ in mine for s, h in zip(samples, hashes, strict=True)
            ]
            assert sorted(flat) == [(s, identities[s]) for s in range(first, stop)]
            costs = np.array([[cost for *_, cost in mine] for mine in ranks])
            spent += costs.sum(1).max() if objective == "step" else costs.max(0).sum()
            total += costs.sum() / dp
        waited.append(spent / total)
    assert waited[0] < waited[1] or (waited == [1, 1] and dp == 1)


@pytest.mark.parametrize("objective", ["step", "micro-step"])
@pytest.mark.parametrize(("micro", "dp"), LAYOUTS)
def test_a_rank_gets_what_our_own_loader_gives_it_also_after_a_resume(
    data: Path, micro: int, dp: int, objective: Any
) -> None:
    balance = Balance(objective=objective)
    for start in (0, 40, 104):  # sample 40: in the ramp-up; saved by a run of another layout, without balance
        state = StreamState.from_json(begin(data, balance=None).snapshot(start).to_json()) if start else None
        found = handed_out(begin(data, state, balance=balance), micro, dp, start, 168)
        for rank, mine in enumerate(found):
            order = begin(data, state, balance=balance)
            loader = StreamLoader(
                order.stream, order.schedule, micro_batch_size=micro, dp_rank=rank, dp_size=dp, start=start, stop=168,
                balance=balance,
            )  # fmt: skip
            assert [samples for samples, *_ in mine] == [list(samples) for samples in loader.indices()]


def test_numbers_count_from_the_start_of_a_phase_and_external_takes_the_same(data: Path) -> None:
    order = begin(data)
    whole = handed_out(order, 2, 2, 24, 168)
    for rank in range(2):
        late = dataset_of(order, 2, rank, 2, first=24, num_samples=144)
        samples = [[int(i[SAMPLE_KEY]) for i in late.__getitems__(p)] for p in kit.Sampler(144, 0, 2, rank, 2)]
        assert samples == [micro[0] for micro in whole[rank]]
        external = MicroBatches(
            dataset_of(order, 2, rank, 2, num_samples=168), start=24, micro_batch_size=2, dp_rank=rank, dp_size=2
        )
        assert [batch[SAMPLE_KEY].tolist() for batch in external] == samples


def test_items_do_not_depend_on_what_was_asked_before(data: Path) -> None:
    order = begin(data)
    places = [place for batch in kit.Sampler(168, 0, 2, 1, 4) for place in batch]
    ahead = [int(dataset_of(order, 2, 1, 4)[place][SAMPLE_KEY]) for place in places]
    dataset = dataset_of(order, 2, 1, 4)
    back = {place: int(dataset[place][SAMPLE_KEY]) for place in reversed(places)}
    assert ahead == [back[place] for place in places]


@pytest.mark.parametrize("places", [[0, 4, 8, 12], [4, 5, 6, 7], [2, 3], [14, 15]], ids=str)
def test_a_sampler_that_deals_otherwise_is_refused(data: Path, places: list[int]) -> None:
    """In turn one by one, in blocks, of another rank: samples would be trained twice, and others never."""
    with pytest.raises(UsageError, match="Megatron's sampler deals the samples differently"):
        dataset_of(begin(data), 2, 0, 4).__getitems__(places)


def test_no_state_inside_a_step(data: Path) -> None:
    """A loop with global batches of its own (12 samples) stops at the save: of the first 12, some were not trained."""
    assert begin(data, balance=None).snapshot(12).samples == 12
    order = begin(data)
    assert order.snapshot(16).samples == 16
    with pytest.raises(StateError, match="sample 12 is inside a step"):
        order.snapshot(12)
    state = begin(data, balance=None).snapshot(12)  # --override-ckpt-iteration, perhaps
    with pytest.raises(StateError, match="sample 12 is inside a step"):
        begin(data, state)


def test_the_end_of_the_stream_comes_to_every_rank_alike(tmp_path: Path) -> None:
    path = kit.write_corpus(tmp_path / "short", kit.documents(3, 60, low=20, high=64))
    file = tmp_path / "data.yaml"
    file.write_text(f'packing: best_fit\nsources: {{text: {{path: {path}, max_epochs: 1, split: "1,0,0"}}}}\n')
    order = begin(file, schedule=BatchSchedule.constant(8))
    told = []
    for rank in range(4):
        dataset = dataset_of(order, 1, rank, 4)
        with pytest.raises(StreamExhausted) as error:
            for places in kit.Sampler(400, 0, 1, rank, 4):
                dataset.__getitems__(places)
        told.append((places[0] // 8, str(error.value)))
    assert len(set(told)) == 1 and told[0][0] > 2
