"""`VerlHost`: VeRL's supervised trainer as the host of a `Session`.

The data state lies in ``global_step_10``, in the file where VeRL puts that of its loader.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.paths import tag_iteration
from megaresume.hosts.torch.host import StepHost
from megaresume.hosts.torch.steps import Steps
from megaresume.hosts.verl.batches import FILE, KEY, Batches
from megaresume.session.file_errors import writing
from megaresume.session.host import Reading, Save
from megaresume.session.ranks import on_all_ranks, world_size
from megaresume.stream.errors import CheckpointError

_SHARD = re.compile(r"model_world_size_([0-9]+)_rank_[0-9]+\.pt")


class VerlHost(StepHost):
    """See `megaresume.session.host.Host`.

    Args:
        trainer: VeRL's ``SFTTrainer``.
        steps: what it has trained.
        batches: what it iterates over.
    """

    forgotten = "trainer.resume_mode is disable"
    load = "trainer.resume_mode=auto"
    begin_anew = "merge its weights (verl.model_merger) for model.path, and set another trainer.default_local_dir"

    def __init__(self, trainer: Any, steps: Steps, batches: Batches) -> None:
        self.trainer, self.steps, self.batches = trainer, steps, batches
        self.framework = f"verl {importlib.metadata.version('verl')}"

    def write(self, save: Save, write: Callable[[], object]) -> None:
        """Write the files of this rank by VeRL's own method, ``write()``: for `Session.save`."""
        self.batches.text = save.envelope.to_text()

        def write_files() -> None:
            with writing(save.save_dir / save.tag):
                write()

        on_all_ranks(write_files)

    def read(self, choice: Choice, read: Callable[[], object]) -> Reading:
        """Read the files of this rank by VeRL's own method, ``read()``: for `Session.load`."""
        on_all_ranks(lambda: _check_ranks(choice.tag_dir))
        resumes = self.trainer.ckpt_handler
        before = resumes.resume_mode, resumes.resume_from_path
        resumes.resume_mode, resumes.resume_from_path = "resume_path", str(choice.tag_dir)
        try:
            result = read()
        finally:
            resumes.resume_mode, resumes.resume_from_path = before
        # Its own way to read the loader's state goes on without one, and by the name of today's rank.
        state = torch.load(choice.tag_dir / FILE, map_location="cpu", weights_only=True)
        envelope = Envelope.read(state[KEY])
        step = tag_iteration(choice.tag)
        assert step is not None
        self.steps.go_on(step, envelope.samples)
        return Reading(envelope=envelope, iteration=step, samples=envelope.samples, result=(result,))


def _check_ranks(tag_dir: Path) -> None:
    """Raise a CheckpointError for weights that VeRL cannot read on these ranks: its FSDP saves one file for each."""
    sizes = {int(match[1]) for path in tag_dir.iterdir() if (match := _SHARD.fullmatch(path.name))}
    if sizes and world_size() not in sizes:
        raise CheckpointError(
            f"the weights in {tag_dir.name} are of another number of ranks",
            found=f"files of {' and '.join(map(str, sorted(sizes)))} ranks in {tag_dir}",
            expected=f"{world_size()}, as there are now",
            cause="VeRL's FSDP reads its files on as many ranks as have written them; the data would go on",
            action=f"start on {max(sizes)} ranks",
        )
