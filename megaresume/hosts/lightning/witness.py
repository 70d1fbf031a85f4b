"""`Witness`: whether a micro-batch was trained, whatever Lightning counts."""

from __future__ import annotations

from typing import Any

import torch

from megaresume.hosts.torch.steps import Steps
from megaresume.stream.errors import StateError


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
            raise steps.fail(
                StateError(
                    "a micro-batch was taken and not trained",
                    found=f"no backward pass for the last micro-batch of step {steps.step + 1} that was taken",
                    expected="one for each",
                    cause="training_step returned None",
                    action="return the loss times 0 for what is not to be trained, or remove it from the dataset",
                )
            )
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
