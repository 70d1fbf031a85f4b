"""A script with Hugging Face's Trainer that knows nothing of megaresume: run by tests under the launcher, as

torchrun ... -m megaresume.run plain.py OUTPUT_DIR JSON-OPTIONS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.hosts.hugging_face.program import make

if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    resume = asked.pop("resume", None)
    trainer = make(Path(sys.argv[1]), kill=tuple(asked.pop("kill", ("", 0))), **asked)
    trainer.train(resume_from_checkpoint=resume)
