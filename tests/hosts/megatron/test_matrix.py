"""The order of the samples, step by step, against an uninterrupted run: over layouts, resumes, batch sizes, lengths.

Layouts are simulated: for every coordinate the provider is called as Megatron would on that rank, and its dataset is
driven by Megatron's sampler. Compared is what was trained: the tokens of every sample, in order.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.hosts.megatron.arguments import schedule_from_args
from megaresume.hosts.megatron.project import Project
from megaresume.hosts.megatron.provider import form_of, stream_provider
from megaresume.hosts.megatron.streams import StreamOrder, open_streams
from megaresume.stream.state import StreamState

#: a step: the tokens of its samples, in the order of the global batch.
Step = list[tuple[int, ...]]

GBS, STEPS = 16, 15


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    workers: int = 0
    mbs: int = 4
    kind: str = "single"

    def __str__(self) -> str:
        return f"dp{self.dp}-tp{self.tp}-pp{self.pp}-w{self.workers}-mbs{self.mbs}-{self.kind}"


class Ranks(types.ModuleType):
    """megatron.core.parallel_state, on the coordinate that is being played."""

    at: Mapping[str, int] = {}
    dp_size = pp_size = 1

    def __getattr__(self, name: str) -> Any:
        ranks = {"tensor_model_parallel": "tp", "pipeline_model_parallel": "pp", "data_parallel": "dp"}
        for long, short in ranks.items():
            if name == f"get_{long}_rank":
                return lambda: self.at[short]
        if name == "get_data_parallel_world_size":
            return lambda: self.dp_size
        raise AttributeError(name)


RANKS = Ranks("ranks_of_the_matrix")


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """As in pretrain_gpt.py."""
    return RANKS.at["pp"] in (0, RANKS.pp_size - 1) and RANKS.at["tp"] == 0


def train_valid_test_datasets_provider(nums: Any, vp_stage: int | None = None) -> Any:
    raise AssertionError("ours replaces it")


@pytest.fixture(scope="module", autouse=True)
def project() -> Iterator[Project]:
    sys.modules[RANKS.__name__] = RANKS
    modules = {
        "parallel_state": RANKS.__name__,
        "builder": "megatron.core.datasets.blended_megatron_dataset_builder",
    }
    yield Project(kind="megatron-lm", root=Path(), version="0.16.1", modules=modules)
    del sys.modules[RANKS.__name__]


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three sources of about 90, 40 and 20 samples: a run of 15 steps of 16 crosses epochs of all of them."""
    directory = tmp_path_factory.mktemp("matrix")
    sizes = {"web": (0.5, 130), "code": (0.3, 55), "books": (0.2, 30)}
    words = []
    for seed, (name, (weight, num)) in enumerate(sizes.items()):
        words += [str(weight), kit.write_corpus(directory / name, kit.documents(seed, num))]
    return words


