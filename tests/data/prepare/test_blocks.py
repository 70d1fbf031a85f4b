"""Parts of one prepare on several machines (``--part``): the bytes of one machine, whatever happens to the parts."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megaresume.data.documents import TextOptions
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.prepare.encode import PartFiles
from megaresume.stream.errors import CorpusError, SetupError, UsageError

OUTPUTS = ("bin", "idx", "megaresume.json")


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """One large file that is cut within, a compressed one and an empty one that are not, a small one."""
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": "".join(map(chr, rng.integers(32, 700, rng.integers(0, 300))))}) for _ in range(600)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:400]) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[400:500]).encode()))
    (tmp_path / "c.jsonl").write_text("")
    (tmp_path / "d.jsonl").write_text("\n\n" + "\r\n".join(lines[500:]))
    return [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl", "d.jsonl")]


def written(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in OUTPUTS]


def of_one_machine(inputs: list[Path], directory: Path, **options: object) -> list[bytes]:
    directory.mkdir()
    prepare(inputs, directory / "out", PrepareOptions(**options))
    return written(directory / "out")


@pytest.mark.parametrize("block_bytes", [300, 20_000, 10_000_000])
@pytest.mark.parametrize("order", [(1,), (2, 1), (3, 1, 4, 2), (11, 3, 7, 1, 2, 10, 9, 4, 8, 6, 5)])
def test_parts_in_any_order_are_the_bytes_of_one_machine(inputs, tmp_path, order, block_bytes):
    expected = of_one_machine(inputs, tmp_path / "whole")
    summaries = []
    for number in order:
        summaries.append(
            prepare(inputs, tmp_path / "out", PrepareOptions(part=(number, len(order)), block_bytes=block_bytes))
        )
        assert summaries[-1].bin_bytes is None
        assert not list(tmp_path.glob("out.[bi]*"))
    merged = prepare(inputs, tmp_path / "out", PrepareOptions(block_bytes=block_bytes))
    assert written(tmp_path / "out") == expected
    assert merged.resumed_blocks == merged.blocks == sum(s.blocks for s in summaries)
    assert merged.tokens == sum(s.tokens for s in summaries)
    assert not (tmp_path / "out.prepare").exists()


def test_each_part_makes_about_as_much_and_a_large_file_is_cut(inputs, tmp_path):
    sizes = [prepare(inputs[:1], tmp_path / "out", PrepareOptions(part=(k, 4))).text_bytes for k in range(1, 5)]
    assert min(sizes) > 0.9 * max(sizes)


def test_compressed_files_are_not_cut_and_spread(tmp_path):
    line = json.dumps({"text": "a" * 99}).encode() + b"\n"
    paths = [tmp_path / f"{k}.jsonl.gz" for k in range(5)]
    for k, path in enumerate(paths):
        path.write_bytes(gzip.compress(line * (k + 1) * 300, compresslevel=0))
    made = [prepare(paths, tmp_path / "out", PrepareOptions(part=(k, 4))).documents for k in range(1, 5)]
    assert made == [900, 900, 1200, 1500]


def test_parts_that_are_missing_are_made_by_the_merge(inputs, tmp_path):
    expected = of_one_machine(inputs, tmp_path / "whole")
    options = {"block_bytes": 5000}
    made = prepare(inputs, tmp_path / "out", PrepareOptions(part=(2, 3), **options))
    merged = prepare(inputs, tmp_path / "out", PrepareOptions(**options))
    assert merged.blocks > merged.resumed_blocks == made.blocks > 0
    assert written(tmp_path / "out") == expected


def test_parts_of_machines_without_a_shared_file_system_are_copied_together(inputs, tmp_path):
    expected = of_one_machine(inputs, tmp_path / "whole")
    for number in (1, 2, 3):
        prepare(inputs, tmp_path / f"machine{number}" / "out", PrepareOptions(part=(number, 3)))
        shutil.copytree(tmp_path / f"machine{number}", tmp_path / "merged", dirs_exist_ok=True)
    merged = prepare(inputs, tmp_path / "merged" / "out", PrepareOptions())
    assert merged.resumed_blocks == merged.blocks
    assert written(tmp_path / "merged" / "out") == expected


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"dtype": "int32"}, "dtype was 'uint16', is 'int32'"),
        ({"text": TextOptions(json_key="body")}, "json_key was 'text', is 'body'"),
        ({"part": (2, 4)}, "parts was 3, is 4"),
        ({"part": None, "dtype": "int32"}, "dtype was 'uint16', is 'int32'"),
    ],
)
def test_other_settings_than_another_part_has_are_refused_by_name(inputs, tmp_path, change, found):
    expected = of_one_machine(inputs, tmp_path / "whole")
    prepare(inputs, tmp_path / "out", PrepareOptions(part=(1, 3)))
    with pytest.raises(UsageError, match="00001-of-00003 was left by a prepare of other input") as caught:
        prepare(inputs, tmp_path / "out", PrepareOptions(**{"part": (2, 3), **change}))
    assert found in caught.value.found
    # What was refused leaves nothing that would stop the others.
    for number in (2, 3):
        prepare(inputs, tmp_path / "out", PrepareOptions(part=(number, 3)))
    prepare(inputs, tmp_path / "out", PrepareOptions())
    assert written(tmp_path / "out") == expected


def test_another_tokenizer_than_another_part_has(inputs, tmp_path, tokenizer_json):
    prepare(inputs, tmp_path / "out", PrepareOptions(part=(1, 2)))
    with pytest.raises(UsageError, match="00001-of-00002 was left by") as caught:
        prepare(inputs, tmp_path / "out", PrepareOptions(part=(2, 2), tokenizer=tokenizer_json))
    assert "tokenizer was" in caught.value.found
    assert f"remove {tmp_path / 'out.prepare'}" in caught.value.action


def test_different_settings_on_machines_without_a_shared_file_system(inputs, tmp_path):
    for number, dtype in ((1, "uint16"), (2, "int32")):
        prepare(inputs, tmp_path / f"machine{number}" / "out", PrepareOptions(part=(number, 2), dtype=dtype))
        shutil.copytree(tmp_path / f"machine{number}", tmp_path / "merged", dirs_exist_ok=True)
    for dtype, other in (("uint16", "00002"), ("int32", "00001")):
        with pytest.raises(UsageError, match=f"{other}-of-00002 was left by a prepare of other input"):
            prepare(inputs, tmp_path / "merged" / "out", PrepareOptions(dtype=dtype))


def test_input_that_changed_between_parts(inputs, tmp_path):
    prepare(inputs, tmp_path / "out", PrepareOptions(part=(1, 2)))
    inputs[3].write_text(inputs[3].read_text() + '\n{"text": "more"}\n')
    for part in ((2, 2), None):
        with pytest.raises(UsageError, match="was left by a prepare of other input") as caught:
            prepare(inputs, tmp_path / "out", PrepareOptions(part=part))
        assert "d.jsonl changed" in caught.value.found


def test_parts_after_one_machine_began_and_the_other_way_round(inputs, tmp_path):
    with PartFiles(tmp_path / "out").locked({"inputs": [], "parts": 1}, restart=False):
        pass
    with pytest.raises(UsageError, match="was left by") as caught:
        prepare(inputs, tmp_path / "out", PrepareOptions(part=(1, 2)))
    assert "parts was 1, is 2" in caught.value.found
    prepare(inputs, tmp_path / "out", PrepareOptions(restart=True))
    prepare(inputs, tmp_path / "out", PrepareOptions(part=(1, 2), overwrite=True))
    assert prepare(inputs, tmp_path / "out", PrepareOptions(restart=True, overwrite=True)).resumed_blocks == 0


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"parts": null}', '{"parts": []}'])
def test_a_damaged_plan_is_refused(inputs, tmp_path, content):
    (tmp_path / "out.prepare").mkdir()
    (tmp_path / "out.prepare" / "plan.json").write_text(content)
    with pytest.raises(UsageError, match="was left by") as caught:
        prepare(inputs, tmp_path / "out", PrepareOptions())
    assert "--restart" in caught.value.action


def test_parts_at_once_share_the_directory_and_the_merge_has_it_alone(inputs, tmp_path):
    plan = {"inputs": []}
    with PartFiles(tmp_path / "out").locked(plan, restart=False, machine="00001-of-00002"):
        with pytest.raises(SetupError, match=r"working on .*/00001-of-00002\n"):
            prepare(inputs, tmp_path / "out", PrepareOptions(part=(1, 2)))
        with pytest.raises(SetupError, match=r"working on .*/out\.prepare\n"):
            prepare(inputs, tmp_path / "out", PrepareOptions())
        with PartFiles(tmp_path / "out").locked(plan, restart=False, machine="00002-of-00002"):
            pass


def test_bad_line_is_named_by_its_line_in_the_whole_file(inputs, tmp_path):
    lines = inputs[0].read_text().splitlines()
    lines[390] = '{"text": "cut'
    inputs[0].write_text("\n".join(lines))
    with pytest.raises(CorpusError, match=r"a\.jsonl:391 is not JSON"):
        prepare(inputs[:1], tmp_path / "out", PrepareOptions(part=(4, 4)))
    # The other parts were made before anything was said of bad lines: they hold nothing of that kind.
    prepare(inputs[:1], tmp_path / "out", PrepareOptions(part=(1, 4)))
    summary = prepare(inputs[:1], tmp_path / "out", PrepareOptions(part=(4, 4), text=TextOptions(bad_lines="skip")))
    assert summary.bad_lines == 1
    merged = prepare(inputs[:1], tmp_path / "out", PrepareOptions(text=TextOptions(bad_lines="skip")))
    assert merged.bad_lines == 1


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_text_files(tmp_path, unit):
    (tmp_path / "in").mkdir()
    for number in range(5):
        text = "\n".join(f"{number} {i} \u00e9" if i % 3 else "" for i in range(50 * number))
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    expected = of_one_machine([tmp_path / "in"], tmp_path / "whole", text_unit=unit)
    # Within the directory that is read: parts of others are no input.
    for number in (2, 1, 3):
        prepare([tmp_path / "in"], tmp_path / "in" / "out", PrepareOptions(text_unit=unit, part=(number, 3)))
    prepare([tmp_path / "in"], tmp_path / "in" / "out", PrepareOptions(text_unit=unit))
    assert written(tmp_path / "in" / "out") == expected


@pytest.mark.parametrize("part", [(0, 4), (5, 4), (1, 0), (1, 100_000)])
def test_bad_part(inputs, tmp_path, part):
    with pytest.raises(UsageError, match="bad --part"):
        prepare(inputs, tmp_path / "out", PrepareOptions(part=part))
    assert not list(tmp_path.glob("out*"))
