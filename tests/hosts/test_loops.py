"""Whatever a loop does with the iterator, each step trains exactly its samples, or the run stops; loops.py runs them.

What the weights have seen is what a module in the model wrote down; what they should have seen is read from the raw
``.bin`` files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megaresume
from megaresume.program import main

from .conftest import HERE, Launch, Results, _results

pytestmark = pytest.mark.process

GOOD = [
    "usual",
    "look_first",
    "peek",
    "collect_first",
    "next_behind_step",
    "break_and_go_on",
    "zip_takes_one_more",
    "islice",
    "empty_epochs",
    "split_in_two_loops",
    "two_iterators",
    "progress_bar",
    "two_forwards",
    "changed_inputs",
    "step_once",
    "retry",
    "one_loss_of_two_forwards",
    "two_losses_of_one_forward",
    "one_loss_of_all_micro_batches",
    "evaluation_with_a_graph",
    "logits_changed_in_place",
    "past_the_engine",
    "left_over_at_the_end",
    "log_fails",
    "load_again",
]
TAKEN = "a micro-batch was taken and not trained"
TWICE = "a micro-batch was trained twice"
LACKING = "a step is to be made without all of its micro-batches"
HALF = "failed half-way, and no more training is possible"
LATE = "the engine is past its first step, but no data state was restored"
LOST = "an error came between a micro-batch and the loop"
AGAIN = "engine.step() was called again, and no micro-batch was taken for it"
MADE = "a step was made, and no micro-batch was taken for it"
NONE = "a step is to be made, and no micro-batch was taken for it"
#: what stops a loop, and what the error names, on rank 0 with 1 micro-batch a step, and with 4; None: nothing is wrong.
BAD: dict[str, tuple[tuple[str, str] | None, tuple[str, str]]] = {
    "look_with_next": ((TAKEN, "samples 0 to 1 taken"), (TAKEN, "the model was not trained on samples 0 to 1")),
    "look_in_an_accumulation": (
        (TAKEN, "samples 4 to 5 taken"),
        (TAKEN, "the model was not trained on samples 4 to 5"),
    ),
    "warm_up": ((TAKEN, "samples 0 to 1 taken"), (TAKEN, "samples 0 to 1, samples 4 to 5")),
    "evaluate": (
        (TAKEN, "samples 4 to 5 taken"),
        (TAKEN, "the model was not trained on samples 4 to 5, samples 8 to 9"),
    ),
    "another_in_its_place": ((TAKEN, "samples 0 to 1 taken"), (TAKEN, "the model was not trained on samples 0 to 1")),
    "no_backward": ((TAKEN, "not trained on samples 4 to 5"), (TAKEN, "not trained on samples 28 to 29")),
    "no_backward_of_changed_inputs": (
        (TAKEN, "not trained on samples 4 to 5"),
        (TAKEN, "not trained on samples 28 to 29"),
    ),
    "step_without_anything": ((TAKEN, "not trained on samples 4 to 5"), (TAKEN, "samples 4 to 5, samples 8 to 9")),
    "two_backwards": ((TWICE, "two forwards of samples 4 to 5"), (TWICE, "two forwards of samples 28 to 29")),
    "the_same_twice": ((NONE, "no micro-batch taken"), (AGAIN, "samples 0 to 1 taken since step 0")),
    "the_one_before": ((TAKEN, "not trained on samples 4 to 5"), (TAKEN, "not trained on samples 16 to 17")),
    "what_was_shown": ((TAKEN, "not trained on samples 0 to 1"), (TAKEN, "not trained on samples 0 to 1")),
    "transform_fails": ((LOST, "OSError: a picture is not there"), (LOST, "OSError: a picture is not there")),
    "backward_fails": ((f"engine.backward() {HALF}", "out of memory"), (f"engine.backward() {HALF}", "out of memory")),
    "backward_fails_by_us": ((f"engine.backward() {HALF}", "a shard is damaged"),) * 2,
    "backward_fails_and_the_next_is_taken": ((f"engine.backward() {HALF}", "a shard is damaged"),) * 2,
    "step_fails": ((f"engine.step() {HALF}", "out of memory"), (f"engine.step() {HALF}", "out of memory")),
    "step_is_tried_again": ((f"engine.step() {HALF}", "out of memory"), (f"engine.step() {HALF}", "out of memory")),
    "pass_over": ((TAKEN, "samples 4 to 5 taken"), (TAKEN, "the model was not trained on samples 4 to 5")),
    "read_ahead": ((TAKEN, "samples 0 to 1 taken"), (TAKEN, "samples 0 to 1, samples 4 to 5")),
    "other_batches": ((NONE, "no micro-batch taken"), (AGAIN, "no micro-batch taken")),
    "batch_size_by_hand": ((LACKING, "all 12 samples of the step"), (LACKING, "all 16 samples of the step")),
    "save_in_the_middle": (
        None,
        ("a checkpoint was asked for in the middle", "samples 0 to 1 taken since step 0"),
    ),
    "attach_after_load": ((LATE, "iteration 1, no data state"), (LATE, "iteration 1, no data state")),
    "after_an_error": ((TAKEN, "samples 0 to 1 taken"), (TAKEN, "samples 0 to 1")),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loops")


@pytest.fixture(scope="module")
def loops(launch: Launch, data_yaml: Path, root: Path) -> Results:
    return Results(_results(launch, "loops.py", 2, data_yaml, root))


def raw_samples(data_yaml: Path, count: int) -> list[list[int]]:
    """The tokens of the first samples, straight from the corpora; padded with 0."""
    stream = megaresume.open_stream(data_yaml)
    bins = [np.fromfile(data_yaml.parent / f"{name}.bin", np.uint16) for name in ("web", "code")]
    starts = []
    for name in ("web", "code"):
        raw = (data_yaml.parent / f"{name}.idx").read_bytes()
        documents = int.from_bytes(raw[18:26], "little")
        starts.append(np.frombuffer(raw, "<i8", documents, 34 + 4 * documents) // 2)
    found = []
    for segments in stream.plan(0, count):
        sample: list[int] = []
        for s in segments:
            begin = int(starts[s.source][s.document]) + s.offset
            sample += bins[s.source][begin : begin + s.length].tolist()
        found.append(sample + [0] * (32 - len(sample)))
    return found


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_a_loop_trains_its_samples_or_stops(loops: Any, data_yaml: Path, name: str, accumulation: int) -> None:
    raw = raw_samples(data_yaml, 3 * 4 * accumulation)
    for rank, found in enumerate(loops[f"{name}_{accumulation}"]):
        expected = None if name in GOOD else BAD[name][accumulation == 4]
        if expected is None:
            assert found["error"] == [] and found["steps"] == 3
        else:
            assert found["error"][0] == "StateError" and found["error"][1].startswith(expected[0]), found["error"]
            assert rank != 0 or expected[1] in found["error"][1].split("\n")[1] + found["error"][1].split("\n")[2]
        # Whether it stopped or not: what the weights have seen are the samples in their order, and they are counted.
        assert found["samples"] == found["steps"] * 4 * accumulation
        starts = [4 * micro + 2 * rank for micro in range(found["steps"] * accumulation)]
        assert found["seen"] == [raw[start] + raw[start + 1] for start in starts]


def test_a_forgotten_load_is_refused_and_nothing_is_overwritten(loops: Any, root: Path) -> None:
    for found in loops["forgotten"]:
        for case in ("known", "unknown", "weights_alone", "from_another"):
            kind, text = found[case]
            assert kind == "UsageError" and text.startswith("this start did not load a checkpoint of this directory")
            assert f"global_step3 in {root / 'forgotten'}" in text
            assert "another directory, or move this one away" in text
        assert found["changed"] == [] and found["files"] > 5
        assert found["loaded"] == found["killed_in_its_first_save"] == []


def test_a_load_leaves_no_gradients_of_the_step_it_gives_up(loops: Any) -> None:
    for found in loops["load_in_a_step"]:
        assert len(found) == 4
        for case, (expected, after) in found.items():
            assert after == expected, case


def test_gradients_that_are_only_read_train_nothing(loops: Any) -> None:
    for rank, found in enumerate(loops["gradients_read"]):
        assert found["read_as_well"] == [[], 3]
        samples = f"samples {2 * rank} to {2 * rank + 1}"
        for case, words in (("only_read", TAKEN), ("two_backwards", TWICE)):
            error, made = found[case]
            assert error[1].startswith(words) and samples in error[1] and made == 0, case


def test_batches_of_other_loaders(loops: Any) -> None:
    for found in loops["loaders"]:
        assert found["plain"] == found["peeked"] == found["changed"] == [[], [0, 1, 2, 3]]
        error, trained = found["looked"]
        assert error[1].startswith(TAKEN) and trained == []
        assert "batch 0 of this rank, batch 1 of this rank taken since step 0, 1 of them in its gradients" in error[1]
        error, trained = found["another"]
        assert error[1].startswith(TAKEN) and "the model was not trained on batch 0 of this rank" in error[1]
        assert found["saved_after_peek"] == [[], [1]]
        assert found["not_restored"][0][1].startswith("the loader does not take its state back")


def test_batches_of_another_engine(loops: Any) -> None:
    for found in loops["crossed"]:
        assert found[1].startswith(TAKEN) and "the model was not trained on samples" in found[1]


def test_pipelines(loops: Any) -> None:
    for found in loops["pipelines"]:
        assert found["usual_pipeline"] == [[], 2, 16]
        error, *counts = found["evaluates"]
        assert error[0] == "UsageError" and counts == [1, 8]
        assert "handed out within train_batch only" in error[1]
        assert "do not evaluate with it" in error[1]
        error, *counts = found["fails"]
        assert error[1].startswith(f"engine.train_batch() {HALF}") and counts == [0, 0]
        error, made = found["ends"]  # on both ranks: the one that reads no more would wait for the other
        assert error[0] == "StreamExhausted" and made == loops["pipelines"][0]["ends"][1] > 2
        error, *_ = found["other_iterator"]
        assert error[0] == "StateError" and error[1].startswith(MADE)


def test_the_log_has_what_the_model_was_given(loops: Any, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not what was handed out: so `verify` notices what every count says is right."""
    assert loops["unguarded"] == [48, 48]
    assert main(["verify", str(root / "unguarded")]) == 0  # the states alone cannot tell
    capsys.readouterr()
    assert main(["verify", str(root / "unguarded"), "--log-samples", str(root / "unguarded_logs")]) == 1
    said = capsys.readouterr().out
    assert "first difference in the log: step 1, rank 0" in said
    assert "samples recorded   4 to 5, 8 to 9, 12 to 13" in said


