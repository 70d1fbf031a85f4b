"""The provider as Megatron calls it: who gets datasets, of what length, from where on."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.hosts.megatron.project import Project
from megaresume.hosts.megatron.provider import MicroBatches, stream_provider
from megaresume.hosts.megatron.samples import SAMPLE_KEY, SampleDataset, SampleForm
from megaresume.hosts.megatron.streams import StreamOrder, Streams, open_streams
from megaresume.stream.batches import BatchSchedule

FORM = SampleForm(identity=True)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    path = kit.write_corpus(tmp_path_factory.mktemp("provider") / "text", kit.documents(1, 2000))
    return open_streams(kit.arguments(data_path=[path], split="80,10,10"), None)


@pytest.fixture
def order(streams: Streams) -> StreamOrder:
    return StreamOrder(streams, saved=None, position=0, iteration=0, schedule=BatchSchedule.constant(8))


class Ranks(types.ModuleType):
    """Where this process stands, in the words of megatron.core.parallel_state."""

    tp = pp = dp = 0
    dp_size = 1

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tp

    def get_data_parallel_rank(self) -> int:
        return self.dp

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    module = sys.modules["ranks_of_a_test"] = Ranks("ranks_of_a_test")
    yield module
    del sys.modules["ranks_of_a_test"]


@pytest.fixture
def project(ranks: Ranks) -> Project:
    modules = {
        "parallel_state": ranks.__name__,
        "builder": "megatron.core.datasets.blended_megatron_dataset_builder",
    }
    return Project(kind="megatron-lm", root=Path(), version="0.16.1", modules=modules)


def script(is_dataset_built_on_rank: str, provider: str) -> Callable[..., Any]:
    """A user's script with these two functions; its globals are its own."""
    names: dict[str, Any] = {"asked": []}
    exec(f"{is_dataset_built_on_rank}\n{provider}", names)
    function: Callable[..., Any] = names["train_valid_test_datasets_provider"]
    return function


PROVIDER = "def train_valid_test_datasets_provider(nums, vp_stage=None): raise AssertionError('called')"
OLD_PROVIDER = "def train_valid_test_datasets_provider(nums): raise AssertionError('called')"
#: is_dataset_built_on_rank as it stands in the versions, and whether it was asked for packed samples.
SIGNATURES = {
    "0.8": ("def is_dataset_built_on_rank(): asked.append(()); return answer", OLD_PROVIDER, ()),
    "0.16": ("def is_dataset_built_on_rank(vp_stage=None): asked.append((vp_stage,)); return answer", PROVIDER, (1,)),
    "0.19": (
        "def is_dataset_built_on_rank(vp_stage=None, is_packed_sequence=False):"
        " asked.append((vp_stage, is_packed_sequence)); return answer",
        PROVIDER,
        (1, True),
    ),
}


@pytest.mark.parametrize("version", SIGNATURES)
@pytest.mark.parametrize("answer", [False, True])
def test_the_script_says_where_data_is_wanted(project: Project, order: StreamOrder, version: str, answer: bool) -> None:
    asks, base, expected = SIGNATURES[version]
    function = script(asks, base)
    function.__globals__["answer"] = answer

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # as megaresume.provider does
        return function(*args, **kwargs)

    chunk = wrapped if version == "0.8" else functools.partial(wrapped, vp_stage=1)
    provide = stream_provider(project, kit.arguments(), order, SampleForm(cu_seqlens="padded"), chunk)
    assert provide.is_distributed  # type: ignore[attr-defined]
    built = provide([160, 48, 16])
    assert [part is not None for part in built] == [answer] * 3
    assert function.__globals__["asked"] == [expected]


def test_without_the_script_tensor_parallel_rank_0_reads(project: Project, ranks: Ranks, order: StreamOrder) -> None:
    provide = stream_provider(project, kit.arguments(), order, FORM, None)
    assert provide([160, 48, 16])[0] is not None
    ranks.tp = 1
    assert provide([160, 48, 16]) == (None, None, None)


def test_megatron_deepspeed_asks_where_it_wants(ranks: Ranks, order: StreamOrder) -> None:
    ranks.tp = 1
    deepspeed = Project(kind="bigscience", root=Path(), version="1", modules={"parallel_state": ranks.__name__})
    train, _, _ = stream_provider(deepspeed, kit.arguments(), order, FORM, None)([160, 48, 16])
    assert len(train) == 160 and not hasattr(train, "index_split")


def test_lengths_are_megatrons_own(project: Project, order: StreamOrder) -> None:
    from megatron.core.datasets.utils import Split

    provide = stream_provider(project, kit.arguments(), order, FORM, None)
    parts = provide([160, 48, 16])
    assert [len(part) for part in parts] == [160, 48, 16]
    assert [part.index_split for part in parts] == [Split.train, Split.valid, Split.test]
    assert provide([160, 0, 0])[1:] == (None, None)
    assert provide([160, None, 16])[1] is None


