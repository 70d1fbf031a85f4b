"""``megaresume report`` from a directory alone: no corpora, no log."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import threading

import pytest

from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.starts import record_membership, record_start
from megaresume.checkpoint.system import Topology
from megaresume.program import main
from megaresume.render import svg
from megaresume.runs import report_facts as facts_module


def report(capsys, *words):
    assert main(["report", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_corpora_and_log(run, capsys):
    shutil.rmtree(run.corpora)
    facts = report(capsys, run.save)
    newest = read_step_file(run.save / "megaresume" / "step_0000012.json").state
    assert (facts["samples"], facts["tokens"]) == (newest.samples, newest.tokens)
    assert [p["step"] for p in facts["points"]] == [0, 4, 8, 12]
    assert facts["fill"] == newest.tokens / (newest.samples * 64)
    # The samples between two states and their fill, against the states themselves.
    states = [read_step_file(run.save / "megaresume" / f"step_{step:07d}.json").state for step in (4, 8)]
    second = facts["intervals"][1]
    assert second["fill"] == (states[1].tokens - states[0].tokens) / ((states[1].samples - states[0].samples) * 64)
    drawn = {name: states[1].sources[name].tokens - states[0].sources[name].tokens for name in ("web", "code")}
    assert second["share"] == {name: tokens / sum(drawn.values()) for name, tokens in drawn.items()}
    assert {row["name"]: row["documents"] for row in facts["sources"]} == {
        name: cursor.documents for name, cursor in newest.sources.items()
    }
    assert main(["report", str(run.save)]) == 0
    page = (run.save / "report.html").read_text()
    assert page.count("<svg") == 2 and f"{newest.tokens:,} tokens" in page


def test_a_pipe_in_place_of_the_page(run, capsys):
    """It is refused if nobody reads it, and otherwise written to."""
    pipe = run.save / "report.html"
    os.mkfifo(pipe)
    assert main(["report", str(run.save)]) == 1
    assert "--output ANOTHER" in capsys.readouterr().err
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    while main(["report", str(run.save)]) != 0:  # until the reader has opened it
        pass
    reader.join()
    assert read[0].startswith(b"<!doctype html>") and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_page_that_cannot_be_written_keeps_the_old_one(run, capsys, monkeypatch):
    assert main(["report", str(run.save)]) == 0
    before = (run.save / "report.html").read_bytes()
    monkeypatch.setattr("megaresume.runs.report.run_page", lambda _: "x" * 10_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        assert main(["report", str(run.save)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert "cannot write" in capsys.readouterr().err and (run.save / "report.html").read_bytes() == before


def test_a_directory_whose_name_is_not_utf8(run, tmp_path):
    named = run.save.with_name("caf\udce9")
    run.save.rename(named)
    assert main(["report", str(named), "--output", str(tmp_path / "page.html")]) == 0
    assert "caf\\udce9</h1>" in (tmp_path / "page.html").read_text()


def test_names_in_any_script(recwarn):
    assert "日本" in svg(lambda axes: axes.set_title("日本"), height=1)
    assert not list(recwarn)


def test_dollars_in_names_are_no_formula():
    def draw(axes):
        axes.plot([0, 1], [0, 1], label="$price_^$")
        axes.figure.legend()
        axes.legend()

    assert svg(draw, height=1).count("$price_^$") == 2


def test_what_a_restart_lost(run, capsys):
    """Back to step 4 when 12 was saved: at least eight steps."""
    state = read_step_file(run.save / "megaresume" / "step_0000004.json").state
    record_start(run.save, iteration=4, state=state, choice=None, topology=Topology(dp=4, global_batch_size=8))
    starts = report(capsys, run.save)["starts"]
    assert [(s["step"], s["lost"], s["lost_is_exact"]) for s in starts] == [(0, 0, True), (4, 8, False)]
    assert starts[1]["layout"].startswith("dp 4")


def test_what_was_trained_again_is_not_known_without_figures(run, capsys):
    def starts():
        assert main(["top", str(run.save), "--once", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["top", str(run.save), "--once"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["starts"]]
        return found["repeated"], line.split(maxsplit=1)[1]

    assert starts() == (0, "1, 0 samples trained again")
    state = read_step_file(run.save / "megaresume" / "step_0000012.json").state
    record_start(run.save, iteration=12, state=state, choice=None, topology=Topology(dp=2, global_batch_size=8))
    assert starts() == (None, "2")


def test_a_damaged_line_is_named_once(run, capsys):
    ledger = ledger_path(run.save)
    first, *rest = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(first + rest[0].replace(b"samples", b"sampled", 1) + b"".join(rest[1:]))
    (note,) = report(capsys, run.save)["notes"]
    assert note.startswith("ledger line 2 ")


def test_replicas_that_leave_and_join(run, capsys):
    """Each change of the ledger, in ``report`` and ``top``; a run with one membership has made no change."""
    state = read_step_file(run.save / "megaresume" / "step_0000012.json").state
    assert report(capsys, run.save)["memberships"] == []
    for step, replicas in ((13, 2), (20, 1), (31, 3)):
        topology, details = Topology(dp=2 * replicas, global_batch_size=8), {"replicas": replicas, "launch": step}
        record_membership(run.save, iteration=step, state=state, topology=topology, details=details)
        assert main(["top", str(run.save), "--once"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["replicas"]]
        more = {13: "", 20: ", 2 before; changes so far: 1", 31: ", 1 before; changes so far: 2"}[step]
        assert line.split(maxsplit=1)[1] == f"{replicas} since step {step}{more}"
    found = report(capsys, run.save)["memberships"]
    assert [(one["step"], one["replicas"]) for one in found] == [(13, 2), (20, 1), (31, 3)]
    assert main(["top", str(run.save), "--json", "--once"]) == 0
    assert json.loads(capsys.readouterr().out)["memberships"] == found
    assert main(["report", str(run.save)]) == 0
    page = (run.save / "report.html").read_text()
    assert "<h2>Replicas</h2>" in page and "31</td><td>3</td>" in page.replace(" class=number", "")


def test_long_runs_are_sampled(run, capsys, monkeypatch):
    monkeypatch.setattr(facts_module, "MOST_POINTS", 2)
    facts = report(capsys, run.save)
    assert [p["step"] for p in facts["points"]] == [0, 4, 12]
    assert sum(i["share"]["web"] + i["share"]["code"] for i in facts["intervals"]) == pytest.approx(2)


def test_bad_input(run, tmp_path, capsys):
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert main(["report", str(run.corpora)]) == 1
    assert "no data state" in capsys.readouterr().err
    assert main(["report", str(run.save), "--output", str(tmp_path / "no" / "where")]) == 1
    assert "cannot write" in capsys.readouterr().err
