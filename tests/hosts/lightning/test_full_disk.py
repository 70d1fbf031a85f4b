"""A disk that is full in the middle of a save of Lightning's: the save is tried again, and the order goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import megaresume
from megaresume.checkpoint.load.choose import choose
from tests.hosts.lightning.program import Module, trainer_of
from tests.hosts.torch.program import Numbers

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


def test_a_disk_that_is_cleaned(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    directory, filler = small_disk / "run", small_disk / "filler"
    links = ModelCheckpoint(small_disk / "links", every_n_train_steps=5, save_top_k=-1)
    trainer = trainer_of(directory, max_steps=10, callbacks=[links])
    megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(save_dir=directory, save_retry_wait=0.01))
    write, tries = trainer.strategy.save_checkpoint, []

    def full_at_first(checkpoint: Any, path: str, *args: Any) -> None:
        tries.append(Path(path).parent.name)
        if len(tries) == 1:
            with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**16))
        else:
            filler.unlink(missing_ok=True)
        write(checkpoint, path, *args)

    trainer.strategy.save_checkpoint = full_at_first
    trainer.fit(Module(directory), megaresume.DataLoader(Numbers(), 4), ckpt_path="last")
    assert tries == ["global_step5", "global_step5", "global_step10"]
    assert "global_step5 was not saved: " in capfd.readouterr().out
    for step in (5, 10):
        choice = choose(directory, tag=f"global_step{step}", checksums=True)
        assert choice is not None and choice.iteration == step
        file = small_disk / "links" / f"epoch=0-step={step}.ckpt"
        assert file.samefile(directory / f"global_step{step}" / "checkpoint.ckpt")
