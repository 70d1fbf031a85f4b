"""The command: formats, text, questions after documents, and what a user can get wrong."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from megaresume.batches.open import open_stream
from megaresume.checkpoint.records.ledger import append_ledger, read_ledger
from megaresume.checkpoint.system import Topology
from megaresume.data.catalog import open_sources
from megaresume.program import main
from megaresume.runs.directory import Run
from megaresume.runs.trace.documents import Decoder
from megaresume.runs.trace.trace import Trace
from tests.cli.conftest import megaresume


def rows(*words) -> list[dict]:
    done = megaresume("trace", *words, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_past_and_future_are_those_of_the_stream(run):
    stream = open_stream(run.data)
    found = rows(run.save, "--steps", "4:15")
    assert [r["sample"] for r in found] == list(range(24, 112))
    for row in found:
        plan = stream.plan(row["sample"], row["sample"] + 1)
        assert row["step"] == row["sample"] // 8 + 1 and row["hash"] == f"{int(plan.hashes[0]):016x}"
        expected = [(s.source, s.epoch, s.document, s.offset, s.length) for s in plan.segments(row["sample"])]
        segments = [
            (["web", "code"].index(s["source"]), s["epoch"], s["document"], s["offset"], s["length"])
            for s in row["segments"]
        ]
        assert segments == expected
    assert rows(run.save, "--samples", "24:112") == found
    assert rows(run.save, "--steps", "4") == found[:8] and rows(run.save, "--samples", "30") == found[6:7]
    # Beside a tag directory, and corpora that have moved.
    assert rows(run.save / "global_step8", "--steps", "4") == found[:8]
    run.corpora.rename(run.corpora.with_name("elsewhere"))
    moved = run.data.with_name("moved.yaml")
    moved.write_text(run.data.read_text().replace("corpora/", "elsewhere/"))
    assert rows(run.save, "--steps", "4:15", "--data", moved) == found


def test_ranks_follow_the_last_start(run):
    ledger = run.save / "megaresume" / "ledger.jsonl"
    last = read_ledger(ledger).entries[-1]
    topology = Topology(world_size=4, dp=4, micro_batch_size=1, global_batch_size=12)
    append_ledger(
        ledger,
        type(last)(
            kind="start",
            iteration=12,
            tag=last.tag,
            samples=96,
            digest=last.digest,
            run=last.run,
            time=last.time,
            topology=topology,
        ),
    )
    found = rows(run.save, "--steps", "12:14")
    assert [(r["step"], r["rank"], r["micro_batch"]) for r in found[:8]] == [(12, None, None)] * 8
    assert [(r["step"], r["rank"], r["micro_batch"]) for r in found[8:]] == [(13, k % 4, k // 4) for k in range(12)]
    done = megaresume("trace", run.save, "--steps", "12:14")
    headings = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert headings == [
        "# trained, stage start, best_fit into 64 tokens, batch size 8, dp 2, micro-batch size ?",
        "# to come, stage start, best_fit into 64 tokens, batch size 12, dp 4, micro-batch size 1",
    ]
    assert len(done.stdout.splitlines()) == 22


def test_csv(run):
    done = megaresume("trace", run.save, "--steps", "3:5", "--csv")
    lines = list(csv.DictReader(io.StringIO(done.stdout)))
    segments = [(row, s) for row in rows(run.save, "--steps", "3:5") for s in row["segments"]]
    assert len(lines) == len(segments) > 16
    for line, (row, segment) in zip(lines, segments, strict=True):
        both = {**row, **segment}
        assert line == {name: "" if both[name] is None else str(both[name]) for name in line}


def test_text_of_byte_tokens(run):
    found = rows(run.save, "--samples", "0:6", "--text")
    segments = [s for row in found for s in row["segments"]]
    assert {s["source"] for s in segments} == {"web", "code"}
    for s in segments:
        whole = f"{s['source']} {s['document']} " + "x" * (s["document"] * 7 % 90)
        assert s["text"] == whole.strip()[s["offset"] : s["offset"] + s["length"]]
    done = megaresume("trace", run.save, "--samples", "0:6", "--text")
    assert [line[6:] for line in done.stdout.splitlines() if line.startswith("    | ")] == [
        s["text"] for s in segments if s["text"]
    ]
    read = csv.DictReader(io.StringIO(megaresume("trace", run.save, "--samples", "0:6", "--text", "--csv").stdout))
    assert [line["text"] for line in read] == [s["text"] for s in segments]


def test_token_ids_where_no_tokenizer_is_known(run):
    """A corpus that another program built says nothing of its tokenizer."""
    other = run.corpora.with_name("other")
    shutil.copytree(run.corpora, other)
    record = other / "code.megaresume.json"
    content = json.loads(record.read_text())
    state = json.loads((run.save / "megaresume" / "step_0000012.json").read_text())
    fingerprint = state["state"]["content"]["fingerprints"]["code"]["tokenizer"]
    assert content["tokenizer"]["fingerprint"] == fingerprint
    stock = yaml.safe_load(run.data.read_text())
    # A tokenizer that is not at hand: its fingerprint is all that there is.
    sources = open_sources({n: {"path": o["path"]} for n, o in stock["sources"].items()}, base_dir=run.data.parent)
    trace = Trace(Run(run.save), sources)
    content["tokenizer"] |= {"fingerprint": "0" * 32, "name": "llama/tokenizer.json"}
    record.write_text(json.dumps(content))
    stock["sources"]["code"]["path"] = "other/code"
    changed = open_sources({n: {"path": o["path"]} for n, o in stock["sources"].items()}, base_dir=run.data.parent)
    notes: list[str] = []
    decoder = Decoder(changed, None, notes.append)
    segments = [s for p in trace.pieces(0, 30) for row in decoder.rows(p) for s in row["segments"]]
    for s in segments:
        tokens = sources[s["source"]].read(s["document"], s["offset"], s["length"]).tolist()
        if s["source"] == "code":
            assert s["token_ids"] == tokens and "text" not in s
        else:
            assert "text" in s and "token_ids" not in s
    assert len(notes) == 1 and "token ids for code" in notes[0] and "llama/tokenizer.json" in notes[0]


def test_find(run):
    stream = open_stream(run.data)
    plan = stream.plan(0, 96)
    sample, document = next((n, s.document) for n in range(50, 96) for s in plan.segments(n) if s.source == 0)
    (found,) = rows(run.save, "--find", f"web:{document}")
    first = found["occurrences"][0]
    assert first["status"] == "trained" and first["parts"][-1]["sample"] >= sample - 1
    assert {"step": sample // 8 + 1, "sample": sample}.items() <= next(
        p for p in first["parts"] if p["sample"] == sample
    ).items()
    assert found["occurrences"][1]["status"] == "not planned" and found["occurrences"][1]["about_step"] > 12
    done = megaresume("trace", run.save, "--find", f"web:{document}", "--until-step", 200)
    assert done.returncode == 0 and f"step {sample // 8 + 1}  sample {sample}" in done.stdout
    assert "to come" in done.stdout
    done = megaresume("trace", run.save, "--find", f"web:{document},code:3", "--epochs", 2)
    assert done.stdout.count("\n  epoch ") == 4 and "not planned" not in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ((), 2, "say what to trace"),
        (("--steps", "1:2", "--samples", "1:2"), 2, "say what to trace"),
        (("--steps", "0:2"), 2, "steps are counted from 1"),
        (("--steps", "3:3"), 2, "bad range of steps"),
        (("--steps", "x"), 2, "bad range of steps"),
        (("--samples", "-1:4"), 2, "samples"),
        (("--steps", "1", "--epochs", "2"), 2, "--epochs goes with --find"),
        (("--steps", "1", "--images", "pictures"), 2, "this run has no images"),
        (("--find", "web:1", "--csv"), 2, "--csv goes with --steps"),
        (("--find", "web:1", "--epochs", "0"), 2, "--epochs: must be at least 1"),
        (("--steps", "1", "--tokenizer", "t.json"), 2, "--tokenizer goes with --text"),
        (("--steps", "1", "--text", "--tokenizer", "nowhere.json"), 2, "nowhere.json cannot be read"),
        (("--find", "web"), 2, "bad --find"),
        (("--find", "books:1"), 2, "unknown source 'books'"),
        (("--find", "web:300"), 2, "a document from 0 to 299"),
        (("--steps", "1", "--data", "nowhere.yaml"), 2, "no file nowhere.yaml"),
        (("--steps", "1", "--json", "--csv"), 2, "not allowed with"),
    ],
)
def test_mistakes(run, capsys, words, status, message):
    try:
        found = main(["trace", str(run.save), *words])
    except SystemExit as error:  # argparse's
        found = error.code
    out, err = capsys.readouterr()
    assert found == status, err
    assert message in err and out == ""


@pytest.mark.parametrize("words", [(), ("--text",), ("--json",)])
def test_output_that_takes_only_text(run, monkeypatch, words):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["trace", str(run.save), "--samples", "3:5", *words]) == 0
    monkeypatch.undo()
    assert out.getvalue() == megaresume("trace", run.save, "--samples", "3:5", *words).stdout


def test_directories_that_cannot_be_traced(run, tmp_path):
    done = megaresume("trace", tmp_path / "nowhere", "--steps", "1")
    assert done.returncode == 2 and "no such directory" in done.stderr
    done = megaresume("trace", run.corpora, "--steps", "1")
    assert done.returncode == 1 and "no data state" in done.stderr and "megaresume inspect" in done.stderr
    (run.save / "megaresume" / "data.yaml").unlink()
    done = megaresume("trace", run.save, "--steps", "1")
    assert done.returncode == 2 and "--data DATA.yaml" in done.stderr
    for path in (run.save / "megaresume").glob("step_*.json"):
        path.write_bytes(path.read_bytes()[:100])
    done = megaresume("trace", run.save, "--steps", "1", "--data", run.data)
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_a_changed_corpus(run):
    idx = run.corpora / "web.idx"
    data = bytearray(idx.read_bytes())
    data[34 + 4 * 77] ^= 1
    idx.write_bytes(data)
    done = megaresume("trace", run.save, "--steps", "1")
    assert done.returncode == 1 and "web.idx" in done.stderr and "Traceback" not in done.stderr


def test_parquet_without_its_library(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["trace", str(run.save), "--steps", "1:3", "--parquet", str(tmp_path / "out.parquet")]) == 1
    assert "pip install pyarrow" in capsys.readouterr().err and not list(Path(tmp_path).glob("*.parquet"))
