"""As docs/verl.md says: in each process of a trainer that rolls out beside the training."""

from __future__ import annotations

import json
import os

from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

import megaresume

megaresume.attach(SeparateRayPPOTrainer, **json.loads(os.environ["TINY_ATTACH"]))
