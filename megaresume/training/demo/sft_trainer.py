"""The program that ``megaresume demo --sft`` starts and kills: the reference program, each of whose ranks writes down
the tokens, labels and masks that its model is given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaresume.training.__main__ import main
from megaresume.training.demo.masks import write_given
from megaresume.training.loop import Trainer


def record() -> None:
    """From now on, write down every micro-batch before it is trained."""
    losses = Trainer._token_losses

    def recorded(self: Trainer, batch: Any) -> Any:
        write_given(Path(str(self.args.megaresume_log_samples)), dist.get_rank(), batch)
        return losses(self, batch)

    Trainer._token_losses = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    record()
    sys.exit(main())