def run(
    project: Project,
    blend: list[str],
    layout: Layout,
    *,
    first: int,
    stop: int,
    saved: str | None = None,
    **changes: Any,
) -> tuple[list[Step], str]:
    """Train the steps first .. stop in a layout, and save. Every rank is a process of its own, as far as data goes.

    Returns:
        The steps, checked to be the same on every replica, and the state.
    """
    replicas: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {}
    states = set()
    for dp, tp, pp in itertools.product(range(layout.dp), range(layout.tp), range(layout.pp)):
        args = kit.arguments(
            data_path=blend,
            split="100,0,0",
            eval_iters=0,
            global_batch_size=GBS,
            micro_batch_size=layout.mbs,
            num_workers=layout.workers,
            dataloader_type=layout.kind,
            create_attention_mask_in_dataloader=False,
            train_iters=STEPS,
        )
        for name, value in changes.items():
            setattr(args, name, value)
        previous = None if saved is None else StreamState.from_json(saved)
        consumed = 0 if previous is None else previous.samples
        args.iteration, args.consumed_train_samples = first, consumed
        streams = open_streams(args, None)
        schedule = schedule_from_args(args)
        order = StreamOrder(streams, saved=previous, position=consumed, iteration=first, schedule=schedule)
        RANKS.at, RANKS.dp_size, RANKS.pp_size = {"dp": dp, "tp": tp, "pp": pp}, layout.dp, layout.pp
        form = form_of(args, order.stream.config.packing, text=False, eod=lambda: kit.EOD)
        provide = stream_provider(project, args, order, form, train_valid_test_datasets_provider)
        train, valid, test = provide([args.train_iters * args.global_batch_size, 0, 0])
        assert (train is None) == (tp > 0 or pp not in (0, layout.pp - 1)) and valid is None and test is None
        samples = (stop - first) * args.global_batch_size
        if train is not None:
            loader = train
            if layout.kind == "single":
                sampler = kit.Sampler(len(train), consumed, layout.mbs, dp, layout.dp)
                loader = DataLoader(train, batch_sampler=sampler, num_workers=layout.workers)
            batches = itertools.islice(loader, samples // (layout.mbs * layout.dp))
            replicas[dp, pp] = [list(map(tuple, batch["tokens"].tolist())) for batch in batches]
            if layout.kind == "external":
                # Its workers end at once; found in a cycle by the garbage collector, each is waited for for 5 s.
                loader._batches = None
        states.add(json.dumps(order.snapshot(consumed + samples).to_dict()))
    assert len(states) == 1  # also of ranks that read nothing
    steps = None
    for pp in {0, layout.pp - 1}:
        micro = zip(*(replicas[dp, pp] for dp in range(layout.dp)), strict=True)
        flat = [sample for of_ranks in micro for batch in of_ranks for sample in batch]
        size = len(flat) // (stop - first)
        mine = [flat[k * size : (k + 1) * size] for k in range(stop - first)]
        assert steps is None or steps == mine
        steps = mine
    assert steps is not None
    return steps, states.pop()


@pytest.fixture(scope="module")
def uninterrupted(project: Project, blend: list[str]) -> list[Step]:
    return run(project, blend, Layout(), first=0, stop=STEPS)[0]


#: every dp with every mbs, and with every tp and pp; tp and pp read the same samples again, whatever the mbs.
LAYOUTS = [
    *(Layout(dp=dp, tp=1 + k % 2, pp=1 + k // 2 * 2, mbs=(1, 2, 4, 1)[k]) for dp in (1, 2, 4) for k in range(4)),
    *(Layout(dp=dp, pp=2, workers=workers, mbs=2) for dp in (1, 2) for workers in (1, 2, 3)),
    *(Layout(dp=2, tp=2, pp=2, workers=workers, mbs=2, kind="external") for workers in (0, 2)),
]


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_resumes_into_another_layout_change_nothing(
    project: Project, blend: list[str], uninterrupted: list[Step], layout: Layout
) -> None:
    start, state = run(project, blend, Layout(dp=2, mbs=2), first=0, stop=4)
    middle, state = run(project, blend, layout, first=4, stop=9, saved=state)
    end, _ = run(project, blend, Layout(dp=4, mbs=1), first=9, stop=STEPS, saved=state)
    for number, (step, expected) in enumerate(zip([*start, *middle, *end], uninterrupted, strict=True)):
        assert step == expected, f"step {number}"


def test_a_state_does_not_know_the_layout(project: Project, blend: list[str]) -> None:
    states = {run(project, blend, layout, first=0, stop=4)[1] for layout in LAYOUTS[:12:5]}
    assert len(states) == 1


@pytest.mark.parametrize("size", [8, 32, 48])
def test_another_global_batch_size_only_moves_the_steps(
    project: Project, blend: list[str], uninterrupted: list[Step], size: int
) -> None:
    start, state = run(project, blend, Layout(), first=0, stop=6)
    rest, after = run(project, blend, Layout(dp=2), first=6, stop=9, saved=state, global_batch_size=size)
    flat = [sample for step in [*start, *rest] for sample in step]
    assert [len(step) for step in rest] == [size] * 3
    assert flat == [sample for step in uninterrupted for sample in step][: len(flat)]
    assert json.loads(after)["batches"] == [[0, GBS], [6 * GBS, size]]


def test_rampup_is_one_order(project: Project, blend: list[str], uninterrupted: list[Step]) -> None:
    """Sizes 4, 8, 12, 16; the provider knows nothing of them, the schedule in the state does."""
    steps, state = run(project, blend, Layout(dp=2, mbs=2), first=0, stop=6, rampup_batch_size=["4", "4", "48"])
    flat = [sample for step in steps for sample in step]
    assert flat == [sample for step in uninterrupted for sample in step][: len(flat)]
    assert json.loads(state)["batches"] == [[0, 4], [16, 8], [32, 12], [56, 16]]


@pytest.mark.parametrize("iters", [STEPS + 1, 3 * STEPS, 100 * STEPS])
def test_more_iterations_change_nothing(
    project: Project, blend: list[str], uninterrupted: list[Step], iters: int
) -> None:
    start, state = run(project, blend, Layout(), first=0, stop=5)
    rest, _ = run(project, blend, Layout(dp=2), first=5, stop=STEPS, saved=state, train_iters=iters)
    assert [*start, *rest] == uninterrupted


def test_what_stock_does(project: Project, blend: list[str], uninterrupted: list[Step]) -> None:
    """The same blend in Megatron's own datasets: one step more, and other samples come in the steps before it.

    An epoch more of a component, or its last epoch being used to 80 %, shuffles all of that component anew.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = kit.VOCABULARY, kit.EOD, -1, {"class": "Tokenizer"}

    def stock(steps: int) -> Step:
        config = GPTDatasetConfig(
            random_seed=1234,
            sequence_length=64,
            blend=(blend[1::2], [float(weight) for weight in blend[0::2]]),
            split="1,0,0",
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        built = BlendedMegatronDatasetBuilder(GPTDataset, [steps * GBS, 0, 0], lambda: True, config).build()
        return [tuple(built[0][i]["tokens"].tolist()) for i in range(STEPS * GBS)]

    def ours(steps: int) -> Step:
        trained, _ = run(project, blend, Layout(), first=0, stop=STEPS, train_iters=steps)
        return [sample for step in trained for sample in step]

    theirs = {steps: stock(steps) for steps in range(STEPS, STEPS + 6)}
    kept = {steps: sum(a == b for a, b in zip(order, theirs[STEPS], strict=True)) for steps, order in theirs.items()}
    assert kept[STEPS] == STEPS * GBS and kept[STEPS + 1] < 0.8 * STEPS * GBS and kept[STEPS + 3] < kept[STEPS + 1]
    assert {tuple(ours(steps)) for steps in theirs} == {tuple(sample for step in uninterrupted for sample in step)}


def test_epochs_are_crossed(project: Project, blend: list[str]) -> None:
    _, state = run(project, blend, Layout(), first=0, stop=STEPS)
    assert all(source["epoch"] >= 1 for source in json.loads(state)["sources"].values())


def test_dropout_is_not_touched(project: Project, blend: list[str]) -> None:
    """Reading data in this process draws nothing from torch's generator."""
    before = torch.get_rng_state()
    run(project, blend, Layout(kind="external"), first=0, stop=2)
    assert torch.equal(before, torch.get_rng_state())
