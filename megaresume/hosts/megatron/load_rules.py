"""What a launch under Megatron may not be: rules on records and configs alone, without torch.

`megaresume plan` asks them before any rank is started; the hooks on the ranks.
"""

from __future__ import annotations

from megaresume.checkpoint.data_state import Kind
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import StateError, UsageError

#: How to load the weights of a checkpoint without its data. A run that begins does not save over another one.
BEGIN_ANEW = "--finetune and another --save"


#: kind of a data state -> the mode that trains it, and how to ask for it.
_MODES: dict[Kind, tuple[str, str]] = {
    "stream": ("mode stream", "--megaresume-data or --megaresume-mode stream"),
    "order": ("mode guard", "--megaresume-mode guard"),
    "loader": ("a loader of the script's", "--dataloader-type external, and no --megaresume-data"),
}


def check_mode(kind: Kind | None, mode: str) -> None:
    """Raise a StateError if a checkpoint of one mode is to be trained on in another.

    Args:
        kind: of the data state in the checkpoint; None if it has none.
        mode: of this launch: stream or guard.
    """
    if kind is None or _MODES[kind][0] == f"mode {mode}":
        return
    saved, flag = _MODES[kind]
    raise StateError(
        f"the checkpoint was trained in {saved}, and this is mode {mode}",
        found=f"mode {mode}",
        expected=saved,
        cause="a flag was left out or added between save and resume",
        action=f"pass {flag}; or start the data over: {BEGIN_ANEW}",
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
    """The error for training that continues somewhere, without a stream's state to resume from."""
    return StateError(
        "training continues, but no data state was restored",
        found=f"iteration {iteration}, {position} samples trained, no data state",
        expected="the data state of the checkpoint that was loaded",
        cause="the checkpoint was saved without megaresume, or not with a megaresume stream",
        action="continue with Megatron's own data: --megaresume-mode guard; or start the data over: "
        f"{BEGIN_ANEW}; or load a checkpoint that has one: megaresume inspect DIR",
    )
