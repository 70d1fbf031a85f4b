"""`BridgeHost`: a run of Megatron-Bridge as the host of a `Session`.

The data state lies in ``iter_0000010`` beside the weights, in the one file of the state that all ranks have alike: with
that of the schedule of the learning rate. Bridge's own count of samples lies in its ``train_state.pt``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.session.host import Reading, Save
from megaresume.checkpoint.session.ranks import is_rank_0
from megaresume.checkpoint.topology import Topology
from megaresume.hosts.instances import replaced
from megaresume.hosts.torch.host import StepHost, write_all
from megaresume.hosts.torch.steps import Steps

#: ours, in the state of the schedule.
KEY = "megaresume"
#: what rank 0 writes after it has heard of the files of all ranks.
_LAST = (".metadata", "metadata.json", "run_config.yaml", "train_state.pt")


class Carrying:
    """A schedule of the learning rate, and the data state in what it saves and loads.

    Args:
        schedule: Megatron's ``OptimizerParamScheduler``.
        text: of the save that begins: see `Envelope.to_text`. After a load, what was found.
    """

    def __init__(self, schedule: Any, text: str = "") -> None:
        self._schedule, self.text = schedule, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def state_dict(self) -> dict[str, Any]:
        """What is saved; and, before a load, what is looked for."""
        return {**self._schedule.state_dict(), KEY: self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was found."""
        rest = dict(state)
        self.text = str(rest.pop(KEY, ""))
        self._schedule.load_state_dict(rest)


class BridgeHost(StepHost):
    """See `megaresume.checkpoint.session.host.Host`.

    Args:
        config: Bridge's.
        steps: what it has trained.
    """

    forgotten = "checkpoint.load names another directory, or none, or it has lost latest_train_state.pt; or finetune"
    load = "checkpoint.load={directory}"
    begin_anew = "checkpoint.pretrained_checkpoint, and another directory as checkpoint.save and checkpoint.load"

    def __init__(self, config: Any, steps: Steps) -> None:
        self.config, self.steps = config, steps
        self.framework = f"megatron-bridge {importlib.metadata.version('megatron-bridge')}"

    def topology(self) -> Topology:
        """See `Host`."""
        model = self.config.model
        return replace(
            super().topology(),
            tp=model.tensor_model_parallel_size,
            pp=model.pipeline_model_parallel_size,
            cp=model.context_parallel_size,
        )

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`."""
        return list(_LAST) if is_rank_0() else []

    def write(self, save: Save, schedule: Any, write: Callable[[Any], object]) -> None:
        """Write the files of this rank by Bridge's own method, ``write(schedule)``: for `Session.save`."""
        write_all(save, lambda: write(Carrying(schedule, save.envelope.to_text())))

    def read(self, choice: Choice, state: Any, schedule: Any, read: Callable[[Any], Any]) -> Reading:
        """Read the files of this rank by Bridge's own method, ``read(schedule)``: for `Session.load`.

        Args:
            choice: what to read.
            state: Bridge's ``GlobalState``, whose count of steps and samples is read.
            schedule: of the learning rate.
        """
        carrying = Carrying(schedule)
        with replaced(self.config.checkpoint, load=str(choice.tag_dir), ckpt_step=None):
            result = read(carrying)
        trained = state.train_state
        self.steps.loaded(trained.step, trained.consumed_train_samples)
        return Reading(
            envelope=Envelope.read(carrying.text) if carrying.text else None,
            iteration=self.steps.step,
            samples=self.steps.samples,
            result=result,
        )
