"""The demo itself, short; and that its comparison can fail."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from megaresume.cluster.records import compare_runs, read_records
from tests.cli.conftest import megaresume_process
from tests.packaging.conftest import ROOT

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(directory, result) of a short demo."""
    out = tmp_path_factory.mktemp("demo") / "out"
    done = megaresume_process("demo", "--steps", "30", "--out", out, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return out, json.loads(done.stdout)


def test_it_proves_a_run_that_was_killed_twice(demo):
    out, result = demo
    assert result["holds"] and result["steps"] == 30
    assert result["different_samples"] == result["different_content"] == result["missing"] == []
    records = read_records(out / "run.jsonl")
    assert records.starts[0]["step"] == 0 and len(records.starts) == 3
    assert [(s["topology"]["dp"], s["topology"]["num_workers"]) for s in records.starts] == [(2, 0), (1, 2), (2, 1)]
    assert 0 < records.starts[1]["step"] < records.starts[2]["step"] < 30
    assert result["losses"]["largest"] < 1e-4


def test_the_report_is_one_page_with_everything_inside(demo):
    page = (demo[0] / "report.html").read_text()
    assert page.count("<svg") == 3 and page.count("SIGKILL") >= 2
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
    for name in ("code", "docstrings", "manual"):
        assert f"<td>{name}</td>" in page


def shape(text: str) -> str:
    """With N for every number and range."""
    return re.sub(r"N(, N)+", "N", re.sub(r"\d+ to \d+|\d+(\.\d+)?(e[+-]\d+)?", "N", text))


def test_the_readme_shows_what_is_printed(demo):
    readme = re.findall(r"^ {7}(\S.*?)  +(\S.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    page = (demo[0] / "report.html").read_text()
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in page.split("<tr>")]
    assert [name for name, _ in readme][:1] == ["steps compared"]
    shown = [tuple(map(shape, row)) for row in rows if len(row) == 2]
    assert [tuple(map(shape, row)) for row in readme] == shown


def test_steps_done_again_are_told_from_the_others(demo):
    page, run = (demo[0] / "report.html").read_text(), read_records(demo[0] / "run.jsonl")
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in page.split("<tr>")]
    told = [(row[2], row[1], row[0]) for row in rows if len(row) == 7 and row[2]]
    lost = [(record["attempt"], record["step"]) for record in run.lost]
    assert lost and [(start, step) for word, start, step in told if word == "lost to the stop"] == [
        (str(attempt), str(step)) for attempt, step in lost
    ]
    assert [(start, step) for word, start, step in told if word == "done again"] == [
        (str(attempt + 1), str(step)) for attempt, step in lost
    ]
    (checked,) = [row[1] for row in rows if row[:1] == ["steps lost to a kill, and done again"]]
    steps = [step for _, step in lost]
    assert checked.startswith(f"{len(lost)}: {steps[0]}") and checked.endswith(f"{steps[-1]}")
    assert sum(" again)" in row[2] for row in rows if len(row) == 4) == len({attempt for attempt, _ in lost})


def test_it_removes_nothing_that_it_did_not_make(demo, tmp_path):
    again = megaresume_process("demo", "--out", demo[0])
    assert again.returncode == 2 and "--overwrite" in again.stderr
    (tmp_path / "thesis.tex").write_text("precious")
    done = megaresume_process("demo", "--out", tmp_path, "--overwrite")
    assert done.returncode == 2 and (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("field", ["order", "content", "digest", "samples"])
def test_a_different_step_is_found(demo, field):
    out, _ = demo
    twin, run = read_records(out / "twin.jsonl"), read_records(out / "run.jsonl")
    assert compare_runs(twin, run, steps=30).holds
    run.steps[17] = run.steps[17] | {field: [1, 2] if field == "samples" else "0" * 16}
    comparison = compare_runs(twin, run, steps=30)
    assert not comparison.holds
    assert (comparison.different_content if field == "content" else comparison.different_samples) == (17,)


def test_a_step_that_only_an_earlier_attempt_did_differently_is_found(demo):
    out, _ = demo
    twin, run = read_records(out / "twin.jsonl"), read_records(out / "run.jsonl")
    assert run.lost
    wrong = run.lost[0] | {"order": "0" * 16}
    changed = dataclasses.replace(run, lost=(wrong, *run.lost[1:]))
    assert compare_runs(twin, changed, steps=30).different_samples == (wrong["step"],)


def test_a_missing_step_is_found(demo):
    out, _ = demo
    twin, run = read_records(out / "twin.jsonl"), read_records(out / "run.jsonl")
    del run.steps[30]
    assert compare_runs(twin, run, steps=30).missing == (30,)
