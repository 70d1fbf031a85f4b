"""A streaming dataset of `datasets` is refused with the call that gives the same rows by number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megaresume
from megaresume.stream.errors import UsageError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(directory: Path, kind: str, number: int) -> str:
    rows = {"text": [f"{number} {row}" for row in range(5)]}
    path = directory / f"{number}.{kind}"
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(rows), path)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows["text"]))
    return str(path)


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_the_call_that_is_named_gives_the_same_rows_by_number(tmp_path: Path, kind: str) -> None:
    files = [write(tmp_path, kind, number) for number in range(2)]
    stream = datasets.load_dataset(kind, data_files=files, split="train", streaming=True)
    with pytest.raises(UsageError) as refused:
        megaresume.DataLoader(stream.filter(len).map(dict).shuffle(seed=1), 2)
    assert refused.value.found == f"datasets.iterable_dataset.IterableDataset, an IterableDataset of 2 {kind} files"
    action = str(refused.value.action)
    call, _, rest = action.removeprefix("use ").partition(", without streaming=True")
    assert rest.startswith(", and after it the same .filter() and .map(): ") and "--index-only" in rest
    rows = eval(call, {"datasets": datasets})
    assert [row["text"] for row in rows] == [row["text"] for row in stream]
    assert len(megaresume.DataLoader(rows, 2).dataset) == 10


def test_of_many_files_some_are_named(tmp_path: Path) -> None:
    files = [write(tmp_path, "json", number) for number in range(5)]
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    with pytest.raises(UsageError, match="2.json', ...]") as refused:  # noqa: RUF043
        megaresume.DataLoader(stream, 2)
    assert "3.json" not in str(refused.value) and "IterableDataset of 5 json files" in str(refused.value)


def test_of_a_generator(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"datasets\.Dataset\.from_generator"):
        megaresume.DataLoader(datasets.IterableDataset.from_generator(lambda: iter([{"text": "x"}])), 2)
