"""`LightningHost`: Lightning's Trainer as the host of a `Session`; `Batches`: what it reads from; `Witness`: whether a
micro-batch was trained, whatever Lightning counts.

<save_dir>/global_step10/checkpoint.ckpt    what Lightning writes, and within it, under ``megaresume``, the data state:
                                            a file, or under DeepSpeed and with sharded checkpoints a directory
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.session.host import Reading, Save
from megaresume.checkpoint.session.ranks import is_rank_0, on_all_ranks
from megaresume.checkpoint.topology import Topology
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.instances import replaced
from megaresume.hosts.torch.feeds import micro_batches_to, say_left_over
from megaresume.hosts.torch.host import StepHost, write_all
from megaresume.hosts.torch.steps import Steps
from megaresume.stream.errors import CheckpointError, StateError

#: in a tag directory, and in what Lightning saves.
FILE, KEY = "checkpoint.ckpt", "megaresume"
#: in the directory that is `FILE` under DeepSpeed: its tag, as Lightning calls it.
_DEEPSPEED = "checkpoint"


class LightningHost(StepHost):
    """See `megaresume.checkpoint.session.host.Host`.

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
        self.carried: dict[str, Any] | None = None

    @property
    def engine(self) -> Any:
        """DeepSpeed's; None: another strategy."""
        return getattr(self.trainer.strategy, "deepspeed_engine", None)

    def topology(self) -> Topology:
        """See `Host`."""
        return replace(super().topology(), zero_stage=None if self.engine is None else facts.zero_stage(self.engine))

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`."""
        if self.engine is not None:
            names = facts.expected_files(self.engine, str(save_dir / tag / FILE), _DEEPSPEED)
            return [f"{FILE}/{_DEEPSPEED}/{name}" for name in names]
        if self._is_sharded():
            return None
        return [FILE] if is_rank_0() else []

    def _is_sharded(self) -> bool:
        """Whether every rank writes a part, under FSDP."""
        strategy = self.trainer.strategy
        return (
            getattr(strategy, "_state_dict_type", "full") == "sharded"
            or getattr(strategy, "_save_distributed_checkpoint", False) is True
        )

    def write(self, save: Save) -> Path:
        """Write the file that Lightning would write, with the data state in it: for `Session.save`."""
        file, trainer = save.tag_dir / FILE, self.trainer

        def write_file() -> None:
            # Not `trainer.save_checkpoint`: where rank 0 cannot write, the others would wait for it at a barrier.
            state = trainer._checkpoint_connector.dump_checkpoint(False)
            with contextlib.ExitStack() as stack:
                errors = [] if self.engine is None else stack.enter_context(facts.failing_late(self.engine))
                trainer.strategy.save_checkpoint(state, str(file))
            if errors:
                raise errors[0]

        with replaced(self, carried=self.held(save)):
            write_all(save, write_file)
        return file

    def read(self, choice: Choice, before: Topology | None, read: Callable[[str], Any]) -> Reading:
        """Read a checkpoint by Lightning's own method ``read(file)``, which keeps it until the model is there.

        Args:
            choice: the checkpoint.
            before: how the run was laid out when it saved; None: not known.
        """

        def check_and_read() -> None:
            self._check_kind(choice)
            stage, ranks = self.topology().zero_stage, self.trainer.world_size
            facts.check_ranks(stage, before, ranks, choice.tag, begin_anew=self.begin_anew)
            read(str(choice.tag_dir / FILE))

        on_all_ranks(check_and_read)
        held = self.trainer._checkpoint_connector._loaded_checkpoint.get(KEY)
        return Reading(envelope=None, iteration=0, samples=0) if held is None else self.go_on(held)

    def _check_kind(self, choice: Choice) -> None:
        """Raise a CheckpointError for what this strategy would not load, or of which it would leave out a part."""
        path = choice.tag_dir / FILE
        wrote = "DeepSpeed" if (path / _DEEPSPEED).is_dir() else "sharded FSDP" if path.is_dir() else "one file"
        takes = ["DeepSpeed"] if self.engine is not None else ["one file"]
        if hasattr(self.trainer.strategy, "_state_dict_type") or hasattr(
            self.trainer.strategy, "_save_distributed_checkpoint"
        ):
            takes.append("sharded FSDP")
        if wrote not in takes:
            raise CheckpointError(
                "this strategy of Lightning's does not load such a checkpoint",
                found=f"{path}, written as: {wrote}; {type(self.trainer.strategy).__qualname__} now",
                expected=" or ".join(takes),
                cause="Trainer(strategy=...) was changed between save and resume",
                action=f"train with the strategy that wrote it; or {self.begin_anew}",
            )

    def batches_of_epoch(self) -> tuple[int, int]:
        """Micro-batches of this epoch: (that are trained, in whole steps of today; that are to come)."""
        loader, at, end = self.loader, self.steps.samples, self.loader.epoch_end
        if loader.epoch + 1 == self.epochs() and loader.stop != end:
            loader.stop = end
            if not loader.drop_last:
                say_left_over(loader, end - at)
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


class Witness:
    """What was done with the micro-batch that is in training, under automatic optimization.

    A step that a gradient scaler leaves out was made: its items were seen.
    """

    def __init__(self) -> None:
        self._has_backward = self._has_step = False

    def watch(self, optimizers: list[Any]) -> None:
        """Also see steps that `LightningModule.optimizer_step` makes with an optimizer of torch's itself."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_post_hook(lambda *_: self.step_made())

    def backward_made(self) -> None:
        """A backward pass has ended."""
        self._has_backward = True

    def step_made(self) -> None:
        """An optimizer step is made, or left out by a gradient scaler."""
        self._has_step = True

    def check(self, steps: Steps, *, ends_step: bool) -> None:
        """Raise a StateError if Lightning counted what was not done. After each micro-batch.

        Args:
            steps: train nothing any more after that.
            ends_step: whether Lightning counted an optimizer step.
        """
        had_backward, had_step = self._has_backward, self._has_step
        self._has_backward = self._has_step = False
        if not had_backward:
            why = (
                "training_step returned None",
                "return the loss times 0 for what is not to be trained, or remove it from the dataset",
            )
            raise steps.fail(steps.untrained("no backward pass was made for the last of them", why=why))
        if ends_step and not had_step:
            raise steps.fail(
                StateError(
                    "Lightning counted an optimizer step that was not made",
                    found=f"no optimizer step after the micro-batches of step {steps.step + 1}",
                    expected="one after each",
                    cause="optimizer_step of the model or of the strategy left it out",
                    action="call optimizer.step(closure=closure) each time; to leave the parameters as they are, "
                    "optimizer.zero_grad() in on_before_optimizer_step",
                )
            )