def test_a_rank_that_errs_alone_ends_the_job(launch: Launch, data_yaml: Path, tmp_path: Path) -> None:
    """It does not wait for the others, which wait for it: its launcher ends them."""
    status, output = launch(str(HERE / "loops.py"), data_yaml, tmp_path, "alone", launcher="torchrun")
    assert status != 0 and TAKEN in output and "samples 2 to 3 taken" in output


def _text_of(loops: Any, case: str) -> str:
    """The error or warning that a case of docs/deepspeed-loops.md names, on rank 0."""
    if case == "drawn_after_a_save":
        return str(loops[case][0]).replace(". ", ".\n").strip()
    name, which = case.split()[:2]
    if name == "forgotten":
        found = loops[name][0][which]
    elif name == "pipelines":
        found = loops[name][0][which][0]
    else:
        found = loops[f"{name}_{which}"][0]["error"]
    return str(found[1])


def test_the_document_shows_what_is_printed(loops: Any, root: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "deepspeed-loops.md").read_text()
    cases = re.findall(r"<!-- ([^>]*) -->\n```text\n(.*?)\n```", text, re.DOTALL)
    assert len(cases) == text.count("```text") == 19
    for case, shown in cases:
        lines = _text_of(loops, case).replace(str(root / "forgotten"), "/data/checkpoints").split("\n")
        assert shown.split("\n") == (lines if case.endswith(" whole") else lines[:2])
