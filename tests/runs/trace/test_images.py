"""Pictures of a run over real tar shards: bytes, pixels and order against what its loader hands to training."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from megaresume.batches.assemble import make_batch
from megaresume.batches.loader import StreamDataset
from megaresume.program import main
from megaresume.runs.trace import images as images_module
from megaresume.stream.errors import CorpusError
from tests.docs.pages import section
from tests.runs.trace.vlm import BATCH, BROKEN, PROCESSOR, VlmRun, vlm_run

STOP = 40


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> VlmRun:
    return vlm_run(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def written(vlm: VlmRun) -> Path:
    """The pictures of steps 1 to 10: past and future, both stages, two epochs."""
    out = vlm.save.parent / "pictures"
    assert main(["trace", str(vlm.save), "--steps", "1:11", "--images", str(out), "--augmented"]) == 0
    return out


def lines(out: Path) -> list[dict[str, Any]]:
    head, *rows = [json.loads(line) for line in (out / "images.jsonl").read_text().splitlines()]
    assert head["format"] == "megaresume.images" and head["samples"] == [0, STOP]
    return rows


def traced(vlm: VlmRun, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["trace", str(vlm.save), *words]) == 0
    return capsys.readouterr().out


def segments(vlm: VlmRun, sample: int) -> list[Any]:
    stream = vlm.stream_at(sample)
    return list(stream.plan(sample, sample + 1).segments(sample))


def test_every_image_of_every_sample_byte_for_byte_and_in_order(vlm: VlmRun, written: Path) -> None:
    expected = [
        (sample, k, s.document, s.epoch)
        for sample in range(STOP)
        for k, s in enumerate(segments(vlm, sample))
        if s.source == 1
    ]
    rows = lines(written)
    assert [(r["sample"], r["segment"], r["document"], r["epoch"]) for r in rows] == expected
    assert {r["epoch"] for r in rows} >= {0, 1} and len(rows) > STOP
    files = ["images.jsonl", "index.html"]
    for row in rows:
        record = vlm.records[row["document"]]
        assert (row["key"], row["record"]) == (record.key, row["document"] % 15)
        assert row["shard"] == f"shards/pages-{row['document'] // 15}.tar"
        assert row["step"] == row["sample"] // BATCH + 1
        members = [m for m in json.loads(record.members["json"])["images"] if m is not None]
        assert [image["member"] for image in row["images"]] == members
        for image in row["images"]:
            assert (written / image["file"]).read_bytes() == record.members[image["member"]]
            place = f"-place_{image['place']:06d}" if image["shown"] else "-not_shown_"
            name = rf"step_{row['step']:07d}/sample_{row['sample']:08d}-segment_{row['segment']:02d}-pages_"
            assert image["file"].startswith(f"{name}{row['document']}-epoch_{row['epoch']}{place}")
            files += [image[n] for n in ("file", "augmented") if n in image]
    assert sorted(files) == sorted(str(p.relative_to(written)) for p in written.rglob("*") if p.is_file())
    page = (written / "index.html").read_text()
    assert re.findall(r'src="([^"]*)"', page) == files[2:]


def test_augmented_pictures_are_what_training_was_shown(vlm: VlmRun, written: Path) -> None:
    """Through the processor they are the pixels of the batch, at the places of the batch."""
    from megaresume.encoding.images.processors import processor_from_options

    processor = processor_from_options(PROCESSOR)
    rows, stored = lines(written), 0
    for sample in range(STOP):
        stream = vlm.stream_at(sample)
        assembler = StreamDataset(stream).assembler_of(sample, sample + 1)
        batch = make_batch(stream.plan(sample, sample + 1), assembler)
        pixels = [p.numpy() for p in batch["pixel_values"].split(batch["num_tiles"].tolist())]
        shown = [image for row in rows if row["sample"] == sample for image in row["images"] if image["shown"]]
        assert [[image["place"], image["tokens"]] for image in shown] == batch["image_positions"][:, 1:].tolist()
        for image, expected in zip(shown, pixels, strict=True):
            with PIL.Image.open(written / image["augmented"]) as file:
                picture = file.convert("RGB")
            assert picture.size == (image["width"], image["height"])
            found, _ = processor(picture, np.random.default_rng(0))
            assert np.array_equal(found, expected)
            with PIL.Image.open(written / image["file"]) as file:
                stored += np.array_equal(np.asarray(file.convert("RGB")), np.asarray(picture))
    assert stored == 0  # all of them were changed, by the steps of their stage


def test_a_masked_record_is_there_and_not_shown(vlm: VlmRun, written: Path) -> None:
    broken = [row for row in lines(written) if row["document"] == BROKEN]
    assert broken
    for row in broken:
        assert row["fault"]["policy"] == "mask" and "0.png" in row["fault"]["reason"]
        assert [image["shown"] for image in row["images"]] == [False, False]
        assert "augmented" not in row["images"][0]
    assert "not shown to the model" in (written / "index.html").read_text()
    assert all(row["fault"] is None for row in lines(written) if row["document"] != BROKEN)


def test_text_has_images_in_their_places(vlm: VlmRun, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        json.loads(line) for line in traced(vlm, capsys, "--samples", f"0:{STOP}", "--text", "--json").splitlines()
    ]
    texts = [s for row in found for s in row["segments"] if s["source"] == "pages"]
    rows = lines(written)
    assert [s["text"] for s in texts] == [row["text"] for row in rows]
    for row in rows:
        if row["document"] == BROKEN:
            assert row["text"] == ""
            continue
        content = json.loads(vlm.records[row["document"]].members["json"])
        words, images = "", iter(row["images"])
        for text in content["texts"]:
            image = next(images) if text is None else {}
            words += text if text is not None else "<image {width}x{height}, {tokens} tokens>".format(**image)
        assert row["text"].replace("\n", "") == words  # the template puts a line break between two texts
    assert any("<image" in row["text"] for row in rows)
    web = [s for row in found for s in row["segments"] if s["source"] == "web"]
    assert web and all(s["text"].startswith("web ") or s["offset"] for s in web)


def test_rows_name_their_records(vlm: VlmRun, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--samples", f"0:{STOP}")
    quick = [json.loads(line) for line in traced(vlm, capsys, *words, "--json").splitlines()]
    read = [json.loads(line) for line in traced(vlm, capsys, *words, "--json", "--records").splitlines()]
    listed, faults = iter(lines(written)), 0
    for row, full in zip(quick, read, strict=True):
        for segment, more in zip(row["segments"], full["segments"], strict=True):
            assert segment.items() <= more.items()
            if segment["source"] == "web":
                assert "shard" not in segment and "key" not in more
                continue
            line = next(listed)
            names = ("shard", "record", "num_images", "image_tokens")
            assert [segment[n] for n in names] == [line[n] for n in names]
            assert more["key"] == line["key"] and len(more["images"]) == segment["num_images"]
            assert sum(image["tokens"] for image in more["images"]) == segment["image_tokens"]
            if line["document"] == BROKEN and row["sample"] < 8 * BATCH:
                assert more["fault"] == {"policy": "mask", "reason": "as training saw it"}
                faults += 1
            else:
                names = ("member", "width", "height")
                assert [[i[n] for n in names] for i in more["images"]] == [
                    [i[n] for n in names] for i in line["images"]
                ]
    assert faults and next(listed, None) is None
    segments = [s | {"sample": row["sample"]} for row in read for s in row["segments"]]
    for extra in ((), ("--records",)):
        table = list(csv.DictReader(io.StringIO(traced(vlm, capsys, *words, "--csv", *extra))))
        assert len(table) == len(segments)
        for line, segment in zip(table, segments, strict=True):
            names = ["shard", "record", "num_images", "image_tokens", "sample", "document", *(["key"] if extra else [])]
            assert [line[n] for n in names] == [str(segment.get(n, "")) for n in names]
    text = traced(vlm, capsys, *words)
    one = next(s for s in segments if s["source"] == "pages" and s["num_images"])
    place = f"{one['shard']} #{one['record']}"
    assert f"] ({place}, images: {one['num_images']} of {one['image_tokens']} tokens)" in text
    assert f"({place} '{one['key']}', {one['images'][0]['member']} " in traced(vlm, capsys, *words, "--records")


def test_parquet_names_records(vlm: VlmRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    traced(vlm, capsys, "--samples", "0:30", "--parquet", str(tmp_path / "rows.parquet"))
    rows = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    found = [json.loads(line) for line in traced(vlm, capsys, "--samples", "0:30", "--json").splitlines()]
    names = ("source", "document", "shard", "record", "num_images", "image_tokens")
    expected = [[s.get(n) for n in names] for row in found for s in row["segments"]]
    assert [[row[n] for n in names] for row in rows] == expected


def test_stream_names_records(vlm: VlmRun, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["stream", str(vlm.data), "--samples", "0:16"]  # what it holds where no stage begins
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    listed = [row for row in lines(written) if row["sample"] < 16]
    shown = [s for sample in report["samples"] for s in sample["segments"] if s["source"] == "pages"]
    names = ("document", "epoch", "shard", "record", "key", "num_images", "image_tokens")
    assert [[s[n] for n in names] for s in shown] == [[row[n] for n in names] for row in listed]
    assert main(words) == 0
    assert f"({shown[0]['shard']} #{shown[0]['record']} '{shown[0]['key']}'" in capsys.readouterr().out


def test_samples_that_were_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vlm = vlm_run(tmp_path, skip={"samples": ["9:11"]})
    traced(vlm, capsys, "--samples", "8:10", "--images", str(tmp_path / "out"))
    rows = [json.loads(line) for line in (tmp_path / "out" / "images.jsonl").read_text().splitlines()[1:]]
    assert [(row["absolute"], row["sample"]) for row in rows] == sorted((r["absolute"], r["sample"]) for r in rows)
    assert {(row["absolute"], row["sample"]) for row in rows} == {(8, 8), (9, None), (10, None), (11, 9)}
    for row in rows:
        folder = f"left_out/absolute_{row['absolute']:08d}-" if row["sample"] is None else "step_0000003/sample_"
        for image in row["images"]:
            assert image["file"].startswith(folder)
            record = vlm.records[row["document"]]
            assert (tmp_path / "out" / image["file"]).read_bytes() == record.members[image["member"]]


def test_the_document(vlm: VlmRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What docs/verify.md shows of records and pictures."""
    text = section("verify.md", "Which documents did a step train on?")
    quick, read, *files = [
        line for block in re.findall(r"```text\n(.*?)```", text, re.S) for line in block.splitlines()
    ]
    assert quick in traced(vlm, capsys, "--steps", "3").splitlines()
    assert read in traced(vlm, capsys, "--steps", "3", "--records").splitlines()
    (command,) = re.findall(r"^megaresume trace checkpoints/ (.* --images .*)$", text, re.MULTILINE)
    traced(vlm, capsys, *command.replace("pictures", str(tmp_path / "pictures")).split())
    written = sorted(str(p.relative_to(tmp_path / "pictures")) for p in tmp_path.rglob("*") if p.is_file())
    assert written[:4] == files


