"""ms-swift, unmodified, from its command line under the launcher: it trains in a process that it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hugging_face.frameworks.programs import ITEMS, Program, tiny
from tests.hosts.torch.record import items, lines, trained
from tests.release import release

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def program(environment: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Program:
    bin = environment("swift")
    return Program(bin=bin, directory=tiny(tmp_path_factory.mktemp("swift"), bin))


def train(program: Program, run: str, *flags: str, start: dict[str, Any] | None = None, **options: Any) -> Any:
    """``swift sft``: exit status and output."""
    said = {
        "model": program.directory / "model",
        "model_type": "llama",
        "template": "dummy",
        "tuner_type": "full",
        "dataset": program.directory / "data.jsonl",
        "split_dataset_ratio": 0,
        "output_dir": program.directory / run,
        "add_version": "false",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "save_steps": 5,
        "report_to": "none",
        "torch_dtype": "float32",
        "max_length": 32,
        "use_cpu": "true",
        **options,
    }
    words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    return program.start("swift", "sft", *words, *flags, run=run, **(start or {}))


@release(
    "ms-swift, which no extra installs; four launches of it",
    "`tests/hosts/hugging_face/test_launch.py::test_killed_in_a_save_and_resumed`, "
    "`tests/hosts/hugging_face/test_families.py::test_swift`",
)
def test_killed_in_a_save_and_resumed(program: Program) -> None:
    status, text = train(program, "whole")
    assert status == 0, text[-3000:]
    order = items(trained(program.directory / "whole"))
    assert all(sorted(order[ITEMS * e : ITEMS * (e + 1)]) == list(range(ITEMS)) for e in range(2))
    start = {"kill": "save 10", "NPROC_PER_NODE": "2", "MASTER_PORT": "29631"}
    status, text = train(program, "run", start=start, per_device_train_batch_size=1)
    assert status != 0 and (program.directory / "run" / "checkpoint-10").is_dir(), text[-3000:]
    start = {"attempt": 2, "kill": "step 14"}
    status, text = train(program, "run", "--megaresume-max-starts", "9", start=start)
    assert status != 0 and "step 5 from checkpoint-5" in text and "repeated 0 skipped 0" in text, text[-3000:]
    # The checkpoint that it names is the newest, and an older one than the launcher knows of.
    newest = program.directory / "run" / "checkpoint-10"
    options = {"gradient_accumulation_steps": 1, "resume_from_checkpoint": newest}
    status, text = train(program, "run", start={"attempt": 3}, **options)
    assert status == 0 and "step 10 from checkpoint-10" in text, text[-3000:]
    assert items(trained(program.directory / "run")) == order


@release(
    "ms-swift: five launches",
    "`tests/hosts/hugging_face/test_families.py::test_swift`, "
    "`tests/hosts/hugging_face/test_families.py::test_swift_saves`",
)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"add_version": "true"}, "every start has another output_dir"),
        ({"lazy_tokenize": "true"}, "lazy_tokenize without strict cannot be used"),
        ({"train_dataloader_shuffle": "false"}, "train_dataloader_shuffle=False cannot be used"),
        ({"resume_only_model": "true"}, "resume_only_model cannot be used"),
        ({"streaming": "true", "max_steps": 5}, "IterableDataset"),
    ],
    ids=["add_version", "lazy_tokenize", "train_dataloader_shuffle", "resume_only_model", "streaming"],
)
def test_refused(program: Program, options: Any, words: str) -> None:
    run = next(iter(options))
    status, text = train(program, run, **options)
    assert status != 0 and words in text, text[-3000:]
    assert "megaresume: error: " in text and not lines(program.directory / run)


@release(
    "ms-swift: a launch",
    "`tests/hosts/hugging_face/test_families.py::test_swift_saves`",
)
def test_lazily_encoded_if_it_is_strict(program: Program) -> None:
    status, text = train(program, "lazy", lazy_tokenize="true", strict="true", max_steps=5)
    assert status == 0, text[-3000:]
    assert len(set(items(trained(program.directory / "lazy")))) == 20
