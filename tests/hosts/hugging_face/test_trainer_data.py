"""What `megaresume.attach` takes of `megaresume.DataLoader`: packing, keyed randomness, skips and stages.

All in this process, with one rank, interrupted, and resumed; what was trained is read back from the batches.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import random
import typing
from pathlib import Path
from typing import Any

import pytest

from tests.release import release

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

import megaresume
from megaresume.batches.item_options import ItemOptions
from megaresume.program import main
from megaresume.stream.errors import StateError, UsageError
from tests.hosts.hugging_face.program import ITEMS, Numbers, Recorder, Texts, make
from tests.hosts.torch.record import items, launch, launch_forked, lines, trained

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("program.py")
PACKED: dict[str, Any] = {"seq_length": 24}


def run(output: Path, attach: Any = None, **options: Any) -> Recorder:
    """Train two epochs of texts."""
    trainer = make(output, **{"data": Texts(), "num_train_epochs": 2} | options)
    megaresume.attach(trainer, **attach or {})
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of packed texts, which nobody stops."""
    output = tmp_path_factory.mktemp("whole") / "run"
    trainer = run(output, PACKED)
    assert trainer.state.epoch == 2 and trainer.state.global_step == trainer.state.max_steps
    return output


def cut(output: Path, attach: Any = PACKED, step: int = 8, **options: Any) -> None:
    """Interrupted in that step; steps are saved in fives."""
    with pytest.raises(KeyboardInterrupt):
        run(output, attach, kill=("interrupt", step), **options)


def test_it_takes_what_the_loader_takes() -> None:
    loader = inspect.signature(megaresume.DataLoader).parameters
    hints = typing.get_type_hints(megaresume.DataLoader.__init__)
    assert typing.get_type_hints(ItemOptions) == {
        name: hints[name] for name in loader if name in ItemOptions.__annotations__
    }


def test_packed_items_come_whole_and_once_an_epoch(order: list[int]) -> None:
    assert sorted(order) == sorted(2 * list(range(ITEMS)))
    assert order != sorted(order)