def test_a_finished_run_and_more_evaluations_than_planned(project: Project, order: StreamOrder) -> None:
    """Megatron's sampler fails with no samples left; the streams have more."""
    args = kit.arguments(consumed_train_samples=160, consumed_valid_samples=64)
    train, valid, _ = stream_provider(project, args, order, FORM, None)([160, 48, 16])
    assert next(iter(kit.Sampler(len(train), 160, 2, 0, 4))) == [160, 161]
    assert len(list(kit.Sampler(len(valid), 64, 2, 0, 4))) >= 48 // 8


def test_smaller_global_batches_from_here_on(project: Project, order: StreamOrder) -> None:
    """10 steps of 16, then 10 of 4: Megatron counts 20 steps of 4, which is less than what was trained already."""
    args = kit.arguments(consumed_train_samples=160, iteration=10, train_iters=20, global_batch_size=4)
    train, _, _ = stream_provider(project, args, order, FORM, None)([80, 4, 4])
    assert len(list(kit.Sampler(len(train), 160, 2, 0, 2))) >= 10


def test_the_last_step_is_whole(project: Project, streams: Streams) -> None:
    """--train-samples 80, in steps of 4 up to sample 20 and then of 8: the last one trains samples 76 to 83."""
    order = StreamOrder(streams, saved=None, position=0, iteration=0, schedule=BatchSchedule(((0, 4), (20, 8))))
    train, _, _ = stream_provider(project, kit.arguments(), order, FORM, None)([80, 48, 16])
    assert len(train) == 84
    args = kit.arguments(phase_transition_iterations=[3], iteration=5, consumed_train_samples=20, global_batch_size=4)
    train, _, _ = stream_provider(project, args, order, FORM, None)([60, 48, 16])
    assert len(train) == 8 + 60 + 4 and int(train[len(train) - 1][SAMPLE_KEY]) == 83


def test_the_three_parts_are_different_data(project: Project, order: StreamOrder) -> None:
    parts = stream_provider(project, kit.arguments(), order, FORM, None)([160, 48, 16])
    firsts = [tuple(part[0]["tokens"].tolist()) for part in parts]
    assert len(set(firsts)) == 3


def test_phases_go_on_in_one_stream(project: Project, order: StreamOrder) -> None:
    """--phase-transition-iterations: Megatron's sampler starts at the samples of the phase, not of the run."""
    args = kit.arguments(phase_transition_iterations=[10], iteration=12, consumed_train_samples=96)
    train, _, _ = stream_provider(project, args, order, FORM, None)([80, 48, 16])
    first = next(iter(kit.Sampler(len(train), 16, 2, 0, 4)))
    assert [int(item[SAMPLE_KEY]) for item in train.__getitems__(first)] == [96, 97]


# --dataloader-type external


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [0, 2])
def test_external_iterators_are_where_the_sampler_would_be(
    project: Project, ranks: Ranks, order: StreamOrder, num_workers: int
) -> None:
    ranks.dp_size = 2
    for ranks.dp in range(2):
        args = kit.arguments(dataloader_type="external", consumed_train_samples=24, num_workers=num_workers)
        train, valid, test = stream_provider(project, args, order, FORM, None)([80, 48, 16])
        for iterator, start, stop in ((train, 24, 24 + 80), (valid, 0, 48), (test, 0, 16)):
            assert isinstance(iterator, MicroBatches)
            expected = list(kit.Sampler(stop, start, 2, ranks.dp, 2))
            assert [batch[SAMPLE_KEY].tolist() for batch in iterator] == expected
            with pytest.raises(StopIteration):
                next(iterator)


def test_evaluation_has_its_own_micro_batch_size(project: Project, ranks: Ranks, order: StreamOrder) -> None:
    args = kit.arguments(dataloader_type="external", eval_micro_batch_size=4)
    train, valid, _ = stream_provider(project, args, order, FORM, None)([80, 48, 16])
    assert len(next(train)["tokens"]) == 2 and len(next(valid)["tokens"]) == 4


def test_an_external_iterator_is_safe_to_look_at(project: Project, order: StreamOrder) -> None:
    """Megatron asks for len() and takes TypeError for an answer; other patchers call iter() twice; reruns replay."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    args = kit.arguments(dataloader_type="external")
    train, _, _ = stream_provider(project, args, order, FORM, None)([80, 48, 16])
    with pytest.raises(TypeError):
        len(train)
    assert iter(train) is iter(iter(train)) is train
    before = torch.get_rng_state()
    wrapped = RerunDataIterator(train)
    assert next(wrapped)[SAMPLE_KEY].tolist() == [0, 1]
    assert iter(train) is train
    assert next(wrapped)[SAMPLE_KEY].tolist() == [2, 3]
    assert torch.equal(before, torch.get_rng_state())  # dropout is as without it


def test_datasets_of_chunks_share_the_stream(project: Project, order: StreamOrder) -> None:
    one, other = (stream_provider(project, kit.arguments(), order, FORM, None)([80, 48, 16])[0] for _ in range(2))
    assert isinstance(one, SampleDataset) and one is not other and one.stream is other.stream
    for batch in kit.Sampler(80, 0, 2, 0, 1):
        items = zip(one.__getitems__(batch), other.__getitems__(batch), strict=True)
        assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in items)
