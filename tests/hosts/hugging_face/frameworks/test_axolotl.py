"""Axolotl, unmodified, from its command line under the launcher: it trains in a process of `accelerate launch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hugging_face.frameworks.programs import ITEMS, Program, tiny, write_config
from tests.hosts.torch.record import items, lines, trained
from tests.release import release

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def program(environment: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Program:
    bin = environment("axolotl")
    return Program(bin=bin, directory=tiny(tmp_path_factory.mktemp("axolotl"), bin))


def train(program: Program, run: str, *flags: str, start: dict[str, Any] | None = None, **options: Any) -> Any:
    """``axolotl train``: exit status and output."""
    dataset = {
        "path": str(program.directory / "data.jsonl"),
        "ds_type": "json",
        "type": "chat_template",
        "field_messages": "messages",
        "message_property_mappings": {"role": "role", "content": "content"},
    }
    config = {
        "base_model": str(program.directory / "model"),
        "datasets": [dataset],
        "chat_template": "tokenizer_default",
        "dataset_prepared_path": str(program.directory / "prepared"),
        "output_dir": str(program.directory / run),
        "sequence_len": 32,
        "sample_packing": False,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_epochs": 2,
        "learning_rate": 0.0001,
        "optimizer": "adamw_torch",
        "lr_scheduler": "cosine",
        "save_steps": 5,
        "bf16": False,
        "use_cpu": True,
        **options,
    }
    path = write_config(program.directory / f"{run}.yaml", config)
    start = {"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "1", **(start or {})}
    return program.start("axolotl", "train", path, *flags, run=run, **start)


@release(
    "Axolotl, which no extra installs; four launches of it",
    "`tests/hosts/hugging_face/test_launch.py::test_killed_in_a_save_and_resumed`, "
    "`tests/hosts/hugging_face/test_families.py::test_axolotl`",
)
def test_killed_in_a_save_and_resumed(program: Program) -> None:
    status, text = train(program, "whole")
    assert status == 0, text[-3000:]
    order = items(trained(program.directory / "whole"))
    assert all(sorted(order[ITEMS * e : ITEMS * (e + 1)]) == list(range(ITEMS)) for e in range(2))
    status, text = train(program, "run", "--megaresume-max-starts", "9", start={"kill": "save 10"})
    assert status != 0 and (program.directory / "run" / "checkpoint-10").is_dir(), text[-3000:]
    start = {"attempt": 2, "kill": "step 14"}
    status, text = train(program, "run", start=start, auto_resume_from_checkpoints=True)
    assert status != 0 and "step 5 from checkpoint-5" in text and "repeated 0 skipped 0" in text, text[-3000:]
    status, text = train(program, "run", start={"attempt": 3}, gradient_accumulation_steps=1, micro_batch_size=3)
    assert status == 0 and "step 10 from checkpoint-10" in text, text[-3000:]
    assert items(trained(program.directory / "run")) == order


@release(
    "Axolotl: two launches",
    "`tests/hosts/hugging_face/test_families.py::test_axolotl`",
)
@pytest.mark.parametrize("setting", ["sample_packing", "curriculum_sampling"])
def test_refused(program: Program, setting: str) -> None:
    status, text = train(program, setting, **{setting: True})
    assert status != 0 and f"{setting} cannot be used" in text, text[-3000:]
    assert "megaresume: error: " in text and not lines(program.directory / setting)