def test_only_its_own_directory_is_replaced(vlm: VlmRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["trace", str(vlm.save), "--images", str(out)]
    out.mkdir()
    assert main([*words, "--steps", "1:3", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    before = sorted(out.rglob("*"))
    assert done["images"] == sum(p.suffix == ".png" for p in before)
    assert main([*words, "--steps", "3"]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["images.jsonl", "index.html", "step_0000003"]
    (out / "step_0000003" / "mine.png").write_bytes(b"mine")
    capsys.readouterr()
    assert main([*words, "--steps", "1"]) == 2
    assert "mine.png" in capsys.readouterr().err and (out / "step_0000003" / "mine.png").read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [out]


def test_a_failure_leaves_what_was_there(vlm: VlmRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    words = ["trace", str(vlm.save), "--images", str(out), "--steps"]
    assert main([*words, "1"]) == 0
    held = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    real, calls = images_module.show, []

    def show(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise CorpusError("a disk that gives out")
        return real(*arguments)

    monkeypatch.setattr(images_module, "show", show)
    assert main([*words, "2:6"]) == 1
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == held
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "1", "--augmented"), "--augmented goes with --images"),
        (("--steps", "1", "--images", "x", "--text"), "--images goes without --text"),
        (("--find", "pages:1", "--images", "x"), "--images goes with --steps"),
        (("--steps", "1", "--records", "--parquet", "x"), "--records goes with text"),
    ],
)
def test_mistakes(vlm: VlmRun, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert main(["trace", str(vlm.save), *words]) == 2
    assert message in capsys.readouterr().err


def test_names_of_files_are_of_safe_letters() -> None:
    names = ["web", "../etc", "a b", "a.b", "Web", "bücher", "x" * 200]
    words = images_module._file_words(names)
    assert words == {
        "web": "web",
        "../etc": "___etc_1",
        "a b": "a_b_2",
        "a.b": "a_b_3",
        "Web": "Web_4",
        "bücher": "b_cher_5",
        "x" * 200: "x" * 64 + "_6",
    }
    members = ["jpg", "0.PNG", "cats/1.webp", "v1.0/photo", "v1.0/my photo", "a.b c"]
    assert [images_module._suffix(name) for name in members] == ["jpg", "PNG", "webp", "photo", "image", "image"]
    record = {"shard": "<b>", "record": 1, "key": "<i>", "images": [], "text": "<script>", "fault": None}
    place = {"step": 1, "sample": 1, "rank": 0, "micro_batch": 0, "place": 0, "source": "&", "document": 1, "epoch": 0}
    page = images_module._article(copy.deepcopy({**record, **place, "length": 3}))
    assert "<script>" not in page and "<b>" not in page and "&lt;script&gt;" in page
