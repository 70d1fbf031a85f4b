"""Our own small models and their data, made from what this machine has: nothing is downloaded.

gpt   docstrings of the Python installation    --megaresume prepare-->  OUT/data/docstrings.bin, .idx
vlm   pictures of handwritten digits           --megaresume prepare-->  OUT/data/shards/digits-*.tar, .shards.idx
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Literal

from megaresume.cluster.demo.run import ask
from megaresume.cluster.demo.scenario import VISION, as_words, small_gpt, write_config
from megaresume.stream.errors import UsageError

SEQ_LENGTH = 128
#: documents of text.
NUM_TEXTS = 1500


def prepare_data(model: Literal["gpt", "vlm"], directory: Path) -> Path:
    """Make a small corpus.

    Returns:
        its data config.
    """
    directory.mkdir(parents=True)
    sources = {"text": _text(directory)}
    if model == "vlm":
        sources["text"]["weight"] = 0.3
        from megaresume.cluster.demo.vlm import Pictures, prepare_pictures

        _, digits = prepare_pictures(directory, Pictures(name="digits", records=900, shards=3, held_out=False))
        sources["digits"] = digits | {"weight": 0.7}
    return write_config(directory / "data.yaml", sources, seq_length=SEQ_LENGTH)


def _text(directory: Path) -> dict[str, Any]:
    from megaresume.cluster.demo.text import SOURCES

    texts, _ = SOURCES["docstrings"]
    path = directory / "text.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in itertools.islice(texts(), NUM_TEXTS))
    ask("prepare", str(path), "--output", str(directory / "text"))
    return {"path": "text"}


def model_flags(model: Literal["gpt", "vlm"], steps: int) -> list[str]:
    """Flags of a model that trains anywhere.

    Raises:
        UsageError: there is no such model.
    """
    flags = small_gpt(steps)
    if model == "vlm":
        flags |= VISION
    elif model != "gpt":
        raise UsageError("there is no such model", found=f"--model {model}", expected="gpt or vlm")
    # ZeRO 3 cannot share them, and a launch script may ask for it.
    return [*as_words(flags), "--untie-embeddings-and-output-weights"]
