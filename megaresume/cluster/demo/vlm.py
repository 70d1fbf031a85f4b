"""The demo of images: handwritten digits blended with text, and a model that learns to read them.

Pictures of handwritten digits as tar shards: real images from an ordinary package, with their labels.

    scikit-learn's 1797 digits  --shuffled once-->  digits for training | held-out digits
    1 to 4 of them side by side, in a size drawn from 16 to 48 pixels  -->  00000042.png
    a conversation about the picture, or about two of them             -->  00000042.json

    user: <image>which digits?        assistant: 3 1 4

No training picture contains a held-out digit.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from megaresume.cluster.demo.demo import (
    GLOBAL_BATCH_SIZE,
    VISION,
    Demo,
    DemoStart,
    Extra,
    as_words,
    small_gpt,
    write_config,
    write_texts,
)
from megaresume.cluster.processes import ask
from megaresume.cluster.records import read_records
from megaresume.cluster.scenario import Say
from megaresume.render import COLOURS, escape, svg

#: The encoder for ``megaresume prepare``: bytes as tokens; squares of 16 pixels, 4 patches of 8, become one token.
ENCODER: dict[str, Any] = {
    "tokenizer": None,
    "template": {"kind": "chat", "style": {"user": {"after": " "}, "assistant": {"end": "\n"}}},
    "processor": {
        "kind": "native",
        "patch_size": 8,
        "merge": 2,
        "temporal_patch_size": 1,
        "min_pixels": 256,
        "max_pixels": 16384,
        "normalize": "siglip",
    },
}

#: least and greatest height of pictures in pixels; shares of records with the least height, with a single digit, with
#: two pictures. Small and single ones are learned first, and the demo only takes minutes.
_HEIGHTS = (16, 48)
_SMALL, _ALONE, _TWO_PICTURES = 0.65, 0.4, 0.06
#: The number of held-out digits, of 1797.
_HELD_OUT_DIGITS = 360


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """The shards of one set of pictures."""

    #: files are called ``<name>-000000.tar`` and so on.
    name: str
    records: int
    shards: int
    held_out: bool


TRAIN = Pictures(name="digits", records=6000, shards=4, held_out=False)
HELD_OUT = Pictures(name="held_out", records=400, shards=1, held_out=True)


def write_pictures(directory: Path, pictures: Pictures) -> list[Path]:
    """Write the shards; the bytes are always the same."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    records = _records(digits.images, digits.target, digits_of(pictures, len(digits.images)), pictures)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{pictures.name}-{k:06d}.tar" for k in range(pictures.shards)]
    for k, path in enumerate(paths):
        first, stop = (pictures.records * i // pictures.shards for i in (k, k + 1))
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, members in zip(range(first, stop), records, strict=False):
                for extension, content in members.items():
                    info = tarfile.TarInfo(f"{number:08d}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return paths


def prepare_pictures(directory: Path, pictures: Pictures) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the shards and their index; returns the summary of the index, and the source in a data config."""
    encoder = directory / "encoder.yaml"
    encoder.write_text(yaml.safe_dump(ENCODER, sort_keys=False))
    shards = write_pictures(directory / "shards", pictures)
    output = directory / "shards" / pictures.name
    made = ask("prepare", *map(str, shards), "--encoder", str(encoder), "--output", str(output))
    return made, {"kind": "webdataset", "index": f"shards/{pictures.name}.shards.idx"}


def digits_of(pictures: Pictures, total: int) -> npt.NDArray[np.int64]:
    """The digits, out of ``total``, that its pictures may contain."""
    order = np.random.default_rng(0).permutation(total)
    return order[:_HELD_OUT_DIGITS] if pictures.held_out else order[_HELD_OUT_DIGITS:]


def _records(images: Any, answers: Any, which: Any, pictures: Pictures) -> Iterator[dict[str, bytes]]:
    """The members of each record."""
    rng = np.random.default_rng([1, pictures.held_out])
    for _ in range(pictures.records):
        num_pictures = 2 if rng.random() < _TWO_PICTURES else 1
        chosen = [
            rng.choice(which, 1 if rng.random() < _ALONE else int(rng.integers(1, 5))) for _ in range(num_pictures)
        ]
        members = {
            "png" if num_pictures == 1 else f"{k}.png": _png(np.concatenate(images[ids], axis=1), rng)
            for k, ids in enumerate(chosen)
        }
        answer = ", ".join(" ".join(map(str, answers[ids])) for ids in chosen)
        question = "<image>" * num_pictures + "which digits?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield members | {"json": json.dumps({"messages": turns}).encode()}


def _png(strip: Any, rng: np.random.Generator) -> bytes:
    """Digits of 8 x 8 values from 0 to 16, side by side, enlarged."""
    from PIL import Image

    height = _HEIGHTS[0] if rng.random() < _SMALL else int(rng.integers(_HEIGHTS[0], _HEIGHTS[1] + 1))
    image = Image.fromarray((strip * (255 / 16)).astype(np.uint8))
    image = image.resize((height * strip.shape[1] // 8, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    return buffer.getvalue()


#: every epoch shows each picture differently, but the same epoch always in the same way.
AUGMENT = [{"crop": {"scale": [0.85, 1.0]}}, {"color_jitter": {"brightness": 0.2, "contrast": 0.2}}]
TEXT = "docstrings"
#: the share of text tokens.
TEXT_WEIGHT = 0.1

_DIGITS = range(ord("0"), ord("9") + 1)


def _prepare(out: Path, say: Say) -> Path:
    """Write shards and texts, and run ``megaresume prepare`` on them."""
    sources = {}
    for pictures in (TRAIN, HELD_OUT):
        made, sources[pictures.name] = prepare_pictures(out, pictures)
        say(
            f"   {pictures.name}: {made['shards']} tar shards, {made['records']:,} records, {made['images']:,} images, "
            f"{made['tokens']:,} tokens, {made['image_tokens']:,} of them of images"
        )
    text = write_texts(out / "texts")[TEXT]
    made = ask("prepare", str(text), "--output", str(out / "corpora" / TEXT))
    say(f"   {TEXT}: {made['documents']:,} documents, {made['tokens']:,} tokens")
    digits = sources[TRAIN.name] | {"weight": 1 - TEXT_WEIGHT, "augment": AUGMENT}
    text_source = {"path": f"corpora/{TEXT}", "weight": TEXT_WEIGHT}
    write_config(out / "data.yaml", {TRAIN.name: digits, TEXT: text_source})
    write_config(out / "held_out.yaml", {HELD_OUT.name: sources[HELD_OUT.name]})
    return out / "data.yaml"


def _flags(out: Path, steps: int) -> list[str]:
    return as_words(
        small_gpt(steps)
        | VISION
        | {
            "hidden-size": 96,
            # More than Megatron's 0.02: so small a model would start using its images a hundred steps later.
            "init-method-std": 0.08,
            "global-batch-size": GLOBAL_BATCH_SIZE,
            "lr": "4e-3",
            "min-lr": "1e-4",
            "adam-beta2": 0.98,
            "save-interval": max(steps // 12, 4),
            "eval-interval": max(steps // 8, 1),
            "megaresume-held-out": out / "held_out.yaml",
            "megaresume-held-out-iters": 2,
        }
    )


def _extra(out: Path) -> Extra:
    """Accuracy of the run and of its twin, and the run's final answers."""
    run, twin = (read_records(out / f"{name}.jsonl").held_out for name in ("run", "twin"))
    first, last = run[min(run)], run[max(run)]
    before, after = _accuracy(first), _accuracy(last)
    digits = sum(last["by_token"].get(str(token), (0, 0))[1] for token in _DIGITS)
    row = (
        "held-out digits read right",
        f"{100 * after:.1f} % of {digits}; untrained {100 * before:.1f} %, by chance 10 %",
    )
    note = (
        f"<p>{100 * after:.1f} % of {digits} handwritten digits, none of which any picture of the training holds, "
        f"each read from the picture and the digits before it; before the first step {100 * before:.1f} %, by chance "
        "10 %.</p>"
    )
    parts = ("<h2>Held-out accuracy</h2>", note, _curve(run, twin), "<h2>What the run answers now</h2>")
    return Extra(
        rows=(row,),
        parts=(*parts, _pictures(out, last)),
        result={"accuracy_before": round(before, 4), "accuracy": round(after, 4), "digits": digits},
    )


def _accuracy(record: dict[str, Any]) -> float:
    """The accuracy over digits alone, without the spaces between them and the end of an answer."""
    counts = [record["by_token"].get(str(token), (0, 0)) for token in _DIGITS]
    right, total = (sum(column) for column in zip(*counts, strict=True))
    return float(right / max(total, 1))


def _curve(run: dict[int, dict[str, Any]], twin: dict[int, dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        for records, style in ((twin, {"color": "#c9d0dc", "lw": 7, "label": "uninterrupted"}), (run, {})):
            values = [100 * _accuracy(records[step]) for step in sorted(records)]
            axes.plot(sorted(records), values, **({"color": COLOURS[0], "marker": "o", "label": "run"} | style))
        axes.axhline(10, color="#56607a", lw=0.8, ls=":", label="chance")
        axes.set_xlabel("step")
        axes.set_ylabel("digits read right, %")
        axes.set_ylim(0, 100)
        axes.legend(frameon=False, fontsize=9, loc="upper left")

    return svg(draw, height=3)


def _pictures(out: Path, record: dict[str, Any]) -> str:
    """The first pictures with their answers, as a row of cards."""
    from megaresume.batches.open import open_stream

    source = open_stream(out / "held_out.yaml").sources[0]
    cards = []
    for answer in record["answers"][:12]:
        members = source.record(answer["document"]).members  # type: ignore[attr-defined]
        images = "".join(
            f'<img alt="" style="height:4rem;image-rendering:pixelated;margin-right:.3rem" '
            f'src="data:image/png;base64,{base64.b64encode(members[name]).decode()}">'
            for name in sorted(members)
            if name.endswith("png")
        )
        expected, predicted = (_decoded(answer[key]) for key in ("expected", "predicted"))
        mark = "right" if expected == predicted else f"expected {expected}"
        cards.append(
            f'<div style="display:inline-block;margin:.4rem 1.2rem .4rem 0">{images}<br>'
            f"<code>{escape(predicted)}</code> <small>{escape(mark)}</small></div>"
        )
    return "".join(cards)


def _decoded(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace").strip()


VLM = Demo(
    title="megaresume demo --vlm",
    steps=300,
    twin=DemoStart(processes=2, workers=0, micro_batch_size=8),
    attempts=(
        DemoStart(processes=2, workers=1, micro_batch_size=8, start_method="fork", killed_after=0.29),
        DemoStart(processes=1, workers=2, micro_batch_size=4, start_method="spawn", killed_after=0.5),
        DemoStart(processes=2, workers=0, micro_batch_size=2),
    ),
    data="handwritten digits as tar shards of image-text records, and the texts of this machine's Python",
    content="tokens, labels, masks, positions, pixels",
    packing="No document with an image was cut.",
    prepare=_prepare,
    flags=_flags,
    extra=_extra,
)
