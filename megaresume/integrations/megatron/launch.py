"""What a launch under Megatron may not be: rules on records and configs alone, without torch.

`megaresume plan` asks them before any rank is started; the hooks on the ranks.
"""

from __future__ import annotations

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import StateError, UsageError

__all__ = ["BEGIN_ANEW", "check_mode", "check_stages", "without_state"]

#: How to load the weights of a checkpoint without its data. A run that begins does not save over another one.
BEGIN_ANEW = "--finetune and another --save"


def check_mode(saved: str | None, mode: str) -> None:
    """Raise a StateError where a checkpoint of one mode is to be trained on in the other.

    Args:
        saved: stream or guard; None: the checkpoint says neither.
        mode: of this launch.
    """
    if saved is not None and saved != mode:
        flag = "--megaresume-data or --megaresume-mode stream" if saved == "stream" else "--megaresume-mode guard"
        raise StateError(
            f"the checkpoint was trained in mode {saved}, and this is mode {mode}",
            found=f"mode {mode}",
            expected=f"mode {saved}",
            cause="a flag was left out or added between save and resume",
            action=f"pass {flag}; or begin the data anew: {BEGIN_ANEW}",
        )


def check_stages(config: StreamConfig, seq_length: int) -> None:
    """A stage to come may change the blend; Megatron's model and loader have one shape of samples from start to end."""
    for stage in config.stages:
        length = stage.seq_length or seq_length
        if length != seq_length or (stage.packing is not None and stage.packing != config.packing):
            raise UsageError(
                f"stage '{stage.name}' changes the shape of samples in the middle of a launch",
                found=", ".join(f"{key}: {value}" for key, value in stage.to_dict().items()),
                expected="stages that change weights only",
                cause="Megatron builds its model and its loaders for one sequence length and one packing",
                action="stop the run there (--exit-interval), then resume with the new value in the data config and "
                "--megaresume-on-change stage",
            )


def without_state(iteration: int, position: int) -> StateError:
    """The error for training that goes on somewhere, without a stream's state to go on from."""
    return StateError(
        "training goes on, but no data state was restored",
        found=f"iteration {iteration}, {position} samples trained, no data state",
        expected="the data state of the checkpoint that was loaded",
        cause="the checkpoint was saved without megaresume, or not with a megaresume stream",
        action="go on with Megatron's own data: --megaresume-mode guard; or begin the data anew: "
        f"{BEGIN_ANEW}; or load a checkpoint that has one: megaresume inspect DIR",
    )
