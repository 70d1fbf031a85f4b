"""`LightningHost`: Lightning's Trainer as the host of a `Session`; `Batches`: what it reads from.

<save_dir>/global_step10/checkpoint.ckpt    what Lightning writes, and within it, under ``megaresume``, the data state
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.hosts.torch.feeds import micro_batches_to
from megaresume.hosts.torch.host import StepHost
from megaresume.hosts.torch.steps import Steps
from megaresume.session.file_errors import writing
from megaresume.session.host import Reading, Save
from megaresume.session.ranks import is_rank_0, on_all_ranks

#: in a tag directory, and in what Lightning saves.
FILE, KEY = "checkpoint.ckpt", "megaresume"


class LightningHost(StepHost):
    """See `megaresume.session.host.Host`.

    Args:
        trainer: Lightning's.
        loader: of this rank.
        version: of Lightning, with its name.
    """

    forgotten = "trainer.fit was called without ckpt_path='last', or save_dir was used before"
    load = "trainer.fit(model, ckpt_path='last')"
    begin_anew = "read its weights with YourModule.load_from_checkpoint, and save to another directory"

    def __init__(self, trainer: Any, loader: DataLoader, steps: Steps, version: str) -> None:
        self.trainer, self.loader, self.steps, self.framework = trainer, loader, steps, version
        #: what the checkpoint that is being made is to hold; None: none is.
        self.held: dict[str, Any] | None = None

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`."""
        return [FILE] if is_rank_0() else []

    def write(self, save: Save) -> Path:
        """Write the file that Lightning would write, with the data state in it: for `Session.save`."""
        self.held = {"data": save.envelope.to_text(), "step": self.steps.step, "samples": self.steps.trained}
        file, trainer = save.save_dir / save.tag / FILE, self.trainer

        def write_file() -> None:
            # Not `trainer.save_checkpoint`: where rank 0 cannot write, the others would wait for it at a barrier.
            with writing(file.parent):
                trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(False), str(file))

        try:
            on_all_ranks(write_file)
        finally:
            self.held = None
        return file

    def read(self, choice: Choice, read: Callable[[str], Any]) -> Reading:
        """Read a checkpoint by Lightning's own method ``read(file)``, which keeps it until the model is there."""
        on_all_ranks(lambda: read(str(choice.tag_dir / FILE)))
        held = self.trainer._checkpoint_connector._loaded_checkpoint.get(KEY)
        if held is None:
            return Reading(envelope=None, iteration=0, samples=0)
        self.steps.go_on(held["step"], held["samples"])
        return Reading(envelope=Envelope.read(held["data"]), iteration=held["step"], samples=held["samples"])

    def batches_of_epoch(self) -> tuple[int, int]:
        """Micro-batches of this epoch: (that are trained, in whole steps of today; that are to come)."""
        loader, at, end = self.loader, self.steps.trained, self.loader.epoch_end
        if loader.epoch + 1 == self.epochs():
            loader.stop = end
        within = max(at - (end - loader.items), 0)
        return within // loader.step_samples * loader.accumulation, micro_batches_to(loader, end, at)

    def epochs(self) -> int | None:
        """How many epochs the run has, by the Trainer or by the loader; None: no end."""
        limits = [self.trainer.fit_loop.max_epochs, *(one.max_epochs for one in self.loader.stream.config.sources)]
        return min((limit for limit in limits if limit not in (None, -1)), default=None)


class Batches:
    """The micro-batches of this rank, with the length of the epoch that runs.

    Lightning takes it for a loader with a state of its own, and says nothing of one that cannot be resumed. Its data
    state lies elsewhere in the checkpoint, and is checked there.

    Args:
        steps: see `Steps`.
        length: micro-batches of an epoch.
    """

    def __init__(self, steps: Steps, length: int) -> None:
        self.steps, self.length = steps, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see `LightningHost.write`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: see `LightningHost.read`."""
