"""A page's whole program is one that `megaresume new` writes; with gradient accumulation it resumes as exactly."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from tests.cli.test_new import command_lines_of
from tests.docs.pages import DOCS
from tests.docs.starting_points import PLACE, file_of, renewed
from tests.release import release

#: trainers that have no starting point yet.
OF_THEIR_OWN = {"megatron-bridge.md", "torchft.md", "torchtitan.md"}
#: page -> trainer
SHOWN = {
    "accelerate.md": "accelerate",
    "deepspeed.md": "deepspeed",
    "hugging-face.md": "trainer",
    "lightning.md": "lightning",
    "megatron.md": "megatron",
    "torch.md": "torch",
}


def test_pages_show_what_is_written() -> None:
    pages = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
    changed = [name for name, text in pages.items() if renewed(text) != text]
    assert changed == [], "python -m tests.docs.starting_points copies the programs anew"
    assert {name: found["trainer"] for name, text in pages.items() if (found := PLACE.search(text))} == SHOWN


def test_no_page_has_another_program() -> None:
    for page in sorted({path.name for path in DOCS.glob("*.md")} - OF_THEIR_OWN):
        text = PLACE.sub("", (DOCS / page).read_text())
        for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            # a host, and a trainer that is made up, are what docs/hosts.md is about
            assert "megaresume.attach(" not in block or block.count("\n") <= 20 or page == "hosts.md", block


def fragment(page: str) -> str:
    """The page's Python block that shows what accumulation changes."""
    blocks = re.findall(r"^```python\n(.*?)^```", PLACE.sub("", (DOCS / page).read_text()), re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if "ends_step" in block or "sync_gradients" in block)


def accumulating(trainer: str) -> str:
    """The starting point in steps of two micro-batches, as its page says."""
    text = file_of(trainer, "train.py")

    def put(old: str, new: str) -> None:
        nonlocal text
        assert text.count(old) == 1, old
        text = text.replace(old, new)

    if trainer == "deepspeed":
        put(text[text.index("data = megaresume") :], fragment("deepspeed.md"))
        put('"train_batch_size": 8', '"train_batch_size": 8, "gradient_accumulation_steps": 2')
        return text
    put("batch_size=8,", "batch_size=4, accumulation=2,")
    if trainer == "torch":
        put(text[text.index("    for inputs, targets") : text.index("loop.save()\nloop")], fragment("torch.md"))
        put('"optimizer": optimizer}', '"optimizer": optimizer, "scheduler": scheduler}')
        put("loader = ", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)\nloader = ")
    if trainer == "accelerate":
        once = text[text.index("        accelerator.print(") : text.index("accelerator.save_state()\nloop")]
        put(once, fragment("accelerate.md"))
        put("Accelerator(", "Accelerator(gradient_accumulation_steps=2, ")
    if trainer == "lightning":
        put("L.Trainer(", "L.Trainer(accumulate_grad_batches=2, ")
        put("        print(", "        if batch_idx % 2: print(")
    return text


@pytest.mark.process
@pytest.mark.parametrize("trainer", ["torch", "accelerate", "lightning", "deepspeed"])
@release("three starts of each", "`tests/cli/test_new.py::test_it_runs_and_goes_on_exactly_after_a_kill`")
def test_steps_of_several_micro_batches(tmp_path: Path, trainer: str) -> None:
    if find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed")
    command = ["torchrun", "--nproc-per-node", "1", "train.py"] if trainer == "deepspeed" else ["python", "train.py"]
    saves = {"accelerate": "checkpoints/checkpoints", "lightning": "checkpoints/run"}.get(trainer, "checkpoints")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "train.py").write_text(accumulating(trainer))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    # Two epochs of 640 items, eight a step.
    whole = command_lines_of(tmp_path / "whole", command)
    assert [int(line.split()[1]) for line in whole] == list(range(1, 161))
    killed = command_lines_of(tmp_path / "cut", command, kill_at=70)
    assert killed == whole[: len(killed)]
    choice = choose(tmp_path / "cut" / saves)
    assert choice is not None and choice.iteration is not None
    resumed = command_lines_of(tmp_path / "cut", command)
    assert resumed == whole[choice.iteration :]
    last = choose(tmp_path / "cut" / saves)
    assert last is not None and last.manifest is not None and last.manifest.durable and last.manifest.has_checksums
    ledger = read_ledger(ledger_path(tmp_path / "cut" / saves)).entries
    # A loop around an engine tells nobody that it is over.
    finished = [] if trainer == "deepspeed" else [(160, 1280)]
    assert [(entry.iteration, entry.samples) for entry in ledger if entry.kind == "finished"] == finished
    kept = {path.name for path in (tmp_path / "cut" / saves).iterdir() if path.name[-1].isdigit()}
    assert kept == {f"{choice.tag.rstrip('0123456789')}{step}" for step in (120, 140, 160)}
