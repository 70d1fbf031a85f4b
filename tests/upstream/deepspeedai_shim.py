"""Stand-ins for what deepspeedai's Megatron-DeepSpeed imports and current releases no longer have. Test-only.

    torchrun … deepspeedai_shim.py worker.py …

Computer vision only, and compression, which DeepSpeed dropped. CoreAttention views tensors that are not contiguous
without flash attention; that is so on any device.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import ModuleType
from typing import Any


def stub() -> None:
    """Modules that are imported and not used by a GPT."""
    for name, attributes in (
        ("megatron.model.vision.knn_monitor", ("compute_feature_bank",)),
        ("deepspeed.compression.compress", ("init_compression", "redundancy_clean")),
    ):
        module = ModuleType(name)
        module.__dict__.update(dict.fromkeys(attributes))
        sys.modules.setdefault(name, module)


def make_contiguous() -> None:
    """What the attention forgets."""
    import megatron.model.transformer as transformer

    plain = transformer.CoreAttention.forward

    def forward(self: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        return plain(self, query.contiguous(), key.contiguous(), value.contiguous(), mask)

    transformer.CoreAttention.forward = forward


if __name__ == "__main__":
    # DeepSpeed's launcher gives the local rank; torchrun does not.
    sys.argv = [*sys.argv[1:], f"--local_rank={os.environ['LOCAL_RANK']}"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    stub()
    make_contiguous()
    runpy.run_path(sys.argv[0], run_name="__main__")
