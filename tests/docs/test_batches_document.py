"""docs/batches.md: its Python, run as it stands there over prepared shards; the keys that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from megaresume.data.prepare.shards import prepare_shards
from megaresume.encoding.images.encoder import ImageTextEncoder
from tests.batches.pages import page
from tests.data.kit import write_shard

TEXT = (Path(__file__).parents[2] / "docs" / "batches.md").read_text()
OPEN, PLACES, GPT, LLAVA, HF = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the first block, run beside a data.yaml."""
    processor = {"kind": "patches", "size": 16, "patch_size": 4}
    encoder = ImageTextEncoder.from_options({"processor": processor, "template": "interleaved"})
    write_shard(tmp_path / "pages.tar", [(page(i).key, page(i).members) for i in range(20)])
    prepare_shards([tmp_path / "pages.tar"], tmp_path / "pages", encoder)
    sources = {"pages": {"kind": "webdataset", "index": "pages.shards.idx"}}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"seq_length": 128, "packing": "best_fit", "sources": sources}))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(OPEN, names)
    return names


def test_the_keys_are_those_of_a_batch(scope: dict[str, Any]) -> None:
    tables = TEXT.split("## megatron-core")[0].splitlines()
    named = {key for line in tables if line.startswith("| `") for key in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert set(scope["batch"]) == named - {"attention_mask", "pairs"}


def test_features_go_to_their_places(scope: dict[str, Any]) -> None:
    positions = scope["batch"]["image_positions"]
    number = torch.arange(len(positions)).repeat_interleave(positions[:, 2])
    scope |= {"image_token_id": 257, "embeddings": torch.full((2, 128, 1), -1), "features": number[:, None]}
    exec(PLACES, scope)
    for n, (row, column, num) in enumerate(positions.tolist()):
        assert (scope["embeddings"][row, column : column + num] == n).all()
    assert len(positions) > 3 and int((scope["embeddings"] >= 0).sum()) == len(number)


def test_arguments_of_models(scope: dict[str, Any]) -> None:
    exec(GPT, scope)
    assert set(scope["arguments"]) == set(re.findall(r"\w+", GPT.split("#")[1]))
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**tiny, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(**tiny, vocab_size=258),
        image_token_index=257,
        vision_feature_layer=-1,
    )
    scope["model"] = transformers.LlavaForConditionalGeneration(config)
    exec(HF, scope)
    scope["loss"].backward()
    assert 4 < scope["loss"].item() < 7
