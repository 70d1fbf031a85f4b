"""A plugin of Axolotl's that attaches its Trainer. In the YAML of a run:

plugins:
  - megaresume.hosts.hugging_face.axolotl.Plugin
auto_resume_from_checkpoints: true

See docs/hugging-face.md. Importing this module imports Axolotl.
"""

from __future__ import annotations

import functools
from typing import Any

from axolotl.integrations.base import BasePlugin

from megaresume.hosts.hugging_face.attach import attach_trainer


class Plugin(BasePlugin):  # type: ignore[misc]
    """See above."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attach the Trainer, once it is made.

        Raises:
            UsageError: a setting under which the order would be another one, by name.
        """
        attach_trainer(trainer)
        if cfg.auto_resume_from_checkpoints and not cfg.resume_from_checkpoint:
            trainer.train = functools.partial(_train_newest, trainer.train)


def _train_newest(train: Any, resume_from_checkpoint: Any = None, **more: Any) -> Any:
    """From the newest complete checkpoint: Axolotl takes the newest by its name."""
    return train(resume_from_checkpoint=True, **more)
