"""As `pretrain_schedule`, with the times of its steps: for `benchmarks.hosts`.

TIMES names the file that the times of the ends of steps are written to, SECONDS says how long a step lasts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pretrain_schedule as mini
import torch
from megatron.training import pretrain

from benchmarks.hosts import Clock
from tests.upstream import cpu_shim

clock = Clock(torch.device("cpu"), float(os.environ["SECONDS"]))
#: of the model, which takes tokens modulo it: one as large as that of the corpora would take 300 ms of a CPU's step.
VOCABULARY = 256


def forward_step(data_iterator: Any, model: Any) -> Any:
    """As the stand-in's, in the time of a step. One micro-batch is a step."""
    clock.tick()
    batch = mini.get_batch(data_iterator)
    losses = model(batch["tokens"] % VOCABULARY, batch["labels"] % VOCABULARY)
    clock.work(losses.detach().mean())
    return losses, mini.partial(mini.loss_func, batch["loss_mask"])


if __name__ == "__main__":
    del __file__  # or the process that megatron-core spawns for a queue would import all this again
    cpu_shim.install()
    mini.train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        mini.train_valid_test_datasets_provider,
        lambda **_: mini.Stage(VOCABULARY),
        mini.ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    np.save(Path(os.environ["TIMES"]), np.array(clock.steps))
