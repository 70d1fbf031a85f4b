"""Figures by source against the tokens of the batches: each packing, stages, what is left out, images, a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megaresume import BatchSchedule, Stream, StreamLoader, open_stream
from megaresume.checkpoint.metrics.figures import BY_NAME
from megaresume.checkpoint.metrics.sources import COUNTED, SourceFigures
from megaresume.data.source import scan_fingerprint
from megaresume.encoding.images.document import EncodedDocument, EncodedImage, Key
from megaresume.stream.state import Fingerprint
from tests.checkpoint.metrics.runs import Counts, config_of, count, nothing, write_sources
from tests.corpora import write_spans

IMAGE = 2999


class Pictures:
    """Image-text documents of the tokens from 2000 on; all but the first are trained, and the image is not."""

    whole = True
    encoder = SimpleNamespace(image_token_id=IMAGE, pixel_shape=(6,))

    def __len__(self) -> int:
        return 50

    def length(self, i: int) -> int:
        return 8 + i % 13

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        return 8 + ids % 13

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        tokens = np.full(self.length(i), 2003 + i)
        tokens[0], tokens[-1], tokens[2:4] = 2001, 2002, IMAGE
        trained = np.ones(len(tokens), bool)
        trained[:4] = False
        pixels = np.zeros((8, 6), np.float32)
        image = EncodedImage(offset=2, num_tokens=2, pixels=pixels, grid=(1, 2, 4))
        return EncodedDocument(tokens=tokens, trained=trained, images=(image,))

    def get(self, i: int) -> np.ndarray:
        return self.encoded(i, Key(seed=0, source="", document=i, epoch=0)).tokens

    def read(self, i: int, offset: int, length: int) -> np.ndarray:
        return self.get(i)[offset : offset + length]

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        return scan_fingerprint(self.lengths, len(self), "pictures")


def batches(stream: Stream, stop: int, found: Counts) -> None:
    """Count what a loader gives of the samples up to ``stop``."""
    for batch in StreamLoader(stream, BatchSchedule.constant(1), micro_batch_size=1, stop=stop, prefetch=0):
        bounds = [row.tolist() for row in batch["cu_seqlens"]]
        count(batch["tokens"].tolist(), batch["loss_mask"].int().tolist(), bounds, found)


CASES: dict[str, dict[str, Any]] = {
    "split": {},
    "best_fit": {"packing": {"mode": "best_fit", "open_bins": 4}},
    "none": {"packing": "none"},
    "aligned": {"packing": {"mode": "best_fit", "open_bins": 4, "align": 8}},
    "filled": {"packing": {"mode": "best_fit", "open_bins": 4}, "options": {"web": {"packing": "split"}}},
    "stages": {"stages": [{"name": "long", "from_samples": 70, "seq_length": 128, "weights": {"web": 1, "code": 3}}]},
    "left out": {"skip": {"samples": ["20:40"], "documents": {"web": [3, 4, 5]}}},
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_counted_is_what_the_batches_hold(case: str, tmp_path: Path) -> None:
    write_sources(tmp_path)
    config = config_of(tmp_path, **CASES[case])
    figures, found = SourceFigures(open_stream(config), 0), nothing(["web", "code"])
    batches(open_stream(config), 150, found)
    reading = figures.advance(150)
    assert figures.counts == found
    assert {what: reading[f"megaresume.source.{what}"] for what in found} == found
    assert reading["megaresume.tokens"] == sum(found["tokens"].values())
    places = 150 * 64 + (80 * 64 if case == "stages" else 0)
    assert reading["megaresume.fill"] == pytest.approx(sum(found["tokens"].values()) / places)


def test_trained_tokens_are_those_of_the_spans(tmp_path: Path) -> None:
    lengths = [len(document) for document in write_sources(tmp_path)["code"]]
    write_spans(tmp_path / "code", lengths, [[(n // 4, n // 2), (n - 1, n)] for n in lengths])
    config = config_of(tmp_path, packing={"mode": "best_fit", "open_bins": 4})
    figures, found = SourceFigures(open_stream(config), 0), nothing(["web", "code"])
    batches(open_stream(config), 150, found)
    figures.advance(150)
    assert figures.counts == found
    assert found["trained"]["code"] < 0.5 * found["tokens"]["code"]


def test_images(tmp_path: Path) -> None:
    write_sources(tmp_path)
    config = config_of(tmp_path)
    config = config | {"packing": "knapsack", "sources": config["sources"] | {"pictures": {"weight": 2}}}
    figures = SourceFigures(open_stream(config, objects={"pictures": Pictures()}), 0)
    found = nothing(["web", "code", "pictures"])
    batches(open_stream(config, objects={"pictures": Pictures()}), 120, found)
    reading = figures.advance(120)
    for what in ("tokens", "documents", "cut"):
        assert reading[f"megaresume.source.{what}"] == found[what]
    # Which of their tokens are trained nobody knows before they are read.
    assert reading["megaresume.source.trained"] == {name: found["trained"][name] for name in ("web", "code")}


@pytest.mark.parametrize("case", CASES)
def test_a_resume_continues_the_counts(case: str, tmp_path: Path) -> None:
    write_sources(tmp_path)
    config = config_of(tmp_path, **CASES[case])
    whole = SourceFigures(open_stream(config), 0)
    before = SourceFigures(open_stream(config), 0)
    before.advance(90)
    resumed = open_stream(config, state=open_stream(config).state_at(90))
    after = SourceFigures(resumed, 90, before.counts)
    assert after.counts == before.counts
    assert after.advance(150)["megaresume.source.share"] == whole.advance(150)["megaresume.source.share"]
    assert after.counts == whole.counts


def test_counts_are_gauges_since_a_start_after_a_kill_takes_them_back(tmp_path: Path) -> None:
    write_sources(tmp_path)
    config = config_of(tmp_path)
    killed = SourceFigures(open_stream(config), 0)
    killed.count_to(90)
    saved = killed.counts
    last = killed.advance(150)
    first = SourceFigures(open_stream(config, state=open_stream(config).state_at(90)), 90, saved).advance(91)
    for name in COUNTED:
        before: Any = last[f"megaresume.source.{name}"]
        after: Any = first[f"megaresume.source.{name}"]
        assert all(after[source] < before[source] for source in ("web", "code"))
        assert BY_NAME[f"megaresume.source.{name}"].kind == "gauge"


def test_shares_and_epochs(tmp_path: Path) -> None:
    documents = write_sources(tmp_path)
    reading = SourceFigures(open_stream(config_of(tmp_path)), 0).advance(400)
    assert reading["megaresume.source.weight"] == {"web": 0.75, "code": 0.25}
    share: Any = reading["megaresume.source.share"]
    assert share["web"] == pytest.approx(0.75, abs=0.01)
    pieces = sum(-(-len(document) // 64) for document in documents["web"])  # a long document comes in parts
    epoch: Any = reading["megaresume.source.epoch"]
    left: Any = reading["megaresume.source.left"]
    assert epoch["web"] % 1 == pytest.approx(1 - left["web"] / pieces)
