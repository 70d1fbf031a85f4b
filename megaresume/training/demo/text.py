"""The demo of text: three corpora of this machine's Python, and a GPT."""

from __future__ import annotations

from pathlib import Path

import yaml

from megaresume.training.demo.commands import ask
from megaresume.training.demo.corpus import SOURCES, write_texts
from megaresume.training.demo.plan import Attempt, as_words
from megaresume.training.demo.scenario import Say, Scenario

__all__ = ["TEXT"]

SEQ_LENGTH = 256
GLOBAL_BATCH_SIZE = 16


def _prepare(out: Path, say: Say) -> Path:
    """Build the corpora with ``megaresume prepare``."""
    for name, path in write_texts(out / "texts").items():
        summary = ask("prepare", str(path), "--output", str(out / "corpora" / name))
        say(f"   {name}: {summary['documents']:,} documents, {summary['tokens']:,} tokens")
    data = out / "data.yaml"
    config = {
        "seed": 1234,
        "seq_length": SEQ_LENGTH,
        "packing": {"mode": "best_fit", "open_bins": 16},
        "sources": {name: {"path": f"corpora/{name}", "weight": float(w)} for name, (_, w) in SOURCES.items()},
    }
    data.write_text(yaml.safe_dump(config, sort_keys=False))
    return data


def _flags(out: Path, steps: int) -> list[str]:
    return as_words(
        {
            "num-layers": 2,
            "hidden-size": 64,
            "num-attention-heads": 4,
            "seq-length": SEQ_LENGTH,
            "max-position-embeddings": SEQ_LENGTH,
            "global-batch-size": GLOBAL_BATCH_SIZE,
            "train-iters": steps,
            "lr": "3e-3",
            "min-lr": "3e-4",
            "lr-decay-style": "cosine",
            "lr-warmup-iters": max(steps // 20, 1),
            "save-interval": 8,
            "eval-interval": steps,
            "eval-iters": 0,
            "seed": 1234,
        }
    )


TEXT = Scenario(
    title="megaresume demo",
    steps=100,
    global_batch_size=GLOBAL_BATCH_SIZE,
    twin=Attempt(processes=2, workers=0, micro_batch_size=4),
    attempts=(
        Attempt(processes=2, workers=0, micro_batch_size=4, killed_after=0.29),
        Attempt(processes=1, workers=2, micro_batch_size=8, start_method="fork", killed_after=0.63),
        Attempt(processes=2, workers=1, micro_batch_size=2, start_method="spawn"),
    ),
    data="three corpora from the texts of this machine's Python",
    content="tokens, labels, masks and positions",
    packing="Only documents longer than a sample were cut.",
    prepare=_prepare,
    flags=_flags,
)
