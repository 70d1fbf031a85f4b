from __future__ import annotations

import json

from megaresume.batches.open import open_stream
from tests.cli.conftest import megaresume


def test_json_is_the_plan(run):
    report = json.loads(megaresume("stream", run.data, "--samples", "5:9", "--json").stdout)
    plan = open_stream(run.data).plan(5, 9)
    assert [s["sample"] for s in report["samples"]] == [5, 6, 7, 8]
    names = ["web", "code"]
    for shown, segments in zip(report["samples"], plan, strict=True):
        assert shown["segments"] == [
            {
                "source": names[s.source],
                "epoch": s.epoch,
                "document": s.document,
                "offset": s.offset,
                "length": s.length,
            }
            for s in segments
        ]
    assert report["tokens"] == int(plan.tokens().sum())


def test_text_names_documents_and_shares(run):
    done = megaresume("stream", run.data, "--samples", "0:2")
    assert done.returncode == 0
    assert done.stdout.startswith("sample         0") and "web" in done.stdout and "weight" in done.stdout


def test_classic_data_path_and_flags_with_underscores(run):
    words = ("0.7", run.corpora / "web", "0.3", run.corpora / "code", "--seq_length", "64", "--seed", "3", "--json")
    classic = json.loads(megaresume("stream", *words).stdout)
    assert classic["packing"] == "split" and len(classic["samples"]) == 8


def test_from_a_state_it_shows_the_same(run):
    state = run.save / "megaresume" / "step_0000008.json"
    resumed = megaresume("stream", run.data, "--samples", "64:70", "--state", state).stdout
    assert resumed and resumed == megaresume("stream", run.data, "--samples", "64:70").stdout
    before = megaresume("stream", run.data, "--samples", "0:70", "--state", state)
    assert before.returncode == 1 and "is before the state" in before.stderr


def test_from_a_state_alone(run, tmp_path):
    """What `Stream.state_at(...).to_json()` gives is a state too; without --samples it begins there."""
    path = tmp_path / "state.json"
    path.write_text(open_stream(run.data).state_at(64).to_json())
    shown = megaresume("stream", run.data, "--state", path).stdout
    assert shown and shown == megaresume("stream", run.data, "--samples", "64:72").stdout
    path.write_text(path.read_text().replace('"samples":64', '"samples":65'))
    damaged = megaresume("stream", run.data, "--state", path)
    assert damaged.returncode == 1 and "the data state is damaged" in damaged.stderr


def test_bad_input(run):
    for words, status, text in [
        (("stream", run.data, "--samples", "9:3"), 2, "bad range"),
        (("stream", run.data, "--samples", "x"), 2, "bad range"),
        (("stream", run.data, "--samples", "0:999999999999999999"), 2, "too many samples"),
        (("stream", run.data, "--seq-length", "32"), 1, "two sequence lengths"),
        (("stream", run.corpora / "nothing", "--seq-length", "32"), 2, "does not exist"),
        (("stream", run.data, "--state", run.data), 1, "data state"),
    ]:
        done = megaresume(*words)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False)
        assert text in done.stderr
