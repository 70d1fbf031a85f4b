"""docs/images.md: its YAML, as it stands there; what it says are defaults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.encoding.images.processors import KINDS
from megaresume.encoding.images.rgb import STEPS, augmentation_from_options
from megaresume.encoding.images.spec import PUBLISHED
from megaresume.encoding.text.conversations import STYLES
from tests.encoding.images.transformers_kit import write_model

pytest.importorskip("PIL")

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "images.md").read_text()
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)]


def test_every_encoder(tmp_path: Path) -> None:
    write_model(tmp_path / "Qwen3-VL-8B-Instruct", *PUBLISHED["qwen3-vl"])
    encoders, kinds = 0, set()
    for block in BLOCKS:
        if "augment" in block:
            assert len(augmentation_from_options(block["augment"])) == 3
        elif block.get("processor", {}).get("kind") not in ("python", "transformers"):
            ImageTextEncoder.from_options({"processor": {"kind": "patches", "size": 28}, **block}, tmp_path)
            kinds.add(block.get("processor", {}).get("kind"))
            encoders += 1
    assert encoders == 12 and kinds == {None, "patches", "tiles", "native"}


def test_the_defaults_are_the_defaults() -> None:
    written = {
        block["processor"]["kind"]: block
        for block in BLOCKS
        if len(block) == 1 and "kind" in block.get("processor", ())
    }
    for kind in ("tiles", "native"):
        assert set(written[kind]["processor"]) - {"kind"} == {field.name for field in dataclasses.fields(KINDS[kind])}
        spec = ImageTextEncoder.from_options(written[kind]).to_spec()
        assert spec == ImageTextEncoder.from_options({"processor": kind}).to_spec()
    llava = next(block for block in BLOCKS if block.get("processor", {}).get("size") == 336)
    plain = ImageTextEncoder.from_options({"processor": "patches"}).to_spec()
    assert ImageTextEncoder.from_options(llava).to_spec() == plain
    images = next(block for block in BLOCKS if list(block) == ["images"])
    assert ImageTextEncoder.from_options({"processor": "patches", **images}).to_spec() == plain


def test_every_step_is_named() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| [a-z]", TEXT, flags=re.MULTILINE)) >= set(STEPS)


def test_every_style_is_named() -> None:
    for page in ("images.md", "conversations.md"):
        text = (DOCS / page).read_text()
        assert [name for name in STYLES if f"`{name}`" not in text] == [], page


def test_the_numbers_of_tokens() -> None:
    (siglip,) = [block for block in BLOCKS if block.get("processor", {}).get("size") == 384]
    assert ImageTextEncoder.from_options(siglip).processor.num_tokens(5, 9) == 729
    tiles, native = (ImageTextEncoder.from_options({"processor": kind}).processor for kind in ("tiles", "native"))
    counts = {tiles.num_tokens(w * 100, h * 100) for w in range(1, 40) for h in range(1, 40)}
    assert (min(counts), max(counts)) == (256, 3328)
    counts = {native.num_tokens(w, h) for w in (21, 28, 60, 999, 4000) for h in (21, 28, 60, 999, 4000)}
    assert min(counts) == 4 and 16000 < max(counts) <= 16384
    (smaller,) = [block for block in BLOCKS if "preset" in block.get("processor", ())]
    for options, most in ((smaller, 1024), ({"processor": {"preset": "qwen3-vl"}}, 16384)):
        qwen3 = ImageTextEncoder.from_options(options).processor
        counts = {qwen3.num_tokens(w, h) for w in (60, 999, 9000) for h in (60, 999, 9000)}
        assert min(counts) >= 64 and 0.97 * most < max(counts) <= most


def test_every_preset_is_named() -> None:
    listed = TEXT[TEXT.index("`preset` is one of") : TEXT.index("and holds the values")]
    assert re.findall(r"`([\w.-]+)`", listed)[1:] == list(PUBLISHED)
