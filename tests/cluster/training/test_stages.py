"""A blend that is changed in the middle of a run: killed, edited, resumed; against a twin that had declared it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaresume.program import main
from tests.cluster.training.compare import compare
from tests.cluster.training.conftest import write_corpus
from tests.release import release

SIZES = "--train-iters 8 --global-batch-size 4 --micro-batch-size 2"
BEGIN = "seed: 1234\nseq_length: 64\npacking: {mode: best_fit, open_bins: 8}\n"


@pytest.fixture(scope="module")
def configs(data_yaml: Path) -> dict[str, Path]:
    """The data configs of the run before and after the change, and the one that declares the change by step."""
    directory = data_yaml.parent
    write_corpus(directory / "books", documents=100, seed=3)
    sources = "sources:\n  web: {{path: web, weight: {}}}\n  code: {{path: code, weight: {}}}\n"
    books = "  books: {{path: books, weight: {}}}\n"
    texts = {
        "before": BEGIN + sources.format(0.7, 0.3),
        "after": BEGIN.replace("packing: {mode: best_fit, open_bins: 8}", "packing: split")
        + sources.format(0.2, 0.3)
        + books.format(0.5),
        "declared": BEGIN
        + sources.format(0.7, 0.3)
        + books.format(0)
        + "stages:\n  - {from_step: 4, weights: {web: 0.2, code: 0.3, books: 0.5}, packing: split}\n",
    }
    paths = {name: directory / f"{name}.yaml" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    return paths


@release(
    "five launches",
    "`tests/cluster/training/test_trace.py::test_the_log_of_a_run`: a stage, killed and resumed",
)
def test_a_change_at_a_resume_is_the_declared_one(
    runs: Any, configs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    twin = runs("declared", f"{SIZES} --save {{dir}}/declared", data=f"--megaresume-data {configs['declared']}")
    assert twin.status == 0, twin.text[-4000:]
    flags = f"{SIZES} --save {{dir}}/staged --load {{dir}}/staged --save-interval 4"
    runs("staged", flags, kill_after=6, data=f"--megaresume-data {configs['before']}")
    after = f"--megaresume-data {configs['after']}"

    refused = runs("staged", flags, num_processes=1, data=after)
    assert refused.status == 1
    assert refused.text.count("the data config is not the one that the state was made with") == 1
    assert "sources.web.weight 2" in refused.text and "--megaresume-on-change stage" in refused.text

    # Another number of ranks as well; and once begun, the stage needs no flag.
    second = runs("staged", f"{flags} --megaresume-on-change stage --exit-interval 6", num_processes=1, data=after)
    assert second.status == 0, second.text[-4000:]
    assert "megaresume: at sample 16:" in second.text and "packing.mode" in second.text
    assert "books" in second.text and "steps from here" in second.text
    third = runs("staged", flags, data=after)
    assert third.status == 0, third.text[-4000:]
    assert compare(twin.records, third.records, fields=("samples", "order", "content", "digest")) is None
    assert third.records.steps[5]["order"] != twin.records.steps[4]["order"]

    assert main(["verify", str(runs.directory / "staged")]) == 0, capsys.readouterr().out
    capsys.readouterr()
    assert main(["inspect", str(runs.directory / "staged")]) == 0
    shown = capsys.readouterr().out
    assert "start from 0, stage 2 from 16" in shown and "at sample 16: " in shown
