"""`TitanHost`: torchtitan's Trainer as the host of a `Session`.

The data state lies in torchtitan's own checkpoint, ``step-10``, where its dataloader's would be: one text, the same on
every rank, so that it loads on any number of ranks.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.session.host import Reading, Save
from megaresume.checkpoint.session.ranks import is_rank_0
from megaresume.hosts.instances import replaced
from megaresume.hosts.torch import files
from megaresume.hosts.torch.background import Background
from megaresume.hosts.torch.host import StepHost, write_all
from megaresume.hosts.torch.steps import Steps

#: torchtitan's name of what a dataloader puts into a checkpoint; and ours within it.
DATALOADER, KEY = "dataloader", "megaresume"


class Carried:
    """The data state in a checkpoint, as torch.distributed.checkpoint's ``Stateful``."""

    def __init__(self) -> None:
        #: of the save that begins, or the load that ended: see `Envelope.to_text`.
        self.text = ""

    def state_dict(self) -> dict[str, str]:
        """What is saved; and, before a load, what is looked for."""
        return {KEY: self.text}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """What was found."""
        self.text = state[KEY]


class TitanHost(StepHost):
    """See `megaresume.checkpoint.session.host.Host`.

    Args:
        trainer: torchtitan's Trainer.
        steps: what it has trained.
    """

    background: Background
    forgotten = "checkpoint.folder was used before, and trainer.train() did not load from it"
    load = "trainer.train(), which loads the newest complete checkpoint"
    begin_anew = "checkpoint.initial_load_path with its step directory, and another checkpoint.folder"

    def __init__(self, trainer: Any, steps: Steps) -> None:
        self.trainer, self.steps, self.manager = trainer, steps, trainer.checkpointer
        self.framework = f"torchtitan {importlib.metadata.version('torchtitan')}"
        self.background = Background(lambda save: steps.session.commit(save))
        self._carried = self.manager.states[DATALOADER] = Carried()

    @property
    def folder(self) -> Path:
        """The checkpoint root."""
        return Path(self.manager.folder)

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`: what rank 0 writes last, after it has heard of the files of all ranks."""
        return [files.METADATA] if is_rank_0() else []

    def write(self, save: Save, write: Callable[[], object]) -> None:
        """Write the files of this rank by torchtitan's own method, ``write()``: for `Session.save`."""
        self._carried.text = save.envelope.to_text()
        write_all(save, files.dcp_errors()(write))
        future, self.manager.save_future = self.manager.save_future, None  # `settle` waits for it
        if future is not None:
            self.background.begin(future, save)

    def read(self, choice: Choice, read: Callable[[int], object]) -> Reading:
        """Read the files of this rank by torchtitan's own method, ``read(step)``: for `Session.load`."""
        assert choice.iteration is not None
        with replaced(self.manager, folder=str(choice.load_dir)), files.dcp_errors():
            read(choice.iteration)
        envelope = Envelope.read(self._carried.text)
        self.steps.loaded(int(self.trainer.step), envelope.samples)
        return Reading(envelope=envelope, iteration=self.steps.step, samples=envelope.samples, result=True)
