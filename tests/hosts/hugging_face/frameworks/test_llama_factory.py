"""LLaMA-Factory, unmodified, from its command line under the launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hugging_face.frameworks.programs import ITEMS, Program, tiny, write_config
from tests.hosts.torch.record import items, lines, trained
from tests.release import release

pytestmark = pytest.mark.process

DATASET = {
    "file_name": "data.jsonl",
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}


@pytest.fixture(scope="module")
def program(environment: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Program:
    bin = environment("llamafactory")
    directory = tiny(tmp_path_factory.mktemp("llamafactory"), bin)
    columns = {name: name for name in ("messages", "chosen", "rejected")}
    pairs = DATASET | {"file_name": "pairs.jsonl", "columns": columns, "ranking": True}
    (directory / "dataset_info.json").write_text(json.dumps({"words": DATASET, "pairs": pairs}))
    return Program(bin=bin, directory=directory)


def train(program: Program, run: str, *flags: str, start: dict[str, Any] | None = None, **options: Any) -> Any:
    """``llamafactory-cli train``: exit status and output."""
    config = {
        "model_name_or_path": str(program.directory / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(program.directory),
        "dataset": "words",
        "template": "default",
        "cutoff_len": 32,
        "output_dir": str(program.directory / run),
        "overwrite_output_dir": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_steps": 5,
        "report_to": "none",
        "use_cpu": True,
        **options,
    }
    path = write_config(program.directory / f"{run}.yaml", config)
    return program.start("llamafactory-cli", "train", path, *flags, run=run, **(start or {}))


@release(
    "LLaMA-Factory, which no extra installs; eight launches of it",
    "`tests/hosts/hugging_face/test_launch.py::test_killed_in_a_save_and_resumed`, "
    "`tests/hosts/hugging_face/test_families.py::test_llama_factory`",
)
@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 2},
        {"num_train_epochs": 6, "packing": True, "finetuning_type": "lora"},
        {"num_train_epochs": 2, "stage": "dpo", "dataset": "pairs"},
    ],
    ids=["full", "packed-lora", "dpo"],
)
def test_killed_in_a_save_and_resumed(program: Program, options: Any) -> None:
    run = "packed" if "packing" in options else options.get("stage", "full")
    whole, output = program.directory / f"{run}-whole", program.directory / run
    status, text = train(program, whole.name, **options)
    assert status == 0, text[-3000:]
    order = items(trained(whole))
    assert sorted(order) == sorted([*range(ITEMS)] * options["num_train_epochs"])
    # It starts torchrun by itself.
    start = {"kill": "save 10", "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
    size = {"per_device_train_batch_size": 1}
    status, text = train(program, run, "--megaresume-max-starts", "9", start=start, **options | size)
    assert status != 0 and (output / "checkpoint-10").is_dir(), text[-3000:]
    # The newest one by its name is what it resumes from, if left to itself.
    start = {"attempt": 2, "kill": "step 14"}
    status, text = train(program, run, start=start, overwrite_output_dir=False, **options)
    assert status != 0 and "step 5 from checkpoint-5" in text and "repeated 0 skipped 0" in text, text[-3000:]
    status, text = train(program, run, start={"attempt": 3}, gradient_accumulation_steps=1, **options)
    assert status == 0 and "step 10 from checkpoint-10" in text, text[-3000:]
    assert items(trained(output)) == order


@release(
    "LLaMA-Factory: two launches",
    "`tests/hosts/hugging_face/test_families.py::test_llama_factory`, "
    "`tests/hosts/hugging_face/test_trainer.py::test_refused`",
)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disable_shuffling": True}, "disable_shuffling cannot be used"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy cannot be used"),
    ],
    ids=["disable_shuffling", "sequential"],
)
def test_refused(program: Program, options: Any, words: str) -> None:
    run = next(iter(options))
    status, text = train(program, run, **options)
    assert status != 0 and words in text, text[-3000:]
    assert "megaresume: error: " in text and not lines(program.directory / run)
