"""`Batches`: what a trainer of VeRL's iterates over, in the place of torchdata's ``StatefulDataLoader``.

VeRL computes its epoch from the step number and today's batch size. So here the whole run is one epoch to it: a ``for``
goes from where the run is to its end, and is longer than the run is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megaresume.hosts.torch.feeds import Items
from megaresume.hosts.torch.steps import Steps

#: the file of the loader's state, and what it has in the place of torchdata's.
FILE, KEY = "data_0.pt", "megaresume"


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
        while self.steps.feed.has(self.steps.trained):
            yield from self.steps

    def state_dict(self) -> dict[str, str]:
        """What VeRL saves."""
        return {KEY: self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What VeRL has found; in a state of torchdata's there is nothing of ours."""
        self.text = str(state.get(KEY, ""))
