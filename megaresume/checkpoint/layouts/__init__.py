"""Other people's checkpoint directories: which of their checkpoints is the newest complete one?

    megatron       iter_0000010/         latest_checkpointed_iteration.txt
    deepspeed      global_step10/        latest
    verl           global_step_10/       latest_checkpointed_iteration.txt
    hugging-face   checkpoint-10/        no pointer                            (LLaMA-Factory too)

Where megaresume saved, its manifest says what is complete. Elsewhere the files are held against what their layout
demands: `content` looks at single files, `words` and `distributed` at what they say of the others, and one file for
each layout at the whole. `newest` chooses. Nothing is unpickled, and no tensor is read.
"""

from megaresume.checkpoint.layouts.base import Layout, Look
from megaresume.checkpoint.layouts.newest import LAYOUTS, Newest, find_newest, look_at, named_by, recognise

__all__ = ["LAYOUTS", "Layout", "Look", "Newest", "find_newest", "look_at", "named_by", "recognise"]
