"""Other people's checkpoint directories: which of their checkpoints is the newest complete one?

    megatron       iter_0000010/         latest_checkpointed_iteration.txt
    deepspeed      global_step10/        latest
    verl           global_step_10/       latest_checkpointed_iteration.txt
    hugging-face   checkpoint-10/        no pointer                            (LLaMA-Factory too)

Where megaresume saved, its manifest says what is complete. Elsewhere the files are checked against what their layout
demands: base.py looks at single files, at what they say of the others, and at PyTorch's distributed checkpoints;
layouts.py at the whole, for each of the four.
`megaresume.runs.latest` chooses. Nothing is unpickled, and no tensor is read.
"""

from megaresume.checkpoint.foreign.base import Layout, Look
from megaresume.checkpoint.foreign.layouts import DEEPSPEED, HUGGING_FACE, MEGATRON, VERL

__all__ = ["LAYOUTS", "Layout", "Look"]

LAYOUTS = {layout.name: layout for layout in (MEGATRON, DEEPSPEED, VERL, HUGGING_FACE)}
