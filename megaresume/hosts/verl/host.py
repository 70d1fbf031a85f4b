"""`VerlHost`: VeRL's supervised trainer as the host of a `Session`.

The data state lies in ``global_step_10``, in the file where VeRL puts that of its loader.

`Batches`: what a trainer iterates over, in the place of torchdata's ``StatefulDataLoader``. VeRL computes its epoch
from the step number and today's batch size. So here the whole run is one epoch to it: a ``for`` goes from where the
run is to its end, and is longer than the run is.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.paths import tag_iteration
from megaresume.checkpoint.session.host import Reading, Save
from megaresume.checkpoint.session.ranks import on_all_ranks, world_size
from megaresume.hosts.instances import replaced
from megaresume.hosts.torch.feeds import Items
from megaresume.hosts.torch.host import StepHost, write_all
from megaresume.hosts.torch.steps import Steps
from megaresume.stream.errors import CheckpointError

#: the file of the loader's state, and what it has in the place of torchdata's.
FILE, KEY = "data_0.pt", "megaresume"

_SHARD = re.compile(r"model_world_size_([0-9]+)_rank_[0-9]+\.pt")


class Batches:
    """Those of this rank, and the text that a checkpoint has of them.

    Args:
        steps: the micro-batches, of `Items`.
        epochs: of the run.
    """

    def __init__(self, steps: Steps, feed: Items, epochs: int) -> None:
        self.steps, self._loader, self._epochs = steps, feed.loader, epochs
        #: of the save that begins, or of the load that ended: see `Envelope.to_text`.
        self.text = ""
        #: steps at the end of the data; with `end`, since the start of the run.
        self.total = 0
        self.end()

    def end(self) -> None:
        """Count, from where the run is, how many steps its epochs have."""
        loader = self._loader
        after_this = self._epochs - loader.epoch - 1
        loader.stop = max(loader.epoch_end + math.ceil(after_this * loader.items), loader.samples)
        self.total = self.steps.step + (loader.stop - loader.samples) // loader.step_samples

    def __len__(self) -> int:
        return self.total + 1

    def __iter__(self) -> Iterator[Any]:
        return self.steps.to_the_end()

    def state_dict(self) -> dict[str, str]:
        """What VeRL saves."""
        return {KEY: self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What VeRL has found; in a state of torchdata's there is nothing of ours."""
        self.text = str(state.get(KEY, ""))


class VerlHost(StepHost):
    """See `megaresume.checkpoint.session.host.Host`.

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
        write_all(save, write)

    def read(self, choice: Choice, read: Callable[[], object]) -> Reading:
        """Read the files of this rank by VeRL's own method, ``read()``: for `Session.load`."""
        on_all_ranks(lambda: _check_ranks(choice.tag_dir))
        with replaced(self.trainer.ckpt_handler, resume_mode="resume_path", resume_from_path=str(choice.tag_dir)):
            result = read()
        # Its own way to read the loader's state goes on without one, and by the name of today's rank.
        state = torch.load(choice.tag_dir / FILE, map_location="cpu", weights_only=True)
        envelope = Envelope.read(state[KEY])
        step = tag_iteration(choice.tag)
        assert step is not None
        self.steps.loaded(step, envelope.samples)
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
