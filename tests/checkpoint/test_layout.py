from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.checkpoint.records.names import (
    check_tag,
    deepspeed_tag,
    manifest_path,
    marker_path,
    megatron_tag,
    parse_record_name,
    recorded_tag,
    split_root,
    step_path,
    tag_iteration,
    usual_tags,
)
from megaresume.stream.errors import UsageError

ROOT = Path("/save")


@pytest.mark.parametrize("iteration", [0, 1, 10, 9_999_999, 10_000_000, 123_456_789_012])
def test_tags_tell_their_iteration(iteration: int) -> None:
    assert tag_iteration(deepspeed_tag(iteration)) == iteration
    assert tag_iteration(megatron_tag(iteration)) == iteration


def test_names_are_those_of_the_frameworks() -> None:
    assert deepspeed_tag(10) == "global_step10"
    assert megatron_tag(10) == "iter_0000010"
    assert usual_tags(10) == ("global_step10", "iter_0000010", "checkpoint-10", "step-10", "global_step_10")
    assert [tag_iteration(tag) for tag in usual_tags(10)] == [10] * 5
    assert step_path(ROOT, 10, "global_step10") == ROOT / "megaresume/step_0000010.json"
    assert manifest_path(ROOT, 10, "iter_0000010") == ROOT / "megaresume/step_0000010.manifest.json"


@pytest.mark.parametrize(
    "tag", ["best", "global_step10_universal", "iter_10", "global_step", "global_step-1", "global_step１0", "iter_x"]
)
def test_other_tags_tell_nothing(tag: str) -> None:
    assert tag_iteration(tag) is None


@pytest.mark.parametrize("tag", ["best", "v1.0", "a@b", "x.manifest", "global_step10", "step_0000010", "ünïcode"])
def test_record_names_can_be_read_back(tag: str) -> None:
    for make, kind in ((step_path, "state"), (manifest_path, "manifest"), (marker_path, "saving")):
        record = parse_record_name(make(ROOT, 5010, tag).name)
        assert record is not None
        assert (record.kind, record.iteration, record.tag) == (kind, 5010, tag)
        usual = parse_record_name(make(ROOT, 10, "global_step10").name)
        assert usual is not None
        assert (usual.kind, usual.iteration, usual.tag) == (kind, 10, None)


@pytest.mark.parametrize(
    "name",
    [
        "ledger.jsonl",
        ".step_0000010.json.megaresume-1-00000000.tmp",
        "step_10.json",
        "step_0000010@...json",
        "step_0000010.manifest@.hidden.json",
    ],
)
def test_other_files_are_no_records(name: str) -> None:
    assert parse_record_name(name) is None


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "../up", "a/b", ".hidden", "a\nb", "a\0b", " a", "latest", "megaresume", "x" * 161]
)
def test_impossible_tags_are_refused(tag: str) -> None:
    with pytest.raises(UsageError, match="plain directory name"):
        check_tag(tag)
    with pytest.raises(ValueError, match="is not a plain directory name"):
        recorded_tag(tag)


def test_split_root_tells_roots_from_tag_directories(root: Path) -> None:
    assert split_root(root) == (root, None)
    assert split_root(root / "global_step10") == (root, "global_step10")
    assert split_root(root / "megaresume") == (root, None)


def test_split_root_is_not_misled_by_a_neighbour_called_megaresume(tmp_path: Path) -> None:
    (tmp_path / "megaresume").mkdir()
    (tmp_path / "run1").mkdir()
    assert split_root(tmp_path / "run1") == (tmp_path / "run1", None)
