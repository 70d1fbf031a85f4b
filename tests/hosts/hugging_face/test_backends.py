"""The Trainer with DeepSpeed (ZeRO 1 to 3) and FSDP as back-ends: two ranks on gloo, killed in a save, and resumed.

What was trained is put together from the lines that the training steps wrote: `trained`. Accelerate shards models over
GPUs alone; `program.py` lets it take CPUs for such.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.release import release

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import megaresume
from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.program import main
from megaresume.stream.errors import CheckpointError
from tests.hosts.hugging_face.program import ITEMS, make
from tests.hosts.torch.record import items, launch_forked, trained

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("program.py")


def zero(stage: int) -> dict[str, Any]:
    """The options of ZeRO."""
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    return {"deepspeed": config | {"zero_optimization": {"stage": stage}, "gradient_clipping": "auto"}}


def fsdp(kind: str) -> dict[str, Any]:
    """The options of FSDP2."""
    return {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": f"{kind}_STATE_DICT"}}


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Two epochs with one rank and DDP, which nobody stops."""
    output = tmp_path_factory.mktemp("whole") / "run"
    trainer = make(output, num_train_epochs=2, per_device_train_batch_size=4)
    megaresume.attach(trainer)
    trainer.train()
    return items(trained(output))


def killed(output: Path, **options: Any) -> None:
    """Killed with two ranks in the save of step 15, started again, and trained to the end of epoch 2."""
    status, said = launch_forked(PROGRAM, output, 2, kill=("save", 15), num_train_epochs=2, **options)
    assert status == -signal.SIGKILL, said[-5000:]
    status, said = launch_forked(PROGRAM, output, 2, attempt=2, num_train_epochs=2, **options)
    assert status == 0, said[-5000:]
    assert "step 10 from checkpoint-10 | random state restored" in said
    assert "repeated 0 skipped 0" in said


RELEASE = release(
    "`[zero1]`, `[zero3]`, `[fsdp-full]`, `[fsdp-sharded]`: three starts each",
    "the same, `[zero2]`",
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(zero(1), id="zero1", marks=RELEASE),
        pytest.param(zero(2), id="zero2"),
        pytest.param(zero(3), id="zero3", marks=RELEASE),
        pytest.param(fsdp("SHARDED"), id="fsdp-sharded", marks=RELEASE),
        pytest.param(fsdp("FULL"), id="fsdp-full", marks=RELEASE),
    ],
)
def test_killed_in_a_save(tmp_path: Path, order: list[int], options: Any) -> None:
    output = tmp_path / "run"
    killed(output, **options)
    assert items(trained(output)) == order
    newest = choose(output, checksums=True)
    assert newest is not None and (newest.tag, newest.rejected) == ("checkpoint-25", ())
    entries = read_ledger(ledger_path(output)).entries
    assert [(e.iteration, e.samples) for e in entries if e.kind == "finished"] == [(25, 2 * ITEMS)]
    assert main(["verify", str(output)]) == 0
    assert main(["inspect", str(output / "checkpoint-20")]) == 0
    other_layouts(output, options)


def other_layouts(output: Path, options: Any) -> None:
    """Another back-end is refused; so is another number of ranks, by ZeRO."""
    backend = "DeepSpeed" if "deepspeed" in options else "FSDP"
    status, said = launch_forked(
        PROGRAM, output, 1, attempt=3, num_train_epochs=3, per_device_train_batch_size=4, **options
    )
    if backend == "DeepSpeed":
        assert status == 1, said[-5000:]
        assert "DeepSpeed cannot load ZeRO optimizer state on a different number of ranks" in said
        assert "on 2 ranks; 1 now" in said
    else:
        assert status == 0, said[-5000:]
        assert "resumed at sample 200" in said and "dp 2->1" in said
        assert sorted(items(trained(output))[200:]) == list(range(ITEMS))
    trainer = make(output, attempt=4, num_train_epochs=3)
    megaresume.attach(trainer)
    with pytest.raises(CheckpointError, match=rf"not written with DDP(.|\n)*written with {backend}"):
        trainer.train(resume_from_checkpoint=True)
