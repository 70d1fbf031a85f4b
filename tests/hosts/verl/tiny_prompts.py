"""The prompts of these tests, which say their numbers. Imports nothing of VeRL."""

from __future__ import annotations

from typing import Any

import torch

ITEMS = 400


class Numbers(torch.utils.data.Dataset[Any]):
    """Prompt i says i. As VeRL makes a dataset of ``data.custom_cls``."""

    def __init__(self, *_: Any, max_samples: int = ITEMS, **__: Any) -> None:
        self.items = max_samples

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "raw_prompt": [{"role": "user", "content": f"p{i}"}],
            "index": i,
            "data_source": "tiny",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
            "ids": torch.tensor([i]),
        }