def test_packed_batches_are_rows_without_padding(whole: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", data=Texts())
    row = next(iter(megaresume.attach(trainer, seq_length=24)))
    assert row["input_ids"].shape == row["labels"].shape == (1, int(row["cu_seq_lens_q"][-1]))
    assert 24 < row["input_ids"].numel() <= 48


@pytest.mark.parametrize("options", [{"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}])
def test_packed_with_another_batch(whole: Path, order: list[int], tmp_path: Path, options: Any) -> None:
    output = tmp_path / "run"
    cut(output)
    trainer = run(output, PACKED, attempt=2, **options)
    assert items(trained(output)) == order
    assert trainer.state.global_step == trainer.state.max_steps and trainer.state.epoch == 2
    finished = run(output, PACKED, attempt=3, **options)
    assert finished.state.global_step == trainer.state.global_step
    assert not [line for line in lines(output) if line["attempt"] == 3]


@release(
    "two launches of two ranks",
    "`::test_packed_with_another_batch`, `tests/hosts/contract/test_trainer.py`",
)
def test_packed_on_two_ranks_killed_in_a_save(order: list[int], tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = {"texts": True, "num_train_epochs": 2, "attach": PACKED, "per_device_train_batch_size": 1}
    done = launch(PROGRAM, output, 2, kill=("save", 10), **options)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-3000:]
    done = launch(PROGRAM, output, 2, attempt=2, **options | {"per_device_train_batch_size": 2})
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(items(trained(output))) == sorted(order)


def test_the_program_knows_which_items_were_packed(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(whole), "--steps", "3:5", "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [s["document"] for one in said for s in one["segments"]] == items(trained(whole)[2:4])
    assert main(["verify", str(whole)]) == 0


@release(
    "three more trainings",
    "`::test_packed_with_another_batch`, "
    "`tests/batches/test_packed_items.py::test_other_lengths_packing_or_samples_are_refused`",
)
def test_packed_otherwise(order: list[int], tmp_path: Path) -> None:
    output = tmp_path / "run"
    cut(output)
    for attach, words in (
        ({"seq_length": 32}, r"seq_length 32(.|\n)*seq_length 24(.|\n)*on_change='stage'"),
        (PACKED | {"packing": "split"}, r"packing\.mode \"split\"(.|\n)*on_change='stage'"),
        ({}, r"items were packed before(.|\n)*pass seq_length=24"),
    ):
        with pytest.raises(StateError, match=words):
            run(output, attach, attempt=2)
    # More epochs alone need no word; with another packing they come too.
    run(output, {"seq_length": 32, "on_change": "stage"}, attempt=2, num_train_epochs=3)
    assert sorted(items(trained(output))) == sorted(3 * list(range(ITEMS)))


@release(
    "two more trainings",
    "`tests/hosts/hugging_face/test_trainer.py::test_max_steps_and_a_checkpoint_by_its_path`, "
    "`::test_packed_with_another_batch`",
)
def test_packed_until_a_step(order: list[int], tmp_path: Path) -> None:
    output = tmp_path / "run"
    trainer = run(output, PACKED, max_steps=7)
    assert trainer.state.global_step == 7 and items(trained(output)) == order[: len(items(trained(output)))]
    trainer = run(output, PACKED, attempt=2, max_steps=40)
    assert trainer.state.global_step == 40 and set(items(trained(output))[-ITEMS:]) <= set(range(ITEMS))
    with pytest.raises(UsageError, match="the data ends before the last step"):
        run(tmp_path / "other", data={"data": (Texts(), {"weight": 1, "max_epochs": 1})}, max_steps=40)


def test_skipped_items(tmp_path: Path) -> None:
    output, skip = tmp_path / "run", {"documents": {"data": [3, 17]}, "samples": ["8:12"]}
    cut(output, {"skip": skip}, data=Numbers(), per_device_train_batch_size=4)
    trainer = run(output, {"skip": skip}, attempt=2, data=Numbers())
    handed = items(trained(output))
    epochs = handed[:94], handed[94:]
    assert sorted(epochs[1]) == sorted(set(range(ITEMS)) - {3, 17})
    assert len(set(epochs[0])) == 94 and set(epochs[0]) < set(epochs[1])
    assert trainer.state.epoch == 2 and trainer.state.global_step == trainer.state.max_steps


@release(
    "two more trainings",
    "`::test_skipped_items`, and `tests/batches/test_items_changed.py`",
)
def test_stages(tmp_path: Path) -> None:
    output = tmp_path / "run"
    attach = {"data": {"a": (Numbers(), 1), "b": (Numbers(ITEMS, first=ITEMS), 1)}}
    attach |= {"stages": [{"from_step": 6, "weights": {"a": 1, "b": 0}}]}
    cut(output, attach, max_steps=12)
    run(output, attach, attempt=2, max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    handed = items(trained(output))
    assert len([i for i in handed[:24] if i >= ITEMS]) == 12 and max(handed[24:]) < ITEMS


class Noisy(Numbers):
    drawn: list[float]

    def __getitem__(self, i: int) -> Any:
        self.drawn.append(random.random())
        return super().__getitem__(i)


def test_keyed_items_and_that_a_resume_is_keyed_too(tmp_path: Path) -> None:
    def drawn(output: Path, **options: Any) -> list[float]:
        data = Noisy()
        data.drawn = []
        with contextlib.suppress(KeyboardInterrupt):
            run(output, {"keyed": True}, data=data, max_steps=12, **options)
        return data.drawn[64:]  # read twice, for the hash of the items

    output = tmp_path / "run"
    whole = drawn(tmp_path / "whole")
    assert drawn(output, kill=("interrupt", 8))[:20] == whole[:20]
    rest = drawn(output, attempt=2, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    assert rest == whole[20:]
    with pytest.raises(StateError, match=r"data\.keyed (null|false)(.|\n)*data\.keyed true"):
        run(output, data=Numbers(), attempt=3)


LIKE = {"padded": True, "train_sampling_strategy": "group_by_length", "num_train_epochs": 2}


def lengths_of_steps(output: Path) -> list[int]:
    """How much the items of a step differ in length: item i has 3 + i % 6 tokens."""
    return [max(lengths) - min(lengths) for step in trained(output) for lengths in [[i % 6 for i in step]]]


def test_batches_of_like_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed on two ranks in a save, and resumed on one, in steps of another size."""
    whole, output = tmp_path / "whole", tmp_path / "killed"
    run(whole, per_device_train_batch_size=4, **LIKE)
    order = items(trained(whole))
    assert sorted(order) == sorted(2 * list(range(ITEMS)))
    differ = lengths_of_steps(whole)
    assert sum(differ) / len(differ) < 2.5  # of 5, as they are in a random order
    status, _ = launch_forked(PROGRAM, output, 2, kill=("save", 10), **LIKE)
    assert status
    run(output, attempt=2, per_device_train_batch_size=3, gradient_accumulation_steps=1, **LIKE)
    steps = trained(output)
    assert items(steps) == order and [len(step) for step in steps[:6]] == [8] * 5 + [3]
    assert main(["trace", str(output), "--steps", "7"]) == 0
    assert main(["verify", str(output)]) == 0
    with pytest.raises(StateError, match="train_sampling_strategy"):
        run(output, attempt=3, **LIKE | {"train_sampling_strategy": "random", "num_train_epochs": 3})


@pytest.mark.parametrize(
    ("attach", "words"),
    [
        ({"batch_size": 4}, "per_device_train_batch_size"),
        ({"seqlength": 4}, "did you mean 'seq_length'"),
        ({"collate_fn": list}, "has no collate_fn\n.*\n.*expected: .*stop, metrics, append"),
        ({"lengths": "length"}, "packing without the tokens of a sample"),
        ({"group_by_length": True}, "train_sampling_strategy"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, attach: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        megaresume.attach(make(tmp_path / "run"), **attach)


def test_a_collator_that_pads_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", data=Texts())
    trainer.data_collator = transformers.DataCollatorForSeq2Seq(None)
    with pytest.raises(UsageError, match="DataCollatorForSeq2Seq"):
        megaresume.attach(trainer, seq_length=24)
    side_by_side = transformers.default_data_collator
    trainer.data_collator = lambda items: side_by_side([{"input_ids": item["input_ids"][:2]} for item in items])
    loader = megaresume.attach(trainer, seq_length=24)
    with pytest.raises(UsageError, match=r"data_collator: \d rows of \d items"):
        next(iter(loader))
    trainer = make(tmp_path / "other", data=Texts())
    trainer.data_collator = transformers.DataCollatorWithFlattening()
    row = next(iter(megaresume.attach(trainer, seq_length=24)))
    assert row["input_ids"].shape == row["position_ids"].shape
