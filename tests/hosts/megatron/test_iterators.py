"""Around Megatron's build of the data iterators: every replica reads the same, and one that does not is named."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.cluster.processes import LocalJob
from megaresume.hosts.megatron.iterators import check_replicas
from megaresume.stream.errors import StateError

pytest.importorskip("megatron.core")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the two ranks of replicas.py said: scenario -> words of each rank."""
    directory = tmp_path_factory.mktemp("replicas")
    kit.write_corpus(directory / "a", kit.documents(1, 300))
    for seed, node in enumerate(("one", "other")):  # the same path, if these were nodes
        (directory / node).mkdir()
        kit.write_corpus(directory / node / "text", kit.documents(seed, 300))
    output = directory / "output.txt"
    variables = {"MEGARESUME_CACHE": str(directory)}
    program = str(HERE / "replicas.py")
    with LocalJob(program, [str(directory)], num_processes=2, output=output, launcher="env", env=variables) as job:
        status = job.wait(240)
        text = job.text()
    assert status == 0, text
    said: dict[str, list[str]] = {}
    for name, _, words in re.findall(r"^(.*?) \| rank (\d) \| (.*)$", text, re.MULTILINE):
        said.setdefault(name, []).append(words)
    return said


REFUSALS = {
    "last stage not restored": (
        r"rank 1 \(tp 0, pp 1, dp 0, cp 0\) differs from the others in its restored state",
        None,
    ),
    "first stage not restored": (
        r"rank 0 \(tp 0, pp 0, dp 0, cp 0\) differs from the others in its restored state",
        None,
    ),
    "nobody restored": ("no data state was restored", "--megaresume-mode guard"),
    "other counter": (r"rank 1 \(tp 0, pp 1, dp 0, cp 0\) differs from the others in its sample", "80"),
    "other corpus": ("rank 1 .* differs from the others in its corpora", "same corpora on every node"),
    "no corpus": ("nowhere.* is missing", "rank 1"),
    "other flag": ("rank 1 .* differs from the others in its data config", None),
    "flag of one": ("--mock-data does not go together", None),
}


@pytest.mark.process
@pytest.mark.parametrize("name", REFUSALS)
def test_all_ranks_refuse_what_is_wrong_on_one(refusals: dict[str, list[str]], name: str) -> None:
    headline, also = REFUSALS[name]
    assert len(refusals[name]) == 2
    for words in refusals[name]:
        assert re.search(headline, words), words
    assert also is None or any(also in words for words in refusals[name])


def test_replicas_that_agree_pass() -> None:
    facts = {"sample": 80, "digest": "ab"}
    check_replicas([("pp 0", facts), ("pp 1", dict(facts))])
    with pytest.raises(StateError, match=r"rank 1 \(pp 1\) differs from the others in its digest"):
        check_replicas([("pp 0", facts), ("pp 1", facts | {"digest": "ac"})])


# Real runs of the stand-in


def flags(data_yaml: Path, *more: object) -> list[object]:
    sizes = ["--train-iters", 6, "--micro-batch-size", 2, "--global-batch-size", 8]
    return ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, *sizes, *more]


@pytest.fixture(scope="module")
def one_rank(mini: Any, data_yaml: Path) -> dict[int, list[str]]:
    run = mini(*flags(data_yaml), num_processes=1)
    assert run.status == 0, run.output
    steps: dict[int, list[str]] = run.steps()
    return steps


LAYOUTS = {
    "tensor": ["--tensor-model-parallel-size", 2],
    "pipeline, virtual": ["--pipeline-model-parallel-size", 2, "--num-virtual-stages", 2],
    "context": ["--context-parallel-size", 2, "--num-workers", 1],
    "external, virtual": ["--dataloader-type", "external", "--num-virtual-stages", 2, "--num-workers", 1],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_read_the_same(mini: Any, data_yaml: Path, one_rank: dict[int, list[str]], name: str) -> None:
    run = mini(*flags(data_yaml, *LAYOUTS[name]))
    assert run.status == 0, run.output[-3000:]
    assert run.steps() == one_rank


def test_data_of_skipped_iterations_move_up(mini: Any, data_yaml: Path, one_rank: dict[int, list[str]]) -> None:
    run = mini(*flags(data_yaml, "--iterations-to-skip", 3), num_processes=1)
    assert run.status == 0, run.output[-3000:]
    steps = run.steps()
    assert sorted(steps) == sorted(one_rank)  # no step is lost
    order = [one_rank[step] for step in sorted(one_rank)]
    # this Megatron counts from 0: 3 is the fourth step
    assert [steps[step] for step in sorted(steps)][:-1] == order[:3] + order[4:]
    assert steps[max(steps)] not in order


def test_documents_that_see_each_other_are_said_once(mini: Any, data_yaml: Path) -> None:
    run = mini(*flags(data_yaml, "--no-create-attention-mask-in-dataloader"))
    assert run.status == 0, run.output[-3000:]
    assert run.output.count("documents of one sample see each other") == 1


def test_rampup_takes_the_same_samples(mini: Any, data_yaml: Path, one_rank: dict[int, list[str]]) -> None:
    run = mini(*flags(data_yaml, "--rampup-batch-size", 4, 4, 12))
    assert run.status == 0, run.output[-3000:]
    flat = [sample for _, samples in sorted(run.steps().items()) for sample in samples]
    assert {len(samples) for samples in run.steps().values()} == {4, 8}
    assert flat == [sample for _, samples in sorted(one_rank.items()) for sample in samples][: len(flat)]
