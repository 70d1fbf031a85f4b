"""A disk that is full in the middle of a save of the Trainer: the save is tried again, and the order goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import megaresume
from megaresume.checkpoint.load.choose import choose
from megaresume.stream.errors import UsageError
from tests.hosts.hugging_face.program import make

pytestmark = pytest.mark.process


def test_a_disk_that_is_cleaned(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make(small_disk / "run", max_steps=10)
    filler, write = small_disk / "filler", trainer._save_optimizer_and_scheduler
    tries: list[str] = []

    def full_at_first(output_dir: str) -> Any:
        tries.append(Path(output_dir).name)
        if tries.count("checkpoint-5") == 1 and len(tries) == 1:
            with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**16))
        else:
            filler.unlink(missing_ok=True)
        return write(output_dir)

    trainer._save_optimizer_and_scheduler = full_at_first
    megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(save_retry_wait=0.01))
    trainer.train(resume_from_checkpoint=True)
    out = capfd.readouterr().out
    assert tries == ["checkpoint-5", "checkpoint-5", "checkpoint-10"], out
    assert "checkpoint-5 was not saved: " in out and "try 1 of 3 in 0.01 s" in out
    newest, older = choose(small_disk / "run"), choose(small_disk / "run", tag="checkpoint-5", checksums=True)
    assert newest is not None and (newest.tag, newest.rejected) == ("checkpoint-10", ())
    assert older is not None and older.iteration == 5


@pytest.mark.parametrize("given", [{"save_dir": "elsewhere"}, {"keep_last": 2}])
def test_what_the_trainer_says_itself(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(given))} cannot be used"):
        megaresume.attach(make(tmp_path / "run"), checkpoints=megaresume.Checkpoints(**given))
